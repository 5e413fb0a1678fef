"""Names for the emulator's messages, from the kernels of the stages."""

import pytest

from common.emulator import Deadlock
from common.emulator.machine.shared_names import SharedArray
from common.shared_arrays import read_shared_arrays
from common.verify import make_arguments
from tests.stages import load_stage


def test_arrays_have_the_names_and_places_of_the_script() -> None:
    """Barriers of each kind, which TVM names in ways of its own, and tiles."""
    arrays = {array.name: array for array in read_shared_arrays(load_stage(6).build().prim_func)}
    stages = arrays["full"].count
    assert arrays["full"] == SharedArray("full", 0, 8 * stages, stages)
    assert arrays["empty"] == SharedArray("empty", 8 * stages, 8 * stages, stages)
    assert arrays["a_ring"].size == stages * 128 * 64 * 2 and arrays["a_ring"].offset % 1024 == 0


def test_a_deadlock_names_the_barrier() -> None:
    stage = load_stage(5, ("finished.arrive(0)", "T.evaluate(0)"))
    values = {"m": 128, "n": 128, "k": 64}
    inputs, outputs = make_arguments(stage, stage.config(**values), seed=0)
    with pytest.raises(Deadlock, match=r"warps 0-3 wait for mbarrier finished\[0\] \(0x410\) phase 0"):
        stage.build(**values)(*inputs, *outputs)
