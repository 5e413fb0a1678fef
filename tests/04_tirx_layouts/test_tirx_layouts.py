"""Stage 04 on the emulator: the same transpose over five layouts of its tile."""

import subprocess
import sys

import pytest

from common.series import stage_script
from common.stage import BadSize
from common.verify import make_arguments, verify_stage
from tests.stages import load_stage

STAGE = load_stage(4)
LAYOUTS = ("none", "pad", "32B", "64B", "128B")


@pytest.mark.parametrize(
    ("rows", "cols", "dtype", "layout"),
    [
        *((520, 392, "float16", layout) for layout in LAYOUTS),  # ragged both ways, 20 tiles over 6 or 7 stages
        (8, 16, "bfloat16", "128B"),  # less than one tile
        (8, 16, "bfloat16", "pad"),
        (132, 260, "float32", "128B"),
        (132, 260, "float32", "pad"),
    ],
)
def test_verifies_under_every_schedule(rows: int, cols: int, dtype: str, layout: str) -> None:
    verify_stage(STAGE, STAGE.config(dtype=dtype, rows=rows, cols=cols, layout=layout, ctas=1))


@pytest.mark.parametrize(
    ("rows", "cols", "dtype", "matrix"),
    [(64, 33, "float16", "A"), (33, 64, "bfloat16", "B"), (64, 66, "float32", "A"), (66, 64, "float32", "B")],
)
def test_rows_that_tma_cannot_address_are_refused_with_the_rule(rows: int, cols: int, dtype: str, matrix: str) -> None:
    with pytest.raises(BadSize, match=f"row of {matrix} .* multiple of 16 bytes"):
        STAGE.config(rows=rows, cols=cols, dtype=dtype)


# Wavefronts over the least possible. An 8 x 8 block of 16-bit elements is eight chunks in one column; a warp's 32 words
# of float32 are four rows of two quadrants, which a padded row or the 32B swizzle does not keep apart.
@pytest.mark.parametrize(
    ("dtype", "side", "layout", "slowdown"),
    [
        ("float16", 256, "none", 8),
        ("float16", 256, "pad", 1),
        ("float16", 256, "32B", 1),
        ("float16", 256, "128B", 1),
        ("float32", 128, "none", 4),
        ("float32", 128, "pad", 2),
        ("float32", 128, "32B", 2),
        ("float32", 128, "128B", 1),
    ],
)
def test_the_layout_alone_decides_the_bank_conflicts(dtype: str, side: int, layout: str, slowdown: int) -> None:
    sizes = {"rows": side, "cols": side, "dtype": dtype, "layout": layout}
    kernel = STAGE.build(**sizes)
    inputs, outputs = make_arguments(STAGE, STAGE.config(**sizes), seed=0)
    figures = kernel(*inputs, *outputs, schedule="early").counters.total()
    assert figures.ideal_wavefronts == 2 * side * side * STAGE.config(**sizes).itemsize // 128
    assert figures.wavefronts == slowdown * figures.ideal_wavefronts


@pytest.mark.parametrize("layout", ["pad", "128B"])
def test_the_copy_engine_does_the_copying_and_nothing_spills(layout: str) -> None:
    kernel = STAGE.build(rows=256, cols=256, layout=layout)
    assert kernel.resources.spill_store_bytes == 0 and kernel.resources.spill_load_bytes == 0
    sass = kernel.sass()
    engine = ("UBLKCP",) if layout == "pad" else ("UTMALDG", "UTMASTG")
    assert all(name in sass for name in (*engine, "LDSM", "STSM", "SYNCS"))


def test_show_writes_drawings_of_layouts_on_which_tirx_and_the_emulator_agree(tmp_path) -> None:
    command = [sys.executable, str(stage_script(4)), "--show", str(tmp_path / "drawings")]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    drawings = sorted(path.stem for path in (tmp_path / "drawings").iterdir())
    assert len(drawings) == text.count("agree on all") + text.count("no hardware unit computes") == 22
    assert {"tile_128B", "operand_K_B128", "operand_MN_B64", "data_path_B", "fragment_16x256b"} <= set(drawings)


def test_show_takes_no_other_flags() -> None:
    command = [sys.executable, str(stage_script(4)), "--show", "--layout", "pad"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2 and "unrecognized arguments" in result.stderr
