import math

import numpy as np
import pytest

from common.emulator.numerics.formats import bf16_from_f32, f32_from_bf16
from common.emulator.numerics.minmax import maximum, maximum_bf16, minimum, minimum_bf16
from tests.common.emulator.numerics.rounding_oracle import assert_same, edge_values

TYPES = [np.float16, np.float32, np.float64]
CANONICAL = {np.float16: (np.uint16, 0x7FFF), np.float32: (np.uint32, 0x7FFFFFFF)}


def order(value):
    """Key that sorts -0.0 before +0.0."""
    return value, math.copysign(1, value)


def choose(operands, pick, propagate_nan, absolute=False, xorsign=False):
    """The ISA's definition for one lane; `pick` is min or max."""
    negative = (math.copysign(1, operands[0]) < 0) != (math.copysign(1, operands[1]) < 0)
    values = [abs(x) for x in operands] if absolute else list(operands)
    numbers = [x for x in values if not math.isnan(x)]
    if not numbers or (propagate_nan and len(numbers) < len(values)):
        return math.nan
    result = pick(numbers, key=order)
    return math.copysign(result, -1 if negative else 1) if xorsign else result


def operands_of(dtype, count):
    rng = np.random.default_rng(21)
    edges = np.concatenate([edge_values(dtype), np.array([0.0, -0.0, np.nan], dtype=dtype)])
    drawn = rng.choice(edges, (count, 4000))
    drawn[1, :1000] = -drawn[0, :1000]
    drawn[1, 1000:1500] = drawn[0, 1000:1500]
    return list(drawn)


@pytest.mark.parametrize("propagate_nan", [False, True])
@pytest.mark.parametrize(("absolute", "xorsign"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("function", "pick"), [(minimum, min), (maximum, max)])
def test_two_operands(function, pick, dtype, absolute, xorsign, propagate_nan):
    operands = operands_of(dtype, 2)
    result = function(*operands, propagate_nan=propagate_nan, absolute=absolute, xorsign=xorsign)
    assert result.dtype == dtype
    rows = zip(*(x.tolist() for x in operands), strict=True)
    expected = np.array([choose(row, pick, propagate_nan, absolute, xorsign) for row in rows])
    assert_same(result.astype(np.float64), expected, *operands)
    if dtype in CANONICAL:
        bits, pattern = CANONICAL[dtype]
        assert set(result[np.isnan(result)].view(bits).tolist()) == {pattern}


@pytest.mark.parametrize("propagate_nan", [False, True])
@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize(("function", "pick"), [(minimum, min), (maximum, max)])
def test_three_operands(function, pick, absolute, propagate_nan):
    operands = operands_of(np.float32, 3)
    result = function(*operands, propagate_nan=propagate_nan, absolute=absolute)
    rows = zip(*(x.tolist() for x in operands), strict=True)
    expected = np.array([choose(row, pick, propagate_nan, absolute) for row in rows])
    assert_same(result.astype(np.float64), expected, *operands)


@pytest.mark.parametrize("xorsign", [False, True])
@pytest.mark.parametrize(("function", "pick"), [(minimum_bf16, min), (maximum_bf16, max)])
def test_bf16(function, pick, xorsign):
    a, b = (bf16_from_f32(x) for x in operands_of(np.float32, 2))
    a[0], b[0] = 0xFFC1, 0x7F81
    for propagate_nan in (False, True):
        result = function(a, b, propagate_nan=propagate_nan, absolute=xorsign, xorsign=xorsign)
        rows = zip(f32_from_bf16(a).tolist(), f32_from_bf16(b).tolist(), strict=True)
        expected = np.array([choose(row, pick, propagate_nan, xorsign, xorsign) for row in rows])
        assert_same(f32_from_bf16(result).astype(np.float64), expected, f32_from_bf16(a), f32_from_bf16(b))
        assert set(result[np.isnan(expected)].tolist()) == {0x7FFF}


def test_ftz_flushes_before_comparing():
    a = np.array([2.0**-130, -(2.0**-130), 2.0**-126], dtype=np.float32)
    b = np.array([2.0**-131, 2.0**-131, -(2.0**-127)], dtype=np.float32)
    assert_same(minimum(a, b, ftz=True), np.array([0.0, -0.0, -0.0], dtype=np.float32), a, b)
    assert_same(maximum(a, b, ftz=True), np.array([0.0, 0.0, 2.0**-126], dtype=np.float32), a, b)


def test_xorsign_is_refused_where_the_isa_has_none():
    one = np.ones(1, dtype=np.float32)
    with pytest.raises(ValueError, match="xorsign"):
        minimum(one, one, one, absolute=True, xorsign=True)
    with pytest.raises(ValueError, match="xorsign"):
        maximum(one, one, xorsign=True)
