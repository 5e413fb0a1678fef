"""`mov`: registers, constants, addresses, and packing and unpacking of vectors (PTX ISA 9.7.9.3, 9.7.9.4)."""

from __future__ import annotations

import numpy as np

from common.emulator.faults import UnsupportedInstruction
from common.emulator.isa.binder import Binder, dtype_of, size_of
from common.emulator.isa.registry import Decoded, Run, instruction
from common.emulator.ptx.module import Instruction, Operand, Register, Sink, Vector

_SCALARS = ("pred", "b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64", "f32", "f64", "f16", "bf16")
_VECTOR_ELEMENTS = {("b16", 2): "u8", ("b32", 2): "u16", ("b32", 4): "u8", ("b64", 2): "u32", ("b64", 4): "u16",
                    ("b128", 2): "u64", ("b128", 4): "u32"}  # fmt: skip


@instruction("mov", lanewise=True)
def decode_move(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    kind = mods.one_of(*_SCALARS, "b128")
    mods.done()
    target, source = inst.operands
    if isinstance(source, Vector):
        return _pack(b, kind, target, source)
    if isinstance(target, Vector):
        return _unpack(b, kind, target, source)
    x, d = b.read(source, kind), b.write(target, kind)
    if kind == "b128":
        return _move_wide(x, d)

    def run(f, m, cta) -> None:
        np.copyto(f[d], f[x], where=m.where)

    return run


def _move_wide(x: int, d: int) -> Run:
    def run(f, m, cta) -> None:
        f[d][m.index] = f[x][m.index]

    return run


def _element(kind: str, vector: Vector) -> str:
    """The type of a vector's elements. Registers must have exactly that width, so none can overlap the scalar."""
    element = _VECTOR_ELEMENTS.get((kind, len(vector.items)))
    if element is None:
        raise UnsupportedInstruction(f"mov.{kind} has no form with a vector of {len(vector.items)} elements")
    for item in vector.items:
        if isinstance(item, Register) and item.bytes != size_of(element):
            raise UnsupportedInstruction(
                f"mov.{kind} with {len(vector.items)} elements needs {8 * size_of(element)}-bit registers, "
                f"{item.name} is .{item.type}"
            )
    return element


def _flat(array: np.ndarray, kind: str) -> np.ndarray:
    """A register's array with nothing but lanes along its last axis."""
    return array.reshape(-1) if kind == "b128" else array


def _pack(b: Binder, kind: str, target: Operand, vector: Vector) -> Run:
    element = _element(kind, vector)
    sources = [b.read(item, element) for item in vector.items]
    d, dtype, count = b.write(target, kind), dtype_of(element), len(sources)

    def run(f, m, cta) -> None:
        parts = _flat(f[d], kind).view(dtype)
        for place, source in enumerate(sources):
            np.copyto(parts[..., place::count], f[source], where=m.where)

    return run


def _unpack(b: Binder, kind: str, vector: Vector, source: Operand) -> Run:
    element = _element(kind, vector)
    if isinstance(source, Register) and source.bytes != size_of(kind):
        raise UnsupportedInstruction(f"mov.{kind} cannot unpack {source.name}, which is .{source.type}")
    targets = [(place, b.write(item, element)) for place, item in enumerate(vector.items) if not isinstance(item, Sink)]
    x, dtype, count = b.read(source, kind), dtype_of(element), len(vector.items)

    def run(f, m, cta) -> None:
        parts = _flat(f[x], kind).view(dtype)
        for place, target in targets:
            np.copyto(f[target], parts[..., place::count], where=m.where)

    return run
