"""Stage 06 on the emulator: the ring, the order of the tiles, the machine code, and the mistakes of the README."""

import re
import subprocess
import sys
from functools import cache

import pytest
import torch

from common.build import Kernel, build
from common.emulator import Deadlock, EmulatorError
from common.launch_spec import launch_shape
from common.series import ROOT
from common.stage import BadSize
from common.verify import Mismatch, make_arguments, poisoned, verify_stage
from tests.sass import innermost_loop, instructions, opcodes
from tests.stages import load_stage, small_integer_operands

STAGE = load_stage(6)
DEFAULT = {"dtype": "float16"}
# 6 tiles of 4 blocks through a ring of 3, all in one CTA: the ring stands elsewhere, in another phase, at every tile.
ONE_CTA = {"dtype": "bfloat16", "m": 259, "n": 201, "k": 200, "ctas": 1, "stages": 3}
LONG = {"dtype": "bfloat16", "m": 128, "n": 8, "k": 4104}
TALL = {"dtype": "float16", "m": 2181, "n": 264, "k": 8, "ctas": 3}  # 18 rows of tiles: a group of 16 and one of 2
GPU = {"dtype": "float16", "scale": "gpu"}


@cache
def built(**sizes) -> Kernel:
    return STAGE.build(**sizes)


def launched(**sizes):
    inputs, outputs = make_arguments(STAGE, STAGE.config(**sizes), seed=0)
    return launch_shape(built(**sizes).launch_spec, (*inputs, *outputs))


@pytest.mark.parametrize("sizes", [DEFAULT, ONE_CTA, LONG, TALL], ids=str)
def test_verifies_under_every_schedule(sizes: dict) -> None:
    verify_stage(STAGE, STAGE.config(**sizes), kernel=built(**sizes))


@pytest.mark.parametrize("sizes", [DEFAULT, ONE_CTA], ids=str)
def test_small_integers_come_out_exact(sizes: dict) -> None:
    """Every sum of products of -1, 0 and 1 is small enough for the type of D: there is nothing to round."""
    config = STAGE.config(**sizes)
    a, b = small_integer_operands(config, seed=1)
    d = poisoned((config.m, config.n), config.torch_dtype)
    built(**sizes)(a.to(config.torch_dtype), b.to(config.torch_dtype), d)
    assert torch.equal(d.long(), a @ b.t())


def test_every_tile_is_computed_once() -> None:
    """All of D is written (it starts as poison), and no more than that is stored and multiplied."""
    config = STAGE.config(**TALL)
    inputs, outputs = make_arguments(STAGE, config, seed=0)
    counters = built(**TALL)(*inputs, *outputs, schedule="early").counters
    assert not outputs[0].isnan().any()
    tiles = 18 * 3
    assert counters.bytes["TMA store"] == tiles * 128 * 128 * 2
    assert counters.bytes["TMA load"] == tiles * 2 * 128 * 128


@pytest.mark.parametrize(("k", "dtype"), [(63, "float16"), (100, "bfloat16")])
def test_rows_that_tma_cannot_address_are_refused_with_the_rule(k: int, dtype: str) -> None:
    with pytest.raises(BadSize, match="multiple of 16 bytes, so k a multiple of 8"):
        STAGE.config(m=8, n=8, k=k, dtype=dtype)


def test_a_ring_has_two_stages_or_more() -> None:
    with pytest.raises(BadSize, match="stages is 1: it must be at least 2"):
        STAGE.config(stages=1)


# -- grid and resources ------------------------------------------------------------------------------------------------


def test_ctas_are_persistent_and_never_more_than_sms_or_tiles() -> None:
    assert launched(**GPU).grid[0] == 148  # 1024 tiles
    assert launched(**LONG).grid[0] == 1
    assert launched(**ONE_CTA).grid[0] == 1
    inputs, outputs = make_arguments(STAGE, STAGE.config(**DEFAULT), seed=0)
    of_two = build(STAGE.kernel(STAGE.config(**DEFAULT, sms=2)))
    assert launch_shape(of_two.launch_spec, (*inputs, *outputs)).grid[0] == 2


def test_the_depth_of_the_ring_follows_from_smem() -> None:
    stage_bytes, d_bytes, barriers = 32 * 1024, 2 * 128 * 128, 1024
    depth = (227 * 1024 - d_bytes - barriers) // stage_bytes
    assert depth == 6
    assert launched(**GPU).shared_bytes == depth * stage_bytes + d_bytes + barriers
    assert launched(**ONE_CTA).shared_bytes == 3 * stage_bytes + d_bytes + barriers


@pytest.mark.parametrize("sizes", [DEFAULT, ONE_CTA, GPU], ids=str)
def test_nothing_spills_and_no_array_lives_in_memory(sizes: dict) -> None:
    resources = built(**sizes).resources
    assert resources.spill_store_bytes == resources.spill_load_bytes == resources.stack_bytes == 0
    assert not {"LDL", "STL"} & {name.split(".")[0] for name in opcodes(instructions(built(**sizes).sass()))}


def test_the_loop_over_blocks_holds_few_instructions_and_no_division() -> None:
    """93 with the compiler that is pinned, for four products and two loads; 13 of them run once a tile."""
    loop = innermost_loop(built(**GPU).sass(), "UTCHMMA")
    assert len(loop) <= 100
    names = opcodes(loop)
    assert names.count("UTCHMMA") == 4 and names.count("UTMALDG.2D") == 2 and names.count("UTCBAR") == 1
    assert "LDTM.x64" not in names and "UTMASTG.2D" not in names


@pytest.mark.parametrize("sizes", [GPU, TALL, ONE_CTA], ids=str)
def test_no_division_is_left_to_run_time(sizes: dict) -> None:
    names = opcodes(instructions(built(**sizes).sass()))
    assert not {"MUFU", "I2F", "F2I"} & {name.split(".")[0] for name in names}


def test_one_thread_asks_the_copy_engine_and_stores_are_128_bits_wide() -> None:
    sass = built(**GPU).sass()
    names = opcodes(instructions(sass))
    assert innermost_loop(sass, "UTMALDG") == innermost_loop(sass, "UTCHMMA")
    tile_loop = opcodes(innermost_loop(sass, "UTMASTG"))
    assert {"UTCHMMA", "LDTM.x64", "UTMASTG.2D"} <= set(tile_loop), (
        "the smallest loop around a store should be the tile's"
    )
    assert names.count("STS.128") == 16 and names.count("UTMASTG.2D") == 2


@pytest.mark.parametrize("sizes", [DEFAULT, ONE_CTA], ids=str)
def test_no_access_to_shared_memory_has_a_bank_conflict(sizes: dict) -> None:
    inputs, outputs = make_arguments(STAGE, STAGE.config(**sizes), seed=0)
    figures = built(**sizes)(*inputs, *outputs, schedule="early").counters.total()
    assert figures.wavefronts == figures.ideal_wavefronts > 0


# -- the mistakes of the README ----------------------------------------------------------------------------------------

EMPTY_WAIT = ("            empty.wait(stage, phase)\n", "")
FIRST_PHASE = ("ahead = PipelineState(STAGES, 1)", "ahead = PipelineState(STAGES, 0)")
PHASE_PER_TILE = (
    "            # Load and multiply: one thread asks for both.\n",
    "            slot.init(0)\n",
)
SAME_PHASE = ("finished.wait(acc.stage, acc.phase)", "finished.wait(0, 0)")
TILE_SYNC = (
    "            T.cuda.cta_sync()\n            T.ptx.tcgen05.fence__after_thread_sync()\n            acc.advance()",
    "            T.ptx.tcgen05.fence__after_thread_sync()\n            acc.advance()",
)
READ_WAIT = ("wait_group.read(D_STAGES - 1)", "wait_group.read(D_STAGES)")
NO_SPARE = ("T.serial(STAGES - 1, unroll=False)", "T.serial(STAGES, unroll=False)")


def verify_with(
    *mistakes: tuple[str, str], schedule: str = "late", seeds: range = range(1), n: int = 256, k: int = 320
) -> None:
    """Two tiles of five blocks, one CTA, three stages. Raises what the first seed raises that finds the mistake."""
    stage = load_stage(6, *mistakes)
    sizes = {"dtype": "float16", "m": 128, "n": n, "k": k, "ctas": 1, "stages": 3}
    kernel = stage.build(**sizes)
    for seed in seeds:
        verify_stage(stage, stage.config(**sizes), [schedule], seed=seed, kernel=kernel)


@pytest.mark.parametrize(("schedule", "wrong"), [("late", r"-?\d"), ("random", "nan")])
def test_a_stage_refilled_too_early_shows_unless_copies_are_immediate(schedule: str, wrong: str) -> None:
    """Under `late` the box of block 3 has landed when the products of block 0 are performed: numbers, not poison."""
    verify_with(EMPTY_WAIT, schedule="early")
    with pytest.raises(Mismatch, match=rf"output\[0, 0\] is {wrong}"):
        verify_with(EMPTY_WAIT, schedule=schedule)


def test_a_ring_whose_first_waits_do_not_pass_never_starts() -> None:
    with pytest.raises(Deadlock, match="1 of 1 arrivals missing"):
        verify_with(FIRST_PHASE)


def test_phases_do_not_start_again_with_a_tile() -> None:
    """Five blocks leave a ring of three elsewhere. (Six would turn it twice, and nobody would notice.)"""
    with pytest.raises(Deadlock):
        verify_with(PHASE_PER_TILE)


def test_the_barrier_of_the_sums_has_a_phase_too() -> None:
    with pytest.raises(Mismatch):
        verify_with(SAME_PHASE)


def test_sums_are_overwritten_while_they_are_read_without_the_barrier_between_tiles() -> None:
    with pytest.raises((Mismatch, EmulatorError)):
        verify_with(TILE_SYNC)


@pytest.mark.parametrize("schedule", ["late", "random"])
def test_a_chunk_that_is_still_being_stored_is_overwritten_unless_copies_are_immediate(schedule: str) -> None:
    verify_with(READ_WAIT, schedule="early", n=512, k=64)
    with pytest.raises(Mismatch):
        verify_with(READ_WAIT, schedule=schedule, seeds=range(12), n=512, k=64)


def test_without_a_spare_stage_the_result_is_the_same() -> None:
    """It is the time that differs: every load would wait for the product that was just asked for."""
    verify_with(NO_SPARE)


def test_the_readme_counts_the_waves_as_its_program_does() -> None:
    readme = (ROOT / "06_gemm_pipelined/README.md").read_text(encoding="utf-8")
    program, shown = re.search(r"^```python\n(.*?)^```\n\n```\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE).groups()
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed == shown
