"""Correctly rounded add, sub, mul, fma, div, rcp and sqrt in f32, f64, f16 and bf16 (PTX ISA 9.7.3, 9.7.4).

`rounding` is `rn`, `rz`, `rm` or `rp`. f32 results come from float64: a product of two f32 is exact there, quotients
and roots lie too far from any rounding boundary to be rounded wrongly twice, and sums are rounded to odd first. f64
results in directed modes come from the exact error of the operation, computed without error by splitting operands,
and by `exact` where exponents are extreme.

The payload of a NaN in f32, f64 and f16 results is NumPy's unless the function says otherwise: pass f32 and f16 results
through `modifiers.canonical_nan`. bf16 functions return the canonical NaN 0x7fff.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from common.emulator.numerics import exact, modifiers
from common.emulator.numerics.formats import bf16_from_f32, f32_from_bf16
from common.emulator.numerics.modifiers import flush_subnormals, is_tiny
from common.emulator.numerics.rounding import f32_from_f64, round_to_odd, step_directed, two_sum

Array = NDArray

# Factors that move a float64 or float32 down or up by one or two units in the last place.
_BELOW_F64, _ABOVE_F64 = 1 - 2.0**-52, 1 + 2.0**-52
_BELOW_F32, _ABOVE_F32 = np.float32(1 - 2.0**-23), np.float32(1 + 2.0**-23)
_SPLITTER = 2.0**27 + 1
_TINY_SUM = np.uint32(int(np.float32(2.0**-100).view(np.uint32)) << 1)
_TIE_BF16 = np.uint32(0x80000000)

# Exponent ranges in which splitting neither overflows nor loses the low part of a product.
_LARGE, _SMALL = 2.0**990, 2.0**-900

# A factor that takes values next to the smallest normal one well into the normal range, in float16 too.
_WELL_ABOVE = 2.0**12


def add_f32(a: Array, b: Array, rounding: str = "rn", ftz: bool = False, saturate: bool = False) -> Array:
    """`add{.rnd}{.ftz}{.sat}.f32` on float32 arrays."""
    if ftz and rounding == "rn":
        result = a + b
        # A subnormal operand changes no sum of this size: it is below half a unit in the last place of the other one.
        if not is_tiny(result, _TINY_SUM):
            return modifiers.saturate(result) if saturate else result
    if ftz:
        a, b = flush_subnormals(a), flush_subnormals(b)
    result = a + b if rounding == "rn" else _directed_sum_f32(a.astype(np.float64), b.astype(np.float64), rounding)
    return _finish_sum(result, ftz, saturate)


def sub_f32(a: Array, b: Array, rounding: str = "rn", ftz: bool = False, saturate: bool = False) -> Array:
    """`sub{.rnd}{.ftz}{.sat}.f32` on float32 arrays."""
    if rounding == "rn" and not ftz:
        return _finish_sum(a - b, ftz, saturate)
    return add_f32(a, -b, rounding, ftz, saturate)


def mul_f32(a: Array, b: Array, rounding: str = "rn", ftz: bool = False, saturate: bool = False) -> Array:
    """`mul{.rnd}{.ftz}{.sat}.f32` on float32 arrays."""
    if ftz and rounding == "rn":
        result = a * b
        if not (is_tiny(a) or is_tiny(b) or is_tiny(result)):
            return modifiers.saturate(result) if saturate else result
    if ftz:
        a, b = flush_subnormals(a), flush_subnormals(b)
    result = a * b if rounding == "rn" else f32_from_f64(np.multiply(a, b, dtype=np.float64), rounding)
    if ftz:
        result = _flush_result(result, lambda: np.multiply(a, b, dtype=np.float64), rounding)
    return modifiers.saturate(result) if saturate else result


def fma_f32(a: Array, b: Array, c: Array, rounding: str = "rn", ftz: bool = False, saturate: bool = False) -> Array:
    """`fma.rnd{.ftz}{.sat}.f32` on float32 arrays: a * b + c rounded once."""
    if ftz and rounding == "rn":
        result = _nearest_sum_f32(np.multiply(a, b, dtype=np.float64), c)
        if not any(is_tiny(values) for values in (a, b, c, result)):
            return modifiers.saturate(result) if saturate else result
    if ftz:
        a, b, c = flush_subnormals(a), flush_subnormals(b), flush_subnormals(c)
    product = np.multiply(a, b, dtype=np.float64)
    if rounding == "rn":
        result = _nearest_sum_f32(product, c)
    else:
        result = _directed_sum_f32(product, c.astype(np.float64), rounding)
    if ftz:
        result = _flush_result(result, lambda: round_to_odd(*two_sum(product, c.astype(np.float64))), rounding)
    return modifiers.saturate(result) if saturate else result


def div_f32(a: Array, b: Array, rounding: str = "rn", ftz: bool = False) -> Array:
    """`div.rnd{.ftz}.f32` on float32 arrays."""
    if ftz:
        a, b = flush_subnormals(a), flush_subnormals(b)
    result = a / b if rounding == "rn" else f32_from_f64(np.divide(a, b, dtype=np.float64), rounding)
    return _flush_result(result, lambda: np.divide(a, b, dtype=np.float64), rounding) if ftz else result


def rcp_f32(a: Array, rounding: str = "rn", ftz: bool = False) -> Array:
    """`rcp.rnd{.ftz}.f32` on a float32 array."""
    return div_f32(np.ones_like(a), a, rounding, ftz)


def sqrt_f32(a: Array, rounding: str = "rn", ftz: bool = False) -> Array:
    """`sqrt.rnd{.ftz}.f32` on a float32 array; NaN for negative values, -0.0 for -0.0."""
    if ftz:
        a = flush_subnormals(a)
    return np.sqrt(a) if rounding == "rn" else f32_from_f64(np.sqrt(a, dtype=np.float64), rounding)


def add_f64(a: Array, b: Array, rounding: str = "rn") -> Array:
    """`add{.rnd}.f64` on float64 arrays."""
    if rounding == "rn":
        return a + b
    a, b = np.broadcast_arrays(a, b)
    nearest, error = two_sum(a, b)
    finite = np.isfinite(a) & np.isfinite(b)
    extreme = finite & (np.maximum(np.abs(a), np.abs(b)) > _LARGE)
    if extreme.any():
        error[extreme] = exact.errors(extreme, nearest, exact.sign_of_sum_error, a, b)
    return _signed_zero_sum(step_directed(nearest, error, rounding), a, b, rounding)


def sub_f64(a: Array, b: Array, rounding: str = "rn") -> Array:
    """`sub{.rnd}.f64` on float64 arrays."""
    return a - b if rounding == "rn" else add_f64(a, -b, rounding)


def mul_f64(a: Array, b: Array, rounding: str = "rn") -> Array:
    """`mul{.rnd}.f64` on float64 arrays."""
    if rounding == "rn":
        return a * b
    a, b = np.broadcast_arrays(a, b)
    nearest, error = _two_product(a, b)
    error, extreme = _settle(error, nearest, a, b)
    if extreme.any():
        error[extreme] = exact.errors(extreme, nearest, exact.sign_of_product_error, a, b)
    return step_directed(nearest, error, rounding)


def fma_f64(a: Array, b: Array, c: Array, rounding: str = "rn") -> Array:
    """`fma.rnd.f64` on float64 arrays: a * b + c rounded once."""
    a, b, c = np.broadcast_arrays(a, b, c)
    product, low = _two_product(a, b)
    low, extreme = _settle(low, product, a, b)
    nearest, error = _sum_of_three(product, low, c)
    finite_product = np.isfinite(a) & np.isfinite(b)
    finite = finite_product & np.isfinite(c)
    # Infinity, NaN and the sign of an exact zero are those of the plain operations, except that a finite product must
    # not overflow against an infinite c.
    plain = np.where(finite_product & ~np.isfinite(c), c, product + c)
    nearest = np.where(finite & (nearest != 0), nearest, plain)
    error = np.where(finite, error, 0)
    extreme = finite & (extreme | (np.abs(c) > _LARGE))
    if extreme.any():
        pairs = map(exact.fused_multiply_add, *(x[extreme].tolist() for x in (a, b, c)))
        nearest[extreme], error[extreme] = zip(*pairs, strict=True)
    if rounding == "rn":
        return nearest
    exact_zero = (nearest == 0) & (error == 0)
    signed_zero = _signed_zero_sum(nearest, product, c, rounding)
    return np.where(exact_zero, signed_zero, step_directed(nearest, error, rounding))


def div_f64(a: Array, b: Array, rounding: str = "rn") -> Array:
    """`div.rnd.f64` on float64 arrays."""
    if rounding == "rn":
        return a / b
    a, b = np.broadcast_arrays(a, b)
    nearest = a / b
    product, low = _two_product(nearest, b)
    remainder = (a - product) - low
    error, extreme = _settle(np.sign(remainder) * np.sign(b), nearest, a, b)
    if extreme.any():
        error[extreme] = exact.errors(extreme, nearest, exact.sign_of_quotient_error, a, b)
    return step_directed(nearest, error, rounding)


def rcp_f64(a: Array, rounding: str = "rn") -> Array:
    """`rcp.rnd.f64` on a float64 array."""
    return div_f64(np.ones_like(a), a, rounding)


def sqrt_f64(a: Array, rounding: str = "rn") -> Array:
    """`sqrt.rnd.f64` on a float64 array."""
    nearest = np.sqrt(a)
    if rounding == "rn":
        return nearest
    square, low = _two_product(nearest, nearest)
    error = (a - square) - low
    positive = (a > 0) & np.isfinite(a)
    error = np.where(positive, error, 0)
    extreme = positive & ((a < _SMALL) | (a > _LARGE))
    if extreme.any():
        error[extreme] = exact.errors(extreme, nearest, exact.sign_of_root_error, a)
    return step_directed(nearest, error, rounding)


def add_f16(a: Array, b: Array, ftz: bool = False, saturate: bool = False) -> Array:
    """`add{.rn}{.ftz}{.sat}.f16` on float16 arrays."""
    if ftz:
        a, b = flush_subnormals(a), flush_subnormals(b)
    return _finish_sum(a + b, ftz, saturate)


def sub_f16(a: Array, b: Array, ftz: bool = False, saturate: bool = False) -> Array:
    """`sub{.rn}{.ftz}{.sat}.f16` on float16 arrays."""
    return add_f16(a, -b, ftz, saturate)


def mul_f16(a: Array, b: Array, ftz: bool = False, saturate: bool = False) -> Array:
    """`mul{.rn}{.ftz}{.sat}.f16` on float16 arrays."""
    if ftz:
        a, b = flush_subnormals(a), flush_subnormals(b)
    product = np.multiply(a, b, dtype=np.float32)
    result = product.astype(np.float16)
    if ftz:
        result = _flush_result(result, lambda: product)
    return modifiers.saturate(result) if saturate else result


def fma_f16(a: Array, b: Array, c: Array, ftz: bool = False, saturate: bool = False, relu: bool = False) -> Array:
    """`fma.rn{.ftz}{.sat}{.relu}.f16` on float16 arrays: a * b + c rounded once."""
    if ftz:
        a, b, c = flush_subnormals(a), flush_subnormals(b), flush_subnormals(c)
    product, c = np.multiply(a, b, dtype=np.float32), c.astype(np.float32)
    total = product + c
    below, above = (total * _BELOW_F32).astype(np.float16), (total * _ABOVE_F32).astype(np.float16)
    if below.tobytes() == above.tobytes():
        result = below
    else:
        result = round_to_odd(*two_sum(product, c)).astype(np.float16)
    if ftz:
        result = _flush_result(result, lambda: round_to_odd(*two_sum(product, c)))
    if saturate:
        result = modifiers.saturate(result)
    return modifiers.relu(result) if relu else result


def add_bf16(a: Array, b: Array) -> Array:
    """`add{.rn}.bf16` on bf16 bits (uint16). Rounding to f32 first is harmless: 24 bits are enough for 8."""
    return bf16_from_f32(f32_from_bf16(a) + f32_from_bf16(b))


def sub_bf16(a: Array, b: Array) -> Array:
    """`sub{.rn}.bf16` on bf16 bits (uint16)."""
    return bf16_from_f32(f32_from_bf16(a) - f32_from_bf16(b))


def mul_bf16(a: Array, b: Array) -> Array:
    """`mul{.rn}.bf16` on bf16 bits (uint16)."""
    return bf16_from_f32(f32_from_bf16(a) * f32_from_bf16(b))


def fma_bf16(a: Array, b: Array, c: Array, relu: bool = False) -> Array:
    """`fma.rn{.relu}.bf16` on bf16 bits (uint16): a * b + c rounded once."""
    product = np.multiply(f32_from_bf16(a), f32_from_bf16(b), dtype=np.float64)
    addend = f32_from_bf16(c)
    single = (product + addend).astype(np.float32)
    # bf16 and f32 share their exponents: a sum that is no tie in f32 is on the same side of the tie as the exact sum.
    tie = single.view(np.uint32) << np.uint32(16) == _TIE_BF16
    if np.count_nonzero(tie):
        single = _break_ties(single, tie, *two_sum(product, addend.astype(np.float64)))
    result = bf16_from_f32(single)
    return modifiers.relu_bf16(result) if relu else result


def _finish_sum(result: Array, ftz: bool, saturate: bool) -> Array:
    """Apply `.ftz` and `.sat` to a sum of two: when it is subnormal, it is exact."""
    if ftz:
        result = flush_subnormals(result)
    return modifiers.saturate(result) if saturate else result


def _flush_result(result: Array, exact: Callable[[], Array], rounding: str = "rn") -> Array:
    """`.ftz` on a float32 or float16 `result` of which `exact()` is the value before rounding, in a wider type.

    A value is flushed when it lies below the smallest normal one after rounding to the precision of normal values, as
    if the exponent had no limit (seen on an H200). So some values that `result` shows as the smallest normal one are
    flushed: those that were rounded up only because subnormal values are coarse.
    """
    smallest = np.finfo(result.dtype).tiny
    at_limit = np.abs(result) == smallest
    if np.count_nonzero(at_limit):
        scaled = exact() * _WELL_ABOVE
        rounded = f32_from_f64(scaled, rounding) if result.dtype == np.float32 else scaled.astype(np.float16)
        result = result * ~(at_limit & (np.abs(rounded) < smallest * rounded.dtype.type(_WELL_ABOVE)))
    return flush_subnormals(result)


def _nearest_sum_f32(product: Array, c: Array) -> Array:
    """float64 `product` + float32 `c` rounded once to float32.

    The float64 sum differs from the exact one by half a unit at most. When both its neighbours round to the same
    float32, so does the exact sum; else the sum is rounded to odd first.
    """
    total = product + c
    below = (total * _BELOW_F64).astype(np.float32)
    total *= _ABOVE_F64
    if below.tobytes() == total.astype(np.float32).tobytes():
        return below
    return round_to_odd(*two_sum(product, c.astype(np.float64))).astype(np.float32)


def _directed_sum_f32(a: Array, b: Array, rounding: str) -> Array:
    """Sum of float64 arrays that hold f32 values or products of two, rounded once to float32."""
    rounded = f32_from_f64(round_to_odd(*two_sum(a, b)), rounding)
    return _signed_zero_sum(rounded, a, b, rounding)


def _signed_zero_sum(result: Array, a: Array, b: Array, rounding: str) -> Array:
    """An exact zero sum is -0 in `rm` unless both terms are +0; `result` follows round to nearest in this."""
    if rounding != "rm":
        return result
    return np.where((a + b == 0) & (np.signbit(a) | np.signbit(b)), result.dtype.type(-0.0), result)


def _break_ties(single: Array, tie: Array, total: Array, error: Array) -> Array:
    """Move the float32 values marked `tie` by one unit towards the exact sum `total + error`, where it differs."""
    rest = (total - single) + error
    step = np.where((rest > 0) == (single > 0), 1, -1).astype(np.int32)
    return (single.view(np.int32) + step * (tie & (rest != 0))).view(np.float32)


def _two_product(a: Array, b: Array) -> tuple[Array, Array]:
    """Product of float64 arrays rounded to nearest, and its exact error (Dekker), within `_SMALL` and `_LARGE`."""
    product = a * b
    a_high, a_low = _split(a)
    b_high, b_low = _split(b)
    return product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


def _split(a: Array) -> tuple[Array, Array]:
    scaled = a * _SPLITTER
    high = scaled - (scaled - a)
    return high, a - high


def _sum_of_three(product: Array, low: Array, c: Array) -> tuple[Array, Array]:
    """product + low + c rounded to nearest, and an error of the right sign (Boldo and Melquiond's algorithm)."""
    high_sum, high_error = two_sum(c, low)
    total, total_error = two_sum(product, high_sum)
    rest = round_to_odd(*two_sum(high_error, total_error))
    return two_sum(total, rest)


def _settle(error: Array, result: Array, a: Array, b: Array) -> tuple[Array, Array]:
    """Clear the error of lanes that are exact by nature, and find those for which it must be computed exactly.

    Exact are lanes with an operand that is zero, infinite or NaN. `result` is the product or quotient of a and b.
    """
    plain = ~(np.isfinite(a) & np.isfinite(b)) | (a == 0) | (b == 0)
    sizes = np.abs(np.stack((a, b, result)))
    outside = (sizes.max(axis=0) > _LARGE) | (np.abs(result) < _SMALL) | (np.abs(a) < _SMALL)
    return np.where(plain, 0, error), outside & ~plain
