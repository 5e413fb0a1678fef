"""The result modifiers of floating-point instructions: `.ftz`, `.sat`, `.relu`, and NVIDIA's canonical NaNs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray

_SMALLEST_NORMAL = {np.dtype(t): np.finfo(t).tiny for t in (np.float16, np.float32, np.float64)}
_CANONICAL_NAN = {
    np.dtype(np.float16): np.uint16(0x7FFF).view(np.float16),
    np.dtype(np.float32): np.uint32(0x7FFFFFFF).view(np.float32),
}
_ONE = np.uint32(1)
_SMALLEST_NORMAL_SHIFTED = np.uint32(0x0080_0000 << 1)
_BF16_MAGNITUDE = np.uint16(0x7FFF)
_BF16_SMALLEST_NORMAL = np.uint16(0x0080)


def flush_subnormals(values: Array) -> Array:
    """`.ftz`: subnormal float16, float32 or float64 values become zeros of their sign."""
    # Multiplication by a bool keeps NaN, infinity and the sign, in one pass less than a selection.
    return values * (np.abs(values) >= _SMALLEST_NORMAL[values.dtype])


def is_tiny(values: Array, limit: np.uint32 = _SMALLEST_NORMAL_SHIFTED) -> bool:
    """Whether a float32 element is not zero and at or below a magnitude, by default the smallest normal number.

    `limit`: the bits of that magnitude, shifted left by one. Hardly ever true, so it is worth asking before the exact
    but slower answer to `.ftz`.
    """
    bits = values.view(np.uint32) << _ONE  # the sign falls off
    bits -= _ONE  # zero becomes the largest number
    return np.count_nonzero(bits < limit) > 0


def flush_subnormals_bf16(bits: Array) -> Array:
    """`.ftz` on bf16 bits (uint16)."""
    subnormal = bits & _BF16_MAGNITUDE < _BF16_SMALLEST_NORMAL
    return np.where(subnormal, bits & ~_BF16_MAGNITUDE, bits)


def saturate(values: Array) -> Array:
    """`.sat`: clamp to [+0.0, 1.0]; NaN and -0.0 become +0.0."""
    one, zero = values.dtype.type(1), values.dtype.type(0)
    return np.fmin(np.fmax(values, zero), one) + zero


def relu(values: Array) -> Array:
    """`.relu` on float16, float32: negative values and -0.0 become +0.0, NaN becomes the canonical NaN."""
    return canonical_nan(np.where(np.signbit(values) & ~np.isnan(values), values.dtype.type(0), values))


def relu_bf16(bits: Array) -> Array:
    """`.relu` on bf16 bits (uint16) whose NaNs already are canonical: anything with a minus sign becomes +0."""
    return np.where(bits > _BF16_MAGNITUDE, np.uint16(0), bits)


def has_nan(values: Array) -> bool:
    """Whether a float32 array holds a NaN: a sum of squares is NaN exactly when an element is."""
    flat = values.ravel()
    squares = flat.dot(flat)
    return bool(squares != squares)


def canonical_nan(values: Array) -> Array:
    """float16 or float32 `values` with every NaN replaced by NVIDIA's (0x7fff, 0x7fffffff).

    Returns the array itself when it holds no NaN, which is found out at the price of one pass. f64 instructions
    pass a NaN operand on instead (see `pass_nan_on`).
    """
    if values.dtype == np.float32 and not has_nan(values):
        return values
    invalid = np.isnan(values)
    if not np.count_nonzero(invalid):
        return values
    return np.where(invalid, _CANONICAL_NAN[values.dtype], values)


def pass_nan_on(result: Array, *operands: Array) -> Array:
    """float64 `result` whose NaNs are the first NaN among `operands`, made quiet, where there is one.

    The ISA leaves the payload open; this is what an H200 does. Which operand comes first depends on the instruction.
    """
    invalid = np.isnan(result)
    if not invalid.any():
        return result
    for operand in reversed(operands):
        # Adding is what makes a signalling NaN quiet.
        result = np.where(invalid & np.isnan(operand), operand + operand, result)
    return result
