"""Conversions: `cvt` (PTX ISA 9.7.9.21) of single numbers, and `cvt.pack` (9.7.9.22).

`cvt` to or from registers that hold several small floats is in `convert_packed`.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from common.emulator.isa import convert_packed
from common.emulator.isa.binder import Binder, Modifiers, dtype_of, size_of
from common.emulator.isa.elementwise import (
    INTEGERS,
    Array,
    Compute,
    expect_operands,
    read_relaxed,
    unary,
    write_relaxed,
)
from common.emulator.isa.registry import Run, instruction
from common.emulator.numerics import formats
from common.emulator.numerics.formats import bf16_from_f32, encode, f32_from_bf16
from common.emulator.numerics.modifiers import canonical_nan, flush_subnormals, saturate
from common.emulator.numerics.rounding import (
    f32_from_f64,
    float_from_integer,
    integer_from_float,
    to_integral,
)
from common.emulator.ptx.module import Instruction

FLOATS = ("f16", "bf16", "f32", "f64")
SCALARS = INTEGERS + FLOATS
FLOAT_ROUNDINGS = ("rn", "rz", "rm", "rp")
INTEGER_ROUNDINGS = ("rni", "rzi", "rmi", "rpi")

# Pairs (to, from) in which every value of the second is one of the first.
_WIDENING = {("f32", "f16"), ("f32", "bf16"), ("f64", "f16"), ("f64", "bf16"), ("f64", "f32")}
_BELOW_TF32, _HALF_TF32 = np.uint32(0x1FFF), np.uint32(0x1000)  # the bits of f32 that tf32 has not, and their middle
_INFINITY = np.uint32(0x7F800000)
_PACK_BITS = {"u16": 16, "s16": 16, "u8": 8, "s8": 8, "u4": 4, "s4": 4, "u2": 2, "s2": 2}


@instruction("cvt", lanewise=True)
def decode_cvt(inst: Instruction, b: Binder) -> Run:
    """Closure of a conversion.

    Raises UnsupportedInstruction for types, roundings and other modifiers that the ISA does not allow together.
    """
    mods = b.modifiers(inst)
    if mods.take("pack"):
        return _decode_pack(inst, b, mods)
    types = (*SCALARS, "tf32", *convert_packed.TYPES)
    to, source = mods.one_of(*types), mods.one_of(*types)
    if to in SCALARS and source in SCALARS:
        return _decode_scalar(inst, b, mods, to, source)
    if (to, source) == ("tf32", "f32"):
        return _decode_tf32(inst, b, mods)
    return convert_packed.decode_packed(inst, b, mods, to, source)


def _decode_scalar(inst: Instruction, b: Binder, mods: Modifiers, to: str, source: str) -> Run:
    expect_operands(inst, 2)
    if source in INTEGERS:
        choose = _integer_to_integer if to in INTEGERS else _integer_to_float
    else:
        choose = _float_to_integer if to in INTEGERS else _float_to_float
    compute = choose(mods, to, source)
    mods.done()
    x = read_relaxed(b, inst.operands[1], source, source)
    d, wider = write_relaxed(b, inst.operands[0], to, to)
    if compute is None:
        return unary(lambda values: values.astype(dtype_of(to)), d, x) if wider else _assign(d, x)
    if wider and to in FLOATS:
        bits = dtype_of(f"u{8 * size_of(to)}")
        return unary(lambda values: compute(values).view(bits), d, x)
    return unary(compute, d, x)


def _assign(d: int, x: int) -> Run:
    def run(f, m, cta) -> None:
        np.copyto(f[d], f[x], casting="unsafe", where=m.where)

    return run


def _integer_to_integer(mods: Modifiers, to: str, source: str) -> Compute | None:
    """None without saturation: then NumPy's assignment extends or wraps as `cvt` does."""
    from_type, to_type = dtype_of(source), dtype_of(to)
    have, fits = np.iinfo(from_type), np.iinfo(to_type)
    low, high = max(have.min, fits.min), min(have.max, fits.max)
    if (low, high) == (have.min, have.max) or not mods.take("sat"):
        return None
    low, high = from_type.type(low), from_type.type(high)
    return lambda values: np.clip(values, low, high).astype(to_type)


def _integer_to_float(mods: Modifiers, to: str, source: str) -> Compute:
    rounding = mods.one_of(*FLOAT_ROUNDINGS)
    if to == "f32":
        mods.take("ftz")  # no integer is subnormal
    convert = partial(float_from_integer, kind=to, rounding=rounding)
    if to != "bf16" and mods.take("sat"):
        return lambda values: saturate(convert(values))
    return convert


def _float_to_integer(mods: Modifiers, to: str, source: str) -> Compute:
    rounding, to_type = mods.one_of(*INTEGER_ROUNDINGS), dtype_of(to).type
    if source == "bf16":
        return lambda bits: integer_from_float(f32_from_bf16(bits), to_type, rounding)
    mods.take("sat")  # the result is clamped in any case
    if source == "f32" and mods.take("ftz"):
        return lambda values: integer_from_float(flush_subnormals(values), to_type, rounding)
    return lambda values: integer_from_float(values, to_type, rounding)


def _float_to_float(mods: Modifiers, to: str, source: str) -> Compute:
    """NaN payloads follow an H200 where the ISA leaves them open."""
    ftz = "f32" in (to, source) and mods.take("ftz")
    clamp = "bf16" not in (to, source) and mods.take("sat")
    if to == source:
        convert = _same_type(mods, to)
    elif (to, source) in _WIDENING:
        convert = _widening(mods, to, source)
    else:
        convert = _narrowing(mods, to, source, plain=ftz or clamp)
    steps = [convert]
    # To f16 the chip has no flushing conversion: ptxas generates the same instruction with .ftz as without.
    if ftz and source == "f32" and to != "f16":
        steps.insert(0, _flushed)
    if ftz and to == "f32":
        steps.append(flush_subnormals if source == "f64" else _flushed)
    if clamp:
        steps.append(saturate)
    return steps[0] if len(steps) == 1 else partial(_chain, steps)


def _chain(steps: list[Compute], values: Array) -> Array:
    for step in steps:
        values = step(values)
    return values


def _flushed(values: Array) -> Array:
    return canonical_nan(flush_subnormals(values))


def _same_type(mods: Modifiers, kind: str) -> Compute:
    rounding = mods.optional(*INTEGER_ROUNDINGS)
    if kind == "bf16":
        if rounding is None:
            return lambda bits: bf16_from_f32(f32_from_bf16(bits))
        return lambda bits: bf16_from_f32(to_integral(f32_from_bf16(bits), rounding))
    if rounding is None:
        return canonical_nan if kind == "f16" else lambda values: values
    if kind == "f64":
        return partial(to_integral, rounding=rounding)
    return lambda values: canonical_nan(to_integral(values, rounding))


def _widening(mods: Modifiers, to: str, source: str) -> Compute:
    wide = dtype_of(to)
    if source == "bf16":
        mods.optional(*FLOAT_ROUNDINGS)  # the ISA's own example has one, though nothing is rounded
        return f32_from_bf16 if to == "f32" else lambda bits: f32_from_bf16(bits).astype(wide)
    if to == "f32":
        return lambda values: canonical_nan(values.astype(wide))
    if source == "f16":
        return lambda values: values.astype(np.float32).astype(wide)  # by way of f32, a signalling NaN becomes quiet
    return lambda values: values.astype(wide)


def _narrowing(mods: Modifiers, to: str, source: str, plain: bool) -> Compute:
    """Floats to fewer bits of precision or, between f16 and bf16, to another range.

    `plain` excludes .relu and .satfinite. A rounding is mandatory, except that between f16 and bf16 ptxas accepts none
    and generates the instruction of rn.
    """
    default = "rn" if {to, source} == {"f16", "bf16"} else None
    rounding = mods.one_of(*FLOAT_ROUNDINGS, default=default)
    if to == "f32":
        return partial(f32_from_f64, rounding=rounding)
    if source == "f64":
        return partial(_half_from_f64, to, rounding)
    options = {}
    if source == "f32" and rounding in ("rn", "rz") and not plain:
        options = {"relu": mods.take("relu"), "saturate_finite": mods.take("satfinite")}
    narrow = convert_packed.narrow_to_half(to, rounding, **options)
    return (lambda bits: narrow(f32_from_bf16(bits))) if source == "bf16" else narrow


def _half_from_f64(to: str, rounding: str, values: Array) -> Array:
    """f64 to f16 or bf16: a NaN keeps its sign and the top of its payload, and becomes quiet."""
    bits = encode(formats.FORMATS[to], values, rounding)
    invalid = np.isnan(values)
    if invalid.any():
        single = values[invalid].astype(np.float32).view(np.uint32)
        sign, payload = single >> 16 & 0x8000, single & 0x7FFFFF
        bits[invalid] = sign | (0x7C00 | payload >> 13 if to == "f16" else 0x7F80 | payload >> 16)
    return bits.view(np.float16) if to == "f16" else bits


def _decode_tf32(inst: Instruction, b: Binder, mods: Modifiers) -> Run:
    expect_operands(inst, 2)
    rounding = mods.one_of("rn", "rz", "rna")
    saturate_finite, relu = mods.take("satfinite"), rounding != "rna" and mods.take("relu")
    mods.done()
    if rounding == "rna":
        compute: Compute = partial(_tf32_rounded_away, saturate_finite=saturate_finite)
    else:
        compute = partial(encode, formats.TF32, rounding=rounding, saturate_finite=saturate_finite, relu=relu)
    x = read_relaxed(b, inst.operands[1], "f32", "f32")
    d, _ = write_relaxed(b, inst.operands[0], "u32", "tf32")
    return unary(compute, d, x)


def _tf32_rounded_away(values: Array, saturate_finite: bool) -> Array:
    """f32 to tf32 by integer arithmetic, as ptxas has it done for sm_90 and sm_100: NaNs are cut off like numbers."""
    bits = (values.view(np.uint32) + _HALF_TF32 * np.isfinite(values)) & ~_BELOW_TF32
    if saturate_finite:
        bits -= (_BELOW_TF32 + np.uint32(1)) * (bits & _INFINITY >= _INFINITY)
    return bits


def _decode_pack(inst: Instruction, b: Binder, mods: Modifiers) -> Run:
    """`cvt.pack`: two s32 clamped to 16, 8, 4 or 2 bits at the bottom of a register; above, the low bits of a third."""
    mods.one_of("sat")
    to = mods.one_of(*_PACK_BITS)
    mods.one_of("s32")
    bits = _PACK_BITS[to]
    if bits < 16:
        mods.one_of("b32")
    mods.done()
    expect_operands(inst, 3 if bits == 16 else 4)
    x, y = (b.read(operand, "s32") for operand in inst.operands[1:3])
    rest = b.read(inst.operands[3], "b32") if bits < 16 else None
    d = b.write(inst.operands[0], "u32")
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if to.startswith("s") else (0, (1 << bits) - 1)
    field, shift = np.uint32((1 << bits) - 1), np.uint32(bits)

    def clamped(values: Array) -> Array:
        return np.clip(values, low, high).view(np.uint32) & field

    def run(f, m, cta) -> None:
        result = clamped(f[x]) << shift | clamped(f[y])
        if rest is not None:
            result |= f[rest] << shift * np.uint32(2)
        np.copyto(f[d], result, where=m.where)

    return run
