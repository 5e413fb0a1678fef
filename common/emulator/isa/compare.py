"""Comparison and selection (PTX ISA 9.7.6 and 9.7.7, operators in 9.3.1): setp, set, selp, slct."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from common.emulator.faults import UnsupportedInstruction
from common.emulator.isa.binder import Binder, Modifiers, dtype_of
from common.emulator.isa.registry import Decoded, Run, instruction
from common.emulator.numerics.formats import f32_from_bf16
from common.emulator.numerics.modifiers import flush_subnormals
from common.emulator.ptx.module import Instruction, Pair

Array = np.ndarray
_BITS = ("b16", "b32", "b64")
_UNSIGNED = ("u16", "u32", "u64")
_SIGNED = ("s16", "s32", "s64")
_FLOATS = ("f16", "f16x2", "bf16", "bf16x2", "f32", "f64")
_PACKED = ("f16x2", "bf16x2")
_SELECTED = (*_BITS, *_UNSIGNED, *_SIGNED, "f32", "f64")
_ORDERED = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
_UNSIGNED_NAMES = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_OPPOSITE = {"ltu": np.greater_equal, "leu": np.greater, "gtu": np.less_equal, "geu": np.less}
_FLOAT_ONLY = ("equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")
_OPERATORS = (*_ORDERED, *_UNSIGNED_NAMES, *_FLOAT_ONLY)
_COMBINE = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}
_ONE = {"f16": 0x3C00, "bf16": 0x3F80, "f16x2": 0x3C00, "bf16x2": 0x3F80}


class Comparison(NamedTuple):
    """`a CmpOp b` before it is combined: operator, operand type, `.ftz`, and the BoolOp or None."""

    operator: str
    kind: str
    flush: bool
    combine: str | None


def _comparison(mods: Modifiers, kind: str) -> Comparison:
    """Takes the operator, BoolOp and `.ftz`. Raises UnsupportedInstruction for an operator `kind` does not have."""
    operator = mods.one_of(*_OPERATORS)
    combine = mods.optional(*_COMBINE)
    flush = kind in ("f32", "f16", "f16x2") and mods.take("ftz")
    allowed: tuple[str, ...] = ("eq", "ne")
    if kind not in _BITS:
        allowed = tuple(_ORDERED)
    if kind in _UNSIGNED:
        allowed = (*allowed, *_UNSIGNED_NAMES)
    if kind in _FLOATS:
        allowed = (*allowed, *_FLOAT_ONLY)
    if operator not in allowed:
        raise UnsupportedInstruction(f"`{mods.opcode}`: operator .{operator} is not defined for .{kind}")
    return Comparison(_UNSIGNED_NAMES.get(operator, operator), kind, flush, combine)


def _compare(operator: str, floating: bool) -> Callable[[Array, Array], Array]:
    """A NumPy function for the operator. NumPy's own comparisons are ordered except `!=`."""
    if operator in _OPPOSITE:
        opposite = _OPPOSITE[operator]
        return lambda x, y: ~opposite(x, y)
    if operator == "equ":
        return lambda x, y: ~((x < y) | (x > y))
    if operator == "neu":
        return np.not_equal
    if operator == "nan":
        return lambda x, y: (x != x) | (y != y)
    if operator == "num":
        return lambda x, y: (x == x) & (y == y)
    if operator == "ne" and floating:
        return lambda x, y: (x < y) | (x > y)
    return _ORDERED[operator]


def _numbers(comparison: Comparison) -> Callable[[Array], Array] | None:
    """From a frame array to numbers NumPy can compare, (L,) or for packed types (L, 2); None when it already is.

    The arrays may have further axes in front.
    """
    decode = {
        "bf16": f32_from_bf16,
        "f16x2": lambda bits: _halves(bits).view(np.float16),
        "bf16x2": lambda bits: f32_from_bf16(_halves(bits)),
    }.get(comparison.kind)
    if not comparison.flush:
        return decode
    if decode is None:
        return flush_subnormals
    return lambda bits: flush_subnormals(decode(bits))


def _halves(bits: Array) -> Array:
    """(L,) registers as (L, 2) halves, the lower one first."""
    return np.ascontiguousarray(bits).view(np.uint16).reshape(*bits.shape, 2)


def _test(inst: Instruction, b: Binder, comparison: Comparison) -> Callable[[list], Array]:
    """The comparison as a function of the frame: a bool array (L,), or (L, 2) for packed types."""
    x, y = b.read(inst.operands[1], comparison.kind), b.read(inst.operands[2], comparison.kind)
    compare = _compare(comparison.operator, comparison.kind in _FLOATS)
    numbers = _numbers(comparison)
    if numbers is None:
        return lambda f: compare(f[x], f[y])
    return lambda f: compare(numbers(f[x]), numbers(f[y]))


def _condition(inst: Instruction, b: Binder, comparison: Comparison) -> int | None:
    """Slot of the predicate to combine with; checks the number of operands."""
    expected = 3 + (comparison.combine is not None)
    if len(inst.operands) != expected:
        raise UnsupportedInstruction(f"`{inst.opcode}` needs {expected} operands here, not {len(inst.operands)}")
    return b.read(inst.operands[3], "pred") if comparison.combine else None


# -- setp ----------------------------------------------------------------------------------------------------------


@instruction("setp", lanewise=True)
def decode_set_predicate(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    kind = mods.one_of(*_BITS, *_UNSIGNED, *_SIGNED, *_FLOATS)
    comparison = _comparison(mods, kind)
    mods.done()
    condition = _condition(inst, b, comparison)
    target = inst.operands[0]
    pair = isinstance(target, Pair)
    p = b.write(target.first if pair else target, "pred")
    if kind in _PACKED:
        return _set_packed(inst, b, comparison, condition, p, b.write(target.second, "pred") if pair else None)
    if condition is None and not pair and _numbers(comparison) is None:
        return _set_simple(inst, b, comparison, p)
    return _set_combined(inst, b, comparison, condition, p, b.write(target.second, "pred") if pair else None)


def _set_simple(inst: Instruction, b: Binder, comparison: Comparison, p: int) -> Run:
    compare = _compare(comparison.operator, comparison.kind in _FLOATS)
    if not isinstance(compare, np.ufunc):
        return _set_combined(inst, b, comparison, None, p, None)
    x, y = b.read(inst.operands[1], comparison.kind), b.read(inst.operands[2], comparison.kind)

    def run(f, m, cta) -> None:
        m.compute(compare, f[p], f[x], f[y])

    return run


def _set_combined(
    inst: Instruction, b: Binder, comparison: Comparison, condition: int | None, p: int, q: int | None
) -> Run:
    """p = BoolOp(t, c), q = BoolOp(!t, c). The destinations may be the source predicate: both results come first."""
    test = _test(inst, b, comparison)
    combine = _COMBINE.get(comparison.combine)

    def run(f, m, cta) -> None:
        result = test(f)
        other = None if q is None else ~result
        if combine is not None:
            result = combine(result, f[condition])
            other = None if q is None else combine(other, f[condition])
        np.copyto(f[p], result, where=m.where)
        if q is not None:
            np.copyto(f[q], other, where=m.where)

    return run


def _set_packed(
    inst: Instruction, b: Binder, comparison: Comparison, condition: int | None, p: int, q: int | None
) -> Run:
    """p and q are the results of the low and the high half. ptxas takes p alone: an H200 gives the low half."""
    test = _test(inst, b, comparison)
    combine = _COMBINE.get(comparison.combine)

    def run(f, m, cta) -> None:
        result = test(f)
        if combine is not None:
            result = combine(result, f[condition][..., None])
        np.copyto(f[p], result[..., 0], where=m.where)
        if q is not None:
            np.copyto(f[q], result[..., 1], where=m.where)

    return run


# -- set -----------------------------------------------------------------------------------------------------------


@instruction("set", lanewise=True)
def decode_set(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    kind, result = mods.last(), mods.last()
    if result not in _set_results(kind):
        raise UnsupportedInstruction(f"`{mods.opcode}`: no form with result .{result} and operands .{kind}")
    comparison = _comparison(mods, kind)
    mods.done()
    condition = _condition(inst, b, comparison)
    test, combine = _test(inst, b, comparison), _COMBINE.get(comparison.combine)
    packed = kind in _PACKED
    d = b.write(inst.operands[0], result)
    part = np.dtype(np.uint16) if packed else np.dtype(f"u{dtype_of(result).itemsize}")
    true = part.type(0x3F80_0000 if result == "f32" else _ONE.get(result, (1 << (8 * part.itemsize)) - 1))

    def run(f, m, cta) -> None:
        holds = test(f)
        if combine is not None:
            holds = combine(holds, f[condition][..., None] if packed else f[condition])
        values = holds * true
        np.copyto(f[d], values.view(f[d].dtype)[..., 0] if packed else values.view(f[d].dtype), where=m.where)

    return run


def _set_results(kind: str) -> tuple[str, ...]:
    """Destination types of `set` for operands of `kind`."""
    if kind in _PACKED:
        return (kind, "u32", "s32")
    if kind == "f16":
        return ("u16", "s16", "u32", "s32", "f16", "bf16")
    if kind == "bf16":
        return ("u16", "s16", "u32", "s32", "bf16")
    if kind in (*_BITS, *_UNSIGNED, *_SIGNED, "f32", "f64"):
        return ("u32", "s32", "f32", "f16", "bf16")
    return ()


# -- selp, slct ----------------------------------------------------------------------------------------------------


@instruction("selp", lanewise=True)
def decode_select(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    kind = mods.one_of(*_SELECTED)
    mods.done()
    target, first, second, predicate = inst.operands
    x, y, p, d = b.read(first, kind), b.read(second, kind), b.read(predicate, "pred"), b.write(target, kind)

    def run(f, m, cta) -> None:
        np.copyto(f[d], np.where(f[p], f[x], f[y]), where=m.where)

    return run


@instruction("slct", lanewise=True)
def decode_select_by_sign(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    sign = mods.last()
    if sign not in ("s32", "f32"):
        raise UnsupportedInstruction(f"`{mods.opcode}`: the third operand of slct is .s32 or .f32")
    flush = sign == "f32" and mods.take("ftz")
    kind = mods.one_of(*_SELECTED)
    mods.done()
    target, first, second, third = inst.operands
    x, y, z, d = b.read(first, kind), b.read(second, kind), b.read(third, sign), b.write(target, kind)
    zero = dtype_of(sign).type(0)

    def run(f, m, cta) -> None:
        selector = flush_subnormals(f[z]) if flush else f[z]
        np.copyto(f[d], np.where(selector >= zero, f[x], f[y]), where=m.where)

    return run
