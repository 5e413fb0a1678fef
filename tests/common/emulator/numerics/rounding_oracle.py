"""Correct rounding with Python fractions, one value at a time: the definition that the array code is tested against."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np


@dataclass(frozen=True)
class Precision:
    """Mantissa bits without the hidden one, least normal exponent and greatest exponent of an IEEE format."""

    mantissa: int
    least: int
    greatest: int


HALF = Precision(10, -14, 15)
BRAIN = Precision(7, -126, 127)
SINGLE = Precision(23, -126, 127)
DOUBLE = Precision(52, -1022, 1023)


def round_fraction(value: Fraction, precision: Precision, mode: str) -> float:
    """`value`, not zero, rounded by `mode` (rn, rna, rz, rm, rp) to an IEEE format that float64 contains."""
    negative, size = value < 0, abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if Fraction(2) ** exponent > size:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, precision.least) - precision.mantissa)
    whole, rest = divmod(size, unit)
    away = {"rz": False, "rm": negative and rest > 0, "rp": not negative and rest > 0}
    away["rn"] = 2 * rest > unit or (2 * rest == unit and whole % 2 == 1)
    away["rna"] = 2 * rest >= unit
    rounded = (whole + away[mode]) * unit
    largest = (2 - Fraction(2) ** -precision.mantissa) * Fraction(2) ** precision.greatest
    if rounded > largest:
        infinite = mode in ("rn", "rna") or away[mode] or (mode == "rm" and negative) or (mode == "rp" and not negative)
        result = math.inf if infinite else float(largest)
    else:
        result = float(rounded)
    return -result if negative else result


def fused(a: float, b: float, c: float, precision: Precision, mode: str) -> float:
    """a * b + c as IEEE 754 defines it, special values and the sign of zero included."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return a * b + c
    if not math.isfinite(c):
        return c
    value = Fraction(a) * Fraction(b) + Fraction(c)
    if value != 0:
        return round_fraction(value, precision, mode)
    product_sign = math.copysign(1, a) * math.copysign(1, b)
    if product_sign == math.copysign(1, c):
        return math.copysign(0.0, c)
    return -0.0 if mode == "rm" else 0.0


def quotient(a: float, b: float, precision: Precision, mode: str) -> float:
    """a / b as IEEE 754 defines it."""
    sign = math.copysign(1, a) * math.copysign(1, b)
    if math.isnan(a) or math.isnan(b) or (a == 0 and b == 0) or (math.isinf(a) and math.isinf(b)):
        return math.nan
    if math.isinf(a) or b == 0:
        return sign * math.inf
    if math.isinf(b) or a == 0:
        return sign * 0.0
    return round_fraction(Fraction(a) / Fraction(b), precision, mode)


def root(a: float, precision: Precision, mode: str) -> float:
    """Square root as IEEE 754 defines it."""
    if math.isnan(a) or a < 0:
        return math.nan
    if a == 0 or math.isinf(a):
        return a
    # 200 fractional bits and a sticky one: more than any rounding boundary of a float64 can need.
    fraction = Fraction(a)
    scaled = fraction * 4**1300
    integer = math.isqrt(int(scaled))
    sticky = int(integer * integer != scaled)
    return round_fraction(Fraction(2 * integer + sticky, 2 * 2**1300), precision, mode)


def edge_values(dtype: type) -> np.ndarray:
    """Zeros, infinities, NaN, subnormals, neighbours of powers of two and of the range limits, of both signs."""
    info = np.finfo(dtype)
    ones = np.array([1, 1.5, 3, 1 / 3, 10, 2.0 ** (info.nmant // 2), 2.0 ** (info.nmant + 1)], dtype=dtype)
    limits = np.array([0, info.smallest_subnormal, info.tiny, info.tiny * 2, info.max, info.max / 2], dtype=dtype)
    middle = np.concatenate([ones, limits])
    near = np.concatenate([middle, np.nextafter(middle, dtype(0)), np.nextafter(middle, dtype(np.inf))])
    special = np.array([np.inf, np.nan], dtype=dtype)
    positive = np.unique(np.concatenate([near, special]))
    return np.concatenate([positive, -positive])


def same(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Elementwise: equal values and equal signs (zeros included), or both NaN."""
    equal = (actual == expected) & (np.signbit(actual) == np.signbit(expected))
    return equal | (np.isnan(actual) & np.isnan(expected))


def assert_same(actual: np.ndarray, expected: np.ndarray, *operands: np.ndarray) -> None:
    """Fail with the first element that differs and its operands."""
    assert actual.shape == expected.shape
    wrong = np.flatnonzero(~same(actual, expected))
    if wrong.size:
        i = wrong[0]
        inputs = ", ".join(float(x[i]).hex() for x in operands)
        got, want = float(actual[i]).hex(), float(expected[i]).hex()
        raise AssertionError(f"{wrong.size} of {actual.size} differ, first ({inputs}): got {got}, expected {want}")
