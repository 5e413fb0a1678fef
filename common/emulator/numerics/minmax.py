"""The min and max families (PTX ISA 9.7.3.11, 9.7.3.12, 9.7.4.7, 9.7.4.8).

A single NaN operand is ignored, or with `propagate_nan` (`.NaN`) wins. -0.0 counts as less than +0.0. A NaN result is
the canonical NaN in f16, bf16 and f32.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from common.emulator.numerics.formats import f32_from_bf16
from common.emulator.numerics.modifiers import canonical_nan, flush_subnormals

Array = NDArray

_BITS = {np.dtype(np.float16): np.uint16, np.dtype(np.float32): np.uint32, np.dtype(np.float64): np.uint64}


def minimum(
    a: Array,
    b: Array,
    c: Array | None = None,
    *,
    propagate_nan: bool = False,
    absolute: bool = False,
    xorsign: bool = False,
    ftz: bool = False,
) -> Array:
    """`min{.ftz}{.NaN}{.xorsign}{.abs}` of two or three float16, float32 or float64 arrays of one type and shape.

    Raises ValueError for `xorsign` with three operands, or without `absolute`, which the ISA does not allow.
    """
    choose = np.minimum if propagate_nan else np.fmin
    return _choose(choose, np.bitwise_or, (a, b, c), absolute, xorsign, ftz)


def maximum(
    a: Array,
    b: Array,
    c: Array | None = None,
    *,
    propagate_nan: bool = False,
    absolute: bool = False,
    xorsign: bool = False,
    ftz: bool = False,
) -> Array:
    """`max{.ftz}{.NaN}{.xorsign}{.abs}`, with the operands and errors of `minimum`."""
    choose = np.maximum if propagate_nan else np.fmax
    return _choose(choose, np.bitwise_and, (a, b, c), absolute, xorsign, ftz)


def minimum_bf16(
    a: Array, b: Array, *, propagate_nan: bool = False, absolute: bool = False, xorsign: bool = False
) -> Array:
    """`min{.NaN}{.xorsign.abs}.bf16` on bf16 bits (uint16)."""
    wide = minimum(f32_from_bf16(a), f32_from_bf16(b), propagate_nan=propagate_nan, absolute=absolute, xorsign=xorsign)
    return _upper_half(wide)


def maximum_bf16(
    a: Array, b: Array, *, propagate_nan: bool = False, absolute: bool = False, xorsign: bool = False
) -> Array:
    """`max{.NaN}{.xorsign.abs}.bf16` on bf16 bits (uint16)."""
    wide = maximum(f32_from_bf16(a), f32_from_bf16(b), propagate_nan=propagate_nan, absolute=absolute, xorsign=xorsign)
    return _upper_half(wide)


def _choose(
    choose: np.ufunc,
    join_zeros: np.ufunc,
    operands: tuple[Array, Array, Array | None],
    absolute: bool,
    xorsign: bool,
    ftz: bool,
) -> Array:
    values = [x for x in operands if x is not None]
    if xorsign and (len(values) == 3 or not absolute):
        raise ValueError("xorsign needs two operands and abs")
    if ftz:
        values = [flush_subnormals(x) for x in values]
    sign = np.signbit(values[0]) ^ np.signbit(values[1]) if xorsign else None
    if absolute:
        values = [np.abs(x) for x in values]
    result = values[0]
    for other in values[1:]:
        result = _choose_two(choose, join_zeros, result, other)
    if result.dtype != np.float64:
        result = canonical_nan(result)
    if sign is not None:
        result = np.where(sign & ~np.isnan(result), -result, result)
    return result


def _choose_two(choose: np.ufunc, join_zeros: np.ufunc, a: Array, b: Array) -> Array:
    result = choose(a, b)
    if np.count_nonzero(result) == result.size:
        return result
    # NumPy may return either of two zeros. Equal operands differ in the sign of zero at most, so joining their bits
    # decides: any minus sign for the minimum, two of them for the maximum.
    bits = _BITS[result.dtype]
    return np.where(a == b, join_zeros(a.view(bits), b.view(bits)), result.view(bits)).view(result.dtype)


def _upper_half(values: Array) -> Array:
    """bf16 bits of float32 values that are bf16 values already."""
    return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
