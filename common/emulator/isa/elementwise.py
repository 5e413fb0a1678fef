"""Closures for instructions that compute one result per lane, and the rules for the operands of floating-point types.

Registers must have the width of their type, except those of `cvt`, which may be wider (PTX ISA 9.4.1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from common.emulator.faults import UnsupportedInstruction
from common.emulator.isa.binder import Binder, dtype_of, size_of
from common.emulator.isa.registry import Run
from common.emulator.ptx.module import Immediate, Instruction, Operand, Register, Sink

Array = NDArray
Compute = Callable[..., Array]

# NumPy type of one element of a packed type. bf16 elements are handled as their bits.
ELEMENTS = {"f16x2": np.float16, "bf16x2": np.uint16, "f32x2": np.float32}
INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")
_EXACT_SOURCES = ("bf16", "bf16x2")
_EXACT_DESTINATIONS = ("bf16", "bf16x2", "tf32")


def read_exact(b: Binder, operand: Operand, kind: str) -> int:
    """Slot of a source of floating-point type `kind`.

    Raises UnsupportedInstruction for what PTX ISA 9.4.1 and 4.5 do not allow here: registers of another width, integer
    literals, and any literal where the type is neither f32 nor f64.
    """
    if isinstance(operand, Register) and operand.bytes == size_of(kind):
        return b.read(operand, kind)
    if isinstance(operand, Immediate) and kind in ("f32", "f64") and operand.kind != "int":
        return b.read(operand, kind)
    raise UnsupportedInstruction(f"operand {operand} cannot be a .{kind} source of this instruction")


def expect_operands(inst: Instruction, *counts: int) -> int:
    """The number of operands. Raises UnsupportedInstruction unless it is one of `counts`."""
    count = len(inst.operands)
    if count not in counts:
        expected = " or ".join(map(str, counts))
        raise UnsupportedInstruction(f"`{inst.opcode}` has {count} operands here: it takes {expected}")
    return count


def elementwise(inst: Instruction, b: Binder, compute: Compute, result: str, sources: Sequence[str]) -> Run:
    """Closure that writes `compute(*sources)` to the first operand in the lanes of the mask.

    `result` and `sources` are PTX types. `compute` takes and returns arrays (L,) of their NumPy types. It sees all
    lanes, those outside the mask too.
    """
    expect_operands(inst, 1 + len(sources))
    slots = [read_exact(b, operand, kind) for operand, kind in zip(inst.operands[1:], sources)]
    d = b.write(inst.operands[0], result)
    if len(slots) == 1:
        return unary(compute, d, *slots)
    if len(slots) == 2:
        return _binary(compute, d, *slots)
    return _ternary(compute, d, *slots)


def read_relaxed(b: Binder, operand: Operand, kind: str, name: str) -> int:
    """Slot of a source of `cvt`, of PTX type `name`, whose storage the binder knows as `kind`.

    A register wider than the type gives its low part. Raises UnsupportedInstruction for a wider register where the type
    is bf16 or bf16x2, and for a literal of another sort than the type (integer, f32 and f64 alone have literals).
    """
    if name in _EXACT_SOURCES and isinstance(operand, Register) and operand.bytes != size_of(kind):
        raise UnsupportedInstruction(f"register {operand.name} (.{operand.type}) cannot be a .{name} source of cvt")
    if isinstance(operand, Immediate):
        literals = INTEGERS if operand.kind == "int" else ("f32", "f64")
        if name not in literals:
            raise UnsupportedInstruction(f"operand {operand} cannot be a .{name} source of cvt")
    return b.read(operand, kind)


def write_relaxed(b: Binder, operand: Operand, kind: str, name: str) -> tuple[int, bool]:
    """Slot of the destination of `cvt`, and whether its register is wider than the type.

    A wider register's slot is an integer of the whole register, signed as `kind` is: give it integers, or a float's
    bits. Raises UnsupportedInstruction for `_`, and for a wider register where the type is bf16, bf16x2 or tf32.
    """
    if isinstance(operand, Sink):
        raise UnsupportedInstruction("cvt cannot discard its result")
    wider = isinstance(operand, Register) and operand.bytes > size_of(kind)
    if wider and name in _EXACT_DESTINATIONS:
        raise UnsupportedInstruction(
            f"register {operand.name} (.{operand.type}) cannot be a .{name} destination of cvt"
        )
    return b.write_extended(operand, kind), wider


def unary(compute: Compute, d: int, x: int) -> Run:
    """Closure that writes `compute(f[x])` to slot `d`."""

    def run(f, m, cta) -> None:
        np.copyto(f[d], compute(f[x]), where=m.where)

    return run


def on_elements(compute: Compute, kind: str) -> Compute:
    """`compute`, which works on single elements, for whole registers of the packed type `kind`."""
    element, whole = ELEMENTS[kind], dtype_of(kind)

    def packed(*arrays: Array) -> Array:
        return compute(*[array.view(element) for array in arrays]).view(whole)

    return packed


def _binary(compute: Compute, d: int, x: int, y: int) -> Run:
    def run(f, m, cta) -> None:
        np.copyto(f[d], compute(f[x], f[y]), where=m.where)

    return run


def _ternary(compute: Compute, d: int, x: int, y: int, z: int) -> Run:
    def run(f, m, cta) -> None:
        np.copyto(f[d], compute(f[x], f[y], f[z]), where=m.where)

    return run
