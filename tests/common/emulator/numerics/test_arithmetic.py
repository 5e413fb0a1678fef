import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.emulator.numerics import arithmetic, modifiers
from common.emulator.numerics.formats import BF16, decode
from tests.common.emulator.numerics.rounding_oracle import (
    BRAIN,
    DOUBLE,
    HALF,
    SINGLE,
    Precision,
    assert_same,
    edge_values,
    fused,
    quotient,
    root,
    round_fraction,
)

MODES = ["rn", "rz", "rm", "rp"]
TYPES = {"f32": (np.float32, SINGLE), "f64": (np.float64, DOUBLE)}


def patterns(dtype, count, seed):
    """Random bits: every exponent, infinities and NaN."""
    bits = {np.float16: np.uint16, np.float32: np.uint32, np.float64: np.uint64}[dtype]
    rng = np.random.default_rng(seed)
    return rng.integers(0, np.iinfo(bits).max, count, dtype=bits, endpoint=True).view(dtype)


def edge_pairs(dtype):
    """Pairs of edge values, pairs whose exponents are near each other, and random patterns."""
    rng = np.random.default_rng(8)
    a, b = rng.choice(edge_values(dtype), (2, 1200))
    near = rng.standard_normal((2, 300)).astype(dtype)
    return np.concatenate([a, near[0], patterns(dtype, 300, 1)]), np.concatenate([b, near[1], patterns(dtype, 300, 2)])


def edge_triples(dtype, count=1500):
    """Random triples of edge values, random patterns, and sums that almost cancel."""
    rng = np.random.default_rng(9)
    edges = edge_values(dtype)
    chosen = rng.choice(edges, (3, count))
    near = rng.standard_normal((3, count // 2)).astype(dtype)
    near[2] = -(near[0] * near[1])
    random = np.stack([patterns(dtype, count // 2, seed) for seed in (3, 4, 5)])
    return tuple(np.concatenate(parts) for parts in zip(chosen, near, random, strict=True))


def fma_ties(dtype, count=1200):
    """c plus a product that is half a unit of c, give or take far less than twice the precision shows."""
    rng = np.random.default_rng(10)
    info = np.finfo(dtype)
    bits = info.nmant
    span = 3 if dtype is np.float16 else 30
    exponent = rng.integers(-2, span, count).astype(np.float64)
    c = (1 + rng.integers(0, 2**bits, count) * 2.0**-bits) * 2.0**exponent * rng.choice([-1, 1], count)
    k = rng.integers(-3, 4, count) * 2.0**-bits
    a = 1 + k
    b = (1 - k) * 2.0 ** (exponent - bits - 1) * rng.choice([-1, 1], count)
    return a.astype(dtype), b.astype(dtype), c.astype(dtype)


def reference(function, precision, mode, *operands):
    rows = zip(*(x.tolist() for x in operands), strict=True)
    return np.array([function(*row, precision, mode) for row in rows])


def compare(result, function, precision, mode, *operands):
    assert_same(result.astype(np.float64), reference(function, precision, mode, *operands), *operands)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", list(TYPES))
def test_add_sub_mul(kind, mode):
    dtype, precision = TYPES[kind]
    a, b = edge_pairs(dtype)
    one, minus_zero = np.ones_like(a), np.where(np.signbit(a) ^ np.signbit(b), -0.0, 0.0).astype(dtype)
    compare(getattr(arithmetic, f"add_{kind}")(a, b, mode), fused, precision, mode, a, one, b)
    compare(getattr(arithmetic, f"sub_{kind}")(a, b, mode), fused, precision, mode, a, one, -b)
    compare(getattr(arithmetic, f"mul_{kind}")(a, b, mode), fused, precision, mode, a, b, minus_zero)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", list(TYPES))
def test_fma(kind, mode):
    dtype, precision = TYPES[kind]
    fma = getattr(arithmetic, f"fma_{kind}")
    for operands in (edge_triples(dtype), fma_ties(dtype)):
        compare(fma(*operands, mode), fused, precision, mode, *operands)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", list(TYPES))
def test_div_rcp_sqrt(kind, mode):
    dtype, precision = TYPES[kind]
    a, b = edge_pairs(dtype)
    compare(getattr(arithmetic, f"div_{kind}")(a, b, mode), quotient, precision, mode, a, b)
    single = np.concatenate([edge_values(dtype), patterns(dtype, 400, 6), np.arange(60).astype(dtype)])
    compare(getattr(arithmetic, f"rcp_{kind}")(single, mode), quotient, precision, mode, np.ones_like(single), single)
    compare(getattr(arithmetic, f"sqrt_{kind}")(single, mode), root, precision, mode, single)


@settings(max_examples=150, deadline=None)
@given(*[st.floats(width=64)] * 3, st.sampled_from(MODES))
def test_fma_f64_of_any_floats(a, b, c, mode):
    with np.errstate(all="ignore"):
        result = arithmetic.fma_f64(np.array([a]), np.array([b]), np.array([c]), mode)
    assert_same(result, np.array([fused(a, b, c, DOUBLE, mode)]), np.array([a]))


@settings(max_examples=150, deadline=None)
@given(*[st.floats(width=32)] * 3, st.sampled_from(MODES))
def test_fma_f32_of_any_floats(a, b, c, mode):
    with np.errstate(all="ignore"):
        result = arithmetic.fma_f32(*(np.array([x], dtype=np.float32) for x in (a, b, c)), mode)
    assert_same(result.astype(np.float64), np.array([fused(a, b, c, SINGLE, mode)]), np.array([a]))


def test_f16_operations():
    a, b = edge_pairs(np.float16)
    one, zero = np.ones_like(a), np.where(np.signbit(a) ^ np.signbit(b), -0.0, 0.0).astype(np.float16)
    compare(arithmetic.add_f16(a, b), fused, HALF, "rn", a, one, b)
    compare(arithmetic.sub_f16(a, b), fused, HALF, "rn", a, one, -b)
    compare(arithmetic.mul_f16(a, b), fused, HALF, "rn", a, b, zero)
    for operands in (edge_triples(np.float16), fma_ties(np.float16)):
        compare(arithmetic.fma_f16(*operands), fused, HALF, "rn", *operands)


def brain_bits(values):
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def brain_triples():
    """bf16 bits: edge values, random patterns, and products of half a unit next to the addend."""
    rng = np.random.default_rng(12)
    edges = np.array([0, 1, 2, 0x3F, 0x7F, 0x80, 0x81, 0x100, 0x3F7F, 0x3F80, 0x3F81, 0x7F00, 0x7F7F, 0x7F80, 0x7FC0])
    edges = np.concatenate([edges, edges | 0x8000]).astype(np.uint16)
    chosen = rng.choice(edges, (3, 1500))
    random = rng.integers(0, 65536, (3, 800)).astype(np.uint16)
    exponent = rng.integers(-140, 120, 1500).astype(np.float64)
    c = (1 + rng.integers(0, 128, 1500) / 128) * 2.0**exponent
    k = rng.integers(-3, 4, 1500) / 128
    b = (1 - k) * 2.0 ** (exponent / 2 - 8).round()
    a = (1 + k) * 2.0**exponent / 2.0 ** (exponent / 2 - 8).round() / 256 * rng.choice([-1, 1], 1500)
    ties = np.stack([brain_bits(x) for x in (a, b, c)])
    return tuple(np.concatenate(parts) for parts in zip(chosen, random, ties, strict=True))


def test_bf16_operations():
    a, b, c = brain_triples()
    x, y, z = (decode(BF16, v) for v in (a, b, c))
    one, zero = np.ones_like(x), np.where(np.signbit(x) ^ np.signbit(y), -0.0, 0.0)
    cases = [
        (arithmetic.add_bf16(a, c), (x, one, z)),
        (arithmetic.sub_bf16(a, c), (x, one, -z)),
        (arithmetic.mul_bf16(a, b), (x, y, zero)),
        (arithmetic.fma_bf16(a, b, c), (x, y, z)),
    ]
    for result, operands in cases:
        compare(decode(BF16, result), fused, BRAIN, "rn", *operands)
        assert set(result[np.isnan(decode(BF16, result))].tolist()) <= {0x7FFF}


def test_bf16_fma_sees_an_addend_below_float64_precision():
    seven, thirty_seven = brain_bits(np.full(4, 7.0)), brain_bits(np.array([37.0, 37, -37, -37]))
    addend = brain_bits(np.array([2.0**-90, -(2.0**-90)] * 2))
    result = decode(BF16, arithmetic.fma_bf16(seven, thirty_seven, addend))
    assert result.tolist() == [260.0, 258.0, -258.0, -260.0]


def flushed(value):
    return math.copysign(0.0, value) if abs(value) < 2.0**-126 else value


UNBOUNDED_SINGLE = Precision(23, -1000, 1000)


def flushed_result(operation, operands, mode):
    """A result is flushed when it is too small after rounding to 24 bits, whatever its exponent."""
    rounded = operation(*operands, UNBOUNDED_SINGLE, mode)
    if abs(rounded) < 2.0**-126:
        return math.copysign(0.0, rounded)
    return operation(*operands, SINGLE, mode)


@pytest.mark.parametrize("mode", MODES)
def test_ftz_flushes_operands_and_results(mode):
    a, b, c = edge_triples(np.float32, 800)
    expected = [
        flushed_result(fused, [flushed(v) for v in row], mode)
        for row in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    ]
    assert_same(arithmetic.fma_f32(a, b, c, mode, ftz=True).astype(np.float64), np.array(expected), a, b, c)
    expected = [
        flushed_result(quotient, [flushed(x), flushed(y)], mode) for x, y in zip(a.tolist(), b.tolist(), strict=True)
    ]
    assert_same(arithmetic.div_f32(a, b, mode, ftz=True).astype(np.float64), np.array(expected), a, b)


def test_ftz_flushes_what_only_coarse_subnormals_round_up():
    smallest = np.array([2.0**-126, -(2.0**-126)], dtype=np.float32)
    below_one = np.array([1 - 2.0**-24], dtype=np.float32)
    assert np.abs(arithmetic.mul_f32(smallest, below_one)).tolist() == [2.0**-126] * 2
    product = arithmetic.mul_f32(smallest, below_one, ftz=True)
    assert product.tolist() == [0, 0] and np.signbit(product).tolist() == [False, True]
    near_half = np.array([0.5 - 2.0**-24], dtype=np.float32)
    above_twice = np.array([2.0**-125 + 2.0**-148], dtype=np.float32)
    assert arithmetic.mul_f32(near_half, above_twice, ftz=True).tolist() == [2.0**-126]


def test_ftz_of_f16_decides_like_f32():
    smallest, below_one = np.array([2.0**-14], dtype=np.float16), np.array([1 - 2.0**-11], dtype=np.float16)
    assert arithmetic.mul_f16(smallest, below_one).tolist() == [2.0**-14]
    assert arithmetic.mul_f16(smallest, below_one, ftz=True).tolist() == [0]
    assert arithmetic.fma_f16(smallest, below_one, smallest * 0, ftz=True).tolist() == [0]
    assert arithmetic.fma_f16(smallest, smallest, -smallest, ftz=True).tolist() == [-(2.0**-14)]


def test_ftz_keeps_the_sign_of_zero():
    tiny = np.array([2.0**-127, -(2.0**-127)], dtype=np.float32)
    result = arithmetic.add_f32(tiny, tiny, ftz=True)
    assert result.tolist() == [0, 0] and np.signbit(result).tolist() == [False, True]
    result = arithmetic.sub_f32(np.zeros(1, np.float32), tiny[:1], ftz=True)
    assert result.tolist() == [0] and not np.signbit(result)[0]


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_saturation_clamps_to_unit_interval(dtype):
    kind = "f16" if dtype is np.float16 else "f32"
    values = np.array([-0.0, -1, 0.25, 1, 1.5, np.inf, -np.inf, np.nan], dtype=dtype)
    zeros = np.where(np.signbit(values), -0.0, 0.0).astype(dtype)
    result = getattr(arithmetic, f"add_{kind}")(values, zeros, saturate=True)
    assert result.tolist() == [0, 0, 0.25, 1, 1, 1, 0, 0] and not np.signbit(result).any()


def test_relu_clears_negative_results_and_keeps_nan_canonical():
    one = np.ones(4, dtype=np.float16)
    values = np.array([-0.0, -3, 2, np.nan], dtype=np.float16)
    result = arithmetic.fma_f16(values, one, np.array([-0.0, 0, 0, 0], dtype=np.float16), relu=True)
    assert result.view(np.uint16).tolist() == [0, 0, 0x4000, 0x7FFF]
    bits = np.array([0x8000, 0xC040, 0x4000, 0xFFC1], dtype=np.uint16)
    ones = np.full(4, 0x3F80, dtype=np.uint16)
    zeros = np.array([0x8000, 0, 0, 0], dtype=np.uint16)
    assert arithmetic.fma_bf16(bits, ones, zeros, relu=True).tolist() == [0, 0, 0x4000, 0x7FFF]


def test_canonical_nan_replaces_payloads_only():
    bits = np.array([0x7F800001, 0xFFC00000, 0x3F800000, 0xFF800000], dtype=np.uint32)
    assert modifiers.canonical_nan(bits.view(np.float32)).view(np.uint32).tolist() == [
        0x7FFFFFFF,
        0x7FFFFFFF,
        0x3F800000,
        0xFF800000,
    ]
    clean = np.array([np.inf, -np.inf, 3e38, -0.0], dtype=np.float32)
    assert modifiers.canonical_nan(clean) is clean


@pytest.mark.parametrize("mode", MODES)
def test_fma_f64_at_the_edge_of_overflow(mode):
    largest = float(np.finfo(np.float64).max)
    size = 2.0 ** np.array([470.0, 470, 471, 469, 471, -1540])
    a, b = np.full(6, 2.0**500), size * np.array([1, 1 - 2.0**-52, 1, 1, -1, -1])
    c = np.array([largest] * 5 + [2.0**1023])
    for sign in (1, -1):
        compare(arithmetic.fma_f64(sign * a, b, sign * c, mode), fused, DOUBLE, mode, sign * a, b, sign * c)


def test_oracle_rounds_overflow_by_mode():
    results = {mode: round_fraction(Fraction(2) ** 129, SINGLE, mode) for mode in MODES}
    largest = float(np.finfo(np.float32).max)
    assert results == {"rn": math.inf, "rz": largest, "rm": largest, "rp": math.inf}


def test_operands_broadcast_over_two_dimensions():
    a = np.arange(6, dtype=np.float64).reshape(2, 3)
    for mode in MODES:
        assert np.array_equal(arithmetic.fma_f64(a, a, a, mode), a * a + a)
        assert np.array_equal(arithmetic.fma_f32(*[a.astype(np.float32)] * 3, mode), a * a + a)
