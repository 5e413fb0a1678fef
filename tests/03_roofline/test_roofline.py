"""Stage 03 on the emulator: the RMSNorm of stage 02 with a polynomial, and the roofline that it draws."""

import json

import pytest

from common import harness
from common.verify import Mismatch, make_arguments, verify_stage
from tests.stages import load_stage

STAGE = load_stage(3)


@pytest.mark.parametrize(
    ("rows", "cols", "dtype", "degree"),
    [
        (16, 256, "float32", 16),  # the default
        (16, 256, "float32", 0),
        (1, 4096, "float32", 19),  # one row
        (37, 1000, "bfloat16", 5),  # ragged in both directions
        (3, 20008, "float16", 33),  # over a cluster
        (1, 65544, "float32", 1),  # a row that is read twice
    ],
)
def test_verifies_under_every_schedule(rows: int, cols: int, dtype: str, degree: int) -> None:
    verify_stage(STAGE, STAGE.config(dtype=dtype, rows=rows, cols=cols, degree=degree))


def run_at(degree: int, *mistakes: tuple[str, str]):
    """The emulator's run of the default size, verified."""
    stage = load_stage(3, *mistakes)
    return verify_stage(stage, stage.config(degree=degree), ["early"])[0].run


def test_each_degree_is_two_flops_per_element_and_no_byte() -> None:
    elements = 16 * 256
    few, many = run_at(1).counters, run_at(100).counters
    assert many.flops["fp32 fma"] - few.flops["fp32 fma"] == 2 * 99 * elements
    assert {**many.flops, "fp32 fma": 0} == {**few.flops, "fp32 fma": 0}
    paths = ("TMA load", "TMA store", "global load")
    assert [many.bytes[path] for path in paths] == [few.bytes[path] for path in paths] == [4 * elements] * 3


@pytest.mark.parametrize("degree", [0, 1, 100])
def test_the_formula_leaves_out_only_the_sums_of_the_climb(degree: int) -> None:
    counted = sum(n for unit, n in run_at(degree).counters.flops.items() if not unit.endswith("special"))
    climb = counted - STAGE.flops(STAGE.config(degree=degree))
    assert climb == 16 * 32 * (5 + 2 + 1)  # of each lane: five additions, mean and epsilon, the scale of t


def test_intensity_goes_from_a_half_to_512_at_the_size_of_a_gpu() -> None:
    ends = [STAGE.config(scale="gpu", degree=degree) for degree in (0, 2048)]
    assert [STAGE.flops(c) / STAGE.bytes_moved(c) for c in ends] == pytest.approx([0.5, 512.6], rel=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_polynomial_is_fmas_and_nothing_spills(dtype: str) -> None:
    kernel = STAGE.build(rows=64, cols=4096, dtype=dtype)
    assert kernel.resources.spill_store_bytes == 0 and kernel.resources.spill_load_bytes == 0
    per_lane = 128 // STAGE.config(dtype=dtype).itemsize
    assert kernel.sass().count("FFMA") >= 16 * per_lane


# -- the exercises of the README ---------------------------------------------------------------------------------------

REST = """            for _ in T.serial(degree % UNROLL, unroll=False):
                multiply_add()
"""


def test_steps_left_over_by_the_unrolled_loop_are_missed_where_t_is_almost_one() -> None:
    run_at(32, (REST, ""))
    with pytest.raises(Mismatch, match=r"output\[0, 0\]"):
        run_at(33, (REST, ""))


def test_a_branch_per_step_costs_as_much_as_the_step() -> None:
    rolled = run_at(2048, ("UNROLL = 16", "UNROLL = 1")).counters
    unrolled = run_at(2048).counters
    shares = [counters.by_opcode()["fma"] / counters.warp_instructions for counters in (rolled, unrolled)]
    assert shares == pytest.approx([0.57, 0.93], abs=0.01)


def test_the_script_leaves_a_roofline(tmp_path, capsys) -> None:
    assert harness.main(STAGE, ["--device", "emulator", "--quick", "--out", str(tmp_path / "new")]) == 0
    assert "roofline.png" in capsys.readouterr().out
    document = json.loads((tmp_path / "new" / "roofline.json").read_text(encoding="utf-8"))
    assert {ceiling["source"] for ceiling in document["ceilings"]} == {"cited"}
    by_stage = {stage: [p for p in document["points"] if p["stage"] == stage] for stage in (1, 2, 3, 4)}
    assert [len(by_stage[stage]) for stage in (1, 2, 3, 4)] == [1, 1, 13, 1]
    assert all(point["seconds"] is None for point in document["points"])
    assert by_stage[4][0]["intensity"] == 0
    assert (tmp_path / "new" / "roofline.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("number", [1, 2])
def test_formulas_of_other_stages_agree_with_what_the_emulator_counts(number: int) -> None:
    stage = load_stage(number)
    config = stage.config(rows=8, cols=1024, dtype="float32")
    inputs, outputs = make_arguments(stage, config, seed=0)
    flops = stage.build(rows=8, cols=1024, dtype="float32")(*inputs, *outputs, schedule="early").counters.flops
    counted = sum(n for unit, n in flops.items() if not unit.endswith("special"))
    assert stage.flops(config) <= counted < 1.1 * stage.flops(config)
