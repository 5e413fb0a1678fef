"""Slow exact float64 arithmetic with Python fractions, for the few lanes where error-free transformations break down.

Those are lanes with extreme exponents, where a product's error underflows or an intermediate overflows.
All operands are finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

Array = NDArray


def errors(lanes: Array, nearest: Array, compare: Callable[..., int], *operands: Array) -> Array:
    """For each lane in the bool array `lanes`, `compare(nearest, *operands)`: the sign of (exact - nearest)."""
    rows = zip(nearest[lanes].tolist(), *(x[lanes].tolist() for x in operands), strict=True)
    return np.array([compare(*row) for row in rows], dtype=np.float64)


def sign_of_sum_error(nearest: float, a: float, b: float) -> int:
    """Sign of (a + b) - nearest."""
    return _sign_of_difference(Fraction(a) + Fraction(b), nearest)


def sign_of_product_error(nearest: float, a: float, b: float) -> int:
    """Sign of a * b - nearest."""
    return _sign_of_difference(Fraction(a) * Fraction(b), nearest)


def sign_of_quotient_error(nearest: float, a: float, b: float) -> int:
    """Sign of a / b - nearest, for b other than zero."""
    return _sign_of_difference(Fraction(a) / Fraction(b), nearest)


def sign_of_root_error(nearest: float, a: float) -> int:
    """Sign of sqrt(a) - nearest, for positive a."""
    difference = Fraction(a) - Fraction(nearest) ** 2
    return (difference > 0) - (difference < 0)


def fused_multiply_add(a: float, b: float, c: float) -> tuple[float, int]:
    """Nearest float64 of a * b + c, and the sign of (exact - nearest)."""
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return a * b + c, 0
    nearest = _nearest(abs(exact)) if exact > 0 else -_nearest(abs(exact))
    return nearest, _sign_of_difference(exact, nearest)


def _nearest(value: Fraction) -> float:
    try:
        # Python rounds the quotient of two integers correctly, subnormal results included.
        return value.numerator / value.denominator
    except OverflowError:
        return math.inf


def _sign_of_difference(exact: Fraction, nearest: float) -> int:
    if math.isinf(nearest):
        return -1 if nearest > 0 else 1
    difference = exact - Fraction(nearest)
    return (difference > 0) - (difference < 0)
