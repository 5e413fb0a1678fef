"""Registers that an asynchronous load has yet to write (`tcgen05.ld`).

The chip holds an instruction back until the registers it names are there, whether or not a `tcgen05.wait::ld` stands in
between (PTX ISA 9.7.16.6.4.5), and nothing else: the tensor memory that the load reads is protected by the wait alone.
So a load stays in flight until the schedule completes it, and an instruction that touches one of its registers first
stalls its path. Which instructions could meet such a load is found once, by following the control flow from every
load to the waits; only they are given a check. A kernel that waits right after its loads has none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from common.emulator.machine.events import Operation
from common.emulator.ptx.module import Address, Instruction, Not, Operand, Pair, Register, Vector

if TYPE_CHECKING:
    from common.emulator.isa.registry import Run
    from common.emulator.machine.program import Segment
    from common.emulator.machine.thread_block import ThreadBlock

NONE: frozenset[int] = frozenset()


class Stalled(Exception):
    """Raised in front of an instruction whose registers are not there yet; the thread block catches it."""

    def __init__(self, operations: list[Operation]) -> None:
        super().__init__()
        self.operations = operations

    reason = "for registers that a tcgen05.ld has yet to write"

    def ready(self) -> bool:
        return all(operation.finished for operation in self.operations)


@dataclass(eq=False)
class Load:
    """A load in flight: the registers it writes, in which lanes (bool, (L,))."""

    operation: Operation
    lanes: np.ndarray
    registers: frozenset[int]


class Scoreboard:
    """The loads of a CTA that are in flight."""

    def __init__(self, cta: ThreadBlock) -> None:
        self._loads: list[Load] = []

    def add(self, load: Load) -> None:
        self._loads.append(load)

    def _forget_finished(self) -> None:
        self._loads = [load for load in self._loads if not load.operation.finished]

    def pending(self, lanes: np.ndarray) -> list[Operation]:
        """The loads in flight of any of `lanes` (bool, (L,))."""
        self._forget_finished()
        return [load.operation for load in self._loads if (load.lanes & lanes).any()]

    def waiting(self, lanes: np.ndarray) -> np.ndarray:
        """Those of `lanes` that have a load in flight."""
        return np.logical_or.reduce([load.lanes for load in self._loads]) & lanes

    def check(self, registers: frozenset[int], lanes: np.ndarray) -> None:
        """Raises Stalled when one of `registers` is still to be written in one of `lanes`."""
        self._forget_finished()
        waiting = [load.operation for load in self._loads if load.registers & registers and (load.lanes & lanes).any()]
        if waiting:
            raise Stalled(waiting)


def is_load(inst: Instruction) -> bool:
    return inst.opcode == "tcgen05" and inst.modifiers[:1] == ("ld",)


def destinations(inst: Instruction) -> frozenset[int]:
    """The registers that a load writes: its vector, and for `ld.red` the result of the reduction."""
    first_address = next(place for place, operand in enumerate(inst.operands) if isinstance(operand, Address))
    return frozenset(registers_of(inst.operands[:first_address]))


def touched(inst: Instruction) -> frozenset[int]:
    """The registers that an instruction reads or writes."""
    guard = () if inst.guard is None else (inst.guard,)
    return frozenset(registers_of((*inst.operands, *guard)))


def registers_of(operands: Iterable[Operand | None]) -> Iterable[int]:
    """The numbers of all registers in operands, those of addresses and vectors too."""
    for operand in operands:
        if isinstance(operand, Register):
            yield operand.index
        elif isinstance(operand, Not):
            yield from registers_of((operand.operand,))
        elif isinstance(operand, Pair):
            yield from registers_of((operand.first, operand.second))
        elif isinstance(operand, Address):
            yield from registers_of((operand.base, *operand.items))
        elif isinstance(operand, Vector):
            yield from registers_of(operand.items)


def guard_loads(segments: list[Segment], successors: list[list[int]], entries: dict[str, int]) -> None:
    """Gives a check to every instruction that may touch a register which a load has yet to write."""
    if not any(is_load(inst) for segment in segments for inst in segment.instructions):
        return
    incoming = _before_segments(segments, successors, entries)
    for segment, unwritten in zip(segments, incoming):
        _guard(segment, unwritten)


def _before_segments(
    segments: list[Segment], successors: list[list[int]], entries: dict[str, int]
) -> list[frozenset[int]]:
    """For every segment the registers that may be unwritten when it starts.

    A function that is called again may find its own loads of the last call in flight.
    """
    incoming = [NONE] * len(segments)
    for name, entry in entries.items():
        loads = [i for segment in segments if segment.function == name for i in segment.instructions if is_load(i)]
        incoming[entry] = NONE.union(*map(destinations, loads))
    work = list(range(len(segments)))
    while work:
        index = work.pop()
        after = incoming[index]
        for inst in segments[index].instructions:
            after = _after(inst, after)
        for successor in successors[index]:
            if not after <= incoming[successor]:
                incoming[successor] |= after
                work.append(successor)
    return incoming


def _after(inst: Instruction, unwritten: frozenset[int]) -> frozenset[int]:
    if is_load(inst):
        return unwritten | destinations(inst)
    if inst.opcode == "tcgen05" and inst.modifiers[:1] == ("wait::ld",) and inst.guard is None:
        return NONE
    return unwritten - touched(inst) if unwritten else unwritten


def _guard(segment: Segment, unwritten: frozenset[int]) -> None:
    for place, op in enumerate(segment.ops):
        inst = segment.instructions[place]
        met = unwritten & touched(inst)
        if met:
            segment.ops[place] = _stalling(op, met)
            segment.fixed.add(place)
        unwritten = _after(inst, unwritten)
    if segment.control is not None:
        met = unwritten & touched(segment.instructions[-1])
        if met:
            segment.ops.append(_stalling(_nothing, met))
            segment.instructions.insert(-1, segment.instructions[-1])


def _stalling(op: Run, registers: frozenset[int]) -> Run:
    def stalling(f, m, cta) -> None:
        cta.unit(Scoreboard).check(registers, m.lanes)
        op(f, m, cta)

    return stalling


def _nothing(f, m, cta) -> None:
    """Stands in front of a control instruction."""
