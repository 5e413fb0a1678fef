"""tcgen05.commit and .fence (PTX ISA 9.7.16.11, .12).

A commit is an operation, one per mbarrier, that comes after every mma, cp and shift its thread has in flight and after
the thread's earlier commits to that CTA, and then arrives. The fences order what this machine orders already: they
change nothing.
"""

from __future__ import annotations

from common.emulator.faults import InvalidAddress
from common.emulator.isa.async_issue import (
    BARRIER_BYTES,
    Issuer,
    SharedSpan,
    bind_options,
    masked_blocks,
    per_lane,
    require_receiver,
    shared_span,
)
from common.emulator.isa.binder import Binder
from common.emulator.isa.registry import Decoded
from common.emulator.isa.tcgen05 import bind_shared_pointer, take_cta_group, tcgen05_operation
from common.emulator.machine import mbarrier
from common.emulator.machine.memory import RANK_SHIFT
from common.emulator.machine.tensor_memory import use_cta_group
from common.emulator.machine.tensor_pipeline import pipeline
from common.emulator.ptx.module import Instruction


@tcgen05_operation("commit")
def decode_commit(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    mods.take("commit")
    group = take_cta_group(mods)
    mods.one_of("mbarrier::arrive::one")
    space = mods.optional("shared::cluster")
    multicast = "u16" if mods.take("multicast::cluster") else None
    mods.one_of("b64")
    mods.done()
    pointer = bind_shared_pointer(b, inst.operands[0], space)
    (mask,) = bind_options(b, inst.operands[1:], multicast)
    issuer = Issuer(inst)

    def commit(f, lane, cta) -> None:
        use_cta_group(cta, group)
        address = pointer(f, lane)
        if mask is None:
            barriers = [shared_span(cta, address, BARRIER_BYTES, BARRIER_BYTES, lane, own=False)]
        else:
            barriers = _barriers_of(cta, address, int(f[mask][lane]), lane)
        queue, thread = pipeline(cta, group), (cta.rank, lane)
        tracked = queue.issued_by(thread)
        for barrier in barriers:
            after = tracked + queue.signals(thread, barrier.block)
            operation = issuer(cta, lane, "tcgen05.commit", [_arrival(barrier)], f"arrives on {barrier}", after)
            queue.add_signal(thread, barrier.block, operation)

    return per_lane(commit)


def _barriers_of(cta, address: int, mask: int, lane: int) -> list[SharedSpan]:
    """The mbarrier at the offset of `address` in every CTA of the mask."""
    blocks = masked_blocks(cta, mask, lane)
    if address >> RANK_SHIFT >= len(cta.cluster.blocks):
        raise InvalidAddress(f"{address:#x} lies outside shared::cluster", lanes=[lane], address=address)
    offset = address & ((1 << RANK_SHIFT) - 1)
    return [
        shared_span(cta, block.rank << RANK_SHIFT | offset, BARRIER_BYTES, BARRIER_BYTES, lane, own=False)
        for block in blocks
    ]


def _arrival(barrier: SharedSpan):
    def arrive() -> None:
        require_receiver(barrier.block, "a tcgen05.commit")
        mbarrier.arrive(barrier.block, barrier.offset)

    return arrive


@tcgen05_operation("fence::before_thread_sync", "fence::after_thread_sync")
def decode_fence(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    mods.one_of("fence::before_thread_sync", "fence::after_thread_sync")
    mods.done()
    return lambda f, m, cta: None
