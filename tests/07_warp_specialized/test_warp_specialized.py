"""Stage 07 on the emulator: one role per warp, two accumulators."""

import re
from functools import cache

import pytest
import torch

from common.build import Kernel, build
from common.emulator import Deadlock
from common.series import stage_script
from common.stage import BadSize, Config
from common.verify import Mismatch, make_arguments, verify_stage
from tests.sass import DIVISION, count, innermost_loop
from tests.stages import load_stage, small_integer_operands

STAGE = load_stage(7)


@cache
def built(**values) -> tuple[Config, Kernel]:
    config = STAGE.config(**values)
    return config, build(STAGE.kernel(config))


DEFAULT = {"dtype": "float16"}
# Fifteen tiles for one CTA, two stages of SMEM: every ring wraps many times.
MANY = {"dtype": "bfloat16", "m": 601, "n": 261, "k": 136, "tile": "128x128", "ctas": 1, "stages": 2}


@pytest.mark.parametrize(
    "sizes",
    [
        DEFAULT,  # 3 x 2 tiles on 4 CTAs, the last ones ragged
        MANY,  # rows of D that no tensor map can express
        {"dtype": "float16", "m": 127, "n": 200, "k": 4104},  # one ragged tile, a long sum with a tail
        {"dtype": "bfloat16", "m": 256, "n": 512, "k": 64, "ctas": 148},  # fewer whole tiles than SMs, one block of K
        {"dtype": "float16", "m": 1, "n": 1, "k": 8, "tile": "128x128"},
    ],
    ids=lambda sizes: "-".join(map(str, sizes.values())),
)
def test_verifies_under_every_schedule(sizes: dict) -> None:
    config, kernel = built(**sizes)
    verify_stage(STAGE, config, kernel=kernel)


def test_small_integers_are_exact() -> None:
    config, kernel = built(**MANY)
    a, b = small_integer_operands(config, seed=7)
    d = torch.empty(config.m, config.n, dtype=torch.bfloat16)
    kernel(a.bfloat16(), b.bfloat16(), d, schedule="random", seed=7)
    assert torch.equal(d, (a @ b.t()).bfloat16())


def test_what_tma_cannot_address_is_refused_with_the_rule() -> None:
    with pytest.raises(BadSize, match="multiple of 16 bytes, so k a multiple of 8"):
        STAGE.config(m=128, n=128, k=100)


@pytest.mark.parametrize(("sms", "size", "ctas"), [(10, 1024, 10), (148, 4096, 148), (148, 256, 2)])
def test_as_many_ctas_as_the_device_has_sms_or_there_are_tiles(sms: int, size: int, ctas: int) -> None:
    config = STAGE.config(scale="gpu", sms=sms, m=size, n=size, k=64)
    assert build(STAGE.kernel(config)).launch_spec.grid == (ctas, 1, 1)


def test_no_number_of_sms_is_typed() -> None:
    assert not re.search(r"\b1(32|48)\b", stage_script(7).read_text(encoding="utf-8"))


# -- what reaches the chip ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [DEFAULT, {**MANY, "n": 264}], ids=["128x256", "128x128"])
def test_nothing_spills_and_every_unit_is_used(sizes: dict) -> None:
    _, kernel = built(**sizes)
    resources, sass = kernel.resources, kernel.sass()
    assert resources.spill_store_bytes == resources.spill_load_bytes == resources.stack_bytes == 0
    assert resources.registers <= 128
    assert kernel.launch_spec.shared_bytes <= 227 * 1024
    assert not re.search(r"\b(LDL|STL)\b", sass)
    assert all(re.search(rf"\b{name}\b", sass) for name in ("UTMALDG", "UTCHMMA", "UTCBAR", "LDTM", "UTMASTG"))


def test_the_multiplying_thread_issues_little_else() -> None:
    loop = innermost_loop(built(**DEFAULT)[1].sass(), "UTCHMMA")
    assert count(loop, "UTCHMMA") == 4 and count(loop, "UTCBAR") == 1
    assert len(loop) <= 4 * 13
    assert count(loop, *DIVISION) == 0


def test_one_thread_loads_with_two_instructions_per_block() -> None:
    loop = innermost_loop(built(**DEFAULT)[1].sass(), "UTMALDG")
    assert count(loop, "UTMALDG") == 2
    assert len(loop) <= 42
    assert count(loop, *DIVISION) == 0


def test_the_epilogue_is_one_loop_over_tiles_with_wide_stores() -> None:
    loop = innermost_loop(built(**DEFAULT)[1].sass(), "UTMASTG")
    assert count(loop, "UTMASTG") == count(loop, "LDTM") == 4  # chunks of 64 columns
    assert count(loop, "STS") == count(loop, "STS.128") == 4 * 8
    assert count(loop, "STG", "LDG") == 0


def test_every_byte_moves_once_and_no_two_lanes_meet_in_a_bank() -> None:
    config, kernel = built(**DEFAULT)
    inputs, outputs = make_arguments(STAGE, config, seed=0)
    counters = kernel(*inputs, *outputs, schedule="early").counters
    tiles, blocks = 3 * 2, -(-config.k // 64)
    assert counters.bytes["TMA load"] == tiles * blocks * (128 + 256) * 128
    assert counters.bytes["TMEM load"] == tiles * 128 * 256 * 4
    assert counters.bytes["TMA store"] == counters.bytes["shared store"] == tiles * 128 * 256 * 2
    assert counters.total().conflicts == 0
    assert counters.total().sectors == 0


# -- the exercises of the README ---------------------------------------------------------------------------------------

LAST_CHUNK = "if chunk == CHUNKS - 1:"
DRAINED_ARRIVE = "                    drained.arrive(sums_of)\n"
DRAINED_WAIT = "                    drained.wait(sums_of, acc.phase)\n"
READ_WAIT = "                T.ptx.cp.async_.bulk.wait_group.read(D_STAGES - 1)\n"
NOTHING = "T.evaluate(0)\n"


def verify_with(*mistakes: tuple[str, str], schedule: str = "late", tiles: int = 3, **values) -> None:
    stage = load_stage(7, *mistakes)
    sizes = {"m": 128 * tiles, "n": 128, "k": 72, "tile": "128x128", "ctas": 1} | values
    verify_stage(stage, stage.config(dtype="float16", **sizes), [schedule])


def test_sums_that_nobody_waits_for_are_overwritten() -> None:
    with pytest.raises((Mismatch, Deadlock)):
        verify_with((DRAINED_WAIT, ""), tiles=8)


def test_two_tiles_are_in_flight_before_the_multiplier_waits() -> None:
    never_drained = (DRAINED_ARRIVE, f"                    {NOTHING}")
    verify_with(never_drained, tiles=2)
    with pytest.raises(
        Deadlock, match=r"warp 5, thread 160 waits for mbarrier drained\[0\] .* 4 of 4 arrivals missing"
    ):
        verify_with(never_drained, tiles=3)


def test_sums_must_not_be_given_back_after_the_first_chunk() -> None:
    with pytest.raises(Mismatch):
        verify_with((LAST_CHUNK, "if chunk == 0:"), tiles=8)


def test_a_commit_counts_once_however_many_products_it_stands_for() -> None:
    with pytest.raises(Deadlock, match="1 of 2 arrivals missing"):
        verify_with(("finished.init(1)", "finished.init(2)"), tiles=1)


def test_the_stage_of_d_must_be_read_before_it_is_filled_again() -> None:
    unread = (READ_WAIT, f"                {NOTHING}")
    verify_with(unread, schedule="early", tile="128x256", n=256)
    for schedule in ("late", "random"):
        with pytest.raises(Mismatch):
            verify_with(unread, schedule=schedule, tile="128x256", n=256)


def test_one_accumulator_is_right_and_leaves_nothing_to_overlap() -> None:
    one = ("ACCUMULATORS = 2 ", "ACCUMULATORS = 1 ")
    verify_with(one)
    with pytest.raises(Deadlock, match="warp 5, thread 160 waits for mbarrier"):
        verify_with(one, (DRAINED_ARRIVE, f"                    {NOTHING}"), tiles=2)
