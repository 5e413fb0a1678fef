"""Integer arithmetic (PTX ISA 9.7.1). Floating-point forms of the shared opcodes go to `isa.float`.

Division by zero, which the ISA leaves to the machine, gives what an H200 gives: all ones, as quotient and as remainder.
The most negative number divided by -1 wraps to itself, with remainder 0.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from common.emulator.isa import carry
from common.emulator.isa.binder import Binder, Modifiers, dtype_of
from common.emulator.isa.carry import high_product
from common.emulator.isa.registry import Decoded, Run, instruction
from common.emulator.ptx.module import Instruction

INTEGERS = ("u16", "u32", "u64", "s16", "s32", "s64")
SIGNED = ("s16", "s32", "s64")
PACKED = ("u16x2", "s16x2")
FLOATS = {"f16", "f16x2", "bf16", "bf16x2", "f32", "f32x2", "f64"}
WIDENED = {"u16": "u32", "u32": "u64", "s16": "s32", "s32": "s64"}
_HALVES = {"u16x2": np.uint16, "s16x2": np.int16}
_LOW_24_BITS = np.int64(0xFF_FFFF)


def _float_form(inst: Instruction) -> bool:
    return not FLOATS.isdisjoint(inst.modifiers)


def _decode_float(inst: Instruction, b: Binder) -> Decoded:
    from common.emulator.isa.float import decode_float

    return decode_float(inst, b)


# -- add, sub, min, max, abs, neg ----------------------------------------------------------------------------------


@instruction("add", "sub", lanewise=True)
def decode_add(inst: Instruction, b: Binder) -> Decoded:
    if _float_form(inst):
        return _decode_float(inst, b)
    mods = b.modifiers(inst)
    if mods.take("cc"):
        return carry.decode_sum(inst, b, mods, carry_in=False, carry_out=True)
    operation = np.add if inst.opcode == "add" else np.subtract
    saturated = mods.take("sat")
    packed = PACKED if inst.opcode == "add" else ()
    kind = mods.one_of(*(("s32",) if saturated else (*INTEGERS, *packed)))
    mods.done()
    if kind in PACKED:
        return _packed(inst, b, operation, kind, relu=False)
    if saturated:
        return _saturated_sum(inst, b, operation)
    return _elementwise(inst, b, operation, kind)


@instruction("min", "max", lanewise=True)
def decode_minimum(inst: Instruction, b: Binder) -> Decoded:
    if _float_form(inst):
        return _decode_float(inst, b)
    mods = b.modifiers(inst)
    relu = mods.take("relu")
    kind = mods.one_of("s16x2", "s32") if relu else mods.one_of(*INTEGERS, *PACKED)
    mods.done()
    operation = np.minimum if inst.opcode == "min" else np.maximum
    if kind in PACKED:
        return _packed(inst, b, operation, kind, relu)
    return _clamped_at_zero(inst, b, operation) if relu else _elementwise(inst, b, operation, kind)


@instruction("abs", "neg", lanewise=True)
def decode_negate(inst: Instruction, b: Binder) -> Decoded:
    if _float_form(inst):
        return _decode_float(inst, b)
    mods = b.modifiers(inst)
    kind = mods.one_of(*SIGNED)
    mods.done()
    operation = np.absolute if inst.opcode == "abs" else np.negative
    x, d = b.read(inst.operands[1], kind), b.write(inst.operands[0], kind)

    def run(f, m, cta) -> None:
        m.compute(operation, f[d], f[x])

    return run


def _elementwise(inst: Instruction, b: Binder, operation: np.ufunc, kind: str) -> Run:
    target, left, right = inst.operands
    x, y, d = b.read(left, kind), b.read(right, kind), b.write(target, kind)

    def run(f, m, cta) -> None:
        m.compute(operation, f[d], f[x], f[y])

    return run


def _saturated_sum(inst: Instruction, b: Binder, operation: np.ufunc) -> Run:
    target, left, right = inst.operands
    x, y, d = b.read(left, "s32"), b.read(right, "s32"), b.write(target, "s32")

    def run(f, m, cta) -> None:
        np.copyto(f[d], _saturate(operation(f[x], f[y], dtype=np.int64)), where=m.where)

    return run


def _saturate(values: np.ndarray) -> np.ndarray:
    """int64 values clamped to the range of s32."""
    return np.clip(values, -(1 << 31), (1 << 31) - 1).astype(np.int32)


def _clamped_at_zero(inst: Instruction, b: Binder, operation: np.ufunc) -> Run:
    target, left, right = inst.operands
    x, y, d = b.read(left, "s32"), b.read(right, "s32"), b.write(target, "s32")

    def run(f, m, cta) -> None:
        np.maximum(operation(f[x], f[y]), np.int32(0), out=f[d], where=m.where)

    return run


def _packed(inst: Instruction, b: Binder, operation: np.ufunc, kind: str, relu: bool) -> Run:
    """Two 16-bit operations on the halves of 32-bit registers."""
    target, left, right = inst.operands
    x, y, d = b.read(left, kind), b.read(right, kind), b.write(target, kind)
    half = _HALVES[kind]

    def run(f, m, cta) -> None:
        result = operation(_parts(f[x], half), _parts(f[y], half))
        if relu:
            result = np.maximum(result, half(0))
        np.copyto(f[d], result.view(np.uint32), where=m.where)

    return run


def _parts(values: np.ndarray, dtype: type) -> np.ndarray:
    """The parts of 32-bit values side by side as a narrower type, lowest first."""
    return np.ascontiguousarray(values).view(dtype)


# -- products ------------------------------------------------------------------------------------------------------


@instruction("mul", lanewise=True)
def decode_multiply(inst: Instruction, b: Binder) -> Decoded:
    if _float_form(inst):
        return _decode_float(inst, b)
    mods = b.modifiers(inst)
    part = mods.one_of("lo", "hi", "wide")
    kind = mods.one_of(*(WIDENED if part == "wide" else INTEGERS))
    mods.done()
    if part == "lo":
        return _elementwise(inst, b, np.multiply, kind)
    target, left, right = inst.operands
    x, y = b.read(left, kind), b.read(right, kind)
    if part == "wide":
        d, wide = b.write(target, WIDENED[kind]), dtype_of(WIDENED[kind])

        def run_wide(f, m, cta) -> None:
            np.multiply(f[x], f[y], out=f[d], where=m.where, dtype=wide)

        return run_wide
    d = b.write(target, kind)

    def run(f, m, cta) -> None:
        np.copyto(f[d], high_product(f[x], f[y]), where=m.where)

    return run


@instruction("mad", lanewise=True)
def decode_multiply_add(inst: Instruction, b: Binder) -> Decoded:
    if _float_form(inst):
        return _decode_float(inst, b)
    mods = b.modifiers(inst)
    if mods.take("cc"):
        return carry.decode_multiply_add(inst, b, mods, carry_in=False, carry_out=True)
    part = mods.one_of("lo", "hi", "wide")
    saturated = part == "hi" and mods.take("sat")
    kind = mods.one_of(*(("s32",) if saturated else WIDENED if part == "wide" else INTEGERS))
    mods.done()
    target, left, right, addend = inst.operands
    result = WIDENED[kind] if part == "wide" else kind
    x, y = b.read(left, kind), b.read(right, kind)
    return _multiply_add(x, y, b.read(addend, result), b.write(target, result), _product(part, kind), saturated)


def _product(part: str, kind: str) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    if part == "lo":
        return np.multiply
    if part == "hi":
        return high_product
    wide = dtype_of(WIDENED[kind])
    return lambda x, y: np.multiply(x, y, dtype=wide)


def _multiply_add(x: int, y: int, z: int, d: int, product: Callable, saturated: bool) -> Run:
    def run_saturated(f, m, cta) -> None:
        np.copyto(f[d], _saturate(np.add(product(f[x], f[y]), f[z], dtype=np.int64)), where=m.where)

    def run(f, m, cta) -> None:
        m.compute(np.add, f[d], product(f[x], f[y]), f[z])

    return run_saturated if saturated else run


@instruction("mul24", "mad24", lanewise=True)
def decode_multiply_24(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    part = mods.one_of("lo", "hi")
    saturated = inst.opcode == "mad24" and part == "hi" and mods.take("sat")
    kind = mods.one_of(*(("s32",) if saturated else ("u32", "s32")))
    mods.done()
    target, left, right, *addend = inst.operands
    x, y, d = b.read(left, kind), b.read(right, kind), b.write(target, kind)
    extend = _signed_24 if kind == "s32" else _unsigned_24
    shift = np.int64(16 if part == "hi" else 0)
    dtype = dtype_of(kind)

    def product(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return (extend(x) * extend(y) >> shift).astype(dtype)

    if addend:
        return _multiply_add(x, y, b.read(addend[0], kind), d, product, saturated)

    def run(f, m, cta) -> None:
        np.copyto(f[d], product(f[x], f[y]), where=m.where)

    return run


def _unsigned_24(values: np.ndarray) -> np.ndarray:
    return values.astype(np.int64) & _LOW_24_BITS


def _signed_24(values: np.ndarray) -> np.ndarray:
    return values.astype(np.int64) << np.int64(40) >> np.int64(40)


@instruction("sad", lanewise=True)
def decode_sum_of_differences(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    kind = mods.one_of(*INTEGERS)
    mods.done()
    target, left, right, addend = inst.operands
    x, y, z, d = b.read(left, kind), b.read(right, kind), b.read(addend, kind), b.write(target, kind)

    def run(f, m, cta) -> None:
        difference = np.maximum(f[x], f[y]) - np.minimum(f[x], f[y])
        np.add(difference, f[z], out=f[d], where=m.where)

    return run


@instruction("dp4a", lanewise=True)
def decode_dot_4(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    return _dot(inst, b, mods, slice(None), {"u32": np.uint8, "s32": np.int8})


@instruction("dp2a", lanewise=True)
def decode_dot_2(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    chosen = slice(0, 2) if mods.one_of("lo", "hi") == "lo" else slice(2, 4)
    return _dot(inst, b, mods, chosen, {"u32": np.uint16, "s32": np.int16})


def _dot(inst: Instruction, b: Binder, mods: Modifiers, chosen: slice, left_parts: dict[str, type]) -> Run:
    """Dot product of the parts of `a` with the `chosen` bytes of `b`, added to `c` modulo 2**32."""
    left_type, right_type = mods.one_of("u32", "s32"), mods.one_of("u32", "s32")
    mods.done()
    target, left, right, addend = inst.operands
    x, y, z, d = b.read(left, "u32"), b.read(right, "u32"), b.read(addend, "u32"), b.write(target, "u32")
    left_part, right_part = left_parts[left_type], {"u32": np.uint8, "s32": np.int8}[right_type]

    def run(f, m, cta) -> None:
        left = _parts(f[x], left_part).reshape(*f[x].shape, -1).astype(np.int64)
        right = _parts(f[y], right_part).reshape(*f[y].shape, 4)[..., chosen].astype(np.int64)
        np.add((left * right).sum(axis=-1).astype(np.uint32), f[z], out=f[d], where=m.where)

    return run


# -- division ------------------------------------------------------------------------------------------------------


@instruction("div", "rem", lanewise=True)
def decode_divide(inst: Instruction, b: Binder) -> Decoded:
    if _float_form(inst):
        return _decode_float(inst, b)
    mods = b.modifiers(inst)
    kind = mods.one_of(*INTEGERS)
    mods.done()
    target, left, right = inst.operands
    x, y, d = b.read(left, kind), b.read(right, kind), b.write(target, kind)
    operation = _quotient if inst.opcode == "div" else _remainder

    def run(f, m, cta) -> None:
        np.copyto(f[d], operation(f[x], f[y]), where=m.where)

    return run


def _quotient(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """x / y truncated towards zero."""
    dividend = x if x.dtype.kind == "u" else x - np.fmod(x, y)
    return _ones_where_zero(y, dividend // y)


def _remainder(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """x - y * (x / y), with the sign of x."""
    return _ones_where_zero(y, np.fmod(x, y))


def _ones_where_zero(divisor: np.ndarray, result: np.ndarray) -> np.ndarray:
    zero = divisor == 0
    return np.where(zero, ~result.dtype.type(0), result) if zero.any() else result
