import math

import numpy as np
import pytest

from common.emulator.numerics import approximate
from common.emulator.numerics.formats import BF16, decode, encode
from tests.common.emulator.numerics.rounding_oracle import assert_same

INF, NAN = math.inf, math.nan
TINY = 2.0**-130


def single(*values):
    return np.array(values, dtype=np.float32)


@pytest.mark.parametrize(
    ("function", "inputs", "expected"),
    [
        (approximate.ex2_f32, (-INF, -0.0, 0.0, INF, NAN, -149.0, 128.0), (0.0, 1.0, 1.0, INF, NAN, 2.0**-149, INF)),
        (approximate.lg2_f32, (-INF, -1.0, -0.0, 0.0, INF, NAN, TINY), (NAN, NAN, -INF, -INF, INF, NAN, -130.0)),
        (approximate.sin_f32, (-INF, -0.0, 0.0, INF, NAN, TINY), (NAN, -0.0, 0.0, NAN, NAN, TINY)),
        (approximate.cos_f32, (-INF, -0.0, 0.0, INF, NAN, TINY), (NAN, 1.0, 1.0, NAN, NAN, 1.0)),
        (approximate.tanh_f32, (-INF, -0.0, 0.0, INF, NAN, TINY, -TINY), (-1.0, -0.0, 0.0, 1.0, NAN, TINY, -TINY)),
        (approximate.rcp_f32, (-INF, -0.0, 0.0, INF, NAN, 2.0**127), (-0.0, -INF, INF, 0.0, NAN, 2.0**-127)),
        (approximate.sqrt_f32, (-INF, -1.0, -0.0, 0.0, INF, NAN, TINY), (NAN, NAN, -0.0, 0.0, INF, NAN, 2.0**-65)),
        (approximate.rsqrt_f32, (-INF, -1.0, -0.0, 0.0, INF, NAN, TINY), (NAN, NAN, -INF, INF, 0.0, NAN, 2.0**65)),
    ],
)
def test_special_values_without_flushing(function, inputs, expected):
    assert_same(function(single(*inputs)), single(*expected), single(*inputs))


@pytest.mark.parametrize(
    ("function", "inputs", "expected"),
    [
        (approximate.ex2_f32, (TINY, -127.0, -126.0), (1.0, 0.0, 2.0**-126)),
        (approximate.lg2_f32, (TINY, -TINY), (-INF, -INF)),
        (approximate.sin_f32, (TINY, -TINY), (0.0, -0.0)),
        (approximate.cos_f32, (TINY,), (1.0,)),
        (approximate.rcp_f32, (TINY, -TINY, -(2.0**127)), (INF, -INF, -0.0)),
        (approximate.sqrt_f32, (TINY, -TINY), (0.0, -0.0)),
        (approximate.rsqrt_f32, (TINY, -TINY), (INF, -INF)),
    ],
)
def test_flushing_variants(function, inputs, expected):
    assert_same(function(single(*inputs), ftz=True), single(*expected), single(*inputs))


@pytest.mark.parametrize(
    ("function", "oracle", "low", "high"),
    [
        (approximate.ex2_f32, lambda x: 2.0**x, -120, 120),
        (approximate.lg2_f32, math.log2, 1e-30, 1e30),
        (approximate.sin_f32, math.sin, -300, 300),
        (approximate.cos_f32, math.cos, -300, 300),
        (approximate.tanh_f32, math.tanh, -10, 10),
        (approximate.rcp_f32, lambda x: 1 / x, 1e-30, 1e30),
        (approximate.sqrt_f32, math.sqrt, 0, 1e30),
        (approximate.rsqrt_f32, lambda x: 1 / math.sqrt(x), 1e-30, 1e30),
    ],
)
def test_results_are_rounded_to_nearest(function, oracle, low, high):
    rng = np.random.default_rng(31)
    inputs = np.concatenate([rng.uniform(low, high, 2000), rng.uniform(max(low, 0.5), 2, 2000)]).astype(np.float32)
    expected = single(*(oracle(x) for x in inputs.tolist()))
    # Another float64 library may differ in the last bit of float64, which decides a rounding once in 2**28 cases.
    assert (function(inputs) == expected).all()


def test_division():
    largest = 1.5 * 2.0**127
    a = single(6, 1, INF, -INF, -3, 0, 0, 1, NAN, -1, 5)
    b = single(3, largest, largest, -largest, largest, largest, 0, INF, 1, 0, 2.0**126)
    expected = single(2, 0.0, NAN, NAN, -0.0, 0.0, NAN, 0, NAN, -INF, 5 * 2.0**-126)
    assert_same(approximate.div_f32(a, b), expected, a, b)
    full = approximate.div_full_f32(a, b)
    assert full[1] == np.float32(1 / largest) and full[2] == INF and full[3] == INF
    tiny = single(TINY)
    assert approximate.div_full_f32(single(1), tiny)[0] == INF
    assert approximate.div_full_f32(tiny, single(2))[0] == np.float32(TINY / 2)
    assert approximate.div_full_f32(tiny, single(2), ftz=True)[0] == 0
    assert approximate.div_f32(tiny, single(2.0**-126), ftz=True)[0] == 0


def test_upper_word_of_f64():
    inputs = np.array([4.0, -INF, INF, -0.0, 0.0, 1e-310, -1e-310, NAN, 3.0, 2.0**1023])
    expected = np.array([0.25, -0.0, 0.0, -INF, INF, INF, -INF, NAN, 1 / 3, 0.0])
    result = approximate.rcp_upper_f64(inputs)
    assert not (result.view(np.uint64) & np.uint64(0xFFFFFFFF)).any()
    assert result[7].view(np.uint64) == 0x7FFFFFFF00000000
    assert abs(result[8] * 3 - 1) < 2.0**-20
    exact = np.arange(len(inputs)) != 8
    assert_same(result[exact], expected[exact], inputs[exact])
    roots = np.array([4.0, -INF, INF, -0.0, 0.0, 1e-310, -1e-310, -4.0])
    expected = np.array([0.5, NAN, 0.0, -INF, INF, INF, -INF, NAN])
    assert_same(approximate.rsqrt_upper_f64(roots), expected, roots)


def test_upper_word_ignores_the_lower_one():
    bits = np.array([0x4008000000000000, 0x40080000FFFFFFFF, 0x7FF0000000000001], dtype=np.uint64)
    result = approximate.rcp_upper_f64(bits.view(np.float64))
    assert result[0] == result[1] and result[2] == 0


def test_rsqrt_f64():
    inputs = np.array([4.0, -1.0, -0.0, 0.0, INF, 2.0**-1074])
    expected = np.array([0.5, NAN, -INF, INF, 0.0, 2.0**537])
    assert_same(approximate.rsqrt_f64(inputs), expected, inputs)


def test_f16_functions_over_all_values():
    bits = np.arange(65536, dtype=np.uint16)
    inputs = bits.view(np.float16)
    finite = np.isfinite(inputs)
    expected = np.array([np.float16(2.0**x) if x < 16 else np.float16(INF) for x in inputs[finite].tolist()])
    assert_same(approximate.ex2_f16(inputs[finite]), expected, inputs[finite])
    expected = np.array([np.float16(math.tanh(x)) for x in inputs[finite].tolist()])
    assert_same(approximate.tanh_f16(inputs[finite]), expected, inputs[finite])
    special = np.array([-INF, INF, NAN], dtype=np.float16)
    assert_same(approximate.ex2_f16(special), np.array([0, INF, NAN], dtype=np.float16), special)
    assert_same(approximate.tanh_f16(special), np.array([-1, 1, NAN], dtype=np.float16), special)


def test_bf16_functions():
    inputs = encode(BF16, np.array([-INF, -TINY, -0.0, 0.0, TINY, INF, NAN, 3.0, -126.0, -127.0]))
    expected = np.array([0.0, 1.0, 1.0, 1.0, 1.0, INF, NAN, 8.0, 2.0**-126, 0.0])
    assert_same(decode(BF16, approximate.ex2_bf16(inputs)), expected, decode(BF16, inputs))
    inputs = encode(BF16, np.array([-INF, -0.0, 0.0, INF, NAN, TINY, 0.5]))
    expected = np.array([-1.0, -0.0, 0.0, 1.0, NAN, TINY, 0.462890625])
    assert_same(decode(BF16, approximate.tanh_bf16(inputs)), expected, decode(BF16, inputs))
