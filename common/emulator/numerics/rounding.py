"""Rounding to float32, to integral values and to integers, and conversion of integers to floating point.

Rounding twice is avoided in one way throughout: a result that needs more than float64 is held as a nearest value and
the exact error, and either rounded to odd (safe to round again to any format with at most 51 bits of mantissa) or moved
by one unit in the last place in the direction that the rounding mode asks for.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from common.emulator.numerics.formats import BF16, F16, encode

Array = NDArray

DIRECTED = ("rz", "rm", "rp")
_BITS = {np.dtype(np.float32): np.int32, np.dtype(np.float64): np.int64}
_INTEGRAL = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """Sum of two float arrays rounded to nearest, and its exact error (NaN where the sum is not finite)."""
    total = a + b
    b_part = total - a
    return total, (a - (total - b_part)) + (b - b_part)


def round_to_odd(nearest: Array, error: Array) -> Array:
    """`nearest + error` (`error` at most half a unit) rounded to odd: inexact results get an odd last bit.

    Both are float64, or both float32.
    """
    bits = nearest.view(_BITS[nearest.dtype])
    move = (np.abs(error) > 0) & (bits & 1 == 0)
    step = np.where((error > 0) == (nearest > 0), move, -move.astype(bits.dtype))
    return (bits + step).view(nearest.dtype)


def step_directed(nearest: Array, error: Array, rounding: str) -> Array:
    """Turn a result rounded to nearest into one rounded by `rz`, `rm` or `rp`.

    `nearest` is float32 or float64, `error` has the sign of (exact - nearest), zero or NaN where nothing is to be done.
    An infinite `nearest` with an error of the opposite sign (overflow) becomes the largest finite value.
    """
    integer = _BITS[nearest.dtype]
    bits = nearest.view(integer)
    away = np.where(np.signbit(nearest), -1, 1).astype(integer)
    if rounding == "rz":
        stepped = bits - (error * away < 0)
    elif rounding == "rm":
        stepped = bits - (error < 0) * away
    elif rounding == "rp":
        stepped = bits + (error > 0) * away
    else:
        raise ValueError(f"unknown directed rounding {rounding!r}: use one of {', '.join(DIRECTED)}")
    return stepped.astype(integer).view(nearest.dtype)


def f32_from_f64(values: Array, rounding: str = "rn") -> Array:
    """float32 nearest to float64 `values`, or rounded by `rz`, `rm` or `rp`; NaN stays NaN."""
    nearest = values.astype(np.float32)
    if rounding == "rn":
        return nearest
    return step_directed(nearest, values - nearest, rounding)


def to_integral(values: Array, rounding: str) -> Array:
    """`values` (float16, float32 or float64) rounded to integral values by `rni`, `rzi`, `rmi` or `rpi`.

    The sign of a zero result is that of the value. PTX ISA 9.7.9.21, integer notes.
    """
    return _INTEGRAL[rounding](values)


def integer_from_float(values: Array, dtype: type, rounding: str) -> Array:
    """`values` (float16, float32 or float64) as integers of NumPy type `dtype`, clamped to its range.

    `rounding` is `rni`, `rzi`, `rmi` or `rpi`. NaN gives 0, except that from float64, or to a 64-bit integer, it gives
    1 << (width - 1). PTX ISA 9.7.9.21, integer notes. bf16 values come as float32, which has the same rule.
    """
    wide = _INTEGRAL[rounding](values.astype(np.float64))
    limits = np.iinfo(dtype)
    if limits.bits == 64:
        result = _clamped_to_64_bits(wide, limits)
    else:
        result = np.minimum(np.fmax(wide, float(limits.min)), float(limits.max)).astype(dtype)
    invalid = np.isnan(wide)
    if np.count_nonzero(invalid):
        indefinite = values.dtype == np.float64 or limits.bits == 64
        top_bit = limits.min if limits.min < 0 else 1 << (limits.bits - 1)
        result[invalid] = top_bit if indefinite else 0
    return result


def _clamped_to_64_bits(wide: Array, limits: np.iinfo) -> Array:
    """`wide` as 64-bit integers: the largest integer is no float64, so it is put in after the cast."""
    too_large = wide >= float(limits.max)
    largest_float = np.nextafter(float(limits.max), 0.0)
    result = np.minimum(np.fmax(wide, float(limits.min)), largest_float).astype(limits.dtype)
    result[too_large] = limits.max
    return result


def float_from_integer(values: Array, kind: str, rounding: str = "rn") -> Array:
    """Integers of any width and sign as `kind` (f16, bf16, f32, f64), rounded once by `rn`, `rz`, `rm` or `rp`.

    Returns float16, uint16 (bf16 bits), float32 or float64. Values too large for f16 follow the rounding: infinity
    with `rn`, 65504 with `rz`.
    """
    if rounding == "rn" and kind in ("f32", "f64"):
        return values.astype(np.float32 if kind == "f32" else np.float64)
    nearest, error = _as_float64_pair(values)
    if kind == "f64":
        return step_directed(nearest, error, rounding)
    odd = round_to_odd(nearest, error)
    if kind == "f32":
        return f32_from_f64(odd, rounding)
    if kind == "f16":
        return encode(F16, odd, rounding).view(np.float16)
    if kind == "bf16":
        return encode(BF16, odd, rounding)
    raise ValueError(f"unknown floating-point type {kind!r}: use f16, bf16, f32 or f64")


def _as_float64_pair(values: Array) -> tuple[Array, Array]:
    """Integers as the nearest float64 and the exact error."""
    if values.dtype.itemsize < 8:
        exact = values.astype(np.float64)
        return exact, np.zeros_like(exact)
    high = (values >> values.dtype.type(32)).astype(np.float64) * 2.0**32
    low = (values & values.dtype.type(0xFFFFFFFF)).astype(np.float64)
    return two_sum(high, low)
