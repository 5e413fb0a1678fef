"""Approximate functions (PTX ISA 9.7.3.8, 9.7.3.13 to 9.7.3.22, 9.7.4.9, 9.7.4.10).

The ISA bounds the error of these and leaves the bits open. Here each is computed in float64 and rounded once to the
nearest value, which is within every documented bound; results for infinities, zeros, NaN and subnormals follow the
tables of the ISA. The last bits differ from hardware's. NaN payloads are not canonical (see `modifiers`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from common.emulator.numerics.formats import BF16, encode, f32_from_bf16
from common.emulator.numerics.modifiers import flush_subnormals, flush_subnormals_bf16

Array = NDArray

_SMALLEST_NORMAL_F32 = np.float32(2.0**-126)
_UPPER_WORD = np.uint64(0xFFFFFFFF00000000)
_CANONICAL_UPPER_NAN = np.uint64(0x7FFFFFFF00000000).view(np.float64)


def ex2_f32(a: Array, ftz: bool = False) -> Array:
    """`ex2.approx{.ftz}.f32`: 2 to the power of float32 `a`."""
    result = np.exp2(a.astype(np.float64)).astype(np.float32)
    if ftz:  # a subnormal operand gives 1 in any case, and no result is negative
        result *= result >= _SMALLEST_NORMAL_F32
    return result


def lg2_f32(a: Array, ftz: bool = False) -> Array:
    """`lg2.approx{.ftz}.f32`: base-2 logarithm of float32 `a`."""
    return _through_f64(np.log2, a, ftz)


def sin_f32(a: Array, ftz: bool = False) -> Array:
    """`sin.approx{.ftz}.f32` of float32 `a` in radians."""
    return _through_f64(np.sin, a, ftz)


def cos_f32(a: Array, ftz: bool = False) -> Array:
    """`cos.approx{.ftz}.f32` of float32 `a` in radians."""
    return _through_f64(np.cos, a, ftz)


def tanh_f32(a: Array) -> Array:
    """`tanh.approx.f32` of float32 `a`; subnormals pass through."""
    return _through_f64(np.tanh, a, False)


def rcp_f32(a: Array, ftz: bool = False) -> Array:
    """`rcp.approx{.ftz}.f32`: 1 / a for float32 `a`."""
    return _through_f64(np.reciprocal, a, ftz)


def sqrt_f32(a: Array, ftz: bool = False) -> Array:
    """`sqrt.approx{.ftz}.f32` of float32 `a`."""
    return _through_f64(np.sqrt, a, ftz)


def rsqrt_f32(a: Array, ftz: bool = False) -> Array:
    """`rsqrt.approx{.ftz}.f32`: 1 / sqrt(a) for float32 `a`."""
    return _through_f64(_reciprocal_root, a, ftz)


def div_f32(a: Array, b: Array, ftz: bool = False) -> Array:
    """`div.approx{.ftz}.f32`: a / b for float32 arrays.

    For |b| above 2**126 the result is zero of the quotient's sign, and NaN for an infinite `a`.
    """
    result = div_full_f32(a, b, ftz)
    size = np.abs(b)
    huge = (size > np.float32(2.0**126)) & np.isfinite(size)
    if huge.any():
        numerator = flush_subnormals(a) if ftz else a
        result = np.where(huge, numerator * np.copysign(np.float32(0), b), result)
    return result


def div_full_f32(a: Array, b: Array, ftz: bool = False) -> Array:
    """`div.full{.ftz}.f32`: a / b for float32 arrays, over the whole range."""
    if ftz:
        return flush_subnormals(flush_subnormals(a) / flush_subnormals(b))
    return a / b


def rcp_upper_f64(a: Array) -> Array:
    """`rcp.approx.ftz.f64`: reciprocal of the upper word of float64 `a`, in the upper word of the result."""
    return _on_upper_word(np.reciprocal, a)


def rsqrt_upper_f64(a: Array) -> Array:
    """`rsqrt.approx.ftz.f64`: reciprocal root of the upper word of float64 `a`, in the upper word of the result."""
    return _on_upper_word(_reciprocal_root, a)


def rsqrt_f64(a: Array) -> Array:
    """`rsqrt.approx.f64`: 1 / sqrt(a) for float64 `a`."""
    return _reciprocal_root(a)


def ex2_f16(a: Array) -> Array:
    """`ex2.approx.f16`: 2 to the power of float16 `a`."""
    return np.exp2(a.astype(np.float64)).astype(np.float16)


def tanh_f16(a: Array) -> Array:
    """`tanh.approx.f16` of float16 `a`."""
    return np.tanh(a.astype(np.float64)).astype(np.float16)


def ex2_bf16(bits: Array) -> Array:
    """`ex2.approx.ftz.bf16`: 2 to the power of bf16 bits (uint16); subnormal operands and results are flushed."""
    values = f32_from_bf16(flush_subnormals_bf16(bits))
    return flush_subnormals_bf16(encode(BF16, np.exp2(values.astype(np.float64))))


def tanh_bf16(bits: Array) -> Array:
    """`tanh.approx.bf16` of bf16 bits (uint16)."""
    return encode(BF16, np.tanh(f32_from_bf16(bits).astype(np.float64)))


def _through_f64(function: Callable[[Array], Array], a: Array, ftz: bool) -> Array:
    if ftz:
        a = flush_subnormals(a)
    result = function(a.astype(np.float64)).astype(np.float32)
    return flush_subnormals(result) if ftz else result


def _reciprocal_root(a: Array) -> Array:
    return 1 / np.sqrt(a)


def _on_upper_word(function: Callable[[Array], Array], a: Array) -> Array:
    """`function` of the upper 32 bits of `a`, flushed and rounded to nearest in the upper 32 bits of the result."""
    truncated = flush_subnormals((a.view(np.uint64) & _UPPER_WORD).view(np.float64))
    result = function(truncated)
    half = np.uint64(0x7FFFFFFF) + (result.view(np.uint64) >> np.uint64(32) & np.uint64(1))
    rounded = ((result.view(np.uint64) + half) & _UPPER_WORD).view(np.float64)
    return np.where(np.isnan(result), _CANONICAL_UPPER_NAN, flush_subnormals(rounded))
