"""Stage 02 on the emulator: the RMSNorm of stage 01, fed by TMA."""

import pytest

from common.emulator import BarrierFault, Deadlock, EmulatorError, MissingFence
from common.launch_spec import launch_shape
from common.stage import BadSize
from common.verify import SCHEDULES, Mismatch, make_arguments, verify_stage
from tests.stages import load_stage

STAGE = load_stage(2)


@pytest.mark.parametrize(
    ("rows", "cols", "dtype"),
    [
        (256, 4096, "float16"),  # the default
        (1, 4096, "float16"),  # one row
        (37, 1000, "bfloat16"),  # ragged in both directions
        (301, 520, "float32"),
        (5, 4104, "float16"),
        (3, 20008, "float16"),  # over a cluster
        (2, 70008, "bfloat16"),  # a row that is read twice
    ],
)
def test_verifies_under_every_schedule(rows: int, cols: int, dtype: str) -> None:
    verify_stage(STAGE, STAGE.config(dtype=dtype, rows=rows, cols=cols))


@pytest.mark.parametrize(("cols", "dtype"), [(4097, "float16"), (4100, "bfloat16"), (1002, "float32")])
def test_rows_that_tma_cannot_address_are_refused_with_the_rule(cols: int, dtype: str) -> None:
    with pytest.raises(BadSize, match="16"):
        STAGE.check(STAGE.config(rows=8, cols=cols, dtype=dtype))


def test_ctas_are_persistent() -> None:
    config = STAGE.config(rows=4096, cols=4096, dtype="float16")
    kernel = STAGE.build(rows=4096, cols=4096, dtype="float16")
    inputs, outputs = make_arguments(STAGE, config, seed=0)
    ctas = launch_shape(kernel.launch_spec, (*inputs, *outputs)).grid[0]
    assert ctas < 4096 // 8, "each CTA should take many tiles of rows"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_copy_engine_does_the_copying_and_nothing_spills(dtype: str) -> None:
    kernel = STAGE.build(rows=64, cols=4096, dtype=dtype)
    assert kernel.resources.spill_store_bytes == 0 and kernel.resources.spill_load_bytes == 0
    sass = kernel.sass()
    assert "UTMALDG" in sass and "UTMASTG" in sass and "SYNCS" in sass


# -- the mistakes of the README ----------------------------------------------------------------------------------------

ARMED = "full.arrive(slot.stage, STAGE_BYTES)"
EMPTY_WAIT = "            empty.wait(slot.stage, slot.phase)\n"
FULL_WAIT = "            full.wait(slot.stage, slot.phase)\n"
READ_WAIT = "                T.ptx.cp.async_.bulk.wait_group.read(0)\n"


def verify_with(*mistakes: tuple[str, str], schedule: str = "late", seed: int = 0, rows: int = 128) -> None:
    stage = load_stage(2, *mistakes)
    verify_stage(stage, stage.config(dtype="float16", rows=rows, cols=4096, ctas=2), [schedule], seed=seed)


def test_a_stage_refilled_too_early_arms_its_barrier_twice() -> None:
    with pytest.raises(BarrierFault, match="more arrivals than the mbarrier expects"):
        verify_with((EMPTY_WAIT, ""))


@pytest.mark.parametrize(("bytes_more", "message"), [(16, "16 bytes owed"), (-16, "16 bytes more than expected")])
def test_a_wrong_byte_count_hangs_and_the_report_says_by_how_much(bytes_more: int, message: str) -> None:
    with pytest.raises(Deadlock, match=message):
        verify_with((ARMED, f"full.arrive(slot.stage, STAGE_BYTES + {bytes_more})"))


def test_a_wrong_parity_hangs_with_all_three_roles_waiting() -> None:
    with pytest.raises(Deadlock) as caught:
        verify_with(("slot.init(1)", "slot.init(0)"))
    for role in ("warps 0-7 wait", "warp 8 waits", "warp 9 waits"):
        assert role in str(caught.value)


def test_a_stage_refilled_before_the_store_has_read_it() -> None:
    with pytest.raises(Mismatch):
        verify_with((READ_WAIT, ""))
    verify_with((READ_WAIT, ""), schedule="early")


def test_data_read_before_it_lands_is_found() -> None:
    with pytest.raises((EmulatorError, Mismatch)):
        verify_with((FULL_WAIT, ""))


@pytest.mark.parametrize(("schedule", "seed"), [("late", 0), ("random", 1)])
def test_with_one_set_of_sums_a_warp_overtakes_another_unless_copies_are_immediate(schedule: str, seed: int) -> None:
    """A fast warp writes the next tile's sum while a slow one still reads this one's."""
    one_set = ("            parity = parity ^ 1\n", "")
    verify_with(one_set, schedule="early", rows=256)
    with pytest.raises(Mismatch):
        verify_with(one_set, schedule=schedule, seed=seed, rows=256)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_without_the_proxy_fence_the_store_must_not_read_what_the_threads_wrote(schedule: str) -> None:
    fence = "            T.ptx.fence.proxy.async_.shared__cta()\n            T.cuda.warp_sync()\n"
    with pytest.raises(MissingFence, match=r"the TMA store reads shared ring\[0\]"):
        verify_with((fence, "            T.cuda.warp_sync()\n"), schedule=schedule)
