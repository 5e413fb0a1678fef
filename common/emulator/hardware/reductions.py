"""Element-wise reductions into memory, as bulk copies, tensor copies and `red.async` perform them.

Sources: PTX ISA 9.7.9.25.4.2 and 9.7.9.27.1.3 and, for NaN, signed zeros and subnormals, what an H200 does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Reduction = Callable[[np.ndarray, np.ndarray], None]

_ITEMS: dict[str, Any] = {
    "u32": np.uint32, "s32": np.int32, "u64": np.uint64, "s64": np.int64,
    "f16": np.uint16, "bf16": np.uint16, "f32": np.uint32, "f32_flushed": np.uint32, "f64": np.uint64,
}  # fmt: skip


def _half_to_float(bits: np.ndarray) -> np.ndarray:
    return bits.view(np.float16).astype(np.float32)


def _half_from_float(values: np.ndarray) -> np.ndarray:
    bits = values.astype(np.float16).view(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), bits)


def _bfloat_to_float(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _bfloat_from_float(values: np.ndarray) -> np.ndarray:
    bits = values.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FFF), rounded).astype(np.uint16)


def _add_half(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    # The float32 sum of two halves has more than twice their precision plus two bits: rounding again changes nothing.
    return _half_from_float(_half_to_float(old) + _half_to_float(new))


def _add_bfloat(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    return _bfloat_from_float(_bfloat_to_float(old) + _bfloat_to_float(new))


def _add_float(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    total = old.view(np.float32) + new.view(np.float32)
    return np.where(np.isnan(total), np.uint32(0x7FFFFFFF), total.view(np.uint32))


def _flush(bits: np.ndarray) -> np.ndarray:
    return np.where(bits & np.uint32(0x7F800000), bits, bits & np.uint32(0x80000000))


def _add_float_flushed(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    return _flush(_add_float(_flush(old), _flush(new)))


def _add_double(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    x, y = old.view(np.float64), new.view(np.float64)
    return np.where(np.isnan(y), new, np.where(np.isnan(x), old, (x + y).view(np.uint64)))


def _pick_float(smaller: bool, to_float: Any) -> Any:
    """min or max of 16-bit floats: -0 is below +0, a NaN loses to a number, two give 0x7fff."""

    def pick(old: np.ndarray, new: np.ndarray) -> np.ndarray:
        x, y = to_float(old), to_float(new)
        new_is_lower = (y < x) | ((y == x) & np.signbit(y))
        take_new = new_is_lower if smaller else ~new_is_lower & ~((x == y) & ~np.signbit(x))
        result = np.where((take_new | np.isnan(x)) & ~np.isnan(y), new, old)
        return np.where(np.isnan(x) & np.isnan(y), np.uint16(0x7FFF), result)

    return pick


def _increment(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    return np.where(old >= new, np.uint32(0), old + np.uint32(1))


def _decrement(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    return np.where((old == 0) | (old > new), new, old - np.uint32(1))


_BITWISE_KINDS = ("u32", "s32", "u64")  # through a tensor map of INT64, `and` is an illegal instruction (measured)
_ORDERED_KINDS = (*_BITWISE_KINDS, "s64")
_HALF_CONVERSIONS = {"f16": _half_to_float, "bf16": _bfloat_to_float}
REDUCTIONS: dict[str, dict[str, Any]] = {
    "add": dict.fromkeys(_BITWISE_KINDS, np.add)
    | {"f16": _add_half, "bf16": _add_bfloat, "f32": _add_float, "f32_flushed": _add_float_flushed, "f64": _add_double},
    "min": dict.fromkeys(_ORDERED_KINDS, np.minimum) | {t: _pick_float(True, c) for t, c in _HALF_CONVERSIONS.items()},
    "max": dict.fromkeys(_ORDERED_KINDS, np.maximum) | {t: _pick_float(False, c) for t, c in _HALF_CONVERSIONS.items()},
    "inc": {"u32": _increment},
    "dec": {"u32": _decrement},
    "and": dict.fromkeys(_BITWISE_KINDS, np.bitwise_and),
    "or": dict.fromkeys(_BITWISE_KINDS, np.bitwise_or),
    "xor": dict.fromkeys(_BITWISE_KINDS, np.bitwise_xor),
}


def reduction(op: str, kind: str) -> Reduction:
    """`combine(target, source)` on uint8 arrays of one shape: elements of `target` become `target op source`.

    `kind`: a PTX type; `f32_flushed` treats subnormal inputs and results as zeros. Raises KeyError for what is not in
    `REDUCTIONS`.
    """
    kind = {"b32": "u32", "b64": "u64"}.get(kind, kind)
    function, item = REDUCTIONS[op][kind], _ITEMS[kind]

    def combine(target: np.ndarray, source: np.ndarray) -> None:
        old = np.ascontiguousarray(target).view(item)
        with np.errstate(all="ignore"):
            result = function(old, np.ascontiguousarray(source).view(item))
        target[...] = np.ascontiguousarray(result, item).view(np.uint8)

    return combine
