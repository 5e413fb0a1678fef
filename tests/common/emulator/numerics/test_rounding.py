import math
from fractions import Fraction

import numpy as np
import pytest

from common.emulator.numerics.formats import BF16, decode
from common.emulator.numerics.rounding import (
    f32_from_f64,
    float_from_integer,
    integer_from_float,
    round_to_odd,
    to_integral,
    two_sum,
)
from tests.common.emulator.numerics.rounding_oracle import (
    BRAIN,
    DOUBLE,
    HALF,
    SINGLE,
    assert_same,
    edge_values,
    round_fraction,
)

MODES = ["rn", "rz", "rm", "rp"]
PRECISIONS = {"f16": HALF, "bf16": BRAIN, "f32": SINGLE, "f64": DOUBLE}
PYTHON_ROUNDING = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}
INTEGERS = [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]


def float64_samples(rng):
    """Values of every f32 magnitude, with ties and near ties of f32 among them."""
    single = edge_values(np.float32)
    single = np.concatenate([single, rng.integers(0, 2**32, 800, dtype=np.uint32).view(np.float32)]).astype(np.float64)
    next_single = np.nextafter(single.astype(np.float32), np.float32(np.inf)).astype(np.float64)
    middle = (single + next_single) / 2
    near = [middle, np.nextafter(middle, 0), np.nextafter(middle, np.inf)]
    beyond = np.array([1e39, -1e39, 1e-50, -1e-50, 5e-324, 2.0**128 - 2.0**103])
    return np.concatenate([single, *near, beyond, edge_values(np.float64)])


@pytest.mark.parametrize("mode", MODES)
def test_f32_from_f64(mode):
    values = float64_samples(np.random.default_rng(1))
    expected = [
        v if v == 0 or not math.isfinite(v) else round_fraction(Fraction(v), SINGLE, mode) for v in values.tolist()
    ]
    assert_same(f32_from_f64(values, mode).astype(np.float64), np.array(expected), values)


def test_oracle_agrees_with_python_on_nearest_float64():
    rng = np.random.default_rng(2)
    for bits in rng.integers(1, 2**62, 300).tolist():
        value = Fraction(bits * bits + 1, 3 ** (bits % 700))
        assert round_fraction(value, DOUBLE, "rn") == value.numerator / value.denominator


def test_round_to_odd_is_the_odd_neighbour_of_the_exact_sum():
    rng = np.random.default_rng(3)
    a = rng.standard_normal(2000) * 2.0 ** rng.integers(-40, 40, 2000)
    b = rng.standard_normal(2000) * 2.0 ** rng.integers(-40, 40, 2000)
    odd = round_to_odd(*two_sum(a, b))
    for x, y, result in zip(a.tolist(), b.tolist(), odd.tolist(), strict=True):
        exact = Fraction(x) + Fraction(y)
        down, up = (round_fraction(exact, DOUBLE, mode) for mode in ("rm", "rp"))
        if down == up:
            assert result == down
        else:
            assert result in (down, up) and np.float64(result).view(np.int64) & 1 == 1


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("mode", list(PYTHON_ROUNDING))
def test_to_integral_keeps_type_and_sign(mode, dtype):
    halves = np.arange(-6, 6.25, 0.25).astype(dtype)
    values = np.concatenate([halves, -halves, edge_values(dtype)])
    expected = [math.copysign(float(PYTHON_ROUNDING[mode](v)), v) if math.isfinite(v) else v for v in values.tolist()]
    result = to_integral(values, mode)
    assert result.dtype == dtype
    assert_same(result.astype(np.float64), np.array(expected), values)


@pytest.mark.parametrize("source", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("target", INTEGERS)
@pytest.mark.parametrize("mode", list(PYTHON_ROUNDING))
def test_integer_from_float_clamps(mode, target, source):
    limits = np.iinfo(target)
    powers = 2.0 ** np.array([7, 8, 15, 16, 31, 32, 63, 64])
    around = np.concatenate([powers, powers - 1, powers - 0.5, np.nextafter(powers, 0), powers + 1])
    values = np.concatenate([around, -around, np.arange(-4, 4.25, 0.25)]).astype(source)
    values = np.concatenate([values, edge_values(source)])
    nan = 0
    if source is np.float64 or limits.bits == 64:
        nan = -(2 ** (limits.bits - 1)) if limits.min < 0 else 2 ** (limits.bits - 1)
    expected = []
    for v in values.tolist():
        if math.isnan(v):
            expected.append(nan)
        elif math.isinf(v):
            expected.append(limits.max if v > 0 else limits.min)
        else:
            expected.append(min(max(PYTHON_ROUNDING[mode](v), limits.min), limits.max))
    result = integer_from_float(values, target, mode)
    assert result.dtype == target
    assert result.tolist() == expected


def integer_samples(dtype, rng):
    limits = np.iinfo(dtype)
    values = {0, 1, limits.max, limits.max - 1, limits.min, limits.min + 1}
    for shift in range(limits.bits - 1):
        for offset in (-1, 0, 1):
            for mantissa in (7, 10, 23, 52):
                tie = (1 << shift) + (1 << max(shift - mantissa - 1, 0)) + offset
                values |= {tie, -tie, tie + (1 << max(shift - mantissa, 0))}
    values |= set(rng.integers(limits.min, limits.max, 100, dtype=dtype, endpoint=True).tolist())
    return np.array(sorted(v for v in values if limits.min <= v <= limits.max), dtype=dtype)


@pytest.mark.parametrize("kind", list(PRECISIONS))
@pytest.mark.parametrize("dtype", INTEGERS)
def test_float_from_integer_rounds_once(dtype, kind):
    values = integer_samples(dtype, np.random.default_rng(4))
    for mode in MODES:
        result = float_from_integer(values, kind, mode)
        result = decode(BF16, result) if kind == "bf16" else result.astype(np.float64)
        expected = [0.0 if v == 0 else round_fraction(Fraction(v), PRECISIONS[kind], mode) for v in values.tolist()]
        assert_same(result, np.array(expected), values)
