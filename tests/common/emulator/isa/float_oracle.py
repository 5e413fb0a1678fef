"""Floating-point instructions one value at a time, from exact rational arithmetic and the ISA's own definitions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from tests.common.emulator.numerics.rounding_oracle import SINGLE, Precision, fused, quotient, root


def flush(value: float, precision: Precision = SINGLE) -> float:
    """`.ftz` of an operand."""
    return math.copysign(0.0, value) if abs(value) < 2.0**precision.least else value


def saturate(value: float) -> float:
    """`.sat`: [0, 1], and +0 for NaN."""
    return min(value, 1.0) if value > 0 else 0.0


def add(a: float, b: float, precision: Precision, mode: str) -> float:
    return fused(a, 1.0, b, precision, mode)


def subtract(a: float, b: float, precision: Precision, mode: str) -> float:
    return fused(a, 1.0, -b, precision, mode)


def multiply(a: float, b: float, precision: Precision, mode: str) -> float:
    if a == 0 or b == 0 or not (math.isfinite(a) and math.isfinite(b)):
        return a * b
    return fused(a, b, 0.0, precision, mode)


def reciprocal(a: float, precision: Precision, mode: str) -> float:
    return quotient(1.0, a, precision, mode)


# Number of sources and the operation, by opcode.
OPERATIONS: dict[str, tuple[int, Callable[..., float]]] = {
    "add": (2, add),
    "sub": (2, subtract),
    "mul": (2, multiply),
    "fma": (3, fused),
    "mad": (3, fused),
    "div": (2, quotient),
    "rcp": (1, reciprocal),
    "sqrt": (1, root),
}


def results(
    opcode: str,
    columns: Sequence[np.ndarray],
    mode: str = "rn",
    *,
    precision: Precision = SINGLE,
    ftz: bool = False,
    sat: bool = False,
) -> np.ndarray:
    """float64 results of `opcode.mode{.ftz}{.sat}` on columns of operands.

    `.ftz` flushes a result that is too small after rounding to the format's precision without a least exponent.
    """
    operation = OPERATIONS[opcode][1]
    unbounded = Precision(precision.mantissa, -2000, 2000)
    found = []
    for row in zip(*(column.astype(np.float64).tolist() for column in columns)):
        operands = [flush(value, precision) for value in row] if ftz else row
        result = operation(*operands, precision, mode)
        if ftz and abs(operation(*operands, unbounded, mode)) < 2.0**precision.least:
            result = math.copysign(0.0, result)
        found.append(saturate(result) if sat else result)
    return np.array(found)


def select(opcode: str, values: Sequence[float], propagate: bool) -> float:
    """`min` or `max` of two or three values, from left to right; `propagate` is `.NaN`."""
    result = values[0]
    for value in values[1:]:
        result = _select_two(opcode, result, value, propagate)
    return result


def _select_two(opcode: str, a: float, b: float, propagate: bool) -> float:
    if math.isnan(a) or math.isnan(b):
        both = math.isnan(a) and math.isnan(b)
        return math.nan if propagate or both else (b if math.isnan(a) else a)
    if a == b:  # -0 is less than +0
        signs = math.copysign(1, a), math.copysign(1, b)
        return math.copysign(a, min(signs) if opcode == "min" else max(signs))
    return min(a, b) if opcode == "min" else max(a, b)


def min_max(
    opcode: str,
    columns: Sequence[np.ndarray],
    *,
    propagate: bool = False,
    absolute: bool = False,
    xorsign: bool = False,
    ftz: bool = False,
    precision: Precision = SINGLE,
) -> np.ndarray:
    """float64 results of `min` or `max` with its modifiers on columns of operands."""
    found = []
    for row in zip(*(column.astype(np.float64).tolist() for column in columns)):
        values = [flush(value, precision) for value in row] if ftz else list(row)
        result = select(opcode, [abs(value) for value in values] if absolute else values, propagate)
        negative = math.copysign(1, row[0]) != math.copysign(1, row[1])
        found.append(-result if xorsign and negative and not math.isnan(result) else result)
    return np.array(found)
