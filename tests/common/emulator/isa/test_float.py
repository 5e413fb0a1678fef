"""f32, f64, f32x2 and mixed-precision instructions against exact rational arithmetic (PTX ISA 9.7.3, 9.7.5)."""

import math

import ml_dtypes
import numpy as np
import pytest

from common.emulator.faults import UnsupportedInstruction
from tests.common.emulator.isa import float_oracle as oracle
from tests.common.emulator.isa.float_oracle import OPERATIONS
from tests.common.emulator.isa.single_instruction import execute
from tests.common.emulator.numerics.rounding_oracle import DOUBLE, edge_values, same

ROUNDINGS = ("rn", "rz", "rm", "rp")
NAN = 0x7FFFFFFF
SUFFIX = {np.float32: "f32", np.float64: "f64"}


@pytest.fixture(autouse=True)
def silent_floating_point():
    with np.errstate(all="ignore"):
        yield


def samples(dtype, sources, count=250, seed=0):
    """Columns of edge values, random magnitudes, and sums that nearly cancel."""
    rng = np.random.default_rng(seed)
    edges = edge_values(dtype)
    columns = [rng.choice(edges, count) for _ in range(sources)]
    for column in columns:
        ordinary = rng.random(count) < 0.4
        scale = np.exp2(rng.integers(-30, 30, count))
        column[ordinary] = (rng.standard_normal(count) * scale).astype(dtype)[ordinary]
    if sources > 1:
        near = rng.random(count) < 0.2
        columns[1][near] = -np.nextafter(columns[0], dtype(0))[near]
    return columns


def check(actual, wanted, *operands):
    """Equal values and signs; an f32 NaN has NVIDIA's pattern."""
    wrong = np.flatnonzero(~same(actual.astype(np.float64), wanted))
    assert not wrong.size, [
        (*(float(x[i]).hex() for x in operands), "gives", float(actual[i]).hex(), "not", float(wanted[i]).hex())
        for i in wrong[:3]
    ]
    if actual.dtype == np.float32:
        assert set(actual.view(np.uint32)[np.isnan(actual)].tolist()) <= {NAN}


def run(name, *columns, result="f32"):
    names = "abc"[: len(columns)]
    kinds = {np.dtype(np.float32): "f32", np.dtype(np.float64): "f64"}
    sources = {letter: (kinds.get(x.dtype, f"b{8 * x.itemsize}"), x) for letter, x in zip(names, columns)}
    return execute(f"{name} %d, {', '.join('%' + letter for letter in names)};", result, **sources)


def forms():
    for opcode in OPERATIONS:
        for mode in ROUNDINGS:
            for ftz in (False, True):
                for sat in (False, True) if opcode in ("add", "sub", "mul", "fma", "mad") else (False,):
                    yield opcode, mode, ftz, sat


@pytest.mark.parametrize(("opcode", "mode", "ftz", "sat"), list(forms()))
def test_rounded_f32(opcode, mode, ftz, sat):
    columns = samples(np.float32, OPERATIONS[opcode][0], seed=ROUNDINGS.index(mode))
    name = f"{opcode}.{mode}{'.ftz' * ftz}{'.sat' * sat}.f32"
    check(run(name, *columns), oracle.results(opcode, columns, mode, ftz=ftz, sat=sat), *columns)


@pytest.mark.parametrize("opcode", ["add", "sub", "mul"])
@pytest.mark.parametrize("modifiers", ["", ".ftz", ".sat", ".ftz.sat"])
def test_rounding_defaults_to_nearest(opcode, modifiers):
    columns = samples(np.float32, 2)
    rounded = run(f"{opcode}.rn{modifiers}.f32", *columns)
    assert np.array_equal(run(f"{opcode}{modifiers}.f32", *columns).view(np.uint32), rounded.view(np.uint32))


@pytest.mark.parametrize("opcode", OPERATIONS)
@pytest.mark.parametrize("mode", ROUNDINGS)
def test_rounded_f64(opcode, mode):
    columns = samples(np.float64, OPERATIONS[opcode][0], count=200)
    wanted = oracle.results(opcode, columns, mode, precision=DOUBLE)
    check(run(f"{opcode}.{mode}.f64", *columns, result="f64"), wanted, *columns)


@pytest.mark.parametrize(
    ("name", "wins"), [("add", 1), ("sub.rz", 1), ("mul", 1), ("div.rn", 0), ("min", 1), ("max", 1)]
)
def test_f64_passes_a_nan_operand_on(name, wins):
    signalling, quiet = 0x7FF0000000000003, 0x7FF8000000000003
    a, b = np.array([0x7FF8000000000001, signalling], np.uint64), np.array([0xFFF8000000000002, signalling], np.uint64)
    result = execute(f"{name}.f64 %d, %a, %b;", "b64", a=("f64", a), b=("f64", b))
    assert result.tolist() == [int((a, b)[wins][0]), quiet]


@pytest.mark.parametrize("text", ["neg.f64 %d, %a;", "abs.f64 %d, %a;", "fma.rz.f64 %d, 0d3FF0000000000000, 1.5, %a;"])
def test_f64_makes_a_signalling_nan_quiet_and_keeps_its_sign(text):
    values = np.array([0x7FF0000000000003, 0xFFF0000000000003], np.uint64)
    assert execute(text, "b64", a=("f64", values)).tolist() == [0x7FF8000000000003, 0xFFF8000000000003]


@pytest.mark.parametrize("opcode", ["add", "sub", "mul", "fma"])
@pytest.mark.parametrize("mode", ROUNDINGS)
@pytest.mark.parametrize("ftz", [False, True])
def test_f32x2_is_two_f32(opcode, mode, ftz):
    columns = samples(np.float32, OPERATIONS[opcode][0])
    modifiers = f".{mode}{'.ftz' * ftz}"
    packed = run(f"{opcode}{modifiers}.f32x2", *(x.view(np.uint64) for x in columns), result="b64")
    single = run(f"{opcode}{modifiers}.f32", *columns)
    assert np.array_equal(packed.view(np.uint32), single.view(np.uint32))


def half_bits(values, kind):
    return values.astype({"f16": np.float16, "bf16": ml_dtypes.bfloat16}[kind]).view(np.uint16)


def half_values(bits, kind):
    return bits.view({"f16": np.float16, "bf16": ml_dtypes.bfloat16}[kind]).astype(np.float64)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("mode", ROUNDINGS)
@pytest.mark.parametrize("sat", [False, True])
@pytest.mark.parametrize("opcode", ["add", "sub", "fma"])
def test_mixed_precision(opcode, sat, mode, kind):
    a, b, c = samples(np.float32, 3)
    narrow = [half_bits(x, kind) for x in ((a, b) if opcode == "fma" else (a,))]
    columns = [*narrow, c]
    values = [*(half_values(x, kind) for x in narrow), c]
    name = f"{opcode}.{mode}{'.sat' * sat}.f32.{kind}"
    check(run(name, *columns), oracle.results(opcode, values, mode, sat=sat), *values)


@pytest.mark.parametrize("opcode", ["min", "max"])
@pytest.mark.parametrize("ftz", [False, True])
@pytest.mark.parametrize("nan", [False, True])
@pytest.mark.parametrize(("sources", "sign"), [(2, ""), (2, ".xorsign.abs"), (3, ""), (3, ".abs")])
def test_min_max_f32(opcode, ftz, nan, sources, sign):
    columns = samples(np.float32, sources, seed=3)
    wanted = oracle.min_max(opcode, columns, propagate=nan, absolute=bool(sign), xorsign="xorsign" in sign, ftz=ftz)
    check(run(f"{opcode}{'.ftz' * ftz}{'.NaN' * nan}{sign}.f32", *columns), wanted, *columns)


@pytest.mark.parametrize("opcode", ["min", "max"])
def test_min_max_f64(opcode):
    columns = samples(np.float64, 2)
    check(run(f"{opcode}.f64", *columns, result="f64"), oracle.min_max(opcode, columns), *columns)


@pytest.mark.parametrize("opcode", ["neg", "abs"])
@pytest.mark.parametrize("form", ["f32", "ftz.f32", "f64"])
def test_neg_and_abs(opcode, form):
    dtype = np.float64 if form == "f64" else np.float32
    (values,) = samples(dtype, 1)
    wanted = np.array([(-x if opcode == "neg" else abs(x)) for x in values.astype(np.float64).tolist()])
    if "ftz" in form:
        wanted = np.array([oracle.flush(x) for x in wanted.tolist()])
    check(run(f"{opcode}.{form}", values, result=SUFFIX[dtype]), wanted, values)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_testp(dtype):
    values = edge_values(dtype)
    least = np.finfo(dtype).tiny
    subnormal = [0 < abs(x) < least for x in values]
    finite = [math.isfinite(x) for x in values]
    properties = {
        "finite": finite,
        "infinite": [math.isinf(x) for x in values],
        "number": [not math.isnan(x) for x in values],
        "notanumber": [math.isnan(x) for x in values],
        "normal": [a and not b for a, b in zip(finite, subnormal)],
        "subnormal": subnormal,
    }
    for name, wanted in properties.items():
        assert run(f"testp.{name}.{SUFFIX[dtype]}", values, result="pred").tolist() == wanted, name


@pytest.mark.parametrize(("dtype", "bits"), [(np.float32, np.uint32), (np.float64, np.uint64)])
def test_copysign_takes_the_sign_of_the_first(dtype, bits):
    a, b = samples(dtype, 2)
    result = run(f"copysign.{SUFFIX[dtype]}", a, b, result=SUFFIX[dtype]).view(bits)
    top = bits(1 << (8 * a.itemsize - 1))
    assert np.array_equal(result, (a.view(bits) & top) | (b.view(bits) & ~top))


INF = math.inf
SPECIAL_OPERANDS = (-INF, -1.0, -0.0, 0.0, INF, math.nan)
SPECIAL = {  # results for the operands above, from the tables of the ISA
    "rcp": (-0.0, -1.0, -INF, INF, 0.0, math.nan),
    "sqrt": (math.nan, math.nan, -0.0, 0.0, INF, math.nan),
    "rsqrt": (math.nan, math.nan, -INF, INF, 0.0, math.nan),
    "lg2": (math.nan, math.nan, -INF, -INF, INF, math.nan),
    "ex2": (0.0, 0.5, 1.0, 1.0, INF, math.nan),
    "tanh": (-1.0, float(np.float32(math.tanh(-1))), -0.0, 0.0, 1.0, math.nan),
    "sin": (math.nan, float(np.float32(math.sin(-1))), -0.0, 0.0, math.nan, math.nan),
    "cos": (math.nan, float(np.float32(math.cos(-1))), 1.0, 1.0, math.nan, math.nan),
}


@pytest.mark.parametrize("opcode", SPECIAL)
@pytest.mark.parametrize("ftz", ["", ".ftz"])
def test_approximations_of_special_values(opcode, ftz):
    if opcode == "tanh" and ftz:
        with pytest.raises(UnsupportedInstruction):
            run("tanh.approx.ftz.f32", np.ones(1, np.float32))
        return
    values = np.array(SPECIAL_OPERANDS, np.float32)
    check(run(f"{opcode}.approx{ftz}.f32", values), np.array(SPECIAL[opcode]), values)


def relative(bits):
    return lambda actual, exact: np.abs(actual - exact) <= np.abs(exact) * 2.0**bits


def absolute(bits):
    return lambda actual, exact: np.abs(actual - exact) <= 2.0**bits


def ulps(count):
    return lambda actual, exact: np.abs(actual - exact) <= count * np.spacing(np.abs(exact).astype(np.float32))


BOUNDS = {  # function, domain as powers of two, the ISA's bound
    "rcp": (lambda x: 1 / x, (-120, 120), ulps(1)),
    "sqrt": (np.sqrt, (-149, 127), relative(-23)),
    "rsqrt": (lambda x: 1 / np.sqrt(x), (-149, 127), relative(-22.9)),
    "lg2": (np.log2, (1, 127), relative(-22)),
    "ex2": (np.exp2, (-20, 6.9), ulps(2)),
    "tanh": (np.tanh, (-140, 10), relative(-11)),
    "sin": (np.sin, (-20, 2.6), absolute(-20.5)),
    "cos": (np.cos, (-20, 2.6), absolute(-20.5)),
}


@pytest.mark.parametrize("opcode", BOUNDS)
def test_approximations_keep_their_bounds(opcode):
    function, (low, high), within = BOUNDS[opcode]
    rng = np.random.default_rng(5)
    values = np.exp2(rng.uniform(low, high, 5000)).astype(np.float32)
    if opcode in ("rcp", "ex2", "tanh", "sin", "cos"):
        values[::2] *= -1
    exact = function(values.astype(np.float64))
    assert within(run(f"{opcode}.approx.f32", values).astype(np.float64), exact).all()


def test_ex2_ftz_flushes_small_results():
    values = np.array([-126, -126.5, -149, 1e-40, -1e-40], np.float32)
    assert run("ex2.approx.ftz.f32", values).tolist() == [2.0**-126, 0, 0, 1, 1]
    assert run("ex2.approx.f32", values)[2] == 2.0**-149


@pytest.mark.parametrize("form", ["approx", "full"])
@pytest.mark.parametrize("ftz", ["", ".ftz"])
def test_div_approximations(form, ftz):
    rng = np.random.default_rng(6)
    a, b = (np.exp2(rng.uniform(-60, 60, 3000)).astype(np.float32) for _ in range(2))
    exact = a.astype(np.float64) / b
    assert ulps(2)(run(f"div.{form}{ftz}.f32", a, b).astype(np.float64), exact).all()
    top = np.float32(1.5 * 2.0**126)
    a, b = np.array([1, -1, INF, 4], np.float32), np.array([top, top, top, -top], np.float32)
    result = run(f"div.{form}{ftz}.f32", a, b)
    if form == "approx":
        check(result, np.array([0, -0.0, math.nan, -0.0]), a, b)
    else:
        assert result[2] == INF and result[3] == np.float32(4) / -top


def test_upper_word_approximations_of_f64():
    values = np.array([3.0, -0.0, 0.0, 5e-324, -5e-324, INF, -INF, math.nan, 7.25])
    reciprocal = run("rcp.approx.ftz.f64", values, result="f64")
    assert not (reciprocal.view(np.uint64) & np.uint64(0xFFFFFFFF)).any()
    assert reciprocal[1:7].tolist() == [-INF, INF, INF, -INF, 0.0, -0.0]
    assert reciprocal.view(np.uint64)[7] == 0x7FFFFFFF00000000
    assert np.allclose(reciprocal[[0, 8]], [1 / 3, 1 / 7.25], rtol=2.0**-19)
    root_ = run("rsqrt.approx.ftz.f64", values, result="f64")
    assert root_[[1, 2, 3, 4, 5]].tolist() == [-INF, INF, INF, -INF, 0.0]
    assert root_.view(np.uint64)[[6, 7]].tolist() == [0x7FFFFFFF00000000] * 2
    assert np.allclose(run("rsqrt.approx.f64", values[[0, 8]], result="f64"), [3**-0.5, 7.25**-0.5], rtol=1e-15)


def test_lanes_outside_the_mask_keep_their_value():
    values = np.arange(64, dtype=np.float32)
    mask = np.arange(64) % 3 == 0
    for name in ("add.f32", "add.sat.f32", "min.f32"):
        result = execute(f"{name} %d, %a, %b;", "f32", mask=mask, a=("f32", values), b=("f32", values))
        assert (result.view(np.uint32)[~mask] == 0xFFFFFFFF).all()
        assert not np.isnan(result[mask]).any()


def test_nan_is_canonical_in_masked_lanes_alone():
    values = np.full(4, 0xFFC12345, np.uint32)
    result = execute("add.f32 %d, %a, %a;", "f32", mask=np.array([1, 0, 1, 0], bool), a=("b32", values))
    assert result.view(np.uint32).tolist() == [NAN, 0xFFFFFFFF] * 2


def test_literals():
    values = np.array([1.5, -2.0], np.float32)
    assert execute("add.f32 %d, %a, 0f3F800000;", "f32", a=("f32", values)).tolist() == [2.5, -1.0]
    result = execute("fma.rn.f64 %d, %a, 0d4000000000000000, 0.5;", "f64", a=("f64", values.astype(np.float64)))
    assert result.tolist() == [3.5, -3.5]


ILLEGAL = [
    *(f"{op}.rn.rz.f32 %d, %a, %a;" for op in ("add", "mul")),
    "add.rna.f32 %d, %a, %a;", "add.relu.f32 %d, %a, %a;", "add.f32 %d, %a, 1;", "add.f32 %d, %a;",
    "fma.f32 %d, %a, %a, %a;", "mad.f32 %d, %a, %a, %a;", "fma.rn.relu.f32 %d, %a, %a, %a;",
    "div.f32 %d, %a, %a;", "div.rn.sat.f32 %d, %a, %a;", "rcp.f32 %d, %a;", "sqrt.f32 %d, %a;",
    "rsqrt.f32 %d, %a;", "rsqrt.rn.f32 %d, %a;", "ex2.f32 %d, %a;", "lg2.approx.sat.f32 %d, %a;",
    "min.abs.f32 %d, %a, %a;", "min.xorsign.f32 %d, %a, %a;", "max.xorsign.abs.f32 %d, %a, %a, %a;",
    "min.f32 %d, %a;", "neg.sat.f32 %d, %a;", "testp.odd.f32 %d, %a;", "copysign.ftz.f32 %d, %a, %a;",
    "add.ftz.f32.f16 %d, %a, %a;", "mul.f32.f16 %d, %a, %a;", "sin.approx.f64 %d, %a;", "add.f64 %d, %a, %a;",
]  # fmt: skip
ILLEGAL_WIDE = [
    "add.ftz.f64 %d, %a, %a;", "add.sat.f64 %d, %a, %a;", "add.sat.f32x2 %d, %a, %a;", "mad.rn.f32x2 %d, %a, %a, %a;",
    "min.NaN.f64 %d, %a, %a;", "max.f64 %d, %a, %a, %a;", "min.f32x2 %d, %a, %a;", "neg.f32x2 %d, %a;",
    "rcp.approx.f64 %d, %a;", "rcp.rn.ftz.f64 %d, %a;", "sqrt.approx.ftz.f64 %d, %a;", "div.approx.f64 %d, %a, %a;",
    "ex2.approx.f64 %d, %a;", "tanh.approx.f64 %d, %a;", "add.f32 %d, %a, %a;", "add.f32x2 %d, %a, 1.5;",
    "add.f64 %d, %a, 1;", "copysign.f32x2 %d, %a, %a;", "testp.finite.f32x2 %d, %a;",
]  # fmt: skip


@pytest.mark.parametrize(("text", "kind"), [(t, "b32") for t in ILLEGAL] + [(t, "b64") for t in ILLEGAL_WIDE])
def test_refused(text, kind):
    with pytest.raises(UnsupportedInstruction):
        execute(text, kind, a=(kind, np.zeros(32, {"b32": np.uint32, "b64": np.uint64}[kind])))
