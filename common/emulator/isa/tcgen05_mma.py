"""`tcgen05.mma`, `.sp`, `.ws` and `.ws.sp`: decoding, checks and issue (PTX ISA 9.7.16.10.9).

The operation reads its operands and writes D when its step runs, some time after the issue (`machine.tensor_core`).
Instructions that follow one another on the same accumulator with nothing else issued in between join the operation
that is still waiting: nobody could tell a completion between them.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from common.emulator.faults import UnsupportedInstruction
from common.emulator.hardware.data_path import LANES
from common.emulator.hardware.instruction_descriptor import KINDS, SCALED_KINDS, InstructionDescriptor, MmaForm
from common.emulator.hardware.smem_descriptor import SmemDescriptor
from common.emulator.isa.async_issue import Issuer, per_lane
from common.emulator.isa.binder import Binder, Modifiers
from common.emulator.isa.registry import Decoded
from common.emulator.isa.tcgen05 import take_cta_group, tcgen05_operation
from common.emulator.machine.tensor_core import Mma, MmaPlan, Step, mma_plan
from common.emulator.machine.tensor_memory import use_cta_group
from common.emulator.machine.tensor_pipeline import issue_tcgen05, pipeline
from common.emulator.ptx.module import Address, Immediate, Instruction, Operand, Vector

if TYPE_CHECKING:
    from common.emulator.machine.thread_block import ThreadBlock

_USES = ("fill", "use", "lastuse", "discard")
_SCALE_VECTORS = {
    "mxf8f6f4": {"scale_vec::1X": 1, "block32": 1, "": 1},
    "mxf4": {"scale_vec::2X": 2, "block32": 2, "": 2},
    "mxf4nvf4": {"scale_vec::2X": 2, "block32": 2, "scale_vec::4X": 4, "block16": 4},
}
_ADDRESS_BITS = 14  # of the start address in a shared memory descriptor
_ADDRESS_MASK = (1 << _ADDRESS_BITS) - 1
_BYTE_BITS = 0x3FFF_FFFF  # CUTLASS keeps a byte number in the top bits of scale factor addresses
_MASK_WORDS = LANES // 32


@tcgen05_operation("mma")
def decode_mma(inst: Instruction, b: Binder) -> Decoded:
    form = _form(b.modifiers(inst))
    return per_lane(_Issue(inst, form, _bind(inst, b, form)))


# -- decoding ------------------------------------------------------------------------------------------------------


def _form(mods: Modifiers) -> MmaForm:
    """Checks and consumes all modifiers."""
    mods.one_of("mma")
    stationary, sparse = mods.take("ws"), mods.take("sp")
    group = take_cta_group(mods)
    kind = mods.one_of(*(f"kind::{kind}" for kind in KINDS)).removeprefix("kind::")
    scale_vector = _scale_vector(mods, kind)
    if mods.take("ashift"):
        raise UnsupportedInstruction(
            f"`{mods.opcode}`: .ashift is not supported: shift the rows of A before they are stored to tensor memory"
        )
    buffers = ("b0", "b1", "b2", "b3") if stationary else ("a",)
    mods.optional(*(f"collector::{buffer}::{use}" for buffer in buffers for use in _USES))
    mods.done()
    if stationary and (group == 2 or kind in SCALED_KINDS):
        raise UnsupportedInstruction(f"`{mods.opcode}`: .ws needs .cta_group::1 and a kind without scale factors")
    return MmaForm(kind, group, stationary, sparse, scale_vector)


def _scale_vector(mods: Modifiers, kind: str) -> int:
    scaled = mods.take("block_scale")
    if scaled != (kind in SCALED_KINDS):
        raise UnsupportedInstruction(f"`{mods.opcode}`: .block_scale belongs to kinds {', '.join(SCALED_KINDS)}")
    if not scaled:
        return 0
    table = _SCALE_VECTORS[kind]
    size = mods.optional("scale_vec::1X", "scale_vec::2X", "scale_vec::4X", "block16", "block32") or ""
    if size not in table:
        legal = ", ".join(f".{name}" for name in table if name)
        raise UnsupportedInstruction(f"`{mods.opcode}`: kind::{kind} takes one of {legal}")
    return table[size]


@dataclass(frozen=True)
class _Slots:
    """Frame slots of the operands, with the constant offsets of addresses; None for an operand that is not there."""

    d: tuple[int, int]
    a: int  # a descriptor, or a tensor memory address
    a_offset: int | None  # None for a descriptor
    b: int
    descriptor: int
    enable: int
    others: tuple[tuple[int, int], ...]  # addresses of metadata and scale factors
    disabled: tuple[int, ...]
    shift: int
    zero_columns: int | None


def _bind(inst: Instruction, b: Binder, form: MmaForm) -> _Slots:
    rest = list(inst.operands)

    def following() -> Operand:
        if not rest:
            raise UnsupportedInstruction(f"`{inst.text}`: an operand is missing")
        return rest.pop(0)

    d = _bind_address(b, following())
    a = following()
    bound_a = _bind_address(b, a) if isinstance(a, Address) else (b.read(a, "u64"), None)
    bound_b = b.read(following(), "u64")
    others = [_bind_address(b, following())] if form.sparse else []
    descriptor = b.read(following(), "u32")
    others += [_bind_address(b, following()) for _ in range(2 if form.scale_vector else 0)]
    disabled: tuple[int, ...] = ()
    if rest and isinstance(rest[0], Vector):
        disabled = tuple(b.read(item, "u32") for item in following().items)
    if disabled and (form.scale_vector or form.weight_stationary or len(disabled) != _MASK_WORDS * form.group):
        raise UnsupportedInstruction(f"`{inst.text}`: a disable-output-lane vector of {len(disabled)} is not supported")
    enable = b.read(following(), "pred")
    zero_columns = b.read(rest.pop(0), "u64") if rest and form.weight_stationary else None
    shift = _shift(rest.pop(0)) if rest and form.kind in ("f16", "tf32") else 0
    if rest:
        raise UnsupportedInstruction(f"`{inst.text}`: operand {rest[0]} is not supported for {form}")
    return _Slots(d, *bound_a, bound_b, descriptor, enable, tuple(others), disabled, shift, zero_columns)


def _bind_address(b: Binder, operand: Operand) -> tuple[int, int]:
    if not isinstance(operand, Address) or operand.base is None or operand.items:
        raise UnsupportedInstruction(f"{operand} is not a tensor memory address in a register")
    return b.read(operand.base, "u32"), operand.offset


def _shift(operand: Operand) -> int:
    if not isinstance(operand, Immediate) or operand.kind != "int" or not 0 <= operand.value <= 15:
        raise UnsupportedInstruction(f"scale-input-d {operand} must be a constant from 0 to 15")
    return int(operand.value)


# -- issue ---------------------------------------------------------------------------------------------------------


class _Issue:
    """`issue(f, lane, cta)` of one instruction of the program."""

    def __init__(self, inst: Instruction, form: MmaForm, slots: _Slots) -> None:
        self._inst = inst
        self._issuer = Issuer(inst)
        self._form = form
        self._slots = slots
        self._plans: dict[int, MmaPlan] = {}

    def __call__(self, f: list, lane: int, cta: ThreadBlock) -> None:
        slots = self._slots
        if slots.zero_columns is not None and f[slots.zero_columns].item(lane):
            raise UnsupportedInstruction("a zero-column mask descriptor other than 0 is not supported")
        a, b, bits = f[slots.a].item(lane), f[slots.b].item(lane), f[slots.descriptor].item(lane)
        d = _address(f, lane, *slots.d)
        others = [_address(f, lane, *place) for place in slots.others]
        disabled = [f[slot].item(lane) for slot in slots.disabled]
        in_tmem = slots.a_offset is not None
        plan = self._plans.get(bits)
        if plan is None:
            plan = self._plans[bits] = mma_plan(InstructionDescriptor.from_bits(bits, self._form), in_tmem)
        a_key = None if in_tmem else a >> _ADDRESS_BITS
        layouts = (a_key, b >> _ADDRESS_BITS)
        key = (cta, lane, plan, d, layouts, any(disabled) and tuple(disabled))
        place_a = a + slots.a_offset & 0xFFFF_FFFF if in_tmem else (a & _ADDRESS_MASK) << 4
        step = _step(self._form, place_a, (b & _ADDRESS_MASK) << 4, others)
        keep = f[slots.enable].item(lane)
        cta.machine.counters.count_mma(self._inst, plan)
        if keep and not slots.shift and _join(key, step, cta):
            return
        use_cta_group(cta, self._form.group)
        matrix_a = None if in_tmem else SmemDescriptor.from_bits(a)
        matrix_b = SmemDescriptor.from_bits(b)
        blocks = _blocks(cta, self._form.group, lane)
        mma = Mma(plan, blocks, d, matrix_a, matrix_b, layouts, keep, slots.shift, _disabled_lanes(disabled), key)
        self._start(mma, step, cta, lane)

    def _start(self, mma: Mma, step: Step, cta: ThreadBlock, lane: int) -> None:
        mma.check()
        reads = mma.add(step)
        operation = issue_tcgen05(
            self._issuer, cta, lane, "mma", [mma.run], group=self._form.group, accumulator=mma.accumulator,
            reads=reads, writes=mma.written(), detail=mma,
        )  # fmt: skip
        operation.tags["mma"] = mma


def _address(f: list, lane: int, slot: int, offset: int) -> int:
    return f[slot].item(lane) + offset & 0xFFFF_FFFF


def _step(form: MmaForm, a: int, b: int, others: list[int]) -> Step:
    if not others:
        return Step(a, b)
    metadata = others[0] if form.sparse else 0
    scales = [address & _BYTE_BITS for address in others[form.sparse :]]
    return Step(a, b, metadata, *scales)


def _join(key: Hashable, step: Step, cta: ThreadBlock) -> bool:
    """Adds the step to the operation issued last, if that is an instruction on the same accumulator that waits."""
    pending = cta.machine.events.pending
    if not pending:
        return False
    operation = pending[-1]
    mma = operation.tags.get("mma")
    if mma is None or mma.key != key or operation.position or not mma.takes_more:
        return False
    reads = mma.add(step)
    if reads:
        pipeline(cta, mma.plan.descriptor.form.group).pending()[-1].reads += reads
    return True


def _disabled_lanes(words: list[int]) -> np.ndarray | None:
    """bool (CTAs, 128) from a disable-output-lane vector; None when no lane is disabled."""
    if not any(words):
        return None
    bits = np.unpackbits(np.array(words, np.uint32).view(np.uint8), bitorder="little")
    return bits.astype(bool).reshape(-1, LANES)


def _blocks(cta: ThreadBlock, group: int, lane: int) -> tuple[ThreadBlock, ...]:
    """The CTAs whose memory the instruction uses, the even one of a pair first."""
    if group == 1:
        return (cta,)
    other = cta.peer(cta.rank ^ 1, [lane])
    return (other, cta) if cta.rank & 1 else (cta, other)
