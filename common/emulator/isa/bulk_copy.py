"""Bulk copies without a tensor map: `cp{.reduce}.async.bulk` and `cp.async.bulk.prefetch` (PTX ISA 9.7.9.25.4).

Each lane that executes one makes an operation of its own. Copies into shared memory write, then signal their mbarrier;
copies out of it first read, then write, so that `wait_group.read` can return in between. PTX says that additions of f32
flush subnormals; an H200 keeps them, and so does this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from common.emulator.faults import InvalidAddress, UnsupportedInstruction
from common.emulator.hardware.reductions import Reduction, reduction
from common.emulator.isa.async_issue import (
    BARRIER_BYTES,
    CHUNK,
    COMPLETION,
    WAIT_BARRIER,
    GlobalSpan,
    Issuer,
    SharedSpan,
    bind_options,
    bind_pointer,
    check_bulk_size,
    global_span,
    issue_store,
    masked_blocks,
    per_lane,
    poison_bytes,
    poisons,
    require_receiver,
    require_source,
    shared_span,
    signal,
    take_cache_hint,
)
from common.emulator.isa.binder import Binder, Modifiers
from common.emulator.isa.registry import Decoded
from common.emulator.machine.memory import check_alignment
from common.emulator.ptx.module import Instruction

if TYPE_CHECKING:
    from common.emulator.machine.thread_block import ThreadBlock

SPACES = ("global", "shared::cta", "shared::cluster")
_BITWISE = ("and", "or", "xor")
_SHARED_REDUCTIONS = {
    "add": ("u32", "s32", "u64"),
    **dict.fromkeys(("min", "max"), ("u32", "s32")),
    **dict.fromkeys(("inc", "dec"), ("u32",)),
    **dict.fromkeys(_BITWISE, ("b32",)),
}
_GLOBAL_REDUCTIONS = {
    "add": ("u32", "s32", "u64", "f32", "f64", "f16", "bf16"),
    **dict.fromkeys(("min", "max"), ("u32", "s32", "u64", "s64", "f16", "bf16")),
    **dict.fromkeys(("inc", "dec"), ("u32",)),
    **dict.fromkeys(_BITWISE, ("b32", "b64")),
}


def _directions(mods: Modifiers) -> tuple[str, str]:
    """(destination, source) as written."""
    return mods.one_of(*SPACES), mods.one_of(*SPACES)


def decode_bulk_copy(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    mods.take("async")
    mods.take("bulk")
    target, source = _directions(mods)
    if source == "global" and target != "global":
        return _decode_load(inst, b, mods, target)
    if (target, source) == ("shared::cluster", "shared::cta"):
        return _decode_exchange(inst, b, mods)
    if (target, source) == ("global", "shared::cta"):
        return _decode_store(inst, b, mods)
    raise UnsupportedInstruction(f"cp.async.bulk from .{source} to .{target} does not exist")


@dataclass(frozen=True)
class Operands:
    """Readers of one lane's `[dst], [src], size` (and `[mbar]`)."""

    target: Callable[[list, int], int]
    source: Callable[[list, int], int]
    size: int
    barrier: Callable[[list, int], int] | None

    def bytes(self, f: list, lane: int) -> int:
        size = int(f[self.size][lane])
        check_bulk_size(size, lane)
        return size


def _operands(inst: Instruction, b: Binder, target: str, source: str, *, barrier: bool) -> Operands:
    operands = inst.operands
    if len(operands) < 3 + barrier:
        raise UnsupportedInstruction(f"{len(operands)} operands are too few")
    return Operands(
        bind_pointer(b, operands[0], target),
        bind_pointer(b, operands[1], source),
        b.read(operands[2], "u32"),
        bind_pointer(b, operands[3], "shared::cluster") if barrier else None,
    )


def _decode_load(inst: Instruction, b: Binder, mods: Modifiers, space: str) -> Decoded:
    """global -> shared::cta or shared::cluster."""
    mods.one_of(COMPLETION)
    multicast = "u16" if space == "shared::cluster" and mods.take("multicast::cluster") else None
    policy = take_cache_hint(mods)
    mods.done()
    operands = _operands(inst, b, space, "global", barrier=True)
    mask, _ = bind_options(b, inst.operands[4:], multicast, policy)
    issuer = Issuer(inst)
    own = space == "shared::cta"

    def load(f, lane, cta) -> None:
        size = operands.bytes(f, lane)
        source = global_span(cta, operands.source(f, lane), size, CHUNK, lane, writes=False)
        target = shared_span(cta, operands.target(f, lane), size, CHUNK, lane, own=own)
        barrier = shared_span(cta, operands.barrier(f, lane), BARRIER_BYTES, BARRIER_BYTES, lane, own=own)
        if barrier.block is not target.block:
            raise InvalidAddress("the mbarrier of a bulk copy must be in the CTA it writes to", lanes=[lane])
        blocks = [target.block] if mask is None else masked_blocks(cta, int(f[mask][lane]), lane)
        steps = [_delivery(source, target.in_block(block), barrier.in_block(block), size) for block in blocks]
        if poisons(cta):
            for block in blocks:
                poison_bytes(target.in_block(block).bytes(size))
        issuer(cta, lane, "bulk load", steps, f"{size} bytes of {source} to {target}")
        cta.machine.counters.bytes["bulk load"] += size * len(blocks)

    return per_lane(load)


def _delivery(source: GlobalSpan, target: SharedSpan, barrier: SharedSpan, size: int) -> Callable[[], None]:
    """Writes the data, then signals."""

    def deliver() -> None:
        require_receiver(target.block, "a bulk copy")
        target.bytes(size)[...] = source.bytes(size)
        target.overwritten(size)
        signal(barrier, size)

    return deliver


def _decode_exchange(inst: Instruction, b: Binder, mods: Modifiers) -> Decoded:
    """shared::cta -> shared::cluster."""
    mods.one_of(COMPLETION)
    mods.done()
    operands = _operands(inst, b, "shared::cluster", "shared::cta", barrier=True)
    bind_options(b, inst.operands[4:])
    issuer = Issuer(inst)

    def exchange(f, lane, cta) -> None:
        size, source, target, barrier = _exchange_spans(f, lane, cta, operands)
        source.require_fence(size, "the bulk copy")
        if poisons(cta):
            poison_bytes(target.bytes(size))

        def deliver() -> None:
            require_source(cta, WAIT_BARRIER)
            require_receiver(target.block, "a bulk copy")
            target.bytes(size)[...] = source.bytes(size)
            signal(barrier, size)

        issuer(cta, lane, "DSMEM copy", [deliver], f"{size} bytes of {source} to {target}")
        cta.machine.counters.bytes["DSMEM copy"] += size

    return per_lane(exchange)


def _exchange_spans(
    f: list, lane: int, cta: ThreadBlock, operands: Operands
) -> tuple[int, SharedSpan, SharedSpan, SharedSpan]:
    """(size, source, destination, mbarrier) of a transfer from the own CTA's shared memory to that of another."""
    size = operands.bytes(f, lane)
    source = shared_span(cta, operands.source(f, lane), size, CHUNK, lane, own=True)
    target = shared_span(cta, operands.target(f, lane), size, CHUNK, lane, own=False)
    if target.block is cta:  # an H200 stops with an illegal instruction
        raise InvalidAddress("a bulk operation between shared memories needs another CTA as its target", lanes=[lane])
    barrier = shared_span(cta, operands.barrier(f, lane), BARRIER_BYTES, BARRIER_BYTES, lane, own=False)
    if barrier.block is not target.block:
        raise InvalidAddress("the mbarrier of a bulk operation must be in the CTA it writes to", lanes=[lane])
    return size, source, target, barrier


def _decode_store(inst: Instruction, b: Binder, mods: Modifiers) -> Decoded:
    """shared::cta -> global."""
    mods.one_of("bulk_group")
    policy = take_cache_hint(mods)
    masked = "u16" if mods.take("cp_mask") else None
    mods.done()
    operands = _operands(inst, b, "global", "shared::cta", barrier=False)
    _, mask = bind_options(b, inst.operands[3:], policy, masked)
    issuer = Issuer(inst)

    def store(f, lane, cta) -> None:
        size = operands.bytes(f, lane)
        source = shared_span(cta, operands.source(f, lane), size, CHUNK, lane, own=True)
        target = global_span(cta, operands.target(f, lane), size, CHUNK, lane, writes=True)
        source.require_fence(size, "the bulk store")
        chosen = None if mask is None else _byte_mask(int(f[mask][lane]))
        if poisons(cta):
            _write(target.bytes(size), np.full(size, 0xFF, np.uint8), chosen)

        def read() -> np.ndarray:
            return source.bytes(size).copy()

        def write(data: np.ndarray) -> None:
            _write(target.bytes(size), data, chosen)

        issue_store(issuer, cta, lane, "bulk store", read, write, f"{size} bytes of {source} to {target}")
        cta.machine.counters.bytes["bulk store"] += size

    return per_lane(store)


def _byte_mask(mask: int) -> np.ndarray:
    """Which of the 16 bytes of a chunk a `.cp_mask` copies."""
    return np.array([bool(mask >> place & 1) for place in range(CHUNK)])


def _write(target: np.ndarray, data: np.ndarray, chosen: np.ndarray | None) -> None:
    if chosen is None:
        target[...] = data
    else:
        np.copyto(target.reshape(-1, CHUNK), data.reshape(-1, CHUNK), where=chosen)


def decode_bulk_reduction(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    for name in ("reduce", "async", "bulk"):
        mods.one_of(name)
    target, source = _directions(mods)
    if source != "shared::cta" or target == "shared::cta":
        raise UnsupportedInstruction(f"cp.reduce.async.bulk from .{source} to .{target} does not exist")
    if target == "global":
        return _decode_global_reduction(inst, b, mods)
    mods.one_of(COMPLETION)
    combine = _take_reduction(mods, _SHARED_REDUCTIONS)
    mods.done()
    return _reduce_shared(inst, b, combine)


def _take_reduction(mods: Modifiers, table: dict[str, tuple[str, ...]]) -> Reduction:
    op = mods.one_of(*table)
    keeps_subnormals = mods.take("noftz")
    kind = mods.one_of(*table[op])
    if keeps_subnormals != (op == "add" and kind in ("f16", "bf16")):
        raise UnsupportedInstruction(f"{op}.{kind}: .noftz belongs to add of f16 and bf16, and is needed there")
    return reduction(op, kind)


def _reduce_shared(inst: Instruction, b: Binder, combine: Reduction) -> Decoded:
    operands = _operands(inst, b, "shared::cluster", "shared::cta", barrier=True)
    bind_options(b, inst.operands[4:])
    issuer = Issuer(inst)

    def reduce(f, lane, cta) -> None:
        size, source, target, barrier = _exchange_spans(f, lane, cta, operands)

        def deliver() -> None:
            require_source(cta, WAIT_BARRIER)
            require_receiver(target.block, "a bulk reduction")
            combine(target.bytes(size), source.bytes(size))
            signal(barrier, size)

        issuer(cta, lane, "DSMEM reduction", [deliver], f"{size} bytes of {source} into {target}")
        cta.machine.counters.bytes["DSMEM reduction"] += size

    return per_lane(reduce)


def _decode_global_reduction(inst: Instruction, b: Binder, mods: Modifiers) -> Decoded:
    mods.one_of("bulk_group")
    policy = take_cache_hint(mods)
    combine = _take_reduction(mods, _GLOBAL_REDUCTIONS)
    mods.done()
    operands = _operands(inst, b, "global", "shared::cta", barrier=False)
    bind_options(b, inst.operands[3:], policy)
    issuer = Issuer(inst)

    def reduce(f, lane, cta) -> None:
        size = operands.bytes(f, lane)
        source = shared_span(cta, operands.source(f, lane), size, CHUNK, lane, own=True)
        target = global_span(cta, operands.target(f, lane), size, CHUNK, lane, writes=True)
        source.require_fence(size, "the bulk reduction")

        def read() -> np.ndarray:
            return source.bytes(size).copy()

        def write(data: np.ndarray) -> None:
            combine(target.bytes(size), data)

        issue_store(issuer, cta, lane, "bulk reduction", read, write, f"{size} bytes of {source} into {target}")
        cta.machine.counters.bytes["bulk reduction"] += size

    return per_lane(reduce)


def decode_bulk_prefetch(inst: Instruction, b: Binder) -> Decoded:
    """A hint: it moves nothing, but its size and alignment are checked."""
    mods = b.modifiers(inst)
    for name in ("async", "bulk", "prefetch", "L2", "global"):
        mods.one_of(name)
    policy = take_cache_hint(mods)
    mods.done()
    source, size = bind_pointer(b, inst.operands[0], "global"), b.read(inst.operands[1], "u32")
    bind_options(b, inst.operands[2:], policy)

    def prefetch(f, lane, cta) -> None:
        count = int(f[size][lane])
        check_bulk_size(count, lane)
        check_alignment(np.array([source(f, lane)], np.int64), CHUNK, np.array([lane]), "bulk prefetch")
        cta.machine.counters.bytes["L2 prefetch"] += count

    return per_lane(prefetch)
