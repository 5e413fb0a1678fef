"""Stage 03 on the emulator: the RMSNorm of stage 02 with a polynomial, and the roofline that it draws."""

import json
from functools import cache

import pytest

from common import harness
from common.verify import Mismatch, verify_stage
from tests.stages import load_stage

STAGE = load_stage(3)


@cache
def default_kernel():
    return STAGE.build()


@pytest.mark.parametrize("degree", [16, 0, 19])
def test_verifies_under_every_schedule(degree: int) -> None:
    verify_stage(STAGE, STAGE.config(degree=degree), kernel=default_kernel())


@pytest.mark.parametrize(
    ("rows", "cols", "dtype", "degree"),
    [
        (37, 1000, "bfloat16", 5),  # ragged in both directions
        (1, 10000, "float32", 33),  # one row, over a cluster
    ],
)
def test_verifies_at_other_sizes(rows: int, cols: int, dtype: str, degree: int) -> None:
    verify_stage(STAGE, STAGE.config(dtype=dtype, rows=rows, cols=cols, degree=degree))


def counters_at(degree: int, kernel=None):
    """What the emulator counts at the default size, after checking the result."""
    run = verify_stage(STAGE, STAGE.config(degree=degree), ["early"], kernel=kernel or default_kernel())[0].run
    return run.counters


def test_each_degree_is_two_flops_per_element_and_no_byte() -> None:
    elements = 16 * 256
    few, many = counters_at(1), counters_at(100)
    assert many.flops["fp32 fma"] - few.flops["fp32 fma"] == 2 * 99 * elements
    assert {**many.flops, "fp32 fma": 0} == {**few.flops, "fp32 fma": 0}
    paths = ("TMA load", "TMA store", "global load")
    assert [many.bytes[path] for path in paths] == [few.bytes[path] for path in paths] == [4 * elements] * 3


@pytest.mark.parametrize("degree", [0, 1, 100])
def test_the_formula_leaves_out_only_the_sums_of_the_climb(degree: int) -> None:
    counted = sum(n for unit, n in counters_at(degree).flops.items() if not unit.endswith("special"))
    climb = counted - STAGE.flops(STAGE.config(degree=degree))
    assert climb == 16 * 32 * (5 + 2 + 1)  # of each lane: five additions, mean and epsilon, the scale of t


def test_intensity_goes_from_a_half_to_512_at_the_size_of_a_gpu() -> None:
    ends = [STAGE.config(scale="gpu", degree=degree) for degree in (0, 2048)]
    assert [STAGE.flops(c) / STAGE.bytes_moved(c) for c in ends] == pytest.approx([0.5, 512.6], rel=1e-3)


def test_the_polynomial_is_fmas_and_nothing_spills() -> None:
    kernel = default_kernel()
    assert kernel.resources.spill_store_bytes == 0 and kernel.resources.spill_load_bytes == 0
    assert kernel.sass().count("FFMA") >= (16 + 1 + 1) * 256 // 32  # the loop of 16, what is left of it, the squares


# -- the exercises of the README ---------------------------------------------------------------------------------------

REST = """            for _ in T.serial(degree % UNROLL, unroll=False):
                multiply_add()
"""


def test_steps_left_over_by_the_unrolled_loop_are_missed_where_t_is_almost_one() -> None:
    kernel = load_stage(3, (REST, "")).build()
    counters_at(32, kernel)
    with pytest.raises(Mismatch, match=r"output\[0, 0\]"):
        counters_at(33, kernel)


def test_a_branch_per_step_costs_as_much_as_the_step() -> None:
    rolled = counters_at(512, load_stage(3, ("UNROLL = 16", "UNROLL = 1")).build())
    shares = [counters.by_opcode()["fma"] / counters.warp_instructions for counters in (rolled, counters_at(512))]
    assert shares == pytest.approx([0.56, 0.91], abs=0.01)


# -- the picture -------------------------------------------------------------------------------------------------------


def test_the_script_leaves_a_roofline(tmp_path, capsys) -> None:
    assert harness.main(STAGE, ["--device", "emulator", "--out", str(tmp_path / "new")]) == 0
    assert "roofline.png" in capsys.readouterr().out
    document = json.loads((tmp_path / "new" / "roofline.json").read_text(encoding="utf-8"))
    assert {ceiling["source"] for ceiling in document["ceilings"]} == {"cited"}
    by_stage = {stage: [p for p in document["points"] if p["stage"] == stage] for stage in (1, 2, 3, 4)}
    assert [len(by_stage[stage]) for stage in (1, 2, 3, 4)] == [1, 1, 13, 1]
    assert all(point["seconds"] is None for point in document["points"])
    assert by_stage[4][0]["intensity"] == 0
    assert (tmp_path / "new" / "roofline.png").read_bytes().startswith(b"\x89PNG")


def test_the_formula_of_stage_02_agrees_with_what_the_emulator_counts() -> None:
    stage = load_stage(2)
    config = stage.config(rows=8, cols=1024, dtype="float32")
    flops = verify_stage(stage, config, ["early"])[0].run.counters.flops
    counted = sum(n for unit, n in flops.items() if not unit.endswith("special"))
    assert stage.flops(config) <= counted < 1.1 * stage.flops(config)
