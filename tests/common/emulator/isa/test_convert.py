"""cvt and cvt.pack against integers, fractions and tables of values (PTX ISA 9.7.9.21, 9.7.9.22, 6.5)."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from common.emulator.faults import UnsupportedInstruction
from tests.common.emulator.isa.float_oracle import flush, saturate
from tests.common.emulator.isa.single_instruction import execute
from tests.common.emulator.numerics.rounding_oracle import (
    BRAIN,
    DOUBLE,
    HALF,
    SINGLE,
    Precision,
    edge_values,
    round_fraction,
    same,
)

TF32 = Precision(10, -126, 127)
INTEGERS = {
    "u8": np.uint8, "s8": np.int8, "u16": np.uint16, "s16": np.int16,
    "u32": np.uint32, "s32": np.int32, "u64": np.uint64, "s64": np.int64,
}  # fmt: skip
FLOATS = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "f64": np.float64}
PRECISIONS = {"f16": HALF, "bf16": BRAIN, "f32": SINGLE, "f64": DOUBLE, "tf32": TF32}
ROUNDINGS = ("rn", "rz", "rm", "rp")
INTEGRAL = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
EVERY = np.arange(1 << 16, dtype=np.uint16)
NAN = {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF, "tf32": 0x7FFFE000}
BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@pytest.fixture(autouse=True)
def silent_floating_point():
    with np.errstate(all="ignore"):
        yield


def size(kind):
    return np.dtype({**INTEGERS, **FLOATS}[kind]).itemsize


def register(kind):
    """The register that a type usually lives in."""
    return f"b{max(16, 8 * size(kind))}"


def in_register(values, kind):
    """Values of 8 bits in 16-bit registers, with rubbish above; other values as they are."""
    bits = np.ascontiguousarray(values).view(BITS[size(kind)])
    return bits.astype(np.uint16) | 0xA500 if size(kind) == 1 else bits


def convert(name, values, *, wide=None):
    """Result of `cvt.name` on an array of the source's type, as an array of the destination's."""
    to, source = name.split(".")[-2:]
    destination = wide or register(to)
    result = execute(f"cvt.{name} %d, %a;", destination, a=(register(source), in_register(values, source)))
    if wide:
        return result
    if size(to) == 1:
        extension = result.view(np.int16) if to == "s8" else result
        assert np.array_equal(extension, extension.astype(INTEGERS[to]))
        return extension.astype(INTEGERS[to])
    return result.view(FLOATS.get(to) or INTEGERS[to])


def integers(kind, count=300):
    """All values of 8 and 16 bits; edges and values of every magnitude of the others."""
    dtype = np.dtype(INTEGERS[kind])
    if dtype.itemsize <= 2:
        return np.arange(1 << 8 * dtype.itemsize, dtype=BITS[dtype.itemsize]).view(dtype)
    bits = 8 * dtype.itemsize
    rng = np.random.default_rng(1)
    values = [0, 1, -1, 127, 128, -128, -129, 255, 256, 65504, 65519, 65520]
    values += [(1 << 24) + 1, (1 << 25) + 2, (1 << 53) + 1]
    values += [(1 << place) + step for place in (15, 16, 31, 32, 63) for step in (-1, 0, 1)]
    values += [int(rng.integers(1 << 63)) * 2 >> int(rng.integers(64)) for _ in range(count - len(values))]
    return np.array([value % (1 << bits) for value in values], BITS[dtype.itemsize]).view(dtype)


def floats(kind, count=300):
    """All values of 16-bit types; edges, ties of narrower types and values of every magnitude of the others."""
    if kind in ("f16", "bf16"):
        return EVERY.view(FLOATS[kind])
    dtype = FLOATS[kind]
    rng = np.random.default_rng(2)
    steps = [rng.integers(1, 1 << width, 20) * 2.0 ** rng.integers(-30, 20, 20) for width in (4, 5, 9, 12, 25)]
    near = np.concatenate([np.nextafter(np.concatenate(steps).astype(dtype), dtype(way)) for way in (0, 1e30)])
    random = rng.standard_normal(count) * np.exp2(rng.integers(-150, 128, count))
    values = np.concatenate([edge_values(np.float32), edge_values(dtype), *steps, near, random]).astype(dtype)
    return np.concatenate([values, -values])


def check(actual, wanted, values, nan=None):
    """Equal values and signs; NaNs have the bits `nan` when it is given."""
    bits = np.ascontiguousarray(actual).view(BITS[actual.dtype.itemsize])
    numbers = actual.astype(np.float64)
    wrong = np.flatnonzero(~same(numbers, wanted))
    assert not wrong.size, [(values[i], "gives", numbers[i], "not", wanted[i]) for i in wrong[:3]]
    if nan is not None:
        assert set(bits[np.isnan(numbers)].tolist()) <= {nan}


def rounded(values, kind, mode):
    """Each float64 value rounded exactly."""
    found = []
    for value in values.tolist():
        exact = math.isnan(value) or math.isinf(value) or value == 0
        found.append(value if exact else round_fraction(Fraction(value), PRECISIONS[kind], mode))
    return np.array(found)


# Integers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", INTEGERS)
@pytest.mark.parametrize("source", INTEGERS)
def test_integer_to_integer(to, source):
    values = integers(source)
    limits = np.iinfo(INTEGERS[to])
    have = np.iinfo(INTEGERS[source])
    assert np.array_equal(convert(f"{to}.{source}", values), values.astype(INTEGERS[to]))
    clamped = np.array([min(max(value, limits.min), limits.max) for value in values.tolist()], INTEGERS[to])
    if have.min >= limits.min and have.max <= limits.max:
        with pytest.raises(UnsupportedInstruction):
            convert(f"sat.{to}.{source}", values)
    else:
        assert np.array_equal(convert(f"sat.{to}.{source}", values), clamped)


def narrowing_integers():
    for source in ("u32", "s32", "u16", "s16"):
        for to in ("u8", "s8", "u16", "s16", "u32", "s32"):
            yield source, to, ""
            have, limits = np.iinfo(INTEGERS[source]), np.iinfo(INTEGERS[to])
            if have.min < limits.min or have.max > limits.max:
                yield source, to, "sat."


@pytest.mark.parametrize("wide", ["b32", "b64"])
@pytest.mark.parametrize(("source", "to", "sat"), list(narrowing_integers()))
def test_results_extend_to_wider_registers(to, source, wide, sat):
    values = integers(source)
    whole = np.dtype(f"{'i' if to[0] == 's' else 'u'}{int(wide[1:]) // 8}")
    limits = np.iinfo(INTEGERS[to])
    narrow = np.clip(values.astype(np.int64), limits.min, limits.max) if sat else values
    wanted = narrow.astype(INTEGERS[to]).astype(whole)
    assert np.array_equal(convert(f"{sat}{to}.{source}", values, wide=wide).view(whole), wanted)


def test_sources_are_the_low_part_of_wider_registers():
    values = np.array([0x12345680, 0xFFFFFF7F, 0x3C00C000], np.uint32)
    cases = {"s32.s8": [-128, 127, 0], "u32.u8": [0x80, 0x7F, 0], "s32.s16": [0x5680, -129, -16384]}
    for name, wanted in cases.items():
        assert execute(f"cvt.{name} %d, %a;", "b32", a=("b32", values)).view(np.int32).tolist() == wanted
    assert execute("cvt.f32.f16 %d, %a;", "f32", a=("b32", values))[2] == -2.0
    wide = np.array([0xDEAD00003FC00000], np.uint64)
    assert execute("cvt.rzi.s32.f32 %d, %a;", "b32", a=("b64", wide)).tolist() == [1]
    same_register = execute("cvt.s64.s32 %d, %a;", "b64", a=("b64", np.array([0x80000000], np.uint64)))
    assert same_register.view(np.int64).tolist() == [-(1 << 31)]


@pytest.mark.parametrize("to", FLOATS)
@pytest.mark.parametrize("source", INTEGERS)
@pytest.mark.parametrize("mode", ROUNDINGS)
def test_integer_to_float(to, source, mode):
    values = integers(source)
    if size(source) == 2 and size(to) == 2:
        wanted = directed(values.astype(np.float64), FLOATS[to], mode)
    elif size(source) <= 2:
        wanted = values.astype(np.float64)
    else:
        wanted = np.array([round_fraction(Fraction(x), PRECISIONS[to], mode) if x else 0.0 for x in values.tolist()])
    check(convert(f"{mode}.{to}.{source}", values), wanted, values)
    if to != "bf16":
        check(convert(f"{mode}.sat.{to}.{source}", values), np.clip(wanted, 0, 1), values)


# Floats to integers -----------------------------------------------------------------------------------------------


def clamped_integers(values, to, mode, indefinite):
    """The ISA's integer notes: rounding, clamping, and what NaN gives."""
    limits, integral = np.iinfo(INTEGERS[to]), INTEGRAL[mode](values)
    wanted = np.zeros(values.size, INTEGERS[to])
    inside = (integral > limits.min) & (integral < float(limits.max))
    wanted[inside] = integral[inside].astype(INTEGERS[to])
    wanted[integral <= limits.min] = limits.min
    wanted[integral >= float(limits.max)] = limits.max
    if indefinite:
        wanted[np.isnan(values)] = limits.min or (limits.max >> 1) + 1
    return wanted


@pytest.mark.parametrize("to", INTEGERS)
@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("mode", INTEGRAL)
def test_float_to_integer(to, source, mode):
    values = floats(source)
    exact = values.astype(np.float64)
    indefinite = source == "f64" or size(to) == 8
    wanted = clamped_integers(exact, to, mode, indefinite)
    assert np.array_equal(convert(f"{mode}.{to}.{source}", values), wanted)
    if source != "bf16":
        assert np.array_equal(convert(f"{mode}.sat.{to}.{source}", values), wanted)
    if source == "f32":
        flushed = np.array([flush(x) for x in exact.tolist()])
        wanted = clamped_integers(flushed, to, mode, indefinite)
        assert np.array_equal(convert(f"{mode}.ftz.{to}.f32", values), wanted)


# Floats to floats -------------------------------------------------------------------------------------------------

WIDENING = [("f32", "f16"), ("f64", "f16"), ("f64", "f32"), ("f32", "bf16"), ("f64", "bf16")]


@pytest.mark.parametrize(("to", "source"), WIDENING)
def test_widening_changes_no_value(to, source):
    values = floats(source)
    exact = values.astype(np.float64)
    check(convert(f"{to}.{source}", values), exact, values)
    if source == "bf16":
        for mode in ROUNDINGS:
            check(convert(f"{mode}.{to}.bf16", values), exact, values)
    else:
        clamped = np.array([saturate(x) for x in exact.tolist()])
        check(convert(f"sat.{to}.{source}", values), clamped, values)
    if "f32" in (to, source):
        check(convert(f"ftz.{to}.{source}", values), np.array([flush(x) for x in exact.tolist()]), values)


def widened_nans():
    return [
        ("f32.f16", [0x7C01, 0xFE00], [0x7FFFFFFF] * 2),
        ("f32.bf16", [0x7F81, 0xFFC0], [0x7F810000, 0xFFC00000]),
        ("ftz.f32.bf16", [0x7F81, 0xFFC0], [0x7FFFFFFF] * 2),
        ("f64.f16", [0x7C01, 0xFE00], [0x7FF8040000000000, 0xFFF8000000000000]),
        ("f64.f32", [0x7F800001, 0xFFC00000], [0x7FF8000020000000, 0xFFF8000000000000]),
        ("ftz.f64.f32", [0x7F800001, 0xFFC00000], [0x7FFFFFFFE0000000] * 2),
        ("rn.f32.f64", [0x7FF0000000000001, 0xFFF8000000000000], [0x7FC00000, 0xFFC00000]),
        ("rz.f16.f64", [0x7FF0000000000001, 0xFFF8040000000000], [0x7E00, 0xFE01]),
        ("rn.bf16.f64", [0x7FF8000000000000, 0xFFF0200000000000], [0x7FC0, 0xFFC1]),
        ("f32.f32", [0x7F800001], [0x7F800001]),
        ("ftz.f32.f32", [0x7F800001], [0x7FFFFFFF]),
        ("f16.f16", [0x7C01], [0x7FFF]),
        ("bf16.bf16", [0xFFC0], [0x7FFF]),
    ]


@pytest.mark.parametrize(("name", "nans", "wanted"), widened_nans())
def test_nan_payloads_are_those_of_an_h200(name, nans, wanted):
    source = name.split(".")[-1]
    values = np.array(nans, BITS[size(source)]).view(FLOATS[source])
    result = convert(name, values)
    assert result.view(BITS[result.dtype.itemsize]).tolist() == wanted


NARROWING = [("f32", "f64"), ("f16", "f64"), ("bf16", "f64"), ("f16", "f32"), ("bf16", "f32")]


@pytest.mark.parametrize(("to", "source"), NARROWING)
@pytest.mark.parametrize("mode", ROUNDINGS)
def test_narrowing_rounds_once(to, source, mode):
    values = floats(source)
    exact = values.astype(np.float64)
    wanted = rounded(exact, to, mode)
    nan = NAN[to] if source == "f32" else None
    check(convert(f"{mode}.{to}.{source}", values), wanted, values, nan)
    if to != "bf16":
        clamped = np.array([saturate(x) for x in wanted.tolist()])
        check(convert(f"{mode}.sat.{to}.{source}", values), clamped, values)
    if (to, source) == ("f32", "f64"):
        flushed = np.array([flush(x) for x in wanted.tolist()])
        check(convert(f"{mode}.ftz.f32.f64", values), flushed, values)
    if (to, source) == ("bf16", "f32"):
        flushed = rounded(np.array([flush(x) for x in exact.tolist()]), to, mode)
        check(convert(f"{mode}.ftz.bf16.f32", values), flushed, values, nan)
    if (to, source) == ("f16", "f32"):
        # The chip has no flushing form: the result is that without .ftz.
        check(convert(f"{mode}.ftz.f16.f32", values), wanted, values, nan)


@pytest.mark.parametrize("to", ["f16", "bf16"])
@pytest.mark.parametrize("mode", ["rn", "rz"])
@pytest.mark.parametrize("modifiers", ["relu", "satfinite", "relu.satfinite"])
def test_clamped_halves(to, mode, modifiers):
    values = floats("f32")
    wanted = clamped(rounded(values.astype(np.float64), to, mode), float(ml_dtypes.finfo(FLOATS[to]).max), modifiers)
    check(convert(f"{mode}.{modifiers}.{to}.f32", values), wanted, values, NAN[to])


def clamped(values, largest, modifiers):
    """.relu and .satfinite of rounded values."""
    if "satfinite" in modifiers:
        values = np.clip(values, -largest, largest)
    if "relu" in modifiers:
        values = np.where(np.signbit(values) & ~np.isnan(values), 0.0, values)
    return values


def directed(values, dtype, mode):
    """float64 values of another 16-bit type, rounded to nearest by NumPy and then moved if that was the wrong way."""
    nearest = values.astype(np.float32).astype(dtype)
    numbers = nearest.astype(np.float64)
    wrong = {
        "rn": np.zeros(values.shape, bool),
        "rz": np.abs(numbers) > np.abs(values),
        "rm": numbers > values,
        "rp": numbers < values,
    }[mode]
    towards_zero = np.abs(numbers) > np.abs(values)
    bits = nearest.view(np.int16) + np.where(wrong, np.where(towards_zero, -1, 1), 0).astype(np.int16)
    return bits.view(dtype).astype(np.float64)


@pytest.mark.parametrize(("to", "source"), [("f16", "bf16"), ("bf16", "f16")])
@pytest.mark.parametrize("mode", ["", *ROUNDINGS])
def test_between_f16_and_bf16(to, source, mode):
    values = floats(source)
    wanted = directed(values.astype(np.float64), FLOATS[to], mode or "rn")
    check(convert(f"{mode}.{to}.{source}".lstrip("."), values), wanted, values, NAN[to])


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("mode", ["", *INTEGRAL])
def test_rounding_to_integral_values(kind, mode):
    values = floats(kind)
    exact = values.astype(np.float64)
    wanted = INTEGRAL[mode](exact) if mode else exact
    prefix = f"{mode}." if mode else ""
    check(convert(f"{prefix}{kind}.{kind}", values), wanted, values, NAN.get(kind) if mode else None)
    if kind != "bf16":
        clamped_values = np.array([saturate(x) for x in wanted.tolist()])
        check(convert(f"{prefix}sat.{kind}.{kind}", values), clamped_values, values)
    if kind == "f32":
        flushed = np.array([flush(x) for x in exact.tolist()])
        check(convert(f"{prefix}ftz.f32.f32", values), INTEGRAL[mode](flushed) if mode else flushed, values)


def test_floats_in_wider_registers_have_zeros_above():
    values = np.array([-1.5, 2.0], np.float32)
    assert convert("rn.f16.f32", values, wide="b64").tolist() == [0xBE00, 0x4000]
    assert convert("rn.f32.f64", values.astype(np.float64), wide="b64").tolist() == [0xBFC00000, 0x40000000]
    assert convert("f32.f16", values.astype(np.float16), wide="b64").tolist() == [0xBFC00000, 0x40000000]


@pytest.mark.parametrize(
    ("mode", "modifiers"),
    [(mode, form) for mode in ("rn", "rz") for form in ("", "satfinite", "relu", "relu.satfinite")]
    + [("rna", ""), ("rna", "satfinite")],
)
def test_tf32(mode, modifiers):
    values = floats("f32")
    values = values[~np.isnan(values)]
    largest = float((2 - Fraction(1, 1 << 10)) * 2**127)
    wanted = clamped(rounded(values.astype(np.float64), "tf32", mode), largest, modifiers)
    name = f"cvt.{mode}.{modifiers + '.' if modifiers else ''}tf32.f32"
    result = execute(f"{name} %d, %a;", "b32", a=("f32", values))
    assert not (result & 0x1FFF).any()
    check(result.view(np.float32), wanted, values)
    nans = np.array([0x7FC00001, 0xFFFFFFFF], np.uint32)
    if mode != "rna":
        assert execute(f"{name} %d, %a;", "b32", a=("b32", nans)).tolist() == [NAN["tf32"]] * 2
    elif not modifiers:
        assert execute(f"{name} %d, %a;", "b32", a=("b32", nans)).tolist() == [0x7FC00000, 0xFFFFE000]


# Packed floats ----------------------------------------------------------------------------------------------------

SMALL = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
SMALL_BITS = {"e4m3": 8, "e5m2": 8, "e2m3": 6, "e3m2": 6, "e2m1": 4}
SMALL_NAN = {"e4m3": 0x7F, "e5m2": 0x7F, "e2m3": 0x1F, "e3m2": 0x1F, "e2m1": 0x7}


def table(fmt):
    """float64 value of every code."""
    codes = np.arange(1 << SMALL_BITS[fmt], dtype=np.uint8)
    return codes.view(SMALL[fmt]).astype(np.float64)


def nearest_codes(values, fmt, relu=False):
    """Codes by search among all finite values: nearest, ties to the even code, clamped; NaN gives the ISA's code."""
    sign = 1 << (SMALL_BITS[fmt] - 1)
    magnitudes = table(fmt)[:sign]
    magnitudes = magnitudes[np.isfinite(magnitudes)]
    size_ = np.minimum(np.abs(values), magnitudes[-1])
    above = np.minimum(np.searchsorted(magnitudes, np.nan_to_num(size_)), magnitudes.size - 1)
    below = np.maximum(above - 1, 0)
    up, down = magnitudes[above] - size_, size_ - magnitudes[below]
    codes = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    codes = np.where(np.signbit(values), 0 if relu else codes | sign, codes)
    return np.where(np.isnan(values), SMALL_NAN[fmt], codes).astype(np.uint32)


def small_inputs(fmt):
    """f32: every value of the format, every midpoint, their neighbours, and anything."""
    values = table(fmt)
    values = np.sort(values[np.isfinite(values)])
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2, [values[-1] * 1.1, 1e30]]).astype(np.float32)
    near = np.concatenate([np.nextafter(points, np.float32(way)) for way in (-math.inf, math.inf)])
    special = np.array([math.inf, -math.inf, math.nan, -math.nan, 0.0, -0.0, 1e-45, -1e-45], np.float32)
    random = np.random.default_rng(4).standard_normal(500).astype(np.float32) * 100
    return np.concatenate([points, near, special, random])


def pair_register(fmt):
    return "b8" if fmt == "e2m1" else "b16"


def joined(high, low, fmt):
    return high << (4 if fmt == "e2m1" else 8) | low


@pytest.mark.parametrize("fmt", SMALL)
@pytest.mark.parametrize("relu", [False, True])
def test_f32_pairs_to_small_floats(fmt, relu):
    high = small_inputs(fmt)
    low = np.roll(high, 5)
    name = f"cvt.rn.satfinite{'.relu' * relu}.{fmt}x2.f32"
    result = execute(f"{name} %d, %a, %b;", pair_register(fmt), a=("f32", high), b=("f32", low))
    codes = nearest_codes(high.astype(np.float64), fmt, relu)
    wanted = joined(codes, np.roll(codes, 5), fmt)
    assert np.array_equal(result, wanted)


@pytest.mark.parametrize("fmt", SMALL)
@pytest.mark.parametrize("source", ["f16", "bf16"])
@pytest.mark.parametrize("relu", [False, True])
def test_half_pairs_to_small_floats(fmt, source, relu):
    low = np.roll(EVERY, 321)
    pairs = EVERY.astype(np.uint32) << 16 | low
    name = f"cvt.rn.satfinite{'.relu' * relu}.{fmt}x2.{source}x2"
    result = execute(f"{name} %d, %a;", pair_register(fmt), a=("b32", pairs))
    codes = nearest_codes(EVERY.view(FLOATS[source]).astype(np.float64), fmt, relu)
    assert np.array_equal(result, joined(codes, np.roll(codes, 321), fmt))


@pytest.mark.parametrize("fmt", SMALL)
@pytest.mark.parametrize("relu", [False, True])
def test_small_floats_to_f16_pairs(fmt, relu):
    count = 1 << (8 if fmt == "e2m1" else 16)
    pairs = np.arange(count, dtype=np.uint8 if fmt == "e2m1" else np.uint16)
    width, mask = (4, 15) if fmt == "e2m1" else (8, (1 << SMALL_BITS[fmt]) - 1)
    result = execute(f"cvt.rn{'.relu' * relu}.f16x2.{fmt}x2 %d, %a;", "b32", a=(pair_register(fmt), pairs))
    for shift, codes in ((16, pairs >> width), (0, pairs)):
        values = table(fmt)[codes & mask]
        wanted = clamped(values, 1, "relu") if relu else values
        check((result >> shift).astype(np.uint16).view(np.float16), wanted, codes, 0x7FFF)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("mode", ["rn", "rz"])
@pytest.mark.parametrize("modifiers", ["", "relu.", "satfinite.", "relu.satfinite.", "satfinite.relu."])
def test_f32_pairs_to_half_pairs(kind, mode, modifiers):
    high = floats("f32")
    low = np.roll(high, 7)
    result = execute(f"cvt.{mode}.{modifiers}{kind}x2.f32 %d, %a, %b;", "b32", a=("f32", high), b=("f32", low))
    single = convert(f"{mode}.{modifiers}{kind}.f32", high).view(np.uint16).astype(np.uint32)
    assert np.array_equal(result, single << 16 | np.roll(single, 7))


def stochastic(values, fmt, discarded, mantissa, random, width):
    """Magnitude codes of normal results: random bits are added to the top of the fraction that is cut off."""
    bits = values.view(np.uint32).astype(np.int64) & 0x7FFFFFFF
    fraction = bits & ((1 << discarded) - 1)
    carry = ((fraction >> (discarded - width) if discarded > width else fraction) + random) >> width
    return (bits >> discarded) + carry


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("modifiers", ["", "relu.", "satfinite.", "relu.satfinite."])
def test_stochastic_half_pairs(kind, modifiers):
    rng = np.random.default_rng(8)
    high, low = (rng.standard_normal(4000).astype(np.float32) for _ in range(2))
    random = rng.integers(0, 1 << 32, 4000, dtype=np.uint32)
    result = execute(
        f"cvt.rs.{modifiers}{kind}x2.f32 %d, %a, %b, %r;", "b32", a=("f32", high), b=("f32", low), r=("b32", random)
    )
    discarded, width, rebias = (13, 13, (127 - 15) << 10) if kind == "f16" else (16, 16, 0)
    for shift, values in ((16, high), (0, low)):
        share = (random >> shift).astype(np.int64) & ((1 << width) - 1)
        codes = stochastic(values, kind, discarded, None, share, width) - rebias
        negative = np.signbit(values)
        wanted = np.where(negative, 0 if "relu" in modifiers else codes | 0x8000, codes)
        normal = np.abs(values) >= 2.0**-14
        assert np.array_equal((result >> shift & 0xFFFF)[normal], wanted[normal])


def test_stochastic_overflow_and_special_values():
    values = np.array([math.inf, -math.inf, math.nan, 65519.0, 65504.0, 0.0, -0.0], np.float32)
    ones = np.full(7, 0xFFFFFFFF, np.uint32)
    sources = {"a": ("f32", values), "b": ("f32", values), "r": ("b32", ones)}
    result = execute("cvt.rs.f16x2.f32 %d, %a, %b, %r;", "b32", **sources)
    assert (result & 0xFFFF).tolist() == [0x7C00, 0xFC00, 0x7FFF, 0x7C00, 0x7BFF, 0, 0x8000]
    result = execute("cvt.rs.satfinite.f16x2.f32 %d, %a, %b, %r;", "b32", **sources)
    assert (result >> 16).tolist() == [0x7BFF, 0xFBFF, 0x7FFF, 0x7BFF, 0x7BFF, 0, 0x8000]


@pytest.mark.parametrize("fmt", SMALL)
@pytest.mark.parametrize("relu", [False, True])
def test_stochastic_quads(fmt, relu):
    """Exact values stay; others go down without random bits, up with all of them set, or to a neighbour."""
    finite = table(fmt)[np.isfinite(table(fmt))].astype(np.float32)
    rng = np.random.default_rng(9)
    between = (rng.random(400).astype(np.float32) * 2 - 1) * finite.max()
    values = np.concatenate([finite, between, np.array([1e30, -math.inf, math.nan], np.float32)])
    columns = {letter: ("f32", np.roll(values, place)) for place, letter in enumerate("abef")}
    bits = 4 if fmt == "e2m1" else 8
    name = f"cvt.rs{'.relu' * relu}.satfinite.{fmt}x4.f32 %d, {{%a, %b, %e, %f}}, %r;"
    codes = {}
    for random in (0, 0xFFFFFFFF, 0x5A5AA5A5):
        share = ("b32", np.full(values.size, random, np.uint32))
        result = execute(name, "b16" if bits == 4 else "b32", **columns, r=share).astype(np.uint32)
        fields = [result >> (bits * (3 - place)) & ((1 << bits) - 1) for place in range(4)]
        if random in (0, 0xFFFFFFFF):
            assert all(np.array_equal(field, np.roll(fields[0], place)) for place, field in enumerate(fields))
        codes[random] = fields[0]
    numbers = {random: table(fmt)[code] for random, code in codes.items()}
    exact = clamped(np.clip(values.astype(np.float64), finite.min(), finite.max()), 1, "relu" * relu)
    number = ~np.isnan(values)
    assert np.array_equal(numbers[0][: finite.size], exact[: finite.size])
    assert (codes[0][~number] == SMALL_NAN[fmt]).all()
    assert (np.abs(numbers[0]) <= np.abs(exact))[number].all() and (np.abs(numbers[0xFFFFFFFF]) >= np.abs(exact))[
        number & (np.abs(exact) > 0.5)
    ].all()
    magnitude = codes[0xFFFFFFFF].astype(int) - codes[0].astype(int)
    assert set(magnitude[number].tolist()) <= {0, 1} and (magnitude[number] == 1).any()
    assert ((codes[0x5A5AA5A5] == codes[0]) | (codes[0x5A5AA5A5] == codes[0xFFFFFFFF])).all()


def test_quads_share_random_bits_as_the_isa_says():
    """Half of a unit goes up exactly when the top random bit of an element is set."""
    half = ("f32", np.full(4, 1.0625, np.float32))  # between the e4m3 values 1 and 1.125
    random = ("b32", np.array([0x00008000, 0x80000000, 0x80008000, 0x7FFF7FFF], np.uint32))
    values = {letter: half for letter in "abef"}
    result = execute("cvt.rs.satfinite.e4m3x4.f32 %d, {%a, %b, %e, %f}, %r;", "b32", **values, r=random)
    assert result.tolist() == [0x38383939, 0x39393838, 0x39393939, 0x38383838]
    half = ("f32", np.full(4, 1.25, np.float32))  # between the e2m1 values 1 and 1.5
    random = ("b32", np.array([0x00800000, 0x80000000, 0x00008080, 0xFF7FFFFF], np.uint32))
    values = {letter: half for letter in "abef"}
    result = execute("cvt.rs.satfinite.e2m1x4.f32 %d, {%a, %b, %e, %f}, %r;", "b16", **values, r=random)
    assert result.tolist() == [0x2233, 0x3322, 0x2222, 0x3322]


def power_of_two(value, mode, satfinite):
    """ue8m0 code of the magnitude of a value."""
    if math.isnan(value):
        return 0xFF
    if math.isinf(value):
        return 0xFE if satfinite else 0xFF
    if value == 0:
        return 0
    fraction, exponent = math.frexp(abs(value))
    code = exponent - 1 + 127 + (mode == "rp" and fraction != 0.5)
    return min(max(code, 0), 0xFE if satfinite else 0xFF)


@pytest.mark.parametrize("mode", ["rz", "rp"])
@pytest.mark.parametrize("satfinite", [False, True])
def test_ue8m0(mode, satfinite):
    modifiers = f"cvt.{mode}{'.satfinite' * satfinite}.ue8m0x2"
    high = floats("f32")
    low = np.roll(high, 3)
    codes = np.array([power_of_two(x, mode, satfinite) for x in high.tolist()], np.uint16)
    result = execute(f"{modifiers}.f32 %d, %a, %b;", "b16", a=("f32", high), b=("f32", low))
    assert np.array_equal(result, codes << 8 | np.roll(codes, 3))
    pairs = EVERY.astype(np.uint32) << 16 | np.roll(EVERY, 3)
    values = EVERY.view(ml_dtypes.bfloat16).astype(np.float64)
    codes = np.array([power_of_two(x, mode, satfinite) for x in values.tolist()], np.uint16)
    result = execute(f"{modifiers}.bf16x2 %d, %a;", "b16", a=("b32", pairs))
    assert np.array_equal(result, codes << 8 | np.roll(codes, 3))


def test_ue8m0_to_bf16():
    result = execute("cvt.rn.bf16x2.ue8m0x2 %d, %a;", "b32", a=("b16", EVERY))
    for shift, codes in ((16, EVERY >> 8), (0, EVERY & 0xFF)):
        halves = (result >> shift).astype(np.uint16)
        wanted = np.where(codes == 0xFF, math.nan, np.exp2(codes.astype(np.float64) - 127))
        check(halves.view(ml_dtypes.bfloat16), wanted, codes, 0x7FFF)


def sixty_fourths(value, factor, relu):
    if math.isnan(value) or math.isnan(factor):
        return 127
    if math.isinf(value):
        return 127 if value > 0 else (0 if relu else -128)
    units = round(Fraction(value) / Fraction(factor) * 64)
    return min(max(units, 0 if relu else -128), 127)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_to_s2f6(relu, scaled):
    rng = np.random.default_rng(11)
    steps = np.arange(-270, 270) / 128
    special = [math.inf, -math.inf, math.nan, 3e38]
    high = np.concatenate([steps, rng.standard_normal(200) * 1.5, special]).astype(np.float32)
    low = np.roll(high, 9)
    scales = rng.integers(120, 134, (2, high.size)) if scaled else np.full((2, high.size), 127)
    if scaled:
        scales[:, :3] = [[0xFF, 0, 254]] * 2
    factors = [[math.nan if code == 0xFF else 2.0 ** (code - 127) for code in row] for row in scales.tolist()]
    modifiers = f"cvt.rn.satfinite{'.relu' * relu}{'.scaled::n2::ue8m0' * scaled}.s2f6x2"
    scale = {"s": ("b16", (scales[0] << 8 | scales[1]).astype(np.uint16))} if scaled else {}
    tail = ", %s" if scaled else ""
    bytes_ = [
        np.array([sixty_fourths(x, y, relu) % 256 for x, y in zip(column.tolist(), row)], np.uint16)
        for column, row in zip((high, low), factors)
    ]
    result = execute(f"{modifiers}.f32 %d, %a, %b{tail};", "b16", a=("f32", high), b=("f32", low), **scale)
    assert np.array_equal(result, bytes_[0] << 8 | bytes_[1])
    halves = [column.astype(ml_dtypes.bfloat16) for column in (high, low)]
    pairs = halves[0].view(np.uint16).astype(np.uint32) << 16 | halves[1].view(np.uint16)
    bytes_ = [
        np.array([sixty_fourths(float(x), y, relu) % 256 for x, y in zip(column, row)], np.uint16)
        for column, row in zip(halves, factors)
    ]
    result = execute(f"{modifiers}.bf16x2 %d, %a{tail};", "b16", a=("b32", pairs), **scale)
    assert np.array_equal(result, bytes_[0] << 8 | bytes_[1])


@pytest.mark.parametrize("modifiers", ["", ".relu", ".satfinite", ".satfinite.relu"])
def test_from_s2f6(modifiers):
    plain = execute(f"cvt.rn{modifiers}.bf16x2.s2f6x2 %d, %a;", "b32", a=("b16", EVERY))
    low = (EVERY & 0xFF).astype(np.uint8).view(np.int8)
    wanted = low / 64
    values = clamped(wanted, 1e30, modifiers)
    check((plain & 0xFFFF).astype(np.uint16).view(ml_dtypes.bfloat16), values, low)
    scale = ("b16", np.full(EVERY.size, 0x8001, np.uint16))  # 2 above, 2**-126 below
    name = f"cvt.rn{modifiers}.scaled::n2::ue8m0.bf16x2.s2f6x2"
    result = execute(f"{name} %d, %a, %s;", "b32", a=("b16", EVERY), s=scale)
    tiny = np.array([round_fraction(Fraction(x, 64 << 126), BRAIN, "rn") if x else 0.0 for x in range(-128, 128)])
    tiny = tiny[low.astype(int) + 128]
    check((result & 0xFFFF).astype(np.uint16).view(ml_dtypes.bfloat16), clamped(tiny, 1e30, modifiers), low)
    high = (EVERY >> 8).astype(np.uint8).view(np.int8)
    check((result >> 16).astype(np.uint16).view(ml_dtypes.bfloat16), clamped(high / 32, 1e30, modifiers), high)


# cvt.pack ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["u16", "s16", "u8", "s8", "u4", "s4", "u2", "s2"])
def test_pack(to):
    bits = int(to[1:])
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if to[0] == "s" else (0, (1 << bits) - 1)
    a, b = integers("s32"), np.roll(integers("s32"), 1)
    a[:40], b[:40] = np.arange(-20, 20), np.arange(40)[::-1] - 20
    c = integers("u32")
    mask = (1 << bits) - 1
    wanted = [
        (min(max(x, low), high) & mask) << bits | (min(max(y, low), high) & mask) | (z << 2 * bits if bits < 16 else 0)
        for x, y, z in zip(a.tolist(), b.tolist(), c.tolist())
    ]
    sources = {"a": ("b32", a), "b": ("b32", b)}
    if bits < 16:
        result = execute(f"cvt.pack.sat.{to}.s32.b32 %d, %a, %b, %c;", "b32", **sources, c=("b32", c))
    else:
        result = execute(f"cvt.pack.sat.{to}.s32 %d, %a, %b;", "b32", **sources)
    assert result.tolist() == [value % (1 << 32) for value in wanted]


def test_pack_takes_a_literal():
    sources = {"a": ("b32", np.array([300], np.int32)), "b": ("b32", np.array([-5], np.int32))}
    assert execute("cvt.pack.sat.u8.s32.b32 %d, %a, %b, 7;", "b32", **sources).tolist() == [0x7FF00]


# Masks, literals, refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["cvt.rn.bf16x2.f32 %d, %a, %a;", "cvt.u32.u32 %d, %a;", "cvt.rzi.u32.f32 %d, %a;"])
def test_lanes_outside_the_mask_keep_their_value(text):
    mask = np.arange(64) % 4 == 1
    result = execute(text, "b32", mask=mask, a=("b32", np.full(64, 0x3F800000, np.uint32)))
    assert (result[~mask] == 0xFFFFFFFF).all() and (result[mask] != 0xFFFFFFFF).all()


def test_literals():
    unused = ("b32", np.zeros(2, np.uint32))
    assert execute("cvt.rn.f16x2.f32 %d, 0f40000000, %a;", "b32", a=unused).tolist() == [0x40000000] * 2


ILLEGAL = [
    "cvt.u8.bf16", "cvt.rn.u32.u16", "cvt.rni.f16.f32", "cvt.f16.f32", "cvt.f32.f64", "cvt.f32.s32", "cvt.s32.f32",
    "cvt.rn.s32.f32", "cvt.rn.f32.f32", "cvt.rn.f64.f32", "cvt.rn.f32.f16", "cvt.ftz.u32.u16", "cvt.ftz.f64.f16",
    "cvt.rn.sat.bf16.f32", "cvt.sat.f32.bf16", "cvt.rn.sat.bf16.s32", "cvt.rn.ftz.bf16.u32", "cvt.rzi.sat.s32.bf16",
    "cvt.rm.relu.f16.f32", "cvt.rn.ftz.relu.f16.f32", "cvt.rn.sat.satfinite.f16.f32", "cvt.rn.relu.f16.f64",
    "cvt.rn.satfinite.f32.f64", "cvt.rna.f16.f32", "cvt.tf32.f32", "cvt.rm.tf32.f32", "cvt.rna.relu.tf32.f32",
    "cvt.rn.tf32.f16", "cvt.rn.f32.tf32", "cvt.rn.rz.f16.f32", "cvt.rn.f16x2.bf16x2",
    "cvt.rn.bf16x2.e4m3x2", "cvt.rn.e4m3x2.e5m2x2", "cvt.rz.satfinite.ue8m0x2.f16x2", "cvt.rn.satfinite.e4m3x2.bf16",
    "cvt.rz.f16x2.e4m3x2", "cvt.rn.satfinite.f16x2.e4m3x2", "cvt.rn.relu.bf16x2.ue8m0x2", "cvt.rn.f16x2.ue8m0x2",
    "cvt.rn.bf16x2.f16x2", "cvt.rn.e4m3x2.f16x2", "cvt.rz.satfinite.e4m3x2.f16x2", "cvt.rn.satfinite.s2f6x2.f16x2",
    "cvt.rn.s2f6x2.bf16x2", "cvt.rn.f16x2.s2f6x2", "cvt.pack.s16.s32",
]  # fmt: skip
ILLEGAL_TWO = [
    "cvt.f16x2.f32", "cvt.rm.f16x2.f32", "cvt.rn.ftz.f16x2.f32", "cvt.rn.e4m3x2.f32", "cvt.rz.satfinite.e5m2x2.f32",
    "cvt.rn.satfinite.ue8m0x2.f32", "cvt.rz.relu.ue8m0x2.f32", "cvt.rs.f16x2.f32", "cvt.rs.satfinite.e4m3x2.f32",
    "cvt.rn.satfinite.e4m3x4.f32", "cvt.rs.e4m3x4.f32", "cvt.rn.scaled::n2::ue8m0.satfinite.s2f6x2.f32",
    "cvt.u32.u16", "cvt.pack.sat.u8.s32.b32", "cvt.pack.sat.u16.u32", "cvt.pack.sat.u32.s32", "cvt.pack.sat.u8.s32",
]  # fmt: skip


def fitting_register(kind):
    if kind in {**INTEGERS, **FLOATS}:
        return register(kind)
    if kind in ("f16x2", "bf16x2", "tf32") or (kind.endswith("x4") and kind != "e2m1x4"):
        return "b32"
    return "b8" if kind == "e2m1x2" else "b16"


@pytest.mark.parametrize(
    ("name", "operands"), [(name, "%d, %a") for name in ILLEGAL] + [(name, "%d, %a, %a") for name in ILLEGAL_TWO]
)
def test_refused(name, operands):
    """Each in registers of the right widths, so that the modifiers are the reason."""
    to, source = ("u32", "u32") if "pack" in name else name.split(".")[-2:]
    kind = fitting_register(source)
    values = np.zeros(32, BITS[int(kind[1:]) // 8])
    with pytest.raises(UnsupportedInstruction):
        execute(f"{name} {operands};", fitting_register(to), a=(kind, values))


@pytest.mark.parametrize(
    ("text", "destination", "source"),
    [
        ("cvt.rn.bf16.f32 %d, %a;", "b32", "b32"),
        ("cvt.f32.bf16 %d, %a;", "b32", "b32"),
        ("cvt.rn.bf16x2.f32 %d, %a, %a;", "b64", "b32"),
        ("cvt.rna.tf32.f32 %d, %a;", "b64", "b32"),
        ("cvt.rn.f32.s32 %d, %a;", "b16", "b32"),
        ("cvt.u32.u64 %d, %a;", "b32", "b32"),
        ("cvt.u16.u32 _, %a;", "b16", "b32"),
        ("cvt.rn.f32.s32 %d, 1.5;", "b32", "b32"),
        ("cvt.f64.f32 %d, 2;", "b64", "b32"),
        ("cvt.f32.f16 %d, 1.5;", "b32", "b32"),
    ],
)
def test_operands_of_the_wrong_width_or_sort_are_refused(text, destination, source):
    with pytest.raises(UnsupportedInstruction):
        execute(text, destination, a=(source, np.zeros(32, {"b32": np.uint32}[source])))
