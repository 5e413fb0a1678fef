"""Floating-point operations of an instruction, by the unit that does them."""

from __future__ import annotations

import re

from common.emulator.machine.mask import WARP
from common.emulator.ptx.module import Instruction

_TYPES = {
    "f64": ("fp64", 1), "f32x2": ("fp32", 2), "f32": ("fp32", 1),
    "f16x2": ("fp16", 2), "f16": ("fp16", 1), "bf16x2": ("bf16", 2), "bf16": ("bf16", 1),
}  # fmt: skip
_ARITHMETIC = {"add": ("add", 1), "sub": ("add", 1), "mul": ("mul", 1), "fma": ("fma", 2), "mad": ("fma", 2)}
_SPECIAL = ("div", "rcp", "sqrt", "rsqrt", "sin", "cos", "lg2", "ex2", "tanh")
_MATRIX_TYPES = frozenset(
    ("f16", "bf16", "tf32", "f32", "f64", "e4m3", "e5m2", "e3m2", "e2m3", "e2m1", "s8", "u8", "s4", "u4", "b1", "s32")
)
_SHAPE = re.compile(r"m(\d+)n(\d+)k(\d+)")


def operations_of(inst: Instruction) -> tuple[str, int] | None:
    """(unit, operations per active lane), or None for what does no floating-point arithmetic.

    A fused multiply-add is two operations and an `mma` of m x n x k has 2 * m * n * k, shared among the lanes of its
    warp, or of its warpgroup for `wgmma` (integer ones included). What the special function unit does is one operation
    each, under its own name: it is no addition or multiplication. Comparisons, conversions, min and max count nothing.
    """
    if inst.opcode == "mma" or inst.modifiers[:1] == ("mma_async",):
        return _tensor_operations(inst)
    types = [part for part in inst.modifiers if part in _TYPES]
    if not types:
        return None
    name, elements = _TYPES[types[0]]  # the first of two is that of the result: add.f32.bf16 works in fp32
    if inst.opcode in _SPECIAL:
        return f"{name} special", elements
    if inst.opcode not in _ARITHMETIC:
        return None
    kind, operations = _ARITHMETIC[inst.opcode]
    return f"{name} {kind}", operations * elements


def _tensor_operations(inst: Instruction) -> tuple[str, int]:
    (shape,) = filter(None, map(_SHAPE.fullmatch, inst.modifiers))
    m, n, k = map(int, shape.groups())
    _, a, b, *_ = (part for part in inst.modifiers if part in _MATRIX_TYPES)  # the result's comes first
    lanes = WARP if inst.opcode == "mma" else 4 * WARP
    return f"tensor {a}" if a == b else f"tensor {a} x {b}", 2 * m * n * k // lanes
