"""Names for the emulator's messages, from the kernels of the stages."""

import pytest
import torch
from tvm.script import tirx as T

from common.build import build
from common.emulator import Deadlock, OutOfBounds
from common.emulator.machine.names import SharedArray
from common.kernel_names import read_names
from common.verify import make_arguments
from tests.stages import load_stage


def test_arrays_have_the_names_and_places_of_the_script() -> None:
    """Barriers of each kind, which TVM names in ways of its own, and tiles."""
    kernel = load_stage(6).build()
    arrays = {array.name: array for array in read_names(kernel.prim_func, kernel.launch_spec).shared}
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


def test_arguments_have_the_names_of_the_script_whatever_order_tvm_gives_them() -> None:
    @T.prim_func
    def shift(z: T.handle, a: T.handle):
        Z = T.match_buffer(z, (64,), "float32")
        A = T.match_buffer(a, (64,), "float32")
        T.device_entry()
        T.cta_id([1])
        thread = T.thread_id([64])
        A[thread] = Z[thread + 1]

    with pytest.raises(OutOfBounds, match=r"0 bytes past the end of Z float32\[64\]"):
        build(shift)(torch.zeros(64), torch.zeros(64))
