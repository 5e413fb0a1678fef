"""`cvt` to and from registers that hold several small floats (PTX ISA 9.7.9.21, 5.2.3 and 5.2.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from common.emulator.faults import UnsupportedInstruction
from common.emulator.isa.binder import Binder, Modifiers, dtype_of
from common.emulator.isa.elementwise import (
    Array,
    Compute,
    expect_operands,
    read_relaxed,
    unary,
    write_relaxed,
)
from common.emulator.isa.registry import Run
from common.emulator.numerics import formats
from common.emulator.numerics.formats import FloatFormat, bf16_from_f32, decode, encode
from common.emulator.numerics.modifiers import canonical_nan
from common.emulator.ptx.module import Instruction, Operand, Vector


@dataclass(frozen=True)
class Packed:
    """Several numbers in one register: their format, how many, the bits that each takes, the register's PTX type.

    `element` is None for s2f6, which is no floating-point format.
    """

    element: FloatFormat | None
    count: int
    bits: int
    storage: str


PACKED = {
    "f16x2": Packed(formats.F16, 2, 16, "u32"),
    "bf16x2": Packed(formats.BF16, 2, 16, "u32"),
    "e4m3x2": Packed(formats.E4M3, 2, 8, "u16"),
    "e5m2x2": Packed(formats.E5M2, 2, 8, "u16"),
    "e2m3x2": Packed(formats.E2M3, 2, 8, "u16"),
    "e3m2x2": Packed(formats.E3M2, 2, 8, "u16"),
    "e2m1x2": Packed(formats.E2M1, 2, 4, "u8"),
    "ue8m0x2": Packed(formats.UE8M0, 2, 8, "u16"),
    "s2f6x2": Packed(None, 2, 8, "u16"),
    "e4m3x4": Packed(formats.E4M3, 4, 8, "u32"),
    "e5m2x4": Packed(formats.E5M2, 4, 8, "u32"),
    "e2m3x4": Packed(formats.E2M3, 4, 8, "u32"),
    "e3m2x4": Packed(formats.E3M2, 4, 8, "u32"),
    "e2m1x4": Packed(formats.E2M1, 4, 4, "u16"),
}
TYPES = tuple(PACKED)
HALVES = ("f16x2", "bf16x2")
SMALL_PAIRS = ("e4m3x2", "e5m2x2", "e2m3x2", "e3m2x2", "e2m1x2")
QUADS = tuple(name for name in TYPES if PACKED[name].count == 4)

_SCALE = "scaled::n2::ue8m0"
_UNIT_FACTORS = 0x7F7F  # two ue8m0 ones, which stand in for a missing scale factor
_S2F6_UNIT = 2.0**-6


def decode_packed(inst: Instruction, b: Binder, mods: Modifiers, to: str, source: str) -> Run:
    """Closure of a conversion in which at least one type is of `TYPES`; the two types are no longer in `mods`.

    Raises UnsupportedInstruction for types, roundings and other modifiers that the ISA does not allow together.
    """
    if source == "f32" and to == "s2f6x2" or (to, source) == ("s2f6x2", "bf16x2"):
        return _to_fixed(inst, b, mods, source)
    if (to, source) == ("bf16x2", "s2f6x2"):
        return _from_fixed(inst, b, mods)
    if source == "f32" and to in PACKED:
        return _join(inst, b, mods, to)
    if source in HALVES and to in SMALL_PAIRS or (to, source) == ("ue8m0x2", "bf16x2"):
        return _repack(inst, b, mods, to, source)
    if to == "f16x2" and source in SMALL_PAIRS or (to, source) == ("bf16x2", "ue8m0x2"):
        return _widen(inst, b, mods, to, source)
    raise UnsupportedInstruction(f"`{mods.opcode}`: there is no conversion from .{source} to .{to}")


def narrow_to_half(to: str, rounding: str, relu: bool = False, saturate_finite: bool = False) -> Compute:
    """Function from float arrays to float16 (`to` is "f16") or bf16 bits ("bf16"); the usual cases take a short way."""
    plain = rounding == "rn" and not (relu or saturate_finite)
    if to == "f16" and plain:
        return lambda values: canonical_nan(values.astype(np.float16))
    fmt = formats.FORMATS[to]

    def narrow(values: Array) -> Array:
        if plain and values.dtype == np.float32:
            return bf16_from_f32(values)
        return encode(fmt, values, rounding, saturate_finite=saturate_finite, relu=relu)

    return narrow if to == "bf16" else lambda values: narrow(values).view(np.float16)


def _join(inst: Instruction, b: Binder, mods: Modifiers, to: str) -> Run:
    """Two or four f32 to one register; the first source goes to the top."""
    packed = PACKED[to]
    stochastic = to in _SHARES and mods.take("rs")
    narrow = _narrow_elements(mods, to, "rs" if stochastic else _rounding(mods, to))
    mods.done()
    vector = packed.count == 4
    expect_operands(inst, (2 if vector else 3) + stochastic)
    numbers = _items(inst.operands[1], 4) if vector else inst.operands[1:3]
    slots = _read_numbers(b, numbers)
    d, _ = write_relaxed(b, inst.operands[0], packed.storage, to)
    if stochastic:
        share, random = _SHARES[to], read_relaxed(b, inst.operands[-1], "u32", "u32")

        def run(f, m, cta) -> None:
            elements = narrow(_columns(f, slots), random_bits=share(f[random]))
            np.copyto(f[d], _pack(elements, packed), where=m.where)
    else:

        def run(f, m, cta) -> None:
            np.copyto(f[d], _pack(narrow(_columns(f, slots)), packed), where=m.where)

    return run


def _repack(inst: Instruction, b: Binder, mods: Modifiers, to: str, source: str) -> Run:
    """f16x2 or bf16x2 to two smaller floats."""
    wide, small = PACKED[source], PACKED[to]
    narrow = _narrow_elements(mods, to, _rounding(mods, to))
    mods.done()
    expect_operands(inst, 2)
    x = read_relaxed(b, inst.operands[1], wide.storage, source)
    d, _ = write_relaxed(b, inst.operands[0], small.storage, to)
    return unary(lambda registers: _pack(narrow(decode(wide.element, _unpack(registers, wide))), small), d, x)


def _widen(inst: Instruction, b: Binder, mods: Modifiers, to: str, source: str) -> Run:
    """Two small floats to f16x2, or two ue8m0 to bf16x2: nothing is rounded, and one table holds all results."""
    small, wide = PACKED[source], PACKED[to]
    mods.one_of("rn")
    relu = to == "f16x2" and mods.take("relu")
    mods.done()
    expect_operands(inst, 2)
    table = encode(wide.element, decode(small.element, np.arange(256, dtype=np.uint8)), relu=relu)
    x = read_relaxed(b, inst.operands[1], small.storage, source)
    d, _ = write_relaxed(b, inst.operands[0], wide.storage, to)
    return unary(lambda registers: _pack(table[_unpack(registers, small)], wide), d, x)


def _rounding(mods: Modifiers, to: str) -> str:
    if to in QUADS:
        raise UnsupportedInstruction(f"`{mods.opcode}`: a conversion to .{to} needs .rs")
    if to == "ue8m0x2":
        return mods.one_of("rz", "rp")
    return mods.one_of("rn", "rz") if to in HALVES else mods.one_of("rn")


def _narrow_elements(mods: Modifiers, to: str, rounding: str) -> Compute:
    """Function from float arrays to the bits of elements of `to`; it needs `random_bits` when `rounding` is rs."""
    relu = to != "ue8m0x2" and mods.take("relu")
    saturate_finite = mods.take("satfinite")
    if not saturate_finite and to not in (*HALVES, "ue8m0x2"):
        raise UnsupportedInstruction(f"`{mods.opcode}`: a conversion to .{to} needs .satfinite")
    if to in HALVES and rounding != "rs":
        narrow = narrow_to_half(to.removesuffix("x2"), rounding, relu, saturate_finite)
        return lambda values: narrow(values).view(np.uint16)
    options = {"saturate_finite": saturate_finite, "relu": relu, "random_width": _RANDOM_WIDTHS.get(to, 0)}
    return partial(encode, PACKED[to].element, rounding=rounding, **options)


def _to_fixed(inst: Instruction, b: Binder, mods: Modifiers, source: str) -> Run:
    """f32 or bf16x2 to s2f6x2, signed bytes that count sixty-fourths, after division by the factors."""
    mods.one_of("rn")
    mods.one_of("satfinite")
    relu, scaled = mods.take("relu"), mods.take(_SCALE)
    mods.done()
    numbers = 2 if source == "f32" else 1
    expect_operands(inst, 1 + numbers + scaled)
    scale = _read_factors(inst, b, scaled)
    if source == "f32":
        slots = _read_numbers(b, inst.operands[1:3])
    else:
        slots = [read_relaxed(b, inst.operands[1], "u32", source)]
    d, _ = write_relaxed(b, inst.operands[0], "u16", "s2f6x2")

    def run(f, m, cta) -> None:
        if source == "f32":
            values = _columns(f, slots).astype(np.float64)
        else:
            values = decode(formats.BF16, _unpack(f[slots[0]], PACKED[source]))
        units = np.rint(values / (_factors(f[scale]) * _S2F6_UNIT))
        clamped = np.where(np.isnan(units), 127, np.clip(units, 0 if relu else -128, 127))
        np.copyto(f[d], _pack(clamped.astype(np.int8), PACKED["s2f6x2"]), where=m.where)

    return run


def _from_fixed(inst: Instruction, b: Binder, mods: Modifiers) -> Run:
    """s2f6x2 to bf16x2, times the factors."""
    mods.one_of("rn")
    narrow = partial(encode, formats.BF16, saturate_finite=mods.take("satfinite"), relu=mods.take("relu"))
    scaled = mods.take(_SCALE)
    mods.done()
    expect_operands(inst, 2 + scaled)
    scale = _read_factors(inst, b, scaled)
    x = read_relaxed(b, inst.operands[1], "u16", "s2f6x2")
    d, _ = write_relaxed(b, inst.operands[0], "u32", "bf16x2")

    def run(f, m, cta) -> None:
        values = _unpack(f[x], PACKED["s2f6x2"]).view(np.int8) * _S2F6_UNIT
        np.copyto(f[d], _pack(narrow(values * _factors(f[scale])), PACKED["bf16x2"]), where=m.where)

    return run


def _read_factors(inst: Instruction, b: Binder, scaled: bool) -> int:
    """Slot of the operand `scale-factor`, the last one, or of its default."""
    return read_relaxed(b, inst.operands[-1], "u16", "ue8m0x2") if scaled else b.constant(_UNIT_FACTORS, "u16")


def _factors(registers: Array) -> Array:
    return decode(formats.UE8M0, _unpack(registers, PACKED["ue8m0x2"]))


def _items(operand: Operand, count: int) -> tuple[Operand, ...]:
    if not isinstance(operand, Vector) or len(operand.items) != count:
        raise UnsupportedInstruction(f"operand {operand} must be a vector of {count}")
    return operand.items


def _read_numbers(b: Binder, operands: Sequence[Operand]) -> list[int]:
    """Slots of f32 sources, the one for the lowest element first."""
    return [read_relaxed(b, operand, "f32", "f32") for operand in reversed(operands)]


def _columns(f: list, slots: list[int]) -> Array:
    """The f32 slots as one array (L, n). As everywhere here, there may be further axes in front."""
    values = np.empty((*np.broadcast_shapes(*(f[slot].shape for slot in slots)), len(slots)), np.float32)
    for column, slot in enumerate(slots):
        values[..., column] = f[slot]
    return values


def _pack(elements: Array, packed: Packed) -> Array:
    """(L, n) elements, the lowest first, to (L,) registers."""
    if packed.bits == 4:
        elements = elements[..., 0::2] | elements[..., 1::2] << np.uint8(4)
    return elements.view(dtype_of(packed.storage))[..., 0]


def _unpack(registers: Array, packed: Packed) -> Array:
    """(L,) registers of two elements to (L, 2), the lower one first."""
    if packed.bits == 4:
        return np.stack((registers & np.uint8(15), registers >> np.uint8(4)), axis=-1)
    element = dtype_of(f"u{packed.bits}")
    return np.ascontiguousarray(registers).view(element).reshape(*registers.shape, 2)


def _share_f16(random: Array) -> Array:
    return np.stack((random & 0x1FFF, random >> 16 & 0x1FFF), axis=-1)


def _share_bf16(random: Array) -> Array:
    return np.stack((random & 0xFFFF, random >> 16), axis=-1)


def _share_bytes(random: Array) -> Array:
    low, high = random & 0xFFFF, random >> 16
    return np.stack((low, low, high, high), axis=-1)


def _share_nibbles(random: Array) -> Array:
    """The lower byte of each half of the register serves the two elements at the bottom, the upper bytes the others."""
    low = (random >> 8 & 0xFF00) | (random & 0xFF)
    high = (random >> 16 & 0xFF00) | (random >> 8 & 0xFF)
    return np.stack((low, low, high, high), axis=-1)


# `.rs`: how the elements, lowest first, share the random bits of one register, and how many each gets. The ISA says
# which bits serve which elements; that all 16 of them count for elements of 8 bits and fewer is our reading.
_SHARES: dict[str, Compute] = {
    "f16x2": _share_f16,
    "bf16x2": _share_bf16,
    "e4m3x4": _share_bytes,
    "e5m2x4": _share_bytes,
    "e2m3x4": _share_bytes,
    "e3m2x4": _share_bytes,
    "e2m1x4": _share_nibbles,
}
_RANDOM_WIDTHS = {name: 13 if name == "f16x2" else 16 for name in _SHARES}
