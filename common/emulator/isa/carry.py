"""Extended-precision integer arithmetic (PTX ISA 9.7.2): add.cc, addc, sub.cc, subc, mad.cc, madc.

CC.CF is one flag per lane. It lives in the frame, in a slot that all functions share.
"""

from __future__ import annotations

import numpy as np

from common.emulator.isa.binder import Binder, Modifiers, Slot
from common.emulator.isa.registry import Decoded, Run, instruction
from common.emulator.ptx.module import Instruction

_TYPES = ("u32", "s32", "u64", "s64")
_LOW_32_BITS = np.uint64(0xFFFF_FFFF)


@instruction("addc", "subc")
def _decode_sum_with_carry(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    return decode_sum(inst, b, mods, carry_in=True, carry_out=mods.take("cc"))


@instruction("madc")
def _decode_multiply_add_with_carry(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    return decode_multiply_add(inst, b, mods, carry_in=True, carry_out=mods.take("cc"))


def decode_sum(inst: Instruction, b: Binder, mods: Modifiers, *, carry_in: bool, carry_out: bool) -> Run:
    """The rest of `add{c}{.cc}` and `sub{c}{.cc}`: `mods` has the type left."""
    kind = mods.one_of(*_TYPES).replace("s", "u")
    mods.done()
    target, left, right = inst.operands
    x, y, d, flag = b.read(left, kind), b.read(right, kind), b.write(target, kind), _carry_flag(b)
    combine = _add if inst.opcode.startswith("add") else _subtract

    def run(f, m, cta) -> None:
        result, out = combine(f[x], f[y], f[flag] if carry_in else None)
        np.copyto(f[d], result, where=m.where)
        if carry_out:
            np.copyto(f[flag], out, where=m.where)

    return run


def decode_multiply_add(inst: Instruction, b: Binder, mods: Modifiers, *, carry_in: bool, carry_out: bool) -> Run:
    """The rest of `mad{c}.{lo,hi}{.cc}`: `mods` has the part of the product and the type left."""
    part, kind = mods.one_of("lo", "hi"), mods.one_of(*_TYPES)
    mods.done()
    target, left, right, addend = inst.operands
    unsigned = kind.replace("s", "u")
    x, y, z, d = b.read(left, kind), b.read(right, kind), b.read(addend, unsigned), b.write(target, unsigned)
    flag = _carry_flag(b)
    product = np.multiply if part == "lo" else high_product

    def run(f, m, cta) -> None:
        result, out = _add(product(f[x], f[y]).view(f[z].dtype), f[z], f[flag] if carry_in else None)
        np.copyto(f[d], result, where=m.where)
        if carry_out:
            np.copyto(f[flag], out, where=m.where)

    return run


def _carry_flag(b: Binder) -> int:
    return b.layout.place(Slot("scratch", "CC.CF", "pred"))


def _add(x: np.ndarray, y: np.ndarray, carry: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    total = x + y
    out = total < x
    if carry is not None:
        total = total + carry
        out |= (total == 0) & carry
    return total, out


def _subtract(x: np.ndarray, y: np.ndarray, borrow: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    difference, out = x - y, x < y
    if borrow is not None:
        out |= (difference == 0) & borrow
        difference = difference - borrow
    return difference, out


def high_product(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The upper half of the double-width product of two arrays of one integer type (16, 32 or 64 bits)."""
    size = x.dtype.itemsize
    if size < 8:
        wide = np.dtype(f"{x.dtype.kind}{2 * size}")
        return (np.multiply(x, y, dtype=wide) >> wide.type(8 * size)).astype(x.dtype)
    unsigned = _high_product_u64(x.view(np.uint64), y.view(np.uint64))
    if x.dtype.kind == "u":
        return unsigned
    # As unsigned numbers negative operands are larger by 2**64.
    return unsigned.view(np.int64) - np.where(x < 0, y, 0) - np.where(y < 0, x, 0)


def _high_product_u64(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    shift = np.uint64(32)
    x_low, x_high, y_low, y_high = x & _LOW_32_BITS, x >> shift, y & _LOW_32_BITS, y >> shift
    middle = x_high * y_low + (x_low * y_low >> shift)
    other = x_low * y_high + (middle & _LOW_32_BITS)
    return x_high * y_high + (middle >> shift) + (other >> shift)
