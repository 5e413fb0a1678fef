"""`cp.async`, small asynchronous copies from global to shared memory (PTX ISA 9.7.9.25.3), and the table of all `cp`.

One instruction makes one operation for all lanes that execute it; groups are kept per thread. Copies that are in flight
when their CTA exits complete all the same: its shared memory goes to nobody else here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from common.emulator.faults import Fault, InvalidAddress, UnsupportedInstruction
from common.emulator.isa.async_issue import (
    BARRIER_BYTES,
    Issuer,
    bind_options,
    constant_operand,
    decode_group_instruction,
    poisons,
    take_cache_hint,
)
from common.emulator.isa.binder import Binder
from common.emulator.isa.bulk_copy import decode_bulk_copy, decode_bulk_prefetch, decode_bulk_reduction
from common.emulator.isa.load_store import addresses_of, bind_address, gather, space_modifier
from common.emulator.isa.registry import Decoded, Decoder, instruction
from common.emulator.isa.tensor_copy import decode_tensor_copy, decode_tensor_prefetch, decode_tensor_reduction
from common.emulator.machine import mbarrier
from common.emulator.machine.async_groups import BulkGroups, CopyGroups
from common.emulator.machine.counters import Traffic
from common.emulator.machine.mask import Mask
from common.emulator.machine.memory import Piece, check_alignment
from common.emulator.ptx.module import Instruction, Register

if TYPE_CHECKING:
    from common.emulator.machine.thread_block import ThreadBlock

_ELEMENTS = {4: (4, 1), 8: (8, 1), 16: (8, 2)}  # copy size -> (bytes of an element, elements): see Region.view


@instruction("cp")
def decode_copy(inst: Instruction, b: Binder) -> Decoded:
    mods = set(inst.modifiers)
    if "async" not in mods:
        raise UnsupportedInstruction("`cp` without .async is not supported")
    if mods & {"commit_group", "wait_group", "wait_all"}:
        return decode_group_instruction(inst, b, BulkGroups if "bulk" in mods else CopyGroups)
    return _family(mods)(inst, b)


def _family(mods: set[str]) -> Decoder:
    if "bulk" in mods:
        if "prefetch" in mods:
            return decode_tensor_prefetch if "tensor" in mods else decode_bulk_prefetch
        if "reduce" in mods:
            return decode_tensor_reduction if "tensor" in mods else decode_bulk_reduction
        return decode_tensor_copy if "tensor" in mods else decode_bulk_copy
    return _decode_arrive if "mbarrier" in mods else _decode_small_copy


def _decode_small_copy(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    mods.take("async")
    cache = mods.one_of("ca", "cg")
    mods.one_of("shared", "shared::cta")
    mods.one_of("global")
    mods.optional("L2::64B", "L2::128B", "L2::256B")
    policy = take_cache_hint(mods)
    mods.done()
    size = constant_operand(inst.operands[2])
    if size not in _ELEMENTS or (cache == "cg" and size != 16):
        raise UnsupportedInstruction(f"cp.async.{cache} of {size} bytes: the size is 4, 8 or 16, with .cg 16")
    extra = inst.operands[3:]
    count = None
    if len(extra) > (policy is not None):
        ignores = isinstance(extra[0], Register) and extra[0].type == "pred"
        count = "pred" if ignores else "u32"
    limit, _ = bind_options(b, extra, count, policy)
    _, target, target_offset = bind_address(b, inst.operands[0], "shared")
    _, source, source_offset = bind_address(b, inst.operands[1], "global")
    issuer = Issuer(inst)
    traffic = Traffic(inst, size, "store")

    def copy(f, m, cta) -> None:
        into = addresses_of(f, m, target, target_offset)
        (place,) = cta.locate("shared", into, size, m)
        addresses = addresses_of(f, m, source, source_offset)
        check_alignment(addresses, size, m.numbers, f"cp.async of {size} bytes from global memory")
        lengths = _lengths(f, m, limit, count, size)
        transfer = Transfer(cta, place.offsets, size, _sources(cta, addresses, lengths, size, m), lengths)
        if poisons(cta):
            transfer.poison()
        operation = issuer(cta, m, "cp.async", [transfer.run], f"{m.count} copies of {size} bytes")
        cta.unit(CopyGroups).add(operation, m.lanes)
        cta.machine.counters.bytes["cp.async"] += size * m.count
        traffic.count(cta, [place, *transfer.sources], m)

    return copy


def _lengths(f: list, m: Mask, limit: int | None, kind: str | None, size: int) -> np.ndarray | None:
    """Bytes that each lane reads, when these are not `size` for all."""
    if limit is None:
        return None
    values = f[limit][m.index]
    if kind == "pred":
        lengths = np.where(values, 0, size)
    elif (values > size).any():
        raise Fault(f"cp.async with a src-size above its {size} bytes", lanes=m.numbers[values > size])
    else:
        lengths = values.astype(np.int64)
    return None if (lengths == size).all() else lengths


def _sources(cta, addresses: np.ndarray, lengths: np.ndarray | None, size: int, m: Mask) -> list[Piece]:
    """Where the lanes read. Bytes beyond a lane's length are not touched, so they may lie outside every allocation."""
    locate = cta.machine.memory.locate
    if lengths is None:
        return locate(addresses, size, m.numbers)
    pieces = []
    for length in np.unique(lengths[lengths > 0]).tolist():
        chosen = np.flatnonzero(lengths == length)
        for piece in locate(addresses[chosen], length, m.numbers[chosen]):
            pieces.append(Piece(piece.region, piece.offsets, chosen[piece.chosen]))
    return pieces


@dataclass(frozen=True)
class Transfer:
    """The copies of one instruction: `offsets` into the CTA's shared memory, `sources` in global memory."""

    cta: ThreadBlock
    offsets: np.ndarray
    size: int
    sources: list[Piece]
    lengths: np.ndarray | None

    def poison(self) -> None:
        element, count = _ELEMENTS[self.size]
        self._write(np.uint64((1 << 64) - 1) if element == 8 else np.uint32((1 << 32) - 1))

    def run(self) -> None:
        element, count = _ELEMENTS[self.size]
        if self.lengths is None:
            self._write(gather(self.sources, element, count, self.offsets.size))
            return
        values = self._partial().view(np.uint64 if element == 8 else np.uint32)
        self._write(values if count > 1 else values[:, 0])

    def _write(self, values: np.ndarray | np.generic) -> None:
        self.cta.shared.view(*_ELEMENTS[self.size])[self.offsets >> (self.size.bit_length() - 1)] = values

    def _partial(self) -> np.ndarray:
        """The source bytes, (lanes, size) uint8, with zeros after each lane's length."""
        columns = np.arange(self.size)
        data = np.zeros((self.offsets.size, self.size), np.uint8)
        for piece in self.sources:
            found = piece.region.data.take(piece.offsets[:, None] + columns, mode="clip")
            data[piece.chosen] = np.where(columns < self.lengths[piece.chosen][:, None], found, 0)
        return data


def _decode_arrive(inst: Instruction, b: Binder) -> Decoded:
    """`cp.async.mbarrier.arrive{.noinc}` (PTX ISA 9.7.13.15.15): arrives once earlier copies are complete."""
    mods = b.modifiers(inst)
    for name in ("async", "mbarrier", "arrive"):
        mods.one_of(name)
    increments = not mods.take("noinc")
    space = space_modifier(mods)
    if space not in ("generic", "shared"):
        raise UnsupportedInstruction(f"cp.async.mbarrier.arrive in .{space} is not supported")
    mods.one_of("b64")
    mods.done()
    (address,) = inst.operands
    _, base, offset = bind_address(b, address, space)
    issuer = Issuer(inst)

    def arrive(f, m, cta) -> None:
        (piece,) = cta.locate(space, addresses_of(f, m, base, offset), BARRIER_BYTES, m)
        if piece.region is not cta.shared:
            raise InvalidAddress("cp.async.mbarrier.arrive needs an mbarrier of its own CTA", lanes=m.numbers)
        barriers = list(zip(*(column.tolist() for column in np.unique(piece.offsets, return_counts=True)), strict=True))
        if increments:
            for barrier, count in barriers:
                mbarrier.expect_arrivals(cta, barrier, count)

        def complete() -> None:
            for barrier, count in barriers:
                mbarrier.arrive(cta, barrier, count)

        after = cta.unit(CopyGroups).outstanding(m)
        issuer(cta, m, "cp.async.mbarrier.arrive", [complete], f"{m.count} arrivals", after)

    return arrive
