"""Stage 01 on the emulator: every size, type and schedule gives the RMSNorm of float64."""

import pytest

from common.emulator import Deadlock, InvalidAddress
from common.stage import BadSize
from common.verify import Mismatch, verify_stage
from tests.stages import load_stage

STAGE = load_stage(1)


@pytest.mark.parametrize(
    ("rows", "cols", "dtype"),
    [
        (256, 4096, "float16"),  # the default
        (1, 4096, "float16"),  # one row
        (1, 1, "float32"),  # one element
        (37, 1000, "bfloat16"),  # a row within one warp, ragged in both directions
        (5, 4097, "float16"),  # odd: element by element
        (5, 4098, "float32"),  # 8-byte vectors
        (3, 20000, "float16"),  # over a cluster
        (2, 70001, "bfloat16"),  # longer than a cluster's registers
    ],
)
def test_verifies_under_every_schedule(rows: int, cols: int, dtype: str) -> None:
    verify_stage(STAGE, STAGE.config(dtype=dtype, rows=rows, cols=cols))


def test_long_rows_use_a_cluster_and_short_ones_do_not() -> None:
    assert "barrier.cluster" not in STAGE.build(rows=4, cols=4096, dtype="float16").ptx
    ptx = STAGE.build(rows=4, cols=32768, dtype="float16").ptx
    assert "barrier.cluster.wait" in ptx and "mapa" in ptx


@pytest.mark.parametrize(
    ("cols", "dtype"), [(4096, "float16"), (4096, "float32"), (32768, "bfloat16"), (4097, "float16")]
)
def test_nothing_spills_and_loads_are_as_wide_as_the_row_allows(cols: int, dtype: str) -> None:
    kernel = STAGE.build(rows=64, cols=cols, dtype=dtype)
    assert kernel.resources.spill_store_bytes == 0 and kernel.resources.spill_load_bytes == 0
    assert ("LDG.E.128" in kernel.sass()) == (cols % 8 == 0)


def test_a_grid_that_is_too_large_is_refused() -> None:
    with pytest.raises(BadSize, match="2\\^31"):
        STAGE.check(STAGE.config(rows=2**31, cols=40000, dtype="float16"))


# -- the mistakes of the README ----------------------------------------------------------------------------------------

SYNC = """\
                # Without this barrier a fast warp adds up sums that slow warps have not written yet.
                T.cuda.cta_sync()
"""
STORE = "                    warp_sums[warp] = total[0]\n"
CLIMB = "        climb()\n"
EXCHANGE = """\
                T.ptx.barrier.cluster.arrive.release.aligned()
                T.ptx.barrier.cluster.wait.acquire.aligned()
"""


def verify_with(*mistakes: tuple[str, str], schedule: str = "late", **sizes: int) -> None:
    stage = load_stage(1, *mistakes)
    verify_stage(stage, stage.config(dtype="float16", **sizes), [schedule])


def test_a_missing_barrier_is_found_when_warps_do_not_run_in_lockstep() -> None:
    with pytest.raises(Mismatch, match="is nan"):
        verify_with((SYNC, ""), rows=16, cols=4096)
    verify_with((SYNC, ""), rows=16, cols=4096, schedule="early")


def test_a_barrier_in_divergent_code_is_a_deadlock_that_says_who_waits() -> None:
    with pytest.raises(Deadlock) as caught:
        verify_with((SYNC, ""), (STORE, STORE + "                    T.cuda.cta_sync()\n"), rows=16, cols=4096)
    message = str(caught.value)
    assert "threads 0, 32, 64, 96, 128, 160, 192, 224 wait" in message and "bar.sync" in message
    assert "threads 1-31, 33-63" in message and "shfl.sync" in message


def test_lanes_that_skip_the_shuffles_spoil_the_sum() -> None:
    with pytest.raises(Mismatch, match="is nan"):
        verify_with((CLIMB, "        if first < cols:\n            climb()\n"), rows=16, cols=200)


def test_whole_warps_that_skip_the_barrier_are_not_waited_for_once_they_have_exited() -> None:
    verify_with((CLIMB, "        if row < rows:\n            climb()\n"), rows=5, cols=4096)


def test_a_cta_that_leaves_before_the_exchange_is_named() -> None:
    with pytest.raises(InvalidAddress, match="cluster barrier before its exit is missing"):
        verify_with((EXCHANGE, ""), rows=2, cols=70000)
