"""Stage 08 on the emulator: CTA pairs, and clusters that ask for their next tile."""

import re
from functools import cache, partial

import pytest
import torch

from common.build import Kernel, build
from common.emulator import Deadlock, Fault, InvalidAddress
from common.emulator.machine.scheduler import Limits
from common.series import stage_script
from common.stage import BadSize, Config
from common.verify import make_arguments, verify_stage
from tests.sass import DIVISION, count, innermost_loop
from tests.stages import load_stage, small_integer_operands

STAGE = load_stage(8)
ONE_PAIR = Limits(sm_count=2)  # a GPU on which one cluster runs at a time, and must fetch all tiles after the first


@cache
def built(**values) -> tuple[Config, Kernel]:
    config = STAGE.config(**values)
    return config, build(STAGE.kernel(config))


DEFAULT = {"dtype": "float16"}
# Nine tiles, two stages of SMEM: every ring wraps, that of the responses too. No tensor map can express rows of D.
MANY = {"dtype": "bfloat16", "m": 601, "n": 261, "k": 136, "tile": "256x128", "ctas": 2, "stages": 2}
HALVES = {"dtype": "float16", "m": 520, "n": 264, "k": 200, "tile": "512x256"}  # 2 x 2 tiles of two consumers


@pytest.mark.parametrize(
    ("sizes", "limits"),
    [
        (DEFAULT, Limits()),  # all clusters start at once: the first request of each fails
        (DEFAULT | {"scheduler": "static", "ctas": 2}, Limits()),
        (MANY, ONE_PAIR),
        (HALVES | {"epilogue": "bias-residual"}, ONE_PAIR),
        (HALVES | {"scheduler": "static", "dtype": "bfloat16", "ctas": 2}, Limits()),
        ({"dtype": "float16", "m": 127, "n": 200, "k": 4104, "tile": "256x256"}, Limits()),  # one tile, a long sum
        ({"dtype": "float16", "m": 1, "n": 136, "k": 8, "tile": "256x128"}, Limits()),
    ],
    ids=["default", "static", "ring of responses", "two consumers", "two consumers, static", "long sum", "one row"],
)
def test_verifies_under_every_schedule(sizes: dict, limits: Limits) -> None:
    config, kernel = built(**sizes)
    verify_stage(STAGE, config, kernel=partial(kernel, limits=limits))


def test_small_integers_are_exact() -> None:
    config, kernel = built(**MANY)
    a, b = small_integer_operands(config, seed=8)
    d = torch.empty(config.m, config.n, dtype=torch.bfloat16)
    kernel(a.bfloat16(), b.bfloat16(), d, schedule="random", seed=8, limits=ONE_PAIR)
    assert torch.equal(d, (a @ b.t()).bfloat16())


def test_what_tma_cannot_address_is_refused_with_the_rule() -> None:
    with pytest.raises(BadSize, match="multiple of 16 bytes, so k a multiple of 8"):
        STAGE.config(m=128, n=128, k=100)


@pytest.mark.parametrize(
    ("scheduler", "sms", "size", "ctas"),
    [("static", 10, 4096, 10), ("static", 148, 4096, 148), ("static", 148, 512, 8), ("clc", 148, 4096, 512)],
)
def test_the_grid_is_the_pairs_of_sms_or_all_tiles(scheduler: str, sms: int, size: int, ctas: int) -> None:
    config = STAGE.config(scale="gpu", sms=sms, m=size, n=size, k=64, scheduler=scheduler)
    spec = build(STAGE.kernel(config)).launch_spec
    assert (spec.grid, spec.cluster) == ((ctas, 1, 1), (2, 1, 1))


def test_no_number_of_sms_is_typed() -> None:
    assert not re.search(r"\b(66|74|132|148)\b", stage_script(8).read_text(encoding="utf-8"))


# -- what reaches the chip ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [DEFAULT, HALVES | {"epilogue": "bias-residual"}], ids=["256x256", "512x256"])
def test_nothing_spills_and_every_unit_is_used(sizes: dict) -> None:
    _, kernel = built(**sizes)
    resources, sass = kernel.resources, kernel.sass()
    assert resources.spill_store_bytes == resources.spill_load_bytes == resources.stack_bytes == 0
    assert kernel.launch_spec.shared_bytes <= 227 * 1024
    assert not re.search(r"\b(LDL|STL)\b", sass)
    units = ("UTMALDG.2D.2CTA", "UTCHMMA.2CTA", "UTCBAR.2CTA.MULTICAST", "LDTM", "UTMASTG", "UGETNEXTWORKID.BROADCAST")
    assert all(unit in sass for unit in units)


@pytest.mark.parametrize("sizes", [DEFAULT, HALVES | {"epilogue": "bias-residual"}], ids=["256x256", "512x256"])
def test_the_issuing_threads_issue_little_else(sizes: dict) -> None:
    sass = built(**sizes)[1].sass()
    products, loads = innermost_loop(sass, "UTCHMMA"), innermost_loop(sass, "UTMALDG")
    assert count(products, "UTCHMMA") == 4 and count(products, "UTCBAR") == 1
    assert len(products) <= 4 * 13
    assert count(loads, "UTMALDG") == 2
    assert len(loads) <= 48
    assert count(products + loads, *DIVISION) == 0


def test_the_epilogue_is_one_loop_over_tiles_with_wide_stores() -> None:
    loop = innermost_loop(built(**DEFAULT)[1].sass(), "UTMASTG")
    assert count(loop, "UTMASTG") == count(loop, "LDTM") == 4  # chunks of 64 columns
    assert count(loop, "STS") == count(loop, "STS.128") == 4 * 8
    assert count(loop, "STG", "LDG") == 0


def test_each_sm_loads_half_and_no_two_lanes_meet_in_a_bank() -> None:
    config, kernel = built(**DEFAULT)
    inputs, outputs = make_arguments(STAGE, config, seed=0)
    counters = kernel(*inputs, *outputs, schedule="early").counters
    tiles, blocks = 2 * 2, -(-config.k // 64)
    assert counters.bytes["TMA load"] == tiles * blocks * (256 + 256) * 128
    assert counters.bytes["MMA shared read"] == counters.bytes["TMA load"]
    assert counters.bytes["TMEM load"] == tiles * 256 * 256 * 4
    assert counters.bytes["TMA store"] == counters.bytes["shared store"] == tiles * 256 * 256 * 2
    assert counters.total().conflicts == 0
    assert counters.total().sectors == 0


# -- the exercises of the README ---------------------------------------------------------------------------------------


def verify_with(*mistakes: tuple[str, str], schedule: str = "late", seed: int = 0) -> None:
    """Five tiles, fetched one after the other by one pair."""
    stage = load_stage(8, *mistakes)
    config = stage.config(dtype="float16", m=1160, n=128, k=72, tile="256x128", stages=2)
    kernel = partial(build(stage.kernel(config)), limits=ONE_PAIR)
    verify_stage(stage, config, [schedule], kernel=kernel, seed=seed)


def test_the_leader_must_expect_the_bytes_of_both() -> None:
    with pytest.raises((Deadlock, Fault)) as caught:
        verify_with(("full.arrive(stage, PAIR * STAGE_BYTES)", "full.arrive(stage, STAGE_BYTES)"))
    assert "bytes more than expected" in str(caught.value)


def test_a_commit_to_one_cta_leaves_the_peer_waiting() -> None:
    with pytest.raises(Deadlock, match=r"CTA \(1, 0, 0\) warp 4, thread 128 waits for mbarrier empty\[0\]"):
        verify_with(("empty.arrive(stage, cta_group=PAIR, cta_mask=3)", "empty.arrive(stage, cta_group=PAIR)"))


@pytest.mark.parametrize("schedule", ["late", "early", "random"])
def test_a_cta_must_not_end_before_its_peer(schedule: str) -> None:
    only_own = (
        "        T.cuda.cluster_sync()\n        tmem.dealloc()",
        "        T.cuda.cta_sync()\n        tmem.dealloc()",
    )
    with pytest.raises(InvalidAddress, match="a cluster barrier before its exit is missing"):
        verify_with(only_own, schedule=schedule)


@pytest.mark.parametrize(
    ("schedule", "error", "message"),
    [
        ("late", Deadlock, "no warp can run"),
        ("early", Deadlock, "no warp can run"),
        ("random", Fault, "something that is no response"),
    ],
)
def test_a_response_must_be_read_before_the_next_one(schedule: str, error, message: str) -> None:
    with pytest.raises(error, match=message):
        verify_with(("                    taken.wait(turn.stage, turn.phase ^ 1)\n", ""), schedule=schedule)


def test_taken_counts_threads_not_warps() -> None:
    too_few = ("EPILOGUE_WARPS * LANES) + CONSUMERS + 1", "EPILOGUE_WARPS) + CONSUMERS + 1")
    for lucky in ("late", "early"):
        verify_with(too_few, schedule=lucky)
    with pytest.raises(Fault, match="something that is no response"):
        verify_with(too_few, schedule="random")


def test_both_barriers_must_expect_the_response() -> None:
    with pytest.raises(Deadlock, match="16 bytes more than expected"):
        verify_with(("for peer in T.unroll(PAIR):", "for peer in T.unroll(1):"))
