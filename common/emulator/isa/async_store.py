"""Asynchronous stores and reductions from registers, `st.async` and `red.async` (PTX ISA 9.7.9.12, 9.7.13.7), and
`st.bulk` (9.7.9.13).

One instruction makes one operation for all lanes that execute it; each lane signals its own mbarrier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from common.emulator.faults import Fault, InvalidAddress, Misaligned, UnsupportedInstruction
from common.emulator.hardware.reductions import Reduction, reduction
from common.emulator.isa.async_issue import (
    BARRIER_BYTES,
    COMPLETION,
    Issuer,
    SharedSpan,
    bind_pointer,
    constant_operand,
    per_lane,
    poisons,
    require_receiver,
    shared_span,
    signal,
)
from common.emulator.isa.binder import Binder, Modifiers, dtype_of, size_of
from common.emulator.isa.load_store import addresses_of, bind_address, scatter
from common.emulator.isa.registry import Decoded, Run
from common.emulator.machine.memory import SHARED_WINDOW, Piece, refuse_write
from common.emulator.ptx.module import Instruction, Operand, Vector

if TYPE_CHECKING:
    from common.emulator.machine.mask import Mask
    from common.emulator.machine.thread_block import ThreadBlock

SHARED_TYPES = ("b32", "b64", "u32", "u64", "s32", "s64", "f32", "f64")
GLOBAL_TYPES = ("b8", "b16", "u8", "u16", "s8", "s16", *SHARED_TYPES)
MAX_BULK_BYTES = 1 << 24
BULK_MULTIPLE = 8
_SHARED_REDUCTIONS = {
    "add": ("u32", "s32", "u64"),
    **dict.fromkeys(("min", "max"), ("u32", "s32")),
    **dict.fromkeys(("inc", "dec"), ("u32",)),
    **dict.fromkeys(("and", "or", "xor"), ("b32",)),
}
_GLOBAL_REDUCTIONS = {"add": ("u32", "s32", "u64", "s64")}


@dataclass(frozen=True)
class Destination:
    """Operands `[a]` and `[mbar]`: spaces, base slots and offsets. `barrier` is None without a completion mechanism."""

    space: str
    base: int | None
    offset: int
    barrier: tuple[int | None, int] | None

    def pieces(self, f: list, m: Mask, cta: ThreadBlock, width: int) -> list[Piece]:
        """Where the lanes write, checked to be shared memory of a cluster or global memory, as the form needs."""
        addresses = addresses_of(f, m, self.base, self.offset)
        pieces = cta.locate(self.space, addresses, width, m)
        for piece in pieces:
            if piece.region is cta.local or (owner_of(cta, piece) is None) != (self.barrier is None):
                raise InvalidAddress(f"address in {piece.region}, which this form does not write", lanes=m.numbers)
            if self.barrier is None:
                refuse_write(piece.region, m.numbers, piece.region.base + int(piece.offsets[0]))
        return pieces

    def barriers(self, f: list, m: Mask, cta: ThreadBlock) -> list[SharedSpan]:
        """The mbarrier of each active lane."""
        if self.barrier is None:
            return []
        spans: list[SharedSpan | None] = [None] * m.count
        for piece in cta.locate(self.space, addresses_of(f, m, *self.barrier), BARRIER_BYTES, m):
            block = owner_of(cta, piece)
            if block is None:
                raise InvalidAddress("an mbarrier must be in shared memory", lanes=m.numbers)
            for place, offset in zip(np.arange(m.count)[piece.chosen].tolist(), piece.offsets.tolist(), strict=True):
                spans[place] = SharedSpan(block, offset)
        return spans


def owner_of(cta: ThreadBlock, piece: Piece) -> ThreadBlock | None:
    """The CTA of the cluster whose shared memory a piece is in; None for other memory."""
    return next((block for block in cta.cluster.blocks if block.shared is piece.region), None)


def decode_async_store(inst: Instruction, b: Binder) -> Decoded:
    """`st.async` and `st.bulk`; called by the decoder of `st`."""
    return _decode_bulk(inst, b) if "bulk" in inst.modifiers else _decode_store(inst, b)


def _decode_store(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    mods.one_of("async")
    signals = mods.take(COMPLETION)
    count = 1
    if signals:
        mods.take("weak")
        mods.take("cluster")
        space = mods.one_of("shared::cluster", default="generic")
        count = int(mods.one_of("v2", "v4", default="v1")[1:])
        kind = mods.one_of(*SHARED_TYPES)
    else:
        space = _take_release(mods, "gpu", "sys")
        kind = mods.one_of(*GLOBAL_TYPES)
    mods.done()
    destination = _destination(inst, b, space, signals)
    values = inst.operands[1].items if isinstance(inst.operands[1], Vector) else (inst.operands[1],)
    if len(values) != count:
        raise UnsupportedInstruction(f"{len(values)} values for .v{count}")
    slots = [b.read(value, kind) for value in values]
    return _store(Issuer(inst), destination, slots, size_of(kind))


def _take_release(mods: Modifiers, *scopes: str) -> str:
    """Consumes what the form on global memory has; its state space."""
    system = mods.take("mmio")
    mods.one_of("release")
    scope = mods.one_of(*scopes)
    if system and scope != "sys":
        raise UnsupportedInstruction("`.mmio` needs scope .sys")
    return mods.one_of("global", default="generic")


def _destination(inst: Instruction, b: Binder, space: str, signals: bool) -> Destination:
    if len(inst.operands) != 2 + signals:
        raise UnsupportedInstruction(f"{len(inst.operands)} operands where this form has {2 + signals}")
    _, base, offset = bind_address(b, inst.operands[0], space)
    barrier = bind_address(b, inst.operands[2], space)[1:] if signals else None
    return Destination(space, base, offset, barrier)


def _store(issuer: Issuer, destination: Destination, slots: list[int], element: int) -> Run:
    width = element * len(slots)
    bits = dtype_of(f"u{8 * element}")

    def store(f, m, cta) -> None:
        pieces = destination.pieces(f, m, cta, width)
        barriers = destination.barriers(f, m, cta)
        _check_same_block(cta, pieces, barriers, m)
        values = np.stack([f[slot][m.index].view(bits) for slot in slots], axis=-1)
        values = values if len(slots) > 1 else values[:, 0]
        if poisons(cta):
            scatter(pieces, element, len(slots), np.full_like(values, bits.type(-1 & (1 << 8 * element) - 1)), m)

        def complete() -> None:
            _require_receivers(cta, pieces)
            scatter(pieces, element, len(slots), values, m)
            for barrier in barriers:
                signal(barrier, width)

        issuer(cta, m, "st.async", [complete], f"{m.count} stores of {width} bytes")
        cta.machine.counters.bytes["asynchronous store"] += width * m.count

    return store


def _check_same_block(cta: ThreadBlock, pieces: list[Piece], barriers: list[SharedSpan], m: Mask) -> None:
    if not barriers:
        return
    for piece in pieces:
        block = owner_of(cta, piece)
        for place in np.arange(m.count)[piece.chosen].tolist():
            if barriers[place].block is not block:
                raise InvalidAddress("the destination and its mbarrier must be in one CTA", lanes=[m.numbers[place]])


def _require_receivers(cta: ThreadBlock, pieces: list[Piece]) -> None:
    for piece in pieces:
        block = owner_of(cta, piece)
        if block is not None:
            require_receiver(block, "an asynchronous store")


def decode_async_reduction(inst: Instruction, b: Binder) -> Decoded:
    """`red.async`; called by the decoder of `red`."""
    mods = b.modifiers(inst)
    mods.one_of("async")
    signals = mods.take("relaxed")
    if signals:
        mods.one_of("cluster")
        mods.take(COMPLETION)
        space, table = mods.one_of("shared::cluster", default="generic"), _SHARED_REDUCTIONS
    else:
        space, table = _take_release(mods, "cluster", "gpu", "sys"), _GLOBAL_REDUCTIONS
    op = mods.one_of(*table)
    kind = mods.one_of(*table[op])
    mods.done()
    destination = _destination(inst, b, space, signals)
    combine = reduction(op, "u64" if kind == "s64" else kind)  # s64 is only added here, which the sign does not change
    return _reduce(Issuer(inst), destination, b.read(inst.operands[1], kind), size_of(kind), combine)


def _reduce(issuer: Issuer, destination: Destination, slot: int, width: int, combine: Reduction) -> Run:
    def reduce(f, m, cta) -> None:
        pieces = destination.pieces(f, m, cta, width)
        barriers = destination.barriers(f, m, cta)
        _check_same_block(cta, pieces, barriers, m)
        values = np.array(f[slot][m.index]).view(np.uint8).reshape(m.count, width)

        def complete() -> None:
            _require_receivers(cta, pieces)
            for piece in pieces:
                for offset, value in zip(piece.offsets.tolist(), values[piece.chosen], strict=True):
                    combine(piece.region.data[offset : offset + width], value)
            for barrier in barriers:
                signal(barrier, width)

        issuer(cta, m, "red.async", [complete], f"{m.count} reductions of {width} bytes")
        cta.machine.counters.bytes["asynchronous reduction"] += width * m.count

    return reduce


def _decode_bulk(inst: Instruction, b: Binder) -> Decoded:
    """`st.bulk`: zeros into the CTA's shared memory."""
    mods = b.modifiers(inst)
    mods.one_of("bulk")
    mods.take("weak")
    space = mods.one_of("shared::cta", default="generic")
    mods.done()
    target, size, initial = inst.operands
    if constant_operand(initial) != 0:
        raise UnsupportedInstruction("st.bulk writes zeros only")
    pointer, count = bind_pointer(b, target, space), b.read(size, _size_kind(size))

    def store(f, lane, cta) -> None:
        length = int(f[count][lane])
        if length % BULK_MULTIPLE:
            raise Misaligned(f"st.bulk of {length} bytes: the size must be a multiple of {BULK_MULTIPLE}", lanes=[lane])
        if length > MAX_BULK_BYTES:
            raise Fault(f"st.bulk of {length} bytes: the size is at most {MAX_BULK_BYTES}", lanes=[lane])
        address = pointer(f, lane) - (SHARED_WINDOW if space == "generic" else 0)
        span = shared_span(cta, address, length, BULK_MULTIPLE, lane, own=True)
        span.bytes(length)[...] = 0
        cta.machine.counters.bytes["shared store"] += length
        cta.activity()

    return per_lane(store)


def _size_kind(operand: Operand) -> str:
    return "u32" if getattr(operand, "bytes", 8) == 4 else "u64"
