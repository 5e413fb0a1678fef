"""tcgen05.alloc, .dealloc and .relinquish_alloc_permit (PTX ISA 9.7.16.7).

With .cta_group::2 one warp of each CTA of the pair has to execute the instruction: the first one waits for the other,
also where the ISA says that it only may (dealloc, relinquish), except under the schedule `early`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from common.emulator.faults import TensorMemoryFault, UnsupportedInstruction
from common.emulator.isa.async_issue import shared_span
from common.emulator.isa.binder import Binder
from common.emulator.isa.registry import Control, Decoded
from common.emulator.isa.tcgen05 import bind_shared_pointer, common_value, take_cta_group, tcgen05_operation
from common.emulator.machine.mask import WARP, Mask
from common.emulator.machine.tensor_memory import (
    COLUMNS,
    UNIT,
    Request,
    TensorMemories,
    TensorMemory,
    tensor_memory,
    use_cta_group,
)
from common.emulator.ptx.module import Instruction

if TYPE_CHECKING:
    from common.emulator.machine.scheduler import Cluster
    from common.emulator.machine.thread_block import Path, ThreadBlock


@dataclass(eq=False)
class Meeting:
    """The warps, one of each CTA concerned, at one instruction. `value` is what they must agree on."""

    value: tuple[int, ...]
    arrived: list[tuple[TensorMemory, int]] = field(default_factory=list)
    request: Request | None = None

    @property
    def complete(self) -> bool:
        return len(self.arrived) == 2


class PairMeetings:
    """Where warps of the CTAs of a pair wait for one another."""

    def __init__(self, cluster: Cluster) -> None:
        self._open: dict[tuple[int, str], list[Meeting]] = {}

    def join(self, kind: str, memory: TensorMemory, place: int, value: tuple[int, ...]) -> Meeting:
        """The meeting that a warp of the CTA comes to: one that waits for it, or a new one.

        Raises TensorMemoryFault when the operands of the two CTAs differ.
        """
        waiting = self._open.setdefault((memory.cta.rank >> 1, kind), [])
        meeting = next((m for m in waiting if m.arrived[0][0] is not memory), None)
        if meeting is None:
            meeting = Meeting(value)
            waiting.append(meeting)
        else:
            waiting.remove(meeting)
        if meeting.value != value:
            raise TensorMemoryFault(
                f"tcgen05.{kind}.cta_group::2 with {_show(value)} here and {_show(meeting.value)} in the peer CTA"
            )
        meeting.arrived.append((memory, place))
        return meeting


def _show(value: tuple[int, ...]) -> str:
    return " at ".join((f"{value[0]} columns", *(f"{address:#x}" for address in value[1:])))


class Management(Control):
    """An instruction of a whole warp; warps of one path execute it one after another."""

    kind = ""

    def __init__(self, group: int) -> None:
        super().__init__()
        self.group = group

    def run(self, cta: ThreadBlock, path: Path) -> None:
        if not cta.whole_warps(path):
            return
        first = path.mask.warps[0] * WARP
        if len(path.mask.warps) > 1:
            chosen = np.zeros(cta.lanes, bool)
            chosen[first : first + WARP] = True
            mine, others = path.mask.split_by(chosen)
            waiting = cta.fork(path, others, path.segment.index)
            waiting.index, waiting.retrying = len(path.segment.ops), True
            path.mask = mine
        if path.mask.count != WARP:
            raise TensorMemoryFault(f"tcgen05.{self.kind} needs all 32 threads of its warp: some have exited")
        use_cta_group(cta, self.group)
        self.execute(cta, path, tensor_memory(cta))

    @abstractmethod
    def execute(self, cta: ThreadBlock, path: Path, memory: TensorMemory) -> None:
        """Executes the instruction for the one whole warp of the path."""

    def meet(self, cta: ThreadBlock, memory: TensorMemory, place: int, value: tuple[int, ...]) -> Meeting:
        meeting = cta.cluster.unit(PairMeetings).join(self.kind, memory, place, value)
        cta.activity()
        return meeting

    def wait_for_peer(self, cta: ThreadBlock, path: Path, meeting: Meeting) -> None:
        if meeting.complete or cta.machine.schedule == "early":
            cta.advance(path)
        else:
            cta.block(path, reason=lambda: self.peer_reason, ready=lambda: meeting.complete)

    @property
    def peer_reason(self) -> str:
        return f"for a warp of the peer CTA to execute tcgen05.{self.kind}.cta_group::2"


class Allocate(Management):
    kind = "alloc"

    def __init__(self, group: int, columns: int, pointer: Callable[[list, int], int]) -> None:
        super().__init__(group)
        self.columns, self.pointer = columns, pointer

    def execute(self, cta: ThreadBlock, path: Path, memory: TensorMemory) -> None:
        columns = _columns(cta, path.mask, self.columns)
        if memory.relinquished:
            raise TensorMemoryFault("tcgen05.alloc after the CTA has executed tcgen05.relinquish_alloc_permit")
        if columns > memory.largest:
            raise TensorMemoryFault(
                f"tcgen05.alloc of {columns} columns after one of {memory.largest}: allocations of a CTA must not grow"
            )
        lane = int(path.mask.numbers[0])
        place = shared_span(cta, self.pointer(cta.frame, lane), 4, 4, lane, own=True).offset
        if self.group == 1:
            meeting = Meeting((columns,), [(memory, place)])
        else:
            meeting = self.meet(cta, memory, place, (columns,))
        if self.group == len(meeting.arrived):
            meeting.request = Request(columns, meeting.arrived)
            cta.machine.unit(TensorMemories).ask(meeting.request)
        self._wait(cta, path, memory, meeting)

    def _wait(self, cta: ThreadBlock, path: Path, memory: TensorMemory, meeting: Meeting) -> None:
        def ready() -> bool:
            return meeting.request is not None and meeting.request.granted

        def reason() -> str:
            if meeting.request is None:
                return self.peer_reason
            wanted, sm = meeting.request.columns, memory.sm.number
            return f"for {wanted} columns of tensor memory: {memory.free_columns} of SM {sm} are free"

        if ready():
            cta.advance(path)
        else:
            cta.block(path, reason=reason, ready=ready)


class Deallocate(Management):
    kind = "dealloc"

    def __init__(self, group: int, address: int, columns: int) -> None:
        super().__init__(group)
        self.address, self.columns = address, columns

    def execute(self, cta: ThreadBlock, path: Path, memory: TensorMemory) -> None:
        columns = _columns(cta, path.mask, self.columns)
        lanes = path.mask.numbers
        address = common_value(cta.frame[self.address][lanes], "the address of tcgen05.dealloc", lanes)
        memory.free(address, columns)
        if self.group == 1:
            cta.advance(path)
        else:
            self.wait_for_peer(cta, path, self.meet(cta, memory, 0, (columns, address)))


class Relinquish(Management):
    kind = "relinquish_alloc_permit"

    def execute(self, cta: ThreadBlock, path: Path, memory: TensorMemory) -> None:
        memory.relinquished = True
        if self.group == 1:
            cta.advance(path)
        else:
            self.wait_for_peer(cta, path, self.meet(cta, memory, 0, (0,)))


def _columns(cta: ThreadBlock, mask: Mask, slot: int) -> int:
    lanes = mask.numbers
    columns = common_value(cta.frame[slot][lanes], "the number of columns", lanes)
    if not UNIT <= columns <= COLUMNS or columns & (columns - 1):
        raise TensorMemoryFault(f"{columns} columns: the number must be a power of two from {UNIT} to {COLUMNS}")
    return columns


@tcgen05_operation("alloc")
def decode_alloc(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    mods.take("alloc")
    group = take_cta_group(mods)
    mods.one_of("sync")
    mods.one_of("aligned")
    space = mods.optional("shared::cta")
    mods.one_of("b32")
    mods.done()
    address, columns = inst.operands
    return Allocate(group, b.read(columns, "u32"), bind_shared_pointer(b, address, space))


@tcgen05_operation("dealloc")
def decode_dealloc(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    mods.take("dealloc")
    group = take_cta_group(mods)
    for part in ("sync", "aligned", "b32"):
        mods.one_of(part)
    mods.done()
    address, columns = inst.operands
    return Deallocate(group, b.read(address, "u32"), b.read(columns, "u32"))


@tcgen05_operation("relinquish_alloc_permit")
def decode_relinquish(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    mods.take("relinquish_alloc_permit")
    group = take_cta_group(mods)
    mods.one_of("sync")
    mods.one_of("aligned")
    mods.done()
    if inst.operands:
        raise UnsupportedInstruction("tcgen05.relinquish_alloc_permit takes no operands")
    return Relinquish(group)
