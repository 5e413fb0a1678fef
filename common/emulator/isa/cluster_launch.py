"""clusterlaunchcontrol: taking over clusters that have not started (PTX ISA 9.7.13.17, .18).

The response is opaque to programs. Here its four words are the %ctaid of the first CTA of the cancelled cluster and a
tag that says whether there is one, so that memory where no response has come is told from a response.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from common.emulator.faults import Fault, UnsupportedInstruction
from common.emulator.isa.async_issue import (
    BARRIER_BYTES,
    Issuer,
    SharedSpan,
    per_lane,
    poison_bytes,
    poisons,
    require_receiver,
    shared_span,
    signal,
)
from common.emulator.isa.binder import Binder
from common.emulator.isa.fragments import vector_items
from common.emulator.isa.registry import Decoded, instruction
from common.emulator.isa.tcgen05 import bind_shared_pointer
from common.emulator.ptx.module import Instruction

if TYPE_CHECKING:
    from common.emulator.machine.thread_block import ThreadBlock

RESPONSE_BYTES = 16
CANCELLED = 0x434C_4301
FAILED = 0x434C_4300
_AXES = "xyz"


class Requests:
    """What a CTA knows of its requests. `failed`: it has seen one that failed, after which it must not ask again."""

    def __init__(self, cta: ThreadBlock) -> None:
        self.failed = False


@instruction("clusterlaunchcontrol")
def decode_launch_control(inst: Instruction, b: Binder) -> Decoded:
    if "try_cancel" in inst.modifiers:
        return _decode_try_cancel(inst, b)
    return _decode_query(inst, b)


def _decode_try_cancel(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    for part in ("try_cancel", "async"):
        mods.one_of(part)
    space = mods.optional("shared::cta")
    mods.one_of("mbarrier::complete_tx::bytes")
    everywhere = mods.take("multicast::cluster::all")
    mods.one_of("b128")
    mods.done()
    target, barrier = (bind_shared_pointer(b, operand, space) for operand in inst.operands)
    issuer = Issuer(inst)

    def request(f, lane, cta) -> None:
        if cta.unit(Requests).failed:
            raise Fault(
                "clusterlaunchcontrol.try_cancel after this CTA has seen a request fail: nothing is left to cancel",
                lanes=[lane],
            )
        response = shared_span(cta, target(f, lane), RESPONSE_BYTES, RESPONSE_BYTES, lane, own=True)
        signals = shared_span(cta, barrier(f, lane), BARRIER_BYTES, BARRIER_BYTES, lane, own=True)
        blocks = cta.cluster.blocks if everywhere else [cta]
        if poisons(cta):
            for block in blocks:
                poison_bytes(response.in_block(block).bytes(RESPONSE_BYTES))
        answer: list[np.ndarray] = []
        steps = [lambda: answer.append(_cancel(cta))]
        steps += [_delivery(answer, response.in_block(block), signals.in_block(block)) for block in blocks]
        issuer(cta, lane, "clusterlaunchcontrol.try_cancel", steps, f"response to {response}")

    return per_lane(request)


def _cancel(cta: ThreadBlock) -> np.ndarray:
    number = cta.machine.queue.cancel()
    if number is None:
        return np.array([0, 0, 0, FAILED], np.uint32)
    return np.array([*cta.machine.launch.first_cta(number), CANCELLED], np.uint32)


def _delivery(answer: list[np.ndarray], target: SharedSpan, barrier: SharedSpan):
    def deliver() -> None:
        require_receiver(target.block, "clusterlaunchcontrol.try_cancel")
        target.bytes(RESPONSE_BYTES)[...] = answer[0].view(np.uint8)
        signal(barrier, RESPONSE_BYTES)

    return deliver


def _decode_query(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    mods.one_of("query_cancel")
    if mods.take("is_canceled"):
        mods.one_of("pred")
        mods.one_of("b128")
        mods.done()
        target, response = inst.operands
        return _is_cancelled(b.write(target, "pred"), b.read(response, "b128"))
    names = ["get_first_ctaid", *(f"get_first_ctaid::{axis}" for axis in _AXES)]
    axis = mods.one_of(*names).removeprefix("get_first_ctaid").removeprefix("::")
    vector = mods.take("v4")
    mods.one_of("b32")
    mods.one_of("b128")
    mods.done()
    target, response = inst.operands
    items = vector_items(target)
    if vector == bool(axis) or len(items) != (4 if vector else 1):
        raise UnsupportedInstruction(f"`{mods.opcode}` gives a .v4 vector, or with ::x, ::y or ::z one register")
    slots = [b.write(item, "u32") for item in items[:3]]
    return _first_cta(slots, _AXES.index(axis) if axis else 0, b.read(response, "b128"))


def _is_cancelled(target: int, response: int) -> Decoded:
    def query(f, m, cta) -> None:
        tags = _tags(f[response])
        known = (tags == CANCELLED) | (tags == FAILED)
        if not known[m.index].all():
            raise Fault(
                "clusterlaunchcontrol.query_cancel of something that is no response of try_cancel: "
                "a wait for its mbarrier is missing, or another request did not wait until this CTA had read it",
                lanes=m.numbers[~known[m.index]],
            )
        np.copyto(f[target], tags == CANCELLED, where=m.where)
        if (tags[m.index] == FAILED).any():
            cta.unit(Requests).failed = True

    return query


def _first_cta(slots: list[int], axis: int, response: int) -> Decoded:
    """Poison where the request failed: the ISA leaves that open."""

    def query(f, m, cta) -> None:
        words = np.ascontiguousarray(f[response]).view(np.uint32).reshape(-1, 4)
        cancelled = words[:, 3] == CANCELLED
        for place, slot in enumerate(slots, axis):
            np.copyto(f[slot], np.where(cancelled, words[:, place], np.uint32(0xFFFF_FFFF)), where=m.where)

    return query


def _tags(response: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(response).view(np.uint32).reshape(-1, 4)[:, 3]
