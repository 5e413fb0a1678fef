"""Logic and shifts (PTX ISA 9.7.8)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from common.emulator.faults import UnsupportedInstruction
from common.emulator.isa.binder import Binder, size_of
from common.emulator.isa.registry import Decoded, Run, instruction
from common.emulator.ptx.module import Immediate, Instruction, Operand, Pair

_TYPES = ("pred", "b16", "b32", "b64")
_BITWISE = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
Binary = Callable[[np.ndarray, np.ndarray], np.ndarray]


@instruction("and", "or", "xor", lanewise=True)
def decode_bitwise(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    kind = mods.one_of(*_TYPES)
    mods.done()
    operation = _BITWISE[inst.opcode]
    target, left, right = inst.operands
    x, y, d = b.read(left, kind), b.read(right, kind), b.write(target, kind)

    def run(f, m, cta) -> None:
        m.compute(operation, f[d], f[x], f[y])

    return run


@instruction("not", lanewise=True)
def decode_not(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    kind = mods.one_of(*_TYPES)
    mods.done()
    target, source = inst.operands
    x, d = b.read(source, kind), b.write(target, kind)

    def run(f, m, cta) -> None:
        m.compute(np.invert, f[d], f[x])

    return run


@instruction("cnot", lanewise=True)
def decode_logical_not(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    kind = mods.one_of("b16", "b32", "b64")
    mods.done()
    target, source = inst.operands
    x, d = b.read(source, kind), b.write(target, kind)

    def run(f, m, cta) -> None:
        np.copyto(f[d], f[x] == 0, where=m.where)

    return run


# -- lop3 ----------------------------------------------------------------------------------------------------------

_TWO_INPUTS: tuple[Binary, ...] = (
    lambda b, c: np.zeros_like(b),
    lambda b, c: ~(b | c),
    lambda b, c: ~b & c,
    lambda b, c: ~b,
    lambda b, c: b & ~c,
    lambda b, c: ~c,
    lambda b, c: b ^ c,
    lambda b, c: ~(b & c),
    lambda b, c: b & c,
    lambda b, c: ~(b ^ c),
    lambda b, c: c,
    lambda b, c: ~b | c,
    lambda b, c: b,
    lambda b, c: b | ~c,
    lambda b, c: b | c,
    lambda b, c: np.full_like(b, 0xFFFF_FFFF),
)
"""The function of two inputs with truth table `index`: bit 2b + c of the index is the result."""


@instruction("lop3", lanewise=True)
def decode_three_input_logic(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    combine = mods.optional("or", "and")
    mods.one_of("b32")
    mods.done()
    target, first, second, third, table, *condition = inst.operands
    if not isinstance(table, Immediate) or not 0 <= int(table.value) <= 255:
        raise UnsupportedInstruction("the look-up table of lop3 is a constant from 0 to 255")
    x, y, z = b.read(first, "b32"), b.read(second, "b32"), b.read(third, "b32")
    function = _three_input_function(int(table.value))
    if combine is None:
        return _logic(x, y, z, b.write(target, "b32"), function)
    if not isinstance(target, Pair) or len(condition) != 1:
        raise UnsupportedInstruction(f"lop3.{combine} needs a destination d|p and a source predicate")
    q = b.read(condition[0], "pred")
    d, p = b.write(target.first, "b32"), b.write(target.second, "pred")
    join = np.logical_or if combine == "or" else np.logical_and

    def run(f, m, cta) -> None:
        result = function(f[x], f[y], f[z])
        np.copyto(f[d], result, where=m.where)
        join(result != 0, f[q], out=f[p], where=m.where)

    return run


def _logic(x: int, y: int, z: int, d: int, function: Callable) -> Run:
    def run(f, m, cta) -> None:
        np.copyto(f[d], function(f[x], f[y], f[z]), where=m.where)

    return run


def _three_input_function(table: int) -> Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]:
    """F(a, b, c) = f(b, c) ^ (a & g(b, c)): f is F where a = 0, and g is where a makes a difference."""
    without, difference = table & 0xF, (table & 0xF) ^ (table >> 4)
    f, g = _TWO_INPUTS[without], _TWO_INPUTS[difference]
    if difference == 0:
        return lambda a, b, c: f(b, c)
    if without == 0:
        return lambda a, b, c: a & g(b, c)
    if difference == 0xF:
        return lambda a, b, c: a ^ f(b, c)
    return lambda a, b, c: f(b, c) ^ (a & g(b, c))


# -- shifts --------------------------------------------------------------------------------------------------------


@instruction("shl", "shr", lanewise=True)
def decode_shift(inst: Instruction, b: Binder) -> Decoded:
    """NumPy defines shifts by the width or more the way PTX does: 0, or copies of the sign."""
    mods = b.modifiers(inst)
    left = inst.opcode == "shl"
    kind = mods.one_of("b16", "b32", "b64", *(() if left else ("u16", "u32", "u64", "s16", "s32", "s64")))
    mods.done()
    target, source, amount = inst.operands
    x, n, d = b.read(source, kind), _shift_amount(b, amount, kind), b.write(target, kind)
    operation = np.left_shift if left else np.right_shift

    def run(f, m, cta) -> None:
        m.compute(operation, f[d], f[x], f[n])

    return run


def _shift_amount(b: Binder, amount: Operand, kind: str) -> int:
    """An amount in a register is 32 bits wide; a constant takes the type of the shifted value to save a conversion."""
    if isinstance(amount, Immediate):
        return b.constant(min(int(amount.value) & 0xFFFF_FFFF, 8 * size_of(kind)), kind)
    return b.read(amount, "u32")


@instruction("shf", lanewise=True)
def decode_funnel_shift(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    left = mods.one_of("l", "r") == "l"
    clamp = mods.one_of("clamp", "wrap") == "clamp"
    mods.one_of("b32")
    mods.done()
    target, low, high, amount = inst.operands
    x, y, n, d = b.read(low, "b32"), b.read(high, "b32"), b.read(amount, "u32"), b.write(target, "b32")
    width = np.uint32(32)

    def run(f, m, cta) -> None:
        distance = np.minimum(f[n], width) if clamp else f[n] & np.uint32(31)
        up, down = (distance, width - distance) if left else (width - distance, distance)
        np.bitwise_or(f[y] << up, f[x] >> down, out=f[d], where=m.where)

    return run
