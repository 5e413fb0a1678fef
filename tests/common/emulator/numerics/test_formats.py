import math

import numpy as np
import pytest

from common.emulator.numerics import formats
from common.emulator.numerics.formats import (
    BF16,
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    F16,
    F32,
    F64,
    TF32,
    UE4M3,
    UE8M0,
    decode,
    encode,
)

ALL_HALVES = np.arange(65536, dtype=np.uint16)
SMALL = [E4M3, E5M2, E2M3, E3M2, E2M1]
NEAREST_AND_DIRECTED = ["rn", "rna", "rz", "rm", "rp"]


def finite_grid(fmt, extra=1):
    """Non-negative finite values in order of their bits, continued by `extra` values past the largest."""
    values = decode(fmt, np.arange(fmt.max_bits + 1, dtype=fmt.dtype) << fmt.dtype(fmt.shift))
    step = values[-1] - values[-2]
    return np.concatenate([values, values[-1] + step * np.arange(1, extra + 1)])


def search_encode(fmt, values, rounding):
    """Magnitude bits by search in the sorted values: an index past `max_bits` means overflow."""
    grid = finite_grid(fmt)
    size, negative = np.abs(values), np.signbit(values)
    size = np.minimum(size, grid[-1])
    low = np.searchsorted(grid, size, side="right") - 1
    high = np.minimum(low + (grid[low] != size), grid.size - 1)
    below, above = size - grid[low], grid[high] - size
    tie_goes_up = {"rn": low % 2 == 1, "rna": np.ones_like(negative)}
    if rounding in tie_goes_up:
        up = (above < below) | ((above == below) & tie_goes_up[rounding])
    else:
        up = {"rz": np.zeros_like(negative), "rm": negative, "rp": ~negative}[rounding]
    return np.where(up, high, low)


def halves(kind):
    values = decode(F16 if kind == "f16" else BF16, ALL_HALVES)
    return values[~np.isnan(values)]


@pytest.mark.parametrize(
    ("fmt", "bits", "value"),
    [
        (E4M3, 0x7E, 448.0),
        (E4M3, 0x01, 2.0**-9),
        (E4M3, 0x08, 2.0**-6),
        (E4M3, 0xB8, -1.0),
        (E5M2, 0x7B, 57344.0),
        (E5M2, 0x01, 2.0**-16),
        (E5M2, 0x7C, math.inf),
        (E5M2, 0xFC, -math.inf),
        (E2M3, 0x1F, 7.5),
        (E2M3, 0x01, 0.125),
        (E2M3, 0x28, -1.0),
        (E3M2, 0x1F, 28.0),
        (E3M2, 0x01, 0.0625),
        (E2M1, 0x7, 6.0),
        (E2M1, 0x1, 0.5),
        (E2M1, 0xD, -3.0),
        (UE8M0, 0x00, 2.0**-127),
        (UE8M0, 0x7F, 1.0),
        (UE8M0, 0xFE, 2.0**127),
        (UE4M3, 0x7E, 448.0),
        (UE4M3, 0x38, 1.0),
        (F16, 0x3C00, 1.0),
        (F16, 0x0001, 2.0**-24),
        (F16, 0xFBFF, -65504.0),
        (BF16, 0x3F80, 1.0),
        (BF16, 0x0001, 2.0**-133),
        (TF32, 0x3F802000, 1 + 2.0**-10),
        (TF32, 0x3F803FFF, 1 + 2.0**-10),
        (F32, 0x00000001, 2.0**-149),
        (F64, 0x3FF0000000000001, 1 + 2.0**-52),
    ],
)
def test_known_values(fmt, bits, value):
    decoded = decode(fmt, np.array([bits], dtype=fmt.dtype))
    assert decoded[0] == value


@pytest.mark.parametrize(
    ("fmt", "nans"),
    [
        (E4M3, {0x7F, 0xFF}),
        (E5M2, {0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF}),
        (E2M3, set()),
        (E3M2, set()),
        (E2M1, set()),
        (UE8M0, {0xFF}),
        (UE4M3, {0x7F, 0xFF}),
    ],
)
def test_nan_patterns_of_bytes(fmt, nans):
    assert set(np.flatnonzero(np.isnan(decode(fmt, np.arange(256, dtype=np.uint8))))) == nans


@pytest.mark.parametrize("fmt", [*SMALL, F16, BF16, TF32], ids=lambda f: f.name)
def test_every_finite_value_round_trips(fmt):
    magnitudes = np.arange(fmt.max_bits + 1, dtype=np.int64)
    bits = np.concatenate([magnitudes, magnitudes | 1 << (fmt.width - 1)]) << fmt.shift
    for rounding in NEAREST_AND_DIRECTED:
        assert np.array_equal(encode(fmt, decode(fmt, bits.astype(fmt.dtype)), rounding), bits)


@pytest.mark.parametrize("rounding", NEAREST_AND_DIRECTED)
@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("fmt", SMALL, ids=lambda f: f.name)
def test_every_half_to_small_formats_saturating(fmt, kind, rounding):
    values = halves(kind)
    magnitude = np.minimum(search_encode(fmt, values, rounding), fmt.max_bits)
    expected = magnitude | np.signbit(values).astype(np.int64) << (fmt.width - 1)
    assert np.array_equal(encode(fmt, values, rounding, saturate_finite=True), expected)


@pytest.mark.parametrize("rounding", NEAREST_AND_DIRECTED)
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
def test_every_half_to_fp8_without_saturation(fmt, rounding):
    values = halves("f16")
    magnitude = search_encode(fmt, values, rounding)
    negative = np.signbit(values)
    keeps_finite = {"rz": negative | True, "rm": ~negative, "rp": negative}.get(rounding, negative & False)
    magnitude = np.where(keeps_finite, np.minimum(magnitude, fmt.max_bits), magnitude)
    magnitude = np.where(np.isinf(values), fmt.max_bits + 1, magnitude)
    expected = magnitude | negative.astype(np.int64) << 7
    assert np.array_equal(encode(fmt, values, rounding), expected)


@pytest.mark.parametrize("rounding", NEAREST_AND_DIRECTED)
@pytest.mark.parametrize("fmt", [F16, BF16, TF32], ids=lambda f: f.name)
def test_wide_values_at_and_around_ties(fmt, rounding):
    rng = np.random.default_rng(7)
    grid = finite_grid(fmt)
    index = np.concatenate(
        [rng.integers(0, grid.size - 1, 4000), np.arange(50), np.arange(grid.size - 50, grid.size - 1)]
    )
    middle = (grid[index] + grid[index + 1]) / 2
    values = np.concatenate([middle, np.nextafter(middle, 0), np.nextafter(middle, np.inf), grid[index]])
    values = np.concatenate([values, -values])
    magnitude = search_encode(fmt, values, rounding)
    negative = np.signbit(values)
    if rounding in ("rz", "rm", "rp"):
        finite = {"rz": negative | True, "rm": ~negative, "rp": negative}[rounding]
        magnitude = np.where(finite, np.minimum(magnitude, fmt.max_bits), magnitude)
    expected = (magnitude | negative.astype(np.int64) << (fmt.width - 1)) << fmt.shift
    assert np.array_equal(encode(fmt, values, rounding), expected)


def test_f16_matches_numpy_on_f32_patterns():
    rng = np.random.default_rng(3)
    values = rng.integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    values = values[~np.isnan(values)]
    assert np.array_equal(encode(F16, values.astype(np.float64)).view(np.float16), values.astype(np.float16))


@pytest.mark.parametrize(
    ("fmt", "expected"),
    [(F16, 0x7FFF), (BF16, 0x7FFF), (TF32, 0x7FFFE000), (F32, 0x7FFFFFFF), (E4M3, 0x7F), (E5M2, 0x7F)]
    + [(E2M3, 0x1F), (E3M2, 0x1F), (E2M1, 0x7)],
    ids=lambda x: x.name if hasattr(x, "name") else "",
)
def test_nan_becomes_canonical(fmt, expected):
    nans = np.array([0x7FF8000000000000, 0xFFF8000000000001], dtype=np.uint64).view(np.float64)
    for options in ({}, {"relu": True}, {"saturate_finite": True}, {"relu": True, "saturate_finite": True}):
        assert encode(fmt, nans, **options).tolist() == [expected, expected]


def test_saturation_of_infinity_and_overflow():
    values = np.array([math.inf, -math.inf, 1e300, -1e300])
    assert encode(F16, values, saturate_finite=True).tolist() == [0x7BFF, 0xFBFF, 0x7BFF, 0xFBFF]
    assert encode(BF16, values, saturate_finite=True).tolist() == [0x7F7F, 0xFF7F, 0x7F7F, 0xFF7F]
    assert encode(TF32, values, "rna", saturate_finite=True).tolist() == [0x7F7FE000, 0xFF7FE000] * 2
    assert encode(F16, values).tolist() == [0x7C00, 0xFC00, 0x7C00, 0xFC00]
    assert encode(F16, values, "rz").tolist() == [0x7C00, 0xFC00, 0x7BFF, 0xFBFF]


def test_relu_clears_everything_negative():
    values = np.array([-0.0, -1.0, -math.inf, 2.0, -1e-300])
    assert encode(F16, values, relu=True).tolist() == [0, 0, 0, 0x4000, 0]
    assert encode(E4M3, values, relu=True, saturate_finite=True).tolist() == [0, 0, 0, 0x40, 0]


def test_ue8m0_follows_the_exponent():
    values = np.array(
        [0.0, -0.0, 1.0, 1.5, -3.0, 2.0**-127, 1.25 * 2.0**-127, 2.0**-149, 1.5 * 2.0**127, math.inf, math.nan]
    )
    truncated = [0, 0, 127, 127, 128, 0, 0, 0, 254, 255, 255]
    raised = [0, 0, 127, 128, 129, 0, 1, 0, 255, 255, 255]
    assert encode(UE8M0, values, "rz").tolist() == truncated
    assert encode(UE8M0, values, "rp").tolist() == raised
    assert encode(UE8M0, values, "rz", saturate_finite=True).tolist() == [*truncated[:9], 254, 255]
    assert encode(UE8M0, values, "rp", saturate_finite=True).tolist() == [*raised[:8], 254, 254, 255]


@pytest.mark.parametrize(("fmt", "width"), [(F16, 13), (BF16, 16)], ids=["f16", "bf16"])
def test_stochastic_rounding_adds_to_the_discarded_bits(fmt, width):
    rng = np.random.default_rng(11)
    exponent = rng.integers(127 - 13, 127 + 15, 5000).astype(np.uint32) << 23
    bits = exponent | rng.integers(0, 2**23, 5000, dtype=np.uint32)
    random_bits = rng.integers(0, 2**width, 5000).astype(np.uint32)
    carried = (bits + random_bits) >> np.uint32(width) << np.uint32(width)
    encoded = encode(fmt, bits.view(np.float32).astype(np.float64), "rs", random_bits=random_bits, random_width=width)
    assert np.array_equal(decode(fmt, encoded), carried.view(np.float32).astype(np.float64))


def test_bf16_from_f32_agrees_with_encode():
    rng = np.random.default_rng(5)
    bits = rng.integers(0, 2**32, 100_000, dtype=np.uint32)
    ties = (bits & np.uint32(0xFFFF0000)) | np.uint32(0x8000)
    values = np.concatenate([bits, ties, ties + np.uint32(1), ties - np.uint32(1)]).view(np.float32)
    assert np.array_equal(formats.bf16_from_f32(values), encode(BF16, values.astype(np.float64)))


@pytest.mark.parametrize(
    ("fmt", "rounding", "message"),
    [
        (UE8M0, "rn", "rz or rp"),
        (UE4M3, "rn", "no conversion to ue4m3"),
        (F16, "nearest", "unknown rounding"),
        (F16, "rs", "random_bits"),
        (F64, "rn", "already are f64"),
    ],
)
def test_unsupported_encodings_are_refused(fmt, rounding, message):
    with pytest.raises(ValueError, match=message):
        encode(fmt, np.array([1.0]), rounding)
