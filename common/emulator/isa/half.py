"""Half-precision instructions (PTX ISA 9.7.4): f16, f16x2, bf16 and bf16x2."""

from __future__ import annotations

from functools import partial

import numpy as np

from common.emulator.faults import UnsupportedInstruction
from common.emulator.isa.binder import Binder, Modifiers
from common.emulator.isa.elementwise import Array, Compute, elementwise, expect_operands, on_elements
from common.emulator.isa.registry import Run
from common.emulator.numerics import approximate, arithmetic, minmax
from common.emulator.numerics.modifiers import canonical_nan, flush_subnormals
from common.emulator.ptx.module import Instruction

KINDS = ("f16", "f16x2", "bf16", "bf16x2")
# The NaN that a tensor copy writes outside of a tensor. The ISA only names it; on an H200, fma ignores its sign.
OOB_NAN = np.uint16(0x7FF7)

_ARITHMETIC = {
    "f16": {"add": arithmetic.add_f16, "sub": arithmetic.sub_f16, "mul": arithmetic.mul_f16},
    "bf16": {"add": arithmetic.add_bf16, "sub": arithmetic.sub_bf16, "mul": arithmetic.mul_bf16},
}
_MIN_MAX = {
    "f16": {"min": minmax.minimum, "max": minmax.maximum},
    "bf16": {"min": minmax.minimum_bf16, "max": minmax.maximum_bf16},
}
_SIGN = np.uint16(0x8000)
_INFINITY_BF16, _NAN_BF16 = np.uint16(0x7F80), np.uint16(0x7FFF)


def decode_half(inst: Instruction, b: Binder) -> Run:
    """Closure of an instruction on f16, f16x2, bf16 or bf16x2: add, sub, mul, fma, neg, abs, min, max, tanh, ex2.

    Raises UnsupportedInstruction for other opcodes and for modifiers that the ISA does not allow with them.
    """
    mods = b.modifiers(inst)
    kind = mods.one_of(*KINDS)
    element = kind.removesuffix("x2")
    try:
        choose, sources = _CHOICES[inst.opcode]
    except KeyError:
        raise UnsupportedInstruction(f"`{mods.opcode}`: .{kind} is not supported by {inst.opcode}") from None
    compute = choose(inst.opcode, mods, element)
    mods.done()
    expect_operands(inst, 1 + sources)
    if kind != element:
        compute = on_elements(compute, kind)
    return elementwise(inst, b, compute, kind, (kind,) * sources)


def _arithmetic(opcode: str, mods: Modifiers, element: str) -> Compute:
    mods.take("rn")
    compute = _ARITHMETIC[element][opcode]
    if element == "bf16":
        return compute
    compute = partial(compute, ftz=mods.take("ftz"), saturate=mods.take("sat"))
    return lambda x, y: canonical_nan(compute(x, y))


def _fma(opcode: str, mods: Modifiers, element: str) -> Compute:
    mods.one_of("rn")
    relu, oob = mods.take("relu"), mods.take("oob")
    if element == "bf16":
        compute: Compute = partial(arithmetic.fma_bf16, relu=relu)
    else:
        ftz = not oob and mods.take("ftz")
        saturate = not (oob or relu) and mods.take("sat")
        fused = partial(arithmetic.fma_f16, ftz=ftz, saturate=saturate, relu=relu)

        def compute(x: Array, y: Array, z: Array) -> Array:
            return canonical_nan(fused(x, y, z))

    return _zero_outside(compute) if oob else compute


def _zero_outside(fused: Compute) -> Compute:
    """`.oob`: the result is +0 where a factor is the NaN that stands for an element outside of a tensor."""

    def compute(x: Array, y: Array, z: Array) -> Array:
        outside = (x.view(np.uint16) & ~_SIGN == OOB_NAN) | (y.view(np.uint16) & ~_SIGN == OOB_NAN)
        result = fused(x, y, z)
        result[outside] = 0
        return result

    return compute


def _sign(opcode: str, mods: Modifiers, element: str) -> Compute:
    """neg and abs. A NaN becomes the canonical one (measured; the ISA leaves it open)."""
    if element == "bf16":
        change = {"neg": lambda x: x ^ _SIGN, "abs": lambda x: x & ~_SIGN}[opcode]
        return lambda x: np.where(x & ~_SIGN > _INFINITY_BF16, _NAN_BF16, change(x))
    change = {"neg": np.negative, "abs": np.abs}[opcode]
    if mods.take("ftz"):
        return lambda x: canonical_nan(change(flush_subnormals(x)))
    return lambda x: canonical_nan(change(x))


def _min_max(opcode: str, mods: Modifiers, element: str) -> Compute:
    options = {"propagate_nan": mods.take("NaN")}
    options["xorsign"] = options["absolute"] = mods.take("xorsign")
    if options["xorsign"]:
        mods.one_of("abs")
    if element == "f16":
        options["ftz"] = mods.take("ftz")
    return partial(_MIN_MAX[element][opcode], **options)


def _tanh(opcode: str, mods: Modifiers, element: str) -> Compute:
    mods.one_of("approx")
    if element == "bf16":
        return approximate.tanh_bf16
    return lambda x: canonical_nan(approximate.tanh_f16(x))


def _ex2(opcode: str, mods: Modifiers, element: str) -> Compute:
    mods.one_of("approx")
    if element == "bf16":
        mods.one_of("ftz")
        return approximate.ex2_bf16
    return lambda x: canonical_nan(approximate.ex2_f16(x))


# How to choose what an opcode computes, and how many sources it has.
_CHOICES = {
    "add": (_arithmetic, 2),
    "sub": (_arithmetic, 2),
    "mul": (_arithmetic, 2),
    "fma": (_fma, 3),
    "neg": (_sign, 1),
    "abs": (_sign, 1),
    "min": (_min_max, 2),
    "max": (_min_max, 2),
    "tanh": (_tanh, 1),
    "ex2": (_ex2, 1),
}
