"""Loads and stores (PTX ISA 9.7.9.8 to 9.7.9.12): state spaces, vectors, and the hints that change no value."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from common.emulator.faults import UnsupportedInstruction
from common.emulator.isa.binder import Binder, Modifiers, dtype_of, size_of
from common.emulator.isa.registry import Decoded, Run, instruction
from common.emulator.machine.counters import Traffic, traffic_of
from common.emulator.machine.memory import Piece, refuse_write
from common.emulator.ptx.module import Address, Immediate, Instruction, Operand, Sink, Symbol, Vector

SPACES = (
    "global",
    "const",
    "param",
    "param::entry",
    "param::func",
    "shared",
    "shared::cta",
    "shared::cluster",
    "local",
)
SCOPES = ("cta", "cluster", "gpu", "sys")
POLLING = frozenset(("volatile", "relaxed", "acquire", "mmio"))
TYPES = ("b8", "u8", "s8", "b16", "u16", "s16", "b32", "u32", "s32", "b64", "u64", "s64", "f32", "f64", "b128")
_WHOLE = {"f32": "u32", "f64": "u64"}
_EVICTION = ("evict_normal", "evict_unchanged", "evict_first", "evict_last", "no_allocate")
_HINTS = (
    "weak", "volatile", "relaxed", "mmio", *SCOPES, *(f"L1::{priority}" for priority in _EVICTION),
    "L2::evict_normal", "L2::evict_first", "L2::evict_last", "L2::cache_hint",
)  # fmt: skip
_LOAD_HINTS = ("acquire", "ca", "cg", "cs", "lu", "cv", "nc", "L2::64B", "L2::128B", "L2::256B", *_HINTS)
_STORE_HINTS = ("release", "wb", "cg", "cs", "wt", *_HINTS)
_VECTOR_BYTES = 16
_WIDE_VECTOR_BYTES = 32  # .v8 of 32-bit and .v4 of 64-bit elements, in global memory


class Access(NamedTuple):
    """Where an instruction reads or writes: state space, address slot, constant offset, and the size of what moves."""

    inst: Instruction
    space: str
    base: int | None
    offset: int
    element: int
    count: int

    @property
    def width(self) -> int:
        return self.element * self.count


def bind_address(b: Binder, operand: Operand, space: str) -> tuple[str, int | None, int]:
    """(space, slot of the base as s64 or None, constant offset) of `[base + offset]`.

    A `.param` access inside a function, or to the variables of a call, goes to the thread's local memory.
    """
    if not isinstance(operand, Address):
        raise UnsupportedInstruction(f"{operand} is not an address")
    if operand.items:
        raise UnsupportedInstruction("this address form is not supported here")
    if operand.base is None:
        return space, None, operand.offset
    if isinstance(operand.base, Symbol):
        where = b.space_of(operand.base)
        if where == "local_param" or (where == "param" and space == "local"):
            space = "local"
        return space, b.read(operand.base, "s64"), operand.offset
    if operand.base.bytes == 4:
        return space, b.read(operand.base, "u32"), operand.offset
    return space, b.read(operand.base, "s64"), operand.offset


def addresses_of(f: list, m, base: int | None, offset: int) -> np.ndarray:
    """Effective addresses of the active lanes, int64. A 32-bit base wraps around at 32 bits."""
    if base is None:
        return np.full(m.count, offset, np.int64)
    selected = f[base][m.index]
    if selected.dtype == np.int64:
        return selected + offset if offset else selected
    return (selected + np.uint32(offset & 0xFFFF_FFFF)).astype(np.int64)


def space_modifier(mods: Modifiers) -> str:
    """The state space an instruction names; none means generic addressing."""
    space = mods.optional(*SPACES)
    if space is None:
        return "generic"
    return {"param::entry": "param", "param::func": "param", "shared::cta": "shared"}.get(space, space)


def _vector(mods: Modifiers, operand: Operand, kind: str, space: str) -> tuple[Operand, ...]:
    count = mods.optional("v2", "v4", "v8")
    if count is None:
        return operand.items if isinstance(operand, Vector) and len(operand.items) == 1 else (operand,)
    if not isinstance(operand, Vector) or len(operand.items) != int(count[1:]):
        raise UnsupportedInstruction(f".{count} needs a vector of {count[1:]} operands")
    wide = space in ("global", "generic") and kind != "b128"
    if size_of(kind) * len(operand.items) > (_WIDE_VECTOR_BYTES if wide else _VECTOR_BYTES):
        raise UnsupportedInstruction(f".{count}.{kind} is too wide for {space} memory")
    return operand.items


def _hint_operand(inst: Instruction, mods_had_hint: bool, operands: int) -> None:
    if len(inst.operands) != operands + mods_had_hint:
        raise UnsupportedInstruction(f"{inst.opcode} with {len(inst.operands)} operands is not supported")


@instruction("ld", "ldu")
def decode_load(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    hint = "L2::cache_hint" in inst.modifiers
    space = space_modifier(mods)
    if inst.opcode == "ldu" and space not in ("global", "generic"):
        raise UnsupportedInstruction("ldu reads global memory only")
    # Hints change no value, and ordering adds nothing: the emulator's memory is sequentially consistent.
    mods.drop(*_LOAD_HINTS)
    kind = mods.one_of(*TYPES)
    targets = _vector(mods, inst.operands[0], kind, space)
    mods.done()
    _hint_operand(inst, hint, 2)
    space, base, offset = bind_address(b, inst.operands[1], space)
    if kind == "b128":
        return _load_wide(b, targets, Access(inst, space, base, offset, 8, 2))
    slots = [b.scratch(kind) if isinstance(t, Sink) else b.write_extended(t, _WHOLE.get(kind, kind)) for t in targets]
    access = Access(inst, space, base, offset, size_of(kind), len(slots))
    return load_into(access, slots, signed=kind.startswith("s"), polls=not POLLING.isdisjoint(inst.modifiers))


def load_into(access: Access, slots: list[int], *, signed: bool = False, polls: bool = False) -> Run:
    """A load whose elements go to `slots`, zero- or sign-extended to the register's width.

    `polls`: it may be how a loop waits for another thread's store, so it shortens the turn of the path.
    """
    inst, space, base, offset, element, count = access
    width = access.width
    traffic = traffic_of(inst, space, width, "load")
    source = dtype_of(("s" if signed else "u") + str(8 * element))
    label = f"{space} load"

    def load(f, m, cta) -> None:
        addresses = addresses_of(f, m, base, offset)
        pieces = cta.locate(space, addresses, width, m)
        cta.machine.counters.bytes[label] += width * m.count
        if traffic is not None:
            traffic.count(cta, pieces, m)
        if polls:
            cta.machine.polls += 1
        if len(pieces) == 1:
            values = pieces[0].region.view(element, count)[_row(pieces[0], width)]
        else:
            values = gather(pieces, element, count, m.count)
        if signed:
            values = values.view(source)
        if count == 1:
            f[slots[0]][m.index] = values
        else:
            for place, slot in enumerate(slots):
                f[slot][m.index] = values[:, place]

    return load


def _row(piece: Piece, width: int) -> np.ndarray:
    return piece.offsets >> (width.bit_length() - 1)


def gather(pieces: list[Piece], element: int, count: int, lanes: int) -> np.ndarray:
    """Reads an access that spans several regions: (lanes,) or (lanes, count) unsigned values."""
    shape = (lanes,) if count == 1 else (lanes, count)
    values = np.empty(shape, dtype_of(f"u{8 * element}"))
    for piece in pieces:
        values[piece.chosen] = piece.region.view(element, count)[_row(piece, element * count)]
    return values


def scatter(pieces: list[Piece], element: int, count: int, values: np.ndarray, m) -> None:
    """Writes (lanes,) or (lanes, count) unsigned values; of lanes that write one address, the highest wins."""
    for piece in pieces:
        if piece.region.read_only:
            refuse_write(piece.region, m.numbers[piece.chosen], int(piece.offsets[0]) + piece.region.base)
        piece.region.view(element, count)[_row(piece, element * count)] = values[piece.chosen]
        if piece.region.generic_writes is not None:
            piece.region.generic_writes.add(piece.offsets)


@instruction("st")
def decode_store(inst: Instruction, b: Binder) -> Decoded:
    if "async" in inst.modifiers or "bulk" in inst.modifiers:
        from common.emulator.isa.async_store import decode_async_store

        return decode_async_store(inst, b)
    mods = b.modifiers(inst)
    hint = "L2::cache_hint" in inst.modifiers
    space = space_modifier(mods)
    if space == "const":
        raise UnsupportedInstruction("stores to constant memory are illegal")
    mods.drop(*_STORE_HINTS)
    kind = mods.one_of(*TYPES)
    sources = _vector(mods, inst.operands[1], kind, space)
    mods.done()
    _hint_operand(inst, hint, 2)
    space, base, offset = bind_address(b, inst.operands[0], space)
    if kind == "b128":
        return _store_wide(b, sources, Access(inst, space, base, offset, 8, 2))
    bits = "u" + str(8 * size_of(kind))
    access = Access(inst, space, base, offset, size_of(kind), len(sources))
    slots = [None if isinstance(s, Sink) else b.read(s, kind if _is_float_literal(s, kind) else bits) for s in sources]
    if None not in slots:
        return store_from(access, slots)
    if access.width != _WIDE_VECTOR_BYTES:
        raise UnsupportedInstruction("a store leaves out elements (`_`) in the 256-bit forms only")
    return _store_some(access, slots)


def _is_float_literal(operand: Operand, kind: str) -> bool:
    """Whether a float literal is stored. `0f` in an .f64 store (`0d` in .f32) is refused: silicon stores bits."""
    if kind not in _WHOLE or not isinstance(operand, Immediate) or operand.kind == "int":
        return False
    if operand.kind != kind and not isinstance(operand.value, float):
        raise UnsupportedInstruction(f"st.{kind} of an {operand.kind} literal: write it in the width that is stored")
    return True


def store_from(access: Access, slots: list[int]) -> Run:
    """A store of the low `element` bytes of each slot."""
    inst, space, base, offset, element, count = access
    width = access.width
    traffic = traffic_of(inst, space, width, "store")
    bits = dtype_of(f"u{8 * element}")
    label = f"{space} store"
    observable = space != "local"

    def store(f, m, cta) -> None:
        addresses = addresses_of(f, m, base, offset)
        pieces = cta.locate(space, addresses, width, m)
        if count == 1:
            values = f[slots[0]][m.index].view(bits)
        else:
            values = np.empty((m.count, count), bits)
            for place, slot in enumerate(slots):
                values[:, place] = f[slot][m.index].view(bits)
        scatter(pieces, element, count, values, m)
        cta.machine.counters.bytes[label] += width * m.count
        if traffic is not None:
            traffic.count(cta, pieces, m)
        if observable:
            cta.machine.activity += 1

    return store


def _store_some(access: Access, slots: list[int | None]) -> Run:
    """A vector store that leaves memory as it is where a slot is None."""
    inst, space, base, offset, element, _ = access
    traffic = Traffic(inst, access.width, "store")
    bits = dtype_of(f"u{8 * element}")
    label = f"{space} store"

    def store(f, m, cta) -> None:
        pieces = cta.locate(space, addresses_of(f, m, base, offset), access.width, m)
        traffic.count(cta, pieces, m)
        for place, slot in enumerate(slots):
            if slot is not None:
                there = [piece._replace(offsets=piece.offsets + place * element) for piece in pieces]
                scatter(there, element, 1, f[slot][m.index].view(bits), m)
                cta.machine.counters.bytes[label] += element * m.count
        cta.activity()

    return store


def _load_wide(b: Binder, targets: tuple[Operand, ...], access: Access) -> Run:
    if len(targets) != 1:
        raise UnsupportedInstruction("vectors of .b128 are not supported")
    target = b.write(targets[0], "b128")
    inst, space, base, offset, *_ = access
    traffic = traffic_of(inst, space, access.width, "load")

    def load(f, m, cta) -> None:
        pieces = cta.locate(space, addresses_of(f, m, base, offset), 16, m)
        cta.machine.counters.bytes[f"{space} load"] += 16 * m.count
        if traffic is not None:
            traffic.count(cta, pieces, m)
        f[target][m.index] = gather(pieces, 8, 2, m.count)

    return load


def _store_wide(b: Binder, sources: tuple[Operand, ...], access: Access) -> Run:
    if len(sources) != 1:
        raise UnsupportedInstruction("vectors of .b128 are not supported")
    source = b.read(sources[0], "b128")
    inst, space, base, offset, *_ = access
    traffic = traffic_of(inst, space, access.width, "store")

    def store(f, m, cta) -> None:
        pieces = cta.locate(space, addresses_of(f, m, base, offset), 16, m)
        scatter(pieces, 8, 2, f[source][m.index], m)
        cta.machine.counters.bytes[f"{space} store"] += 16 * m.count
        if traffic is not None:
            traffic.count(cta, pieces, m)
        cta.activity()

    return store
