"""Stage 09 on the emulator: attention against its definition in float64, and what the compiler made of the kernel."""

import importlib.util
import re
from functools import cache
from math import inf, log

import numpy as np
import pytest
import torch

from common.emulator import Deadlock, InvalidAddress, MissingFence
from common.series import stage_script
from common.stage import BadSize, Config
from common.verify import SCHEDULES, Mismatch, check_outputs, make_arguments, verify_stage
from tests.stages import load_stage

STAGE = load_stage(9)
TILE = 128
BLOCK_OF_P = TILE * TILE * 2  # bytes
VALUES = {"sq": 256, "skv": 512, "hq": 1, "hkv": 1}  # one CTA with two tiles of queries and four blocks of keys
O_TILE = TILE * 128 * 4  # bytes in TMEM


def build(**values):
    """The kernel of these sizes and options, built once for all tests that want it."""
    config = config_of(**values)
    return _build(config.dtype, tuple(config.values.items()))


@cache
def _build(dtype: str, values: tuple):
    return STAGE.build(dtype=dtype, **dict(values))


def config_of(**values) -> Config:
    return STAGE.config(**values)


def attend(inputs: tuple, schedule: str = "late", seed: int = 0, **values):
    """Run the kernel and compare O and LSE with the reference. Returns O, LSE and the emulator's run."""
    config = config_of(**values)
    _, outputs = make_arguments(STAGE, config, seed=0)
    run = build(**values)(*inputs, *outputs, schedule=schedule, seed=seed)
    check_outputs(STAGE, config, inputs, outputs)
    check_lse(config, inputs, outputs[1])
    return *outputs, run


def check_lse(config: Config, inputs: tuple, lse: torch.Tensor) -> None:
    """The relative error of a sum of exponentials is at most that of the polynomial."""
    expected = STAGE.reference(config, *inputs)[1]
    finite = expected.isfinite()
    assert torch.equal(lse[~finite].double(), expected[~finite])
    error = (lse.double() - expected)[finite].abs()
    assert (error <= 9e-5 + 2.0**-20 * expected[finite].abs()).all()


# -- shapes ------------------------------------------------------------------------------------------------------------

SHAPES = [
    # batch sq skv hq hkv d, mask, dtype
    (1, 512, 512, 4, 2, 128, "full", "float16"),  # the default
    (1, 512, 512, 4, 2, 128, "causal", "float16"),
    (1, 100, 300, 4, 1, 64, "causal", "float16"),  # fewer queries than keys: each sees at least 201
    (1, 300, 100, 4, 4, 128, "causal", "bfloat16"),  # more queries than keys: the first 200 see nothing
    (2, 1, 1, 1, 1, 128, "full", "float16"),
    (1, 1, 129, 8, 2, 64, "causal", "bfloat16"),  # one query, as in decoding
    (1, 127, 128, 2, 2, 128, "causal", "float16"),
    (3, 128, 127, 1, 1, 64, "full", "bfloat16"),
    (1, 129, 100, 2, 1, 128, "full", "float16"),
    (1, 40, 200, 8, 1, 64, "causal", "float16"),  # a tile of 16 positions of 8 heads
    (1, 40, 200, 16, 1, 128, "full", "bfloat16"),  # 8 positions of 16 heads
]


def values_of(shape: tuple) -> dict:
    return dict(zip(("batch", "sq", "skv", "hq", "hkv", "d", "mask", "dtype"), shape, strict=True))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape)))
def test_verifies_under_every_schedule(shape: tuple) -> None:
    values = values_of(shape)
    verify_stage(STAGE, config_of(**values), kernel=build(**values))


def test_few_ctas_take_many_pieces_of_work() -> None:
    """Five CTAs take three turns, the last of which is not full, over a section of three heads and one of one."""
    stage = load_stage(9, ("L2_BYTES = 126 * 1024 * 1024", "L2_BYTES = 2**19"))
    values = {"batch": 2, "sq": 300, "skv": 300, "hq": 4, "hkv": 2, "d": 64, "mask": "causal", "ctas": 5}
    kernel = stage.build(**values)
    assert kernel.launch_spec.grid == (5, 1, 1)
    verify_stage(stage, stage.config(**values), kernel=kernel)


STEP_SIZES = {"sq": 200, "skv": 256, "hq": 2, "hkv": 1}


@pytest.mark.parametrize("step", ["qk", "softmax", "two-tiles", "correction"])
def test_every_step_verifies(step: str) -> None:
    values = {"step": step, **STEP_SIZES}
    verify_stage(STAGE, config_of(**values), kernel=build(**values))


def test_the_step_with_masks_verifies() -> None:
    values = {"step": "causal", "sq": 200, "skv": 250, "hq": 2, "hkv": 1, "mask": "causal"}
    verify_stage(STAGE, config_of(**values), kernel=build(**values))


def test_tensors_of_other_lengths_are_refused() -> None:
    kernel = build(**VALUES)
    for length, other in (("skv", "keys"), ("sq", "queries")):
        inputs, outputs = make_arguments(STAGE, config_of(**{**VALUES, length: 200}), seed=0)
        with pytest.raises(RuntimeError, match=f"another number of {other}"):
            kernel(*inputs, *outputs)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"d": 96}, "64 or 128"),
        ({"hq": 3, "hkv": 2}, "multiple of hkv"),
        ({"hq": 3, "hkv": 1}, "divide 128"),
        ({"step": "correction", "mask": "causal"}, "cannot hide a key"),
        ({"step": "softmax", "skv": 100}, "multiple of 128"),
        ({"step": "correction", "lengths": "varying"}, "--lengths equal"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_rule(values: dict, message: str) -> None:
    with pytest.raises(BadSize, match=message):
        config_of(**values)


# -- values ----------------------------------------------------------------------------------------------------------

every_schedule = pytest.mark.parametrize("schedule", SCHEDULES)


def normal(seed: int, length: int, d: int = 128) -> torch.Tensor:
    return torch.randn(1, length, 1, d, generator=torch.Generator().manual_seed(seed))


def rising(step: float) -> tuple:
    """Inputs whose scores, in units of log2, rise by `step` from block to block in every row."""
    blocks = torch.arange(512) // TILE
    level = step * log(2) * blocks
    k = 0.1 * normal(1, 512)
    k[0, :, 0, 0] = level / 8
    q = 0.1 * normal(2, 256)
    q[..., 0] = 8
    return q.half(), k.half(), normal(3, 512).half(), 1.0


def rescaled(run) -> float:
    """Tiles of O that were rescaled, from the bytes that went to TMEM."""
    return (run.counters.bytes["TMEM store"] - 8 * BLOCK_OF_P) / O_TILE


@every_schedule
def test_one_hot_values_show_the_weights(schedule: str) -> None:
    v = torch.eye(128).repeat(4, 1).reshape(1, 512, 1, 128)
    attend((normal(1, 256).half(), normal(2, 512).half(), v.half(), 128**-0.5), schedule, **VALUES)


@every_schedule
def test_a_maximum_that_rises_beyond_the_threshold_rescales_every_block(schedule: str) -> None:
    *_, run = attend(rising(12), schedule, **VALUES)
    assert rescaled(run) == 2 * 3  # two tiles, every block but the first


@every_schedule
def test_a_maximum_that_rises_less_rescales_nothing_and_the_sum_makes_up_for_it(schedule: str) -> None:
    *_, run = attend(rising(2.5), schedule, **VALUES)
    assert rescaled(run) == 0


def test_without_a_threshold_every_rise_rescales() -> None:
    *_, run = attend(rising(2.5), step="softmax", **VALUES)
    assert rescaled(run) == 2 * 3


def test_a_maximum_that_falls_leaves_the_first_base() -> None:
    q, k, v, scale = rising(12)
    *_, run = attend((q, k.flip(1), v, scale), **VALUES)
    assert rescaled(run) == 0


def test_only_warps_with_a_rising_row_rescale() -> None:
    q, k, v, scale = rising(12)
    q[0, 1:, 0, 0] = 0
    *_, run = attend((q, k, v, scale), **VALUES)
    assert rescaled(run) == 3 / 4  # one warp of the first tile, in three blocks


@every_schedule
@pytest.mark.parametrize("sign", [1, -1])
def test_scores_of_hundreds(sign: int, schedule: str) -> None:
    """All far above 0, or all far below: what counts is how far they are from each other."""
    q, k = normal(4, 256), normal(5, 512)
    q[..., 0], k[..., 0] = 20, 20 * sign
    _, lse, _ = attend((q.half(), k.half(), normal(6, 512).half(), 1.0), schedule, **VALUES)
    assert (sign * lse > 300).all()


def test_scores_so_far_apart_that_one_key_takes_all() -> None:
    o, *_ = attend((40 * normal(7, 256).half(), 40 * normal(8, 512).half(), normal(9, 512).half(), 1.0), **VALUES)
    assert (o.float().abs() > 1e-3).any()


@every_schedule
def test_equal_scores_give_the_mean(schedule: str) -> None:
    v = normal(10, 512).half()
    o, lse, _ = attend((torch.zeros(1, 256, 1, 128).half(), normal(11, 512).half(), v, 0.1), schedule, **VALUES)
    assert torch.equal(lse, torch.full_like(lse, log(512)))
    torch.testing.assert_close(o[0, :, 0].double(), v.double().mean(1)[0].expand(256, 128), rtol=1e-3, atol=1e-5)


def test_the_scale_is_an_argument() -> None:
    q, k, v = normal(12, 256).half(), normal(13, 512).half(), normal(14, 512).half()
    results = [attend((q, k, v, scale), **VALUES)[1] for scale in (0.01, 0.5)]
    assert not torch.allclose(*results)


def test_keys_behind_the_mask_do_not_count_whatever_they_are() -> None:
    """A key or a value of float16's largest number past what a query sees changes no bit of its row."""
    values = {"sq": 256, "skv": 256, "hq": 1, "hkv": 1, "mask": "causal"}
    q, k, v = (normal(seed, 256).half() for seed in (15, 16, 17))
    before = attend((q, k, v, 0.1), **values)
    k[0, 200:], v[0, 200:] = 60000.0, -60000.0
    after = [torch.empty_like(x) for x in before[:2]]
    build(**values)(q, k, v, 0.1, *after)
    assert torch.equal(before[0][:, :200], after[0][:, :200]) and torch.equal(before[1][..., :200], after[1][..., :200])


def test_rows_that_see_nothing_give_zeros_and_minus_infinity() -> None:
    values = values_of(SHAPES[3])
    inputs, _ = make_arguments(STAGE, config_of(**values), seed=5)
    o, lse, _ = attend(inputs, "random", **values)
    assert (o[:, :200] == 0).all() and (lse[..., :200] == -inf).all() and lse[..., 200:].isfinite().all()


# -- sequences of different length -------------------------------------------------------------------------------------

HEADS = {"hq": 2, "hkv": 1, "d": 64}
PACKED = {"lengths": "varying", "batch": 4, "sq": 128, "skv": 128, **HEADS}
LENGTHS = [(0, 128), (1, 0), (129, 5), (300, 200), (0, 0), (128, 129)]  # of queries and of keys


def bounds(lengths: list[tuple[int, int]]) -> list[torch.Tensor]:
    """cu_seqlens_q and cu_seqlens_k."""
    return [torch.tensor([0, *column]).cumsum(0).int() for column in zip(*lengths)]


def packed_inputs(lengths: list[tuple[int, int]], seed: int = 18) -> tuple:
    generator = torch.Generator().manual_seed(seed)
    rows_q, rows_k = (int(ends[-1]) for ends in bounds(lengths))
    heads = HEADS["hkv"]
    shapes = [(rows_q, HEADS["hq"], HEADS["d"]), (rows_k, heads, HEADS["d"]), (rows_k, heads, HEADS["d"])]
    return *(torch.randn(shape, generator=generator).half() for shape in shapes), *bounds(lengths), 0.125


def packed_outputs(inputs: tuple) -> list[torch.Tensor]:
    """O and LSE, full of NaN."""
    q = inputs[0]
    return [torch.full_like(q, torch.nan), torch.full((q.shape[1], q.shape[0]), torch.nan)]


def attend_packed(inputs: tuple, schedule: str = "late", **values) -> list[torch.Tensor]:
    """Run the kernel for lengths that vary and compare with each sequence's own attention. Returns O and LSE."""
    values = {**PACKED, **values}
    outputs = packed_outputs(inputs)
    build(**values)(*inputs, *outputs, schedule=schedule)
    check_outputs(STAGE, config_of(**values), inputs, outputs)
    return outputs


@pytest.mark.parametrize("mask", ["full", "causal"])
def test_sequences_of_different_length_verify_under_every_schedule(mask: str) -> None:
    values = {**PACKED, "mask": mask}
    verify_stage(STAGE, config_of(**values), kernel=build(**values))


@every_schedule
@pytest.mark.parametrize("mask", ["full", "causal"])
def test_a_kernel_takes_any_lengths_and_any_number_of_sequences(mask: str, schedule: str) -> None:
    o, lse = attend_packed(packed_inputs(LENGTHS), schedule, mask=mask)
    assert (o[0] == 0).all() and (lse[:, 0] == -inf).all()  # the query that has no key
    attend_packed(packed_inputs([(200, 100)]), schedule, mask=mask)


def test_equal_lengths_are_lengths_too() -> None:
    """Bit for bit what the kernel for equal lengths gives."""
    q, k, v, *rest = packed_inputs([(200, 150), (200, 150)])
    o, lse = attend_packed((q, k, v, *rest))
    batched = [x.reshape(2, -1, *x.shape[1:]) for x in (q, k, v)]
    expected = attend((*batched, rest[-1]), batch=2, sq=200, skv=150, **HEADS)
    assert torch.equal(o, expected[0].flatten(0, 1)) and torch.equal(lse, expected[1].transpose(0, 1).flatten(1))


MISSING_KEYS = "            missing: T.let = block * TILE + TILE - end\n"
KEYS_FROM_START = "            end: T.let = block * TILE + TILE\n            missing: T.let = 0\n"
END_OF_KEYS = "            end: T.let = T.min(block * TILE + TILE, keys)\n"


def test_values_of_the_next_sequence_are_not_multiplied_even_with_zero() -> None:
    """0 times infinity is NaN: so the box of the last block must end where the sequence does."""
    lengths = [(128, 100), (128, 128)]
    inputs = packed_inputs(lengths)
    before = attend_packed(inputs)
    inputs[2][100:] = inf
    after = packed_outputs(inputs)
    values = {**PACKED, "batch": 2}
    build(**values)(*inputs, *after)
    assert torch.equal(before[0][:128], after[0][:128])
    unclipped = load_stage(9, (END_OF_KEYS + MISSING_KEYS, KEYS_FROM_START)).build(**values)
    after[0].zero_()
    unclipped(*inputs, *after)
    assert after[0][:128].isnan().all()


def test_cumulative_lengths_of_two_batches_are_refused() -> None:
    inputs = list(packed_inputs(LENGTHS))
    inputs[4] = inputs[4][:-1].clone()
    with pytest.raises(ValueError, match=r"CU_SEQLENS_K.shape\[0\]"):
        attend_packed(tuple(inputs))


# -- the polynomial ----------------------------------------------------------------------------------------------------


def test_the_polynomial_is_as_accurate_as_said() -> None:
    """In float32 with one rounding per step, as the kernel computes it."""
    fraction = np.arange(2**18) / 2**18
    value = np.zeros(fraction.shape, np.float32)
    for coefficient in STAGE.kernel.__globals__["POLYNOMIAL"]:
        value = (value.astype(np.float64) * fraction + np.float64(np.float32(coefficient))).astype(np.float32)
    assert value[0] == 1
    assert 8.5e-5 < np.abs(value / np.exp2(fraction) - 1).max() < 8.6e-5


# -- what the compiler made of it --------------------------------------------------------------------------------------


def opcodes(sass: str) -> list[str]:
    """Opcode of each instruction, in order."""
    return re.findall(r"^\s*/\*[0-9a-f]{4,5}\*/\s+(?:@!?U?P\d\s+)?([A-Z][\w.]*)", sass, re.MULTILINE)


@pytest.mark.parametrize(
    "values",
    [
        *map(values_of, SHAPES[:4]),
        *({"lengths": "varying", "mask": mask} for mask in ("full", "causal")),
        *({"step": step, **STEP_SIZES} for step in ("softmax", "two-tiles", "correction")),
    ],
    ids=lambda values: "-".join(map(str, values.values())),
)
def test_no_role_spills(values: dict) -> None:
    resources = build(**values).resources
    assert resources.spill_store_bytes == 0 and resources.spill_load_bytes == 0


def test_registers_move_to_the_softmax() -> None:
    assert {"USETMAXREG.TRY_ALLOC.CTAPOOL", "USETMAXREG.DEALLOC.CTAPOOL"} <= set(opcodes(build().sass()))


def test_the_instructions_are_the_ones_meant() -> None:
    kernel = build()
    ops = opcodes(kernel.sass())
    expected = "UTCHMMA LDTM.x32 STTM.x16 UTMALDG.4D UTMASTG.4D FMNMX3 FFMA2.FTZ FADD2.FTZ.RM".split()
    assert set(expected) <= set(ops)
    # P is the first operand of its product from TMEM, and no copy in SMEM.
    assert re.search(r"UTCHMMA tmem\[", kernel.sass())


def test_the_softmax_takes_few_instructions_for_an_element() -> None:
    """From S in TMEM to P in TMEM for 128 elements of a thread: one copy of the loop, without masks."""
    ops = opcodes(build().sass())
    loop = ops[ops.index("LDTM.x32") : len(ops) - ops[::-1].index("STTM.x16")]
    assert loop.count("MUFU.EX2") == 96 + 1  # and one for the factor
    assert loop.count("F2FP.F16.F32.PACK_AB") == 64
    assert len(loop) / TILE < 4.5


# -- the mistakes of the README ----------------------------------------------------------------------------------------

RESCALED = "                o_empty.wait(tile, (weighed[tile] & 1) ^ 1)\n"
STORED = "        def hand_over(piece):\n            T.ptx.tcgen05.wait__st.sync.aligned()\n"
CLAMPED = "self.x[j + k] = T.max(self.x[j + k], T.float32(SMALLEST))"
QUERIES_READ = "            q_empty.wait(tile, (turn & 1) ^ 1)\n            q_full"
FACTOR_READ = "            factor_empty.wait(warpgroup, (told & 1) ^ 1)\n"
RELEASED = "                    if tile == TILES - 1:\n                        kv_empty.arrive(values)"


def attend_with(mistake: tuple[str, str], schedule: str, seed: int = 0, inputs: tuple | None = None, **values) -> None:
    """Verify a kernel with a mistake in it."""
    stage = load_stage(9, mistake)
    config = stage.config(**{**VALUES, **values})
    fresh, outputs = make_arguments(stage, config, seed=seed)
    inputs = inputs or fresh
    stage.build(**{**VALUES, **values})(*inputs, *outputs, schedule=schedule, seed=seed)
    check_outputs(stage, config, inputs, outputs)


def test_products_that_do_not_wait_for_the_correction() -> None:
    """Nothing happens where no maximum rises beyond the threshold, and even then not if correction is quick."""
    mistake = (RESCALED, "                T.evaluate(0)\n")
    attend_with(mistake, "early")
    attend_with(mistake, "late", inputs=rising(12))
    with pytest.raises(Mismatch):
        attend_with(mistake, "early", inputs=rising(12))


def test_weights_handed_over_before_they_are_stored() -> None:
    mistake = (STORED, STORED[: STORED.index("\n") + 1])
    attend_with(mistake, "early")
    with pytest.raises(Mismatch, match="is nan"):
        attend_with(mistake, "random")


def test_a_ring_that_is_released_after_the_first_of_two_tiles() -> None:
    mistake = (RELEASED, RELEASED.replace("TILES - 1", "0"))
    attend_with(mistake, "early")
    with pytest.raises(Mismatch):
        attend_with(mistake, "late")


def test_queries_that_are_overwritten_by_those_of_the_next_work() -> None:
    with pytest.raises(Mismatch):
        attend_with((QUERIES_READ, "            q_full"), "early", sq=512, skv=256, ctas=1)


def test_factors_that_overtake_each_other_leave_the_correction_waiting_or_are_applied_too_late() -> None:
    with pytest.raises(Deadlock, match="warp 13 waits"):
        attend_with((FACTOR_READ, ""), "early")
    with pytest.raises(Mismatch):
        attend_with((FACTOR_READ, ""), "late")


def test_output_that_is_stored_without_a_proxy_fence() -> None:
    fence = "            T.ptx.fence.proxy.async_.shared__cta()\n            arrive(out_full, tile)\n"
    with pytest.raises(MissingFence, match=r"the TMA store reads shared Os\["):
        attend_with((fence, "            arrive(out_full, tile)\n"), "early", skv=128)


def test_releases_that_nobody_waits_for_may_come_after_the_end() -> None:
    """In few orders of events: hence many seeds."""
    values = {"sq": 256, "skv": 128, "hq": 8, "hkv": 8, "d": 64}
    stage = load_stage(9, ("                    drain()\n", ""))
    kernel, (inputs, outputs) = stage.build(**values), make_arguments(stage, stage.config(**values), seed=0)
    with pytest.raises(InvalidAddress, match="tcgen05.commit completes after CTA"):
        for seed in range(60):
            kernel(*inputs, *outputs, schedule="random", seed=seed)


def test_the_polynomial_of_minus_infinity_is_no_number() -> None:
    mistake = (CLAMPED, "self.x[j + k] = self.x[j + k]")
    attend_with(mistake, "early", skv=256)
    with pytest.raises(Mismatch, match="is nan"):
        attend_with(mistake, "early", skv=250)


def test_a_fraction_on_both_sides_of_0_is_where_the_polynomial_is_bad() -> None:
    with pytest.raises(Mismatch):
        attend_with(("T.ptx.add.rm.ftz.f32x2(whole", "T.ptx.add.rn.ftz.f32x2(whole"), "early")


def test_a_lowest_base_of_minus_infinity_fails_where_a_row_sees_nothing() -> None:
    mistake = ("LOWEST = -1e38", "LOWEST = -inf")
    attend_with(mistake, "early")
    with pytest.raises(Mismatch, match="is nan, expected 0"):
        attend_with(mistake, "early", sq=256, skv=100, mask="causal")


# -- the drawings ------------------------------------------------------------------------------------------------------


def test_the_drawings_are_current() -> None:
    folder = stage_script(9).parent
    spec = importlib.util.spec_from_file_location("diagrams", folder / "diagrams.py")
    diagrams = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(diagrams)
    assert len(diagrams.barriers()) == 12
    for name, text in diagrams.drawings().items():
        assert (folder / name).read_text(encoding="utf-8") == text, f"run {folder.name}/diagrams.py {folder.name}"
