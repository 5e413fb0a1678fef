"""Floating-point formats of PTX and exact conversion between their bits and float64 values.

Sources: PTX ISA 5.2.3 (alternate formats) and 9.7.9.21 (`cvt`). Every finite value of every format here is a
float64 value, so `decode` is exact and `encode` rounds once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from common.emulator.numerics.modifiers import has_nan

Array = NDArray


@dataclass(frozen=True)
class FloatFormat:
    """Layout of a binary floating-point format.

    `nan` is the pattern that PTX `cvt` writes for a NaN, `None` when the format has none. `shift` counts unused low
    bits of the storage: tf32 keeps its 19 bits at the top of 32. `e2m3`, `e3m2` and `e2m1` values lie in the low bits
    of a byte with zeros above (PTX ISA 5.2.3).
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    has_infinity: bool
    nan: int | None
    max_finite: float
    storage_bits: int
    signed: bool = True
    shift: int = 0

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal value."""
        return 1 - self.bias

    @property
    def width(self) -> int:
        """Number of bits that carry information."""
        return self.exponent_bits + self.mantissa_bits + (1 if self.signed else 0)

    @property
    def magnitude_mask(self) -> int:
        """Mask of the exponent and mantissa bits, not shifted."""
        return (1 << (self.exponent_bits + self.mantissa_bits)) - 1

    @property
    def max_bits(self) -> int:
        """Exponent and mantissa bits of `max_finite`, not shifted."""
        fraction, exponent = math.frexp(self.max_finite)
        significand = int(fraction * 2 ** (self.mantissa_bits + 1))
        return ((exponent - 1 - self.min_exponent) << self.mantissa_bits) + significand

    @property
    def dtype(self) -> type:
        """NumPy unsigned integer type that holds one value."""
        return {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}[max(8, self.storage_bits)]


F16 = FloatFormat("f16", 5, 10, 15, True, 0x7FFF, 65504.0, 16)
BF16 = FloatFormat("bf16", 8, 7, 127, True, 0x7FFF, (2 - 2.0**-7) * 2.0**127, 16)
TF32 = FloatFormat("tf32", 8, 10, 127, True, 0x7FFFE000, (2 - 2.0**-10) * 2.0**127, 32, shift=13)
F32 = FloatFormat("f32", 8, 23, 127, True, 0x7FFFFFFF, (2 - 2.0**-23) * 2.0**127, 32)
F64 = FloatFormat("f64", 11, 52, 1023, True, 0x7FF8000000000000, float(np.finfo(np.float64).max), 64)
E4M3 = FloatFormat("e4m3", 4, 3, 7, False, 0x7F, 448.0, 8)
E5M2 = FloatFormat("e5m2", 5, 2, 15, True, 0x7F, 57344.0, 8)
E2M3 = FloatFormat("e2m3", 2, 3, 1, False, None, 7.5, 8)
E3M2 = FloatFormat("e3m2", 3, 2, 3, False, None, 28.0, 8)
E2M1 = FloatFormat("e2m1", 2, 1, 1, False, None, 6.0, 4)
UE8M0 = FloatFormat("ue8m0", 8, 0, 127, False, 0xFF, 2.0**127, 8, signed=False)
UE4M3 = FloatFormat("ue4m3", 4, 3, 7, False, 0x7F, 448.0, 8, signed=False)

FORMATS = {f.name: f for f in (F16, BF16, TF32, F32, F64, E4M3, E5M2, E2M3, E3M2, E2M1, UE8M0, UE4M3)}
_UE8M0_LARGEST = 0xFE
ROUNDINGS = ("rn", "rna", "rz", "rm", "rp", "rs")


def decode(fmt: FloatFormat, bits: Array) -> Array:
    """Values of `bits` (unsigned integers of `fmt.dtype`) as float64, exactly.

    Bits outside the format are ignored, as hardware does with the low 13 bits of a tf32 operand. A NaN gives a NaN.
    """
    bits = np.asarray(bits, dtype=fmt.dtype)
    if fmt is F64:
        return bits.view(np.float64)
    if fmt is F32:
        return bits.view(np.float32).astype(np.float64)
    if fmt is TF32:
        return (bits & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    if fmt is F16:
        return bits.view(np.float16).astype(np.float64)
    if fmt is BF16:
        return f32_from_bf16(bits).astype(np.float64)
    return _byte_table(fmt)[bits]


def encode(
    fmt: FloatFormat,
    values: Array,
    rounding: str = "rn",
    *,
    saturate_finite: bool = False,
    relu: bool = False,
    random_bits: Array | None = None,
    random_width: int = 0,
) -> Array:
    """Bits (`fmt.dtype`) of float64 `values` rounded once to `fmt`, as PTX `cvt` does (PTX ISA 9.7.9.21).

    `rounding` is one of `ROUNDINGS`. `saturate_finite` is `.satfinite`: infinities and overflow give the largest
    finite value of that sign. Without it they give infinity where the format has one (overflow only in the
    directions that the rounding goes), else NaN; e2m3, e3m2 and e2m1, which have neither, always saturate and map
    NaN to the largest positive value. `relu` turns every value with a minus sign, -0 included, into +0.

    `rs` adds `random_bits` (unsigned integers below `2**random_width`), aligned to the top of the discarded fraction,
    to that fraction and rounds away from zero on a carry. For f16 (13 random bits) and bf16 (16) with normal results
    the two have the same width, as the ISA draws it; for other widths and subnormal results the alignment is ours.

    ue8m0 drops the sign and accepts `rz` and `rp` alone, like the instruction. Raises ValueError for a rounding that
    the format does not have, and for ue4m3, to which nothing in PTX converts.
    """
    values = np.asarray(values, dtype=np.float64)
    if rounding not in ROUNDINGS:
        raise ValueError(f"unknown rounding {rounding!r}: use one of {', '.join(ROUNDINGS)}")
    if fmt is UE8M0:
        return _encode_ue8m0(values, rounding, saturate_finite)
    if not fmt.signed:
        raise ValueError(f"PTX has no conversion to {fmt.name}")
    if fmt is F64:
        raise ValueError("float64 values already are f64: view their bits instead of encoding them")
    negative = np.signbit(values)
    magnitude = np.abs(values)
    infinite = np.isinf(magnitude)
    invalid = np.isnan(magnitude)
    # The exponent field of float64; zeros and subnormals lie below every format's range.
    exponent = np.maximum((magnitude.view(np.int64) >> 52) - 1023, fmt.min_exponent)
    scaled = np.ldexp(np.where(infinite | invalid, 0.0, magnitude), fmt.mantissa_bits - exponent)
    whole = _round_scaled(scaled, negative, rounding, random_bits, random_width)
    # A carry out of the mantissa lands in the exponent, which is where it belongs.
    bits = (exponent - fmt.min_exponent) << fmt.mantissa_bits
    bits += whole.astype(np.int64)
    overflow = bits > fmt.max_bits
    if np.count_nonzero(overflow) or np.count_nonzero(infinite):
        bits = _overflowed(fmt, bits, overflow, infinite, negative, rounding, saturate_finite)
    if relu:
        bits = np.where(negative, 0, bits)
    else:
        bits = bits | (negative.astype(np.int64) << (fmt.width - 1))
    bits = bits << fmt.shift
    if np.count_nonzero(invalid):
        bits = np.where(invalid, fmt.max_bits if fmt.nan is None else fmt.nan, bits)
    return bits.astype(fmt.dtype)


def f32_from_bf16(bits: Array) -> Array:
    """float32 values of bf16 `bits` (uint16); NaN payloads are kept."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def bf16_from_f32(values: Array) -> Array:
    """bf16 bits (uint16) of float32 `values`, rounded to nearest even; any NaN gives 0x7fff."""
    bits = values.view(np.uint32)
    tie_to_even = (bits >> np.uint32(16)) & np.uint32(1)
    result = ((bits + (tie_to_even + np.uint32(0x7FFF))) >> np.uint32(16)).astype(np.uint16)
    if has_nan(values):
        result[np.isnan(values)] = BF16.nan
    return result


def _round_scaled(scaled: Array, negative: Array, rounding: str, random_bits: Array | None, width: int) -> Array:
    """Round non-negative `scaled` to integers; `negative` tells which of them stand for negative values."""
    if rounding == "rn":
        return np.rint(scaled)
    below = np.floor(scaled)
    if rounding == "rz":
        return below
    fraction = scaled - below
    if rounding == "rna":
        return below + (fraction >= 0.5)
    if rounding == "rs":
        if random_bits is None or width < 1:
            raise ValueError("rounding rs needs random_bits and random_width")
        return below + (fraction * 2.0**width + random_bits >= 2.0**width)
    away = negative if rounding == "rm" else ~negative
    return below + (away & (fraction > 0))


def _overflowed(
    fmt: FloatFormat,
    bits: Array,
    overflow: Array,
    infinite: Array,
    negative: Array,
    rounding: str,
    saturate_finite: bool,
) -> Array:
    """`bits` with the right magnitude where the value is infinite or too large for `fmt`."""
    if fmt.has_infinity:
        beyond = fmt.magnitude_mask & ~((1 << fmt.mantissa_bits) - 1)
    else:
        beyond = None if fmt.nan is None else fmt.nan & fmt.magnitude_mask
    if saturate_finite or beyond is None:
        return np.where(overflow | infinite, fmt.max_bits, bits)
    stays_finite = {"rz": np.ones_like(negative), "rm": ~negative, "rp": negative}.get(rounding)
    if stays_finite is None:
        stays_finite = np.zeros_like(negative)
    return np.where(infinite, beyond, np.where(overflow, np.where(stays_finite, fmt.max_bits, beyond), bits))


def _encode_ue8m0(values: Array, rounding: str, saturate_finite: bool) -> Array:
    """Power of two at or below (`rz`) or at or above (`rp`) the magnitude; 0 gives the smallest one, 2**-127."""
    if rounding not in ("rz", "rp"):
        raise ValueError(f"conversion to ue8m0 rounds with rz or rp, not {rounding}")
    magnitude = np.abs(values)
    fraction, exponent = np.frexp(magnitude)
    biased = exponent - 1 + UE8M0.bias
    if rounding == "rp":
        biased = biased + (fraction > 0.5)
    largest = _UE8M0_LARGEST if saturate_finite else UE8M0.nan
    biased = np.where(np.isinf(magnitude), largest, np.minimum(biased, largest))
    biased = np.where(magnitude == 0, 0, np.maximum(biased, 0))
    return np.where(np.isnan(magnitude), UE8M0.nan, biased).astype(np.uint8)


@cache
def _byte_table(fmt: FloatFormat) -> Array:
    """float64 values of all 256 bytes, read as `fmt`."""
    table = np.array([_decode_small(fmt, byte) for byte in range(256)], dtype=np.float64)
    table.setflags(write=False)
    return table


def _decode_small(fmt: FloatFormat, byte: int) -> float:
    magnitude = byte & fmt.magnitude_mask
    field, mantissa = magnitude >> fmt.mantissa_bits, magnitude & ((1 << fmt.mantissa_bits) - 1)
    if fmt is UE8M0:
        return math.nan if byte == fmt.nan else math.ldexp(1.0, byte - fmt.bias)
    sign = -1.0 if fmt.signed and byte >> (fmt.width - 1) & 1 else 1.0
    if fmt.has_infinity and field == (1 << fmt.exponent_bits) - 1:
        return sign * math.inf if mantissa == 0 else math.nan
    if fmt.nan is not None and magnitude == fmt.nan & fmt.magnitude_mask:
        return math.nan
    hidden = 1 << fmt.mantissa_bits if field else 0
    return sign * math.ldexp(hidden + mantissa, max(field, 1) - fmt.bias - fmt.mantissa_bits)
