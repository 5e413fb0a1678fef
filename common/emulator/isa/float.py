"""Floating-point instructions (PTX ISA 9.7.3) on f32, f64 and f32x2, and those with mixed precision (9.7.5).

Opcodes that integers share come here from the integer family through `decode_float`; f16 and bf16 go on to `half`.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from common.emulator.faults import UnsupportedInstruction
from common.emulator.isa import half
from common.emulator.isa.binder import Binder, Modifiers
from common.emulator.isa.elementwise import (
    Array,
    Compute,
    elementwise,
    expect_operands,
    on_elements,
    read_exact,
)
from common.emulator.isa.registry import Run, instruction
from common.emulator.numerics import approximate, arithmetic, minmax
from common.emulator.numerics.formats import f32_from_bf16
from common.emulator.numerics.modifiers import canonical_nan, flush_subnormals, has_nan, pass_nan_on
from common.emulator.ptx.module import Instruction

KINDS = ("f32", "f64", "f32x2")
ROUNDINGS = ("rn", "rz", "rm", "rp")

_NAN = np.uint32(0x7FFFFFFF).view(np.float32)
_SOURCES = {"add": 2, "sub": 2, "mul": 2, "fma": 3, "mad": 3}
# Which of several NaN operands an f64 instruction passes on (measured on an H200).
_NAN_ORDER = {
    "add": (1, 0),
    "sub": (1, 0),
    "mul": (1, 0),
    "div": (0, 1),
    "fma": (1, 2, 0),
    "mad": (1, 2, 0),
    "min": (1, 0),
    "max": (1, 0),
}
_NEAREST = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
_ARITHMETIC = {
    "f32": {
        "add": arithmetic.add_f32,
        "sub": arithmetic.sub_f32,
        "mul": arithmetic.mul_f32,
        "fma": arithmetic.fma_f32,
        "mad": arithmetic.fma_f32,
    },
    "f64": {
        "add": arithmetic.add_f64,
        "sub": arithmetic.sub_f64,
        "mul": arithmetic.mul_f64,
        "fma": arithmetic.fma_f64,
        "mad": arithmetic.fma_f64,
    },
}
_WIDEN: dict[str, Compute] = {"f16": lambda x: x.astype(np.float32), "bf16": f32_from_bf16}
_APPROXIMATE = {
    "rcp": approximate.rcp_f32,
    "sqrt": approximate.sqrt_f32,
    "rsqrt": approximate.rsqrt_f32,
    "sin": approximate.sin_f32,
    "cos": approximate.cos_f32,
    "lg2": approximate.lg2_f32,
    "ex2": approximate.ex2_f32,
}
_ROOTS = {
    "rcp": {"f32": arithmetic.rcp_f32, "f64": arithmetic.rcp_f64},
    "sqrt": {"f32": arithmetic.sqrt_f32, "f64": arithmetic.sqrt_f64},
}
_PROPERTIES: dict[str, Compute] = {
    "finite": np.isfinite,
    "infinite": np.isinf,
    "number": lambda x: ~np.isnan(x),
    "notanumber": np.isnan,
    "normal": lambda x: np.isfinite(x) & ~_is_subnormal(x),
    "subnormal": lambda x: _is_subnormal(x),
}


@instruction("fma", "rcp", "sqrt", "rsqrt", "sin", "cos", "lg2", "ex2", "tanh", "testp", "copysign", lanewise=True)
def decode_float(inst: Instruction, b: Binder) -> Run:
    """Closure of a floating-point instruction; its types are f16, f16x2, bf16, bf16x2, f32, f32x2 and f64.

    Raises UnsupportedInstruction for other types, and for modifiers or operands that the ISA does not allow.
    """
    mods = b.modifiers(inst)
    kind = mods.one_of(*KINDS, *half.KINDS)
    if kind in half.KINDS:
        return half.decode_half(inst, b)
    if inst.opcode not in _DECODERS:
        raise UnsupportedInstruction(f"`{mods.opcode}`: .{kind} is not supported by {inst.opcode}")
    return _DECODERS[inst.opcode](inst, b, mods, kind)


def _decode_arithmetic(inst: Instruction, b: Binder, mods: Modifiers, kind: str) -> Run:
    """add, sub, mul, fma and mad, which in f32 and f64 is fma."""
    narrow = mods.optional("f16", "bf16") if kind == "f32" and inst.opcode in ("add", "sub", "fma") else None
    needs_rounding = inst.opcode in ("fma", "mad")
    rounding = mods.one_of(*ROUNDINGS, default=None if needs_rounding else "rn")
    ftz = kind != "f64" and narrow is None and mods.take("ftz")
    saturate = kind == "f32" and mods.take("sat")
    mods.done()
    if kind == "f64":
        compute = _passing_nan(partial(_ARITHMETIC["f64"][inst.opcode], rounding=rounding), _NAN_ORDER[inst.opcode])
        return elementwise(inst, b, compute, kind, (kind,) * _SOURCES[inst.opcode])
    if inst.opcode == "mad" and kind == "f32x2":
        raise UnsupportedInstruction(f"`{mods.opcode}`: .f32x2 is not supported by mad: use fma")
    compute = partial(_ARITHMETIC["f32"][inst.opcode], rounding=rounding, ftz=ftz, saturate=saturate)
    if narrow is not None:
        return _mixed(inst, b, compute, narrow)
    if kind == "f32" and rounding == "rn" and not (ftz or saturate) and inst.opcode in _NEAREST:
        return _nearest(inst, b, _NEAREST[inst.opcode], 2)
    return elementwise(inst, b, _for_kind(_canonical(compute), kind), kind, (kind,) * _SOURCES[inst.opcode])


def _nearest(inst: Instruction, b: Binder, operation: np.ufunc, sources: int) -> Run:
    """f32 instructions that NumPy has: one call, and another to find NaN."""
    expect_operands(inst, 1 + sources)
    slots = [read_exact(b, operand, "f32") for operand in inst.operands[1:]]
    x, y = slots[0], slots[-1]
    d = b.write(inst.operands[0], "f32")

    def unary(f, m, cta) -> None:
        result = f[d]
        m.compute(operation, result, f[x])
        _replace_nan(result, m.where)

    def binary(f, m, cta) -> None:
        result = f[d]
        m.compute(operation, result, f[x], f[y])
        _replace_nan(result, m.where)

    return binary if sources == 2 else unary


def _replace_nan(result: Array, where: Array | bool) -> None:
    if has_nan(result):
        np.copyto(result, _NAN, where=np.isnan(result) & where)


def _mixed(inst: Instruction, b: Binder, compute: Compute, narrow: str) -> Run:
    """Factors, or the first term, are f16 or bf16 and the rest f32 (PTX ISA 9.7.5)."""
    widen, canonical = _WIDEN[narrow], _canonical(compute)
    if inst.opcode == "fma":
        return elementwise(inst, b, lambda x, y, z: canonical(widen(x), widen(y), z), "f32", (narrow, narrow, "f32"))
    return elementwise(inst, b, lambda x, y: canonical(widen(x), y), "f32", (narrow, "f32"))


def _decode_div(inst: Instruction, b: Binder, mods: Modifiers, kind: str) -> Run:
    if kind == "f64":
        divide: Compute = partial(arithmetic.div_f64, rounding=mods.one_of(*ROUNDINGS))
        compute = _passing_nan(divide, _NAN_ORDER["div"])
    else:
        method = mods.one_of("approx", "full", *ROUNDINGS)
        ftz = mods.take("ftz")
        divide = {
            "approx": partial(approximate.div_f32, ftz=ftz),
            "full": partial(approximate.div_full_f32, ftz=ftz),
        }.get(method) or partial(arithmetic.div_f32, rounding=method, ftz=ftz)
        compute = _canonical(divide)
    _refuse_pairs(mods, kind)
    return elementwise(inst, b, compute, kind, (kind, kind))


def _decode_root(inst: Instruction, b: Binder, mods: Modifiers, kind: str) -> Run:
    """rcp and sqrt, approximate or rounded."""
    method = mods.one_of("approx", *ROUNDINGS)
    if kind == "f64" and method == "approx":
        if inst.opcode == "sqrt":
            raise UnsupportedInstruction(f"`{mods.opcode}`: sqrt.f64 needs a rounding modifier, .approx is for .f32")
        mods.one_of("ftz")
        compute: Compute = approximate.rcp_upper_f64
    elif kind == "f64":
        compute = partial(_ROOTS[inst.opcode]["f64"], rounding=method)
    elif method == "approx":
        compute = _canonical(partial(_APPROXIMATE[inst.opcode], ftz=mods.take("ftz")))
    else:
        compute = _canonical(partial(_ROOTS[inst.opcode]["f32"], rounding=method, ftz=mods.take("ftz")))
    _refuse_pairs(mods, kind)
    return elementwise(inst, b, compute, kind, (kind,))


def _decode_approximate(inst: Instruction, b: Binder, mods: Modifiers, kind: str) -> Run:
    """rsqrt, sin, cos, lg2 and ex2."""
    mods.one_of("approx")
    ftz = mods.take("ftz")
    if kind == "f64" and inst.opcode == "rsqrt":
        compute: Compute = approximate.rsqrt_upper_f64 if ftz else approximate.rsqrt_f64
    elif kind == "f32":
        compute = _canonical(partial(_APPROXIMATE[inst.opcode], ftz=ftz))
    else:
        raise UnsupportedInstruction(f"`{mods.opcode}`: .{kind} is not supported by {inst.opcode}")
    mods.done()
    return elementwise(inst, b, compute, kind, (kind,))


def _decode_tanh(inst: Instruction, b: Binder, mods: Modifiers, kind: str) -> Run:
    mods.one_of("approx")
    if kind != "f32":
        raise UnsupportedInstruction(f"`{mods.opcode}`: .{kind} is not supported by tanh")
    mods.done()
    return elementwise(inst, b, _canonical(approximate.tanh_f32), kind, (kind,))


def _decode_sign(inst: Instruction, b: Binder, mods: Modifiers, kind: str) -> Run:
    """neg and abs. A NaN becomes the canonical one in f32 and stays as it is in f64 (measured on an H200)."""
    change: np.ufunc = {"neg": np.negative, "abs": np.abs}[inst.opcode]
    ftz = kind == "f32" and mods.take("ftz")
    _refuse_pairs(mods, kind)
    if kind == "f64":
        return elementwise(inst, b, _passing_nan(change, (0,)), kind, (kind,))
    if ftz:
        return elementwise(inst, b, _canonical(lambda x: change(flush_subnormals(x))), kind, (kind,))
    return _nearest(inst, b, change, 1)


def _decode_min_max(inst: Instruction, b: Binder, mods: Modifiers, kind: str) -> Run:
    select = {"min": minmax.minimum, "max": minmax.maximum}[inst.opcode]
    sources = expect_operands(inst, *((3, 4) if kind == "f32" else (3,))) - 1
    options = {}
    if kind == "f32":
        options = {"ftz": mods.take("ftz"), "propagate_nan": mods.take("NaN")}
        if sources == 3:
            options["absolute"] = mods.take("abs")
        elif mods.take("xorsign"):
            options["xorsign"] = True
            options["absolute"] = bool(mods.one_of("abs"))
    _refuse_pairs(mods, kind)
    compute = partial(select, **options)
    if kind == "f64":
        compute = _passing_nan(compute, _NAN_ORDER[inst.opcode])
    return elementwise(inst, b, compute, kind, (kind,) * sources)


def _decode_testp(inst: Instruction, b: Binder, mods: Modifiers, kind: str) -> Run:
    compute = _PROPERTIES[mods.one_of(*_PROPERTIES)]
    _refuse_pairs(mods, kind)
    return elementwise(inst, b, compute, "pred", (kind,))


def _decode_copysign(inst: Instruction, b: Binder, mods: Modifiers, kind: str) -> Run:
    _refuse_pairs(mods, kind)
    return elementwise(inst, b, lambda sign, size: np.copysign(size, sign), kind, (kind, kind))


def _refuse_pairs(mods: Modifiers, kind: str) -> None:
    mods.done()
    if kind == "f32x2":
        raise UnsupportedInstruction(f"`{mods.opcode}`: .f32x2 is supported by add, sub, mul and fma alone")


def _canonical(compute: Compute) -> Compute:
    """`compute` with NVIDIA's NaN, 0x7fffffff, in place of every NaN of its f32 result."""
    return lambda *arrays: canonical_nan(compute(*arrays))


def _passing_nan(compute: Compute, order: tuple[int, ...]) -> Compute:
    """f64 `compute` that passes on a NaN among its operands, the earlier in `order` (numbers of operands) first."""

    def run(*operands: Array) -> Array:
        return pass_nan_on(compute(*operands), *[operands[i] for i in order])

    return run


def _for_kind(compute: Compute, kind: str) -> Compute:
    return on_elements(compute, kind) if kind == "f32x2" else compute


def _is_subnormal(values: Array) -> Array:
    return (values != 0) & (np.abs(values) < np.finfo(values.dtype).tiny)


_DECODERS = {
    "add": _decode_arithmetic,
    "sub": _decode_arithmetic,
    "mul": _decode_arithmetic,
    "fma": _decode_arithmetic,
    "mad": _decode_arithmetic,
    "div": _decode_div,
    "rcp": _decode_root,
    "sqrt": _decode_root,
    "rsqrt": _decode_approximate,
    "sin": _decode_approximate,
    "cos": _decode_approximate,
    "lg2": _decode_approximate,
    "ex2": _decode_approximate,
    "tanh": _decode_tanh,
    "neg": _decode_sign,
    "abs": _decode_sign,
    "min": _decode_min_max,
    "max": _decode_min_max,
    "testp": _decode_testp,
    "copysign": _decode_copysign,
}
