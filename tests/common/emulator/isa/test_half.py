"""f16 and bf16 instructions, single and in pairs, against exact rational arithmetic (PTX ISA 9.7.4)."""

import ml_dtypes
import numpy as np
import pytest

from common.emulator.faults import UnsupportedInstruction
from tests.common.emulator.isa import float_oracle as oracle
from tests.common.emulator.isa.single_instruction import execute
from tests.common.emulator.numerics.rounding_oracle import BRAIN, HALF, same

DTYPES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}
PRECISIONS = {"f16": HALF, "bf16": BRAIN}
KINDS = tuple(DTYPES)
EVERY = np.arange(1 << 16, dtype=np.uint16)
NAN, INFINITY = 0x7FFF, {"f16": 0x7C00, "bf16": 0x7F80}
OOB_NAN = 0x7FF7


@pytest.fixture(autouse=True)
def silent_floating_point():
    with np.errstate(all="ignore"):
        yield


def values_of(bits, kind):
    return bits.view(DTYPES[kind]).astype(np.float64)


def samples(kind, sources, count=400, seed=0):
    """Bits: special patterns, any patterns, and ordinary values close enough to interact."""
    rng = np.random.default_rng(seed)
    top, one = INFINITY[kind], {"f16": 0x3C00, "bf16": 0x3F80}[kind]
    step = {"f16": 0x400, "bf16": 0x80}[kind]
    special = [0, 1, 2, step - 1, step, step + 1, one, one - 1, one + 1, top - 1, top, top + 1, NAN, OOB_NAN]
    special = np.array([*special, *(x | 0x8000 for x in special)], np.uint16)
    columns = []
    for _ in range(sources):
        column = rng.choice(special, count)
        anything, ordinary = rng.random(count) < 0.3, rng.random(count) < 0.4
        column[anything] = rng.integers(0, 1 << 16, count)[anything]
        column[ordinary] = rng.standard_normal(count).astype(DTYPES[kind]).view(np.uint16)[ordinary]
        columns.append(column)
    return columns


def run(name, *columns):
    """The single form on these bits, after a check that the form on pairs gives the same in both halves."""
    letters = "abc"[: len(columns)]
    operands = ", ".join("%" + letter for letter in letters)
    single = execute(f"{name} %d, {operands};", "b16", **{x: ("b16", v) for x, v in zip(letters, columns)})
    pairs = [column.astype(np.uint32) << 16 | np.roll(column, 1) for column in columns]
    packed = execute(f"{name}x2 %d, {operands};", "b32", **{x: ("b32", v) for x, v in zip(letters, pairs)})
    assert np.array_equal(packed >> 16, single) and np.array_equal(packed & 0xFFFF, np.roll(single, 1))
    return single


def check(bits, wanted, kind, *columns):
    """Equal values and signs; a NaN has NVIDIA's pattern."""
    actual = values_of(bits, kind)
    wrong = np.flatnonzero(~same(actual, wanted))
    assert not wrong.size, [(*(hex(x[i]) for x in columns), "gives", hex(bits[i]), "not", wanted[i]) for i in wrong[:3]]
    assert set(bits[np.isnan(actual)].tolist()) <= {NAN}


@pytest.mark.parametrize("opcode", ["add", "sub", "mul"])
@pytest.mark.parametrize("rounding", ["", ".rn"])
@pytest.mark.parametrize(
    ("kind", "ftz", "sat"), [("f16", f, s) for f in (False, True) for s in (False, True)] + [("bf16", False, False)]
)
def test_arithmetic(opcode, rounding, kind, ftz, sat):
    columns = samples(kind, 2)
    values = [values_of(x, kind) for x in columns]
    wanted = oracle.results(opcode, values, precision=PRECISIONS[kind], ftz=ftz, sat=sat)
    check(run(f"{opcode}{rounding}{'.ftz' * ftz}{'.sat' * sat}.{kind}", *columns), wanted, kind, *columns)


FMA_FORMS = {
    "f16": ["", ".ftz", ".sat", ".ftz.sat", ".relu", ".ftz.relu", ".oob", ".oob.relu"],
    "bf16": ["", ".relu", ".oob", ".oob.relu"],
}


@pytest.mark.parametrize(("kind", "form"), [(kind, form) for kind in KINDS for form in FMA_FORMS[kind]])
def test_fma(kind, form):
    columns = samples(kind, 3, count=800)
    values = [values_of(x, kind) for x in columns]
    wanted = oracle.results("fma", values, precision=PRECISIONS[kind], ftz="ftz" in form, sat="sat" in form)
    if "relu" in form:
        wanted = np.where(np.signbit(wanted) & ~np.isnan(wanted), 0.0, wanted)
    if "oob" in form:
        outside = [(a & 0x7FFF) == OOB_NAN or (b & 0x7FFF) == OOB_NAN for a, b in zip(*columns[:2])]
        assert 10 < sum(outside) < 400
        wanted = np.where(outside, 0.0, wanted)
    check(run(f"fma.rn{form}.{kind}", *columns), wanted, kind, *columns)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["first", "second"])
def test_only_the_oob_nan_clears_a_product(kind, place):
    one = np.full(1 << 16, {"f16": 0x3C00, "bf16": 0x3F80}[kind], np.uint16)
    factors = (EVERY, one) if place == "first" else (one, EVERY)
    result = run(f"fma.rn.oob.{kind}", *factors, one)
    plain = run(f"fma.rn.{kind}", *factors, one)
    assert np.flatnonzero(result != plain).tolist() == [OOB_NAN, OOB_NAN | 0x8000]
    assert not result[[OOB_NAN, OOB_NAN | 0x8000]].any()


@pytest.mark.parametrize("opcode", ["neg", "abs"])
@pytest.mark.parametrize(("kind", "ftz"), [("f16", False), ("f16", True), ("bf16", False)])
def test_neg_and_abs(opcode, kind, ftz):
    wanted = EVERY ^ 0x8000 if opcode == "neg" else EVERY & 0x7FFF
    magnitude = EVERY & 0x7FFF
    if ftz:
        wanted = np.where(magnitude < 0x400, wanted & 0x8000, wanted)
    wanted = np.where(magnitude > INFINITY[kind], NAN, wanted)
    assert np.array_equal(run(f"{opcode}{'.ftz' * ftz}.{kind}", EVERY), wanted)


@pytest.mark.parametrize("opcode", ["min", "max"])
@pytest.mark.parametrize("nan", [False, True])
@pytest.mark.parametrize("xorsign", [False, True])
@pytest.mark.parametrize(("kind", "ftz"), [("f16", False), ("f16", True), ("bf16", False)])
def test_min_max(opcode, nan, xorsign, kind, ftz):
    columns = samples(kind, 2)
    wanted = oracle.min_max(
        opcode, [values_of(x, kind) for x in columns],
        propagate=nan, absolute=xorsign, xorsign=xorsign, ftz=ftz, precision=PRECISIONS[kind],
    )  # fmt: skip
    name = f"{opcode}{'.ftz' * ftz}{'.NaN' * nan}{'.xorsign.abs' * xorsign}.{kind}"
    check(run(name, *columns), wanted, kind, *columns)


@pytest.mark.parametrize(("kind", "bound"), [("f16", 2.0**-10.987), ("bf16", 2.0**-8)])
def test_tanh_keeps_its_bounds(kind, bound):
    values = values_of(EVERY, kind)
    result = run(f"tanh.approx.{kind}", EVERY)
    number = ~np.isnan(values)
    assert (np.abs(values_of(result, kind) - np.tanh(values))[number] <= bound).all()
    assert result[[0, 0x8000]].tolist() == [0, 0x8000]
    assert values_of(result, kind)[[INFINITY[kind], INFINITY[kind] | 0x8000]].tolist() == [1, -1]
    assert set(result[~number].tolist()) == {NAN}


@pytest.mark.parametrize(("name", "bound"), [("ex2.approx.f16", 2.0**-9.9), ("ex2.approx.ftz.bf16", 2.0**-7)])
def test_ex2_keeps_its_bounds(name, bound):
    kind = name.rsplit(".", 1)[1]
    values, result = values_of(EVERY, kind), run(name, EVERY)
    least = 2.0 ** PRECISIONS[kind].least
    exact = np.exp2(values)
    normal = (exact >= least) & (exact <= np.finfo(DTYPES["f16"]).max if kind == "f16" else exact < 2.0**127)
    assert (np.abs(values_of(result, kind) - exact)[normal] <= exact[normal] * bound).all()
    one, infinity = {"f16": 0x3C00, "bf16": 0x3F80}[kind], INFINITY[kind]
    assert result[[0, 0x8000, 1, 0x8001, infinity, infinity | 0x8000]].tolist() == [one] * 4 + [infinity, 0]
    assert set(result[np.isnan(values)].tolist()) == {NAN}
    if kind == "bf16":
        assert not result[exact < least / 2].any()


def test_lanes_outside_the_mask_keep_their_value():
    mask = np.arange(64) % 2 == 0
    bits = np.full(64, 0x3C00, np.uint16)
    result = execute("fma.rn.oob.f16 %d, %a, %a, %a;", "b16", mask=mask, a=("b16", bits))
    assert result.tolist() == [0x4000, 0xFFFF] * 32


ILLEGAL = [
    *(f"{op}.rz.{kind} %d, %a, %a;" for op in ("add", "mul") for kind in KINDS),
    "add.ftz.bf16 %d, %a, %a;", "mul.sat.bf16 %d, %a, %a;", "add.relu.f16 %d, %a, %a;", "sub.f16 %d, %a;",
    "fma.f16 %d, %a, %a, %a;", "fma.rz.bf16 %d, %a, %a, %a;", "fma.rn.sat.relu.f16 %d, %a, %a, %a;",
    "fma.rn.ftz.oob.f16 %d, %a, %a, %a;", "fma.rn.oob.sat.f16 %d, %a, %a, %a;", "fma.rn.ftz.bf16 %d, %a, %a, %a;",
    "min.xorsign.f16 %d, %a, %a;", "min.abs.f16 %d, %a, %a;", "max.ftz.bf16 %d, %a, %a;", "min.f16 %d, %a, %a, %a;",
    "neg.ftz.bf16 %d, %a;", "abs.sat.f16 %d, %a;", "tanh.f16 %d, %a;", "tanh.approx.ftz.f16 %d, %a;",
    "ex2.f16 %d, %a;", "ex2.approx.ftz.f16 %d, %a;", "ex2.approx.bf16 %d, %a;", "div.rn.f16 %d, %a, %a;",
    "mad.rn.f16 %d, %a, %a, %a;", "rcp.approx.f16 %d, %a;", "testp.finite.f16 %d, %a;", "copysign.f16 %d, %a, %a;",
    "add.f16 %d, %a, 1.5;", "add.f16 %d, %a, 15360;", "add.f16.f32 %d, %a, %a;", "add.f16x2 %d, %a, %a;",
]  # fmt: skip


@pytest.mark.parametrize("text", ILLEGAL)
def test_refused(text):
    with pytest.raises(UnsupportedInstruction):
        execute(text, "b16", a=("b16", np.zeros(32, np.uint16)))


def test_registers_of_another_width_are_refused():
    for text in ("add.f16 %d, %a, %a;", "neg.bf16 %d, %a;"):
        with pytest.raises(UnsupportedInstruction):
            execute(text, "b32", a=("b32", np.zeros(32, np.uint32)))
