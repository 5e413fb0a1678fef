"""Barriers of a CTA and of a cluster (PTX ISA 9.7.13.1 and 9.7.13.3).

A CTA has sixteen named barriers. They count warps: a warp has arrived when all its live lanes have, and counts as 32
threads. A barrier without a thread count is for all warps that have not exited; one with a count is for that many
threads, whoever they are. The cluster barrier counts threads, and those that have exited count as arrived.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from common.emulator.faults import BarrierFault, UnsupportedInstruction, ranges
from common.emulator.isa.binder import Binder
from common.emulator.isa.mbarrier import RemoteOperations
from common.emulator.isa.registry import Control, Decoded, instruction
from common.emulator.isa.warp import decode_warp_barrier
from common.emulator.machine.events import Operation
from common.emulator.machine.mask import WARP, Mask
from common.emulator.ptx.module import Instruction

BARRIERS = 16
PLAIN = "sync or arrive"
_RESULTS: dict[str, Callable[[np.ndarray], int]] = {
    "red.popc": np.count_nonzero,
    "red.and": np.all,
    "red.or": np.any,
}


def _by_warp(lanes: np.ndarray) -> np.ndarray:
    return lanes.reshape(-1, WARP).any(axis=1)


def _warps(present: np.ndarray) -> str:
    """A bool array over warps in words: `warps 0-2`."""
    numbers = np.flatnonzero(present)
    return f"warp{'s' * (numbers.size != 1)} {ranges(numbers)}"


# -- named barriers ------------------------------------------------------------------------------------------------


class NamedBarriers:
    """The sixteen barriers of a CTA."""

    def __init__(self, cta) -> None:
        self.barriers = [NamedBarrier(cta, number) for number in range(BARRIERS)]


class NamedBarrier:
    """One barrier. `generation` counts how often it has completed; everything else describes the current use.

    `arrived` and `votes` are bool (L,): the lanes that have come, and their predicates. `counted` is bool (L / 32,):
    the warps whose live lanes have all come. `count` is in threads; with `everyone` exited warps are not waited for.
    """

    def __init__(self, cta, number: int) -> None:
        self.cta = cta
        self.number = number
        self.generation = 0
        self._reset()

    def _reset(self) -> None:
        lanes = self.cta.lanes
        self.kind = ""
        self.count = 0
        self.everyone = False
        self.arrived = np.zeros(lanes, bool)
        self.votes = np.zeros(lanes, bool)
        self.counted = np.zeros(lanes // WARP, bool)
        self.results: list[tuple[np.ndarray, int]] = []
        self.waiting: list = []

    @property
    def idle(self) -> bool:
        return not self.kind

    def arrive(self, m: Mask, kind: str, count: int | None) -> None:
        """Lanes arrive; `count` threads take part, None for the CTA. Raises BarrierFault for what does not fit."""
        if self.idle:
            self.kind, self.count = kind, self.cta.lanes if count is None else count
        self._check(m, kind, count)
        self.everyone |= count is None
        self.arrived |= m.lanes

    def _check(self, m: Mask, kind: str, count: int | None) -> None:
        if kind != self.kind:
            raise BarrierFault(
                f"barrier {self.number} is in use by a {self.kind}: a {kind} cannot join it", lanes=m.numbers
            )
        wanted = self.cta.lanes if count is None else count
        if wanted != self.count:
            raise BarrierFault(
                f"barrier {self.number} has been started for {self.count} threads, an arrival says {wanted}",
                lanes=m.numbers,
            )
        again = m.lanes & self.arrived
        if again.any():
            raise BarrierFault(
                f"second arrival of {_warps(_by_warp(again))} at barrier {self.number} before it has completed "
                f"({self.progress()})",
                lanes=np.flatnonzero(again),
            )
        arriving = WARP * int(np.count_nonzero(_by_warp(self.arrived | m.lanes)))
        if arriving > self.count:
            raise BarrierFault(
                f"barrier {self.number} is for {self.count} threads, {arriving} arrive at it together", lanes=m.numbers
            )

    def settle(self) -> bool:
        """Counts the warps that are complete, and completes the barrier if that was all. Returns whether it was."""
        if self.idle:
            return False
        alive = self.cta.alive
        self.counted |= _by_warp(self.arrived) & ~_by_warp(alive & ~self.arrived)
        if self.everyone:
            complete = not (_by_warp(alive) & ~self.counted).any()
        else:
            complete = WARP * int(np.count_nonzero(self.counted)) == self.count
        if complete:
            self._complete()
        return complete

    def _complete(self) -> None:
        for lanes, slot in self.results:
            self.cta.frame[slot][lanes] = _RESULTS[self.kind](self.votes[self.arrived])
        self.generation += 1
        self._reset()
        self.cta.activity()

    def progress(self) -> str:
        """How far the current use has come, in words."""
        alive = self.cta.alive
        here = int(np.count_nonzero(self.counted))
        partly = _by_warp(self.arrived) & ~self.counted
        parts = []
        if self.everyone:
            live = _by_warp(alive)
            parts.append(f"{here} of {int(np.count_nonzero(live | self.counted))} warps have arrived")
            absent = live & ~self.counted & ~partly
            if absent.any():
                parts.append(f"{_warps(absent)} missing")
        else:
            parts.append(f"{WARP * here} of {self.count} threads have arrived")
            if here:
                parts.append(_warps(self.counted))
        for warp in np.flatnonzero(partly):
            window = np.arange(self.cta.lanes) // WARP == warp
            parts.append(f"of warp {warp} threads {ranges(np.flatnonzero(window & alive & ~self.arrived))} missing")
        gone = ~_by_warp(alive) & ~self.counted
        if gone.any():
            parts.append(f"{_warps(gone)} exited")
        return ", ".join(parts)


class BarrierControl(Control):
    """`bar` and `barrier`: `action` is sync, arrive or red.<op>; the others are slots, None without such an operand."""

    def __init__(
        self, action: str, aligned: bool, number: int, count: int | None, vote: int | None, result: int | None
    ) -> None:
        super().__init__()
        self.action, self.aligned = action, aligned
        self.number, self.count = number, count
        self.vote, self.result = vote, result
        self.kind = action if action in _RESULTS else PLAIN

    def run(self, cta, path) -> None:
        if self.aligned and not cta.whole_warps(path):
            return
        number = path.mask.common(cta.frame[self.number])
        count = -1 if self.count is None else path.mask.common(cta.frame[self.count])
        if number is not None and count is not None:
            self._check_operands(cta, path.mask, number, count)
            self._arrive(cta, path, number, count)
            return
        numbers = cta.frame[self.number].astype(np.int64)
        counts = np.full(cta.lanes, -1) if self.count is None else cta.frame[self.count].astype(np.int64)
        self._arrive_in_groups(cta, path, numbers, counts)

    def _arrive_in_groups(self, cta, path, numbers: np.ndarray, counts: np.ndarray) -> None:
        """Warps that name different barriers in a register go on as paths of their own."""
        rest: Mask | None = path.mask
        groups = []
        while rest is not None:
            first = int(rest.numbers[0])
            number, count = int(numbers[first]), int(counts[first])
            group, rest = rest.split_by((numbers == number) & (counts == count))
            self._check_operands(cta, group, number, count)
            groups.append((group, number, count))
        if self.aligned and sum(len(group.warps) for group, _, _ in groups) > len(path.mask.warps):
            torn = sum(group.present.astype(int) for group, _, _ in groups) > 1
            raise BarrierFault(
                f"the lanes of {_warps(torn)} name different barriers or thread counts",
                lanes=np.flatnonzero(path.mask.lanes & np.repeat(torn, WARP)),
            )
        *others, last = groups
        path.mask = last[0]
        for group, number, count in others:
            self._arrive(cta, cta.fork(path, group, path.segment.index), number, count)
        self._arrive(cta, path, *last[1:])

    def _check_operands(self, cta, m: Mask, number: int, count: int) -> None:
        if number >= BARRIERS:
            raise BarrierFault(f"barrier {number} does not exist: they are 0 to {BARRIERS - 1}", lanes=m.numbers)
        if self.count is not None and (count % WARP or not 0 < count <= cta.lanes):
            raise BarrierFault(
                f"a barrier cannot be for {count} threads: the count must be a multiple of {WARP}, from {WARP} to the "
                f"{cta.lanes} of the CTA",
                lanes=m.numbers,
            )

    def _arrive(self, cta, path, number: int, count: int) -> None:
        barrier = cta.unit(NamedBarriers).barriers[number]
        barrier.arrive(path.mask, self.kind, None if self.count is None else count)
        if self.vote is not None:
            np.copyto(barrier.votes, cta.frame[self.vote], where=path.mask.lanes)
            barrier.results.append((path.mask.lanes, self.result))
        self._go_on(cta, path, barrier)

    def _go_on(self, cta, path, barrier: NamedBarrier) -> None:
        waiting, generation = barrier.waiting, barrier.generation
        if barrier.settle():
            cta.advance(path)
            for other in waiting:
                cta.release(other)
            return
        present = path.mask.present
        if self.action == "arrive" and not (present & ~barrier.counted).any():
            cta.advance(path)
            return

        exits = cta.exits

        def ready() -> bool:
            nonlocal exits
            if barrier.generation != generation:
                return True
            if exits != cta.exits:  # whoever arrives settles the barrier, an exit does not
                exits = cta.exits
                barrier.settle()
            counted = self.action == "arrive" and not (present & ~barrier.counted).any()
            return barrier.generation != generation or counted

        cta.machine.counters.events["barrier waits"] += len(path.mask.warps)
        cta.block(path, lambda: f"for barrier {barrier.number}: {barrier.progress()}", ready)
        if self.action != "arrive":
            barrier.waiting.append(path)


@instruction("bar", "barrier")
def decode_barrier(inst: Instruction, b: Binder) -> Decoded:
    if "warp" in inst.modifiers and inst.opcode == "bar":
        return decode_warp_barrier(inst, b)
    mods = b.modifiers(inst)
    if inst.opcode == "barrier" and mods.take("cluster"):
        return _cluster_barrier(inst, mods)
    mods.take("cta")
    action = mods.one_of("sync", "arrive", "red")
    aligned = inst.opcode == "bar" or mods.take("aligned")
    if action == "red":
        return _reduction(inst, b, mods, aligned)
    mods.done()
    number, *count = inst.operands
    if len(count) > 1 or (action == "arrive" and not count):
        raise UnsupportedInstruction(f"`{inst.opcode}.{action}` does not take {len(inst.operands)} operands")
    return BarrierControl(
        action, aligned, b.read(number, "u32"), b.read(count[0], "u32") if count else None, None, None
    )


def _reduction(inst: Instruction, b: Binder, mods, aligned: bool) -> Decoded:
    operation = mods.one_of("popc", "and", "or")
    kind = mods.one_of("u32" if operation == "popc" else "pred")
    mods.done()
    if len(inst.operands) not in (3, 4):
        raise UnsupportedInstruction(f"`{inst.opcode}.red` does not take {len(inst.operands)} operands")
    target, number, *count, vote = inst.operands
    return BarrierControl(
        f"red.{operation}",
        aligned,
        b.read(number, "u32"),
        b.read(count[0], "u32") if count else None,
        b.read(vote, "pred"),
        b.write(target, kind),
    )


# -- the cluster barrier -------------------------------------------------------------------------------------------


class ClusterBarrier:
    """The barrier of a cluster, completed `completed` times.

    `arrivals[rank]` is int64 (L,): the use of the barrier at which each lane last arrived, from 1. `owed[rank]` is
    bool (L,): lanes that have arrived and not yet waited. `outstanding` are operations on mbarriers of other CTAs that
    an arrival with release semantics came after: they are performed before the barrier completes.
    """

    def __init__(self, cluster) -> None:
        self.blocks = cluster.blocks
        self.completed = 0
        self.arrivals = [np.zeros(block.lanes, np.int64) for block in self.blocks]
        self.owed = [np.zeros(block.lanes, bool) for block in self.blocks]
        self.outstanding: list[Operation] = []

    def arrive(self, cta, m: Mask, release: bool) -> None:
        arrivals = self.arrivals[cta.rank]
        again = m.lanes & (arrivals > self.completed)
        if again.any():
            raise BarrierFault(
                "barrier.cluster.arrive for a second time before the barrier has completed: a thread arrives once, "
                f"then waits ({self.progress()})",
                lanes=np.flatnonzero(again),
            )
        arrivals[m.lanes] = self.completed + 1
        self.owed[cta.rank] |= m.lanes
        if release:
            self.outstanding.extend(cta.unit(RemoteOperations).outstanding)
        self.settle()

    def settle(self) -> None:
        """Completes the barrier when every live thread of the cluster has arrived."""
        if any(self._missing(block).any() for block in self.blocks):
            return
        self.outstanding = [operation for operation in self.outstanding if not operation.finished]
        if self.outstanding:
            return
        self.completed += 1
        self.blocks[0].activity()

    def missing_of(self, cta, m: Mask) -> bool:
        """Whether live lanes of the warps in `m` have not arrived."""
        return bool((_by_warp(self._missing(cta)) & m.present).any())

    def _missing(self, block) -> np.ndarray:
        return block.alive & (self.arrivals[block.rank] <= self.completed)

    def progress(self) -> str:
        parts = []
        for block in self.blocks:
            missing = _by_warp(self._missing(block))
            if missing.any():
                parts.append(f"{_warps(missing)} of CTA rank {block.rank}")
        return "missing " + ", ".join(parts) if parts else "all have arrived"


class ClusterArrive(Control):
    """`barrier.cluster.arrive`"""

    def __init__(self, aligned: bool, release: bool) -> None:
        super().__init__()
        self.aligned, self.release = aligned, release

    def run(self, cta, path) -> None:
        if self.aligned and not cta.whole_warps(path):
            return
        barrier, mask = cta.cluster.unit(ClusterBarrier), path.mask
        barrier.arrive(cta, mask, self.release)
        target = int(barrier.arrivals[cta.rank][mask.numbers[0]])

        def ready() -> bool:
            return barrier.completed >= target or not barrier.missing_of(cta, mask)

        if ready():
            cta.advance(path)
        else:
            cta.block(path, lambda: f"for the rest of its warp at the cluster barrier: {barrier.progress()}", ready)


class ClusterWait(Control):
    """`barrier.cluster.wait`"""

    def __init__(self, aligned: bool) -> None:
        super().__init__()
        self.aligned = aligned

    def run(self, cta, path) -> None:
        if self.aligned and not cta.whole_warps(path):
            return
        barrier, lanes = cta.cluster.unit(ClusterBarrier), path.mask.lanes
        owed = barrier.owed[cta.rank]
        if (lanes & ~owed).any():
            raise BarrierFault(
                "barrier.cluster.wait without a barrier.cluster.arrive before it", lanes=np.flatnonzero(lanes & ~owed)
            )
        owed[lanes] = False
        target = int(barrier.arrivals[cta.rank][lanes].max())

        def ready() -> bool:
            if barrier.completed < target:
                barrier.settle()
            return barrier.completed >= target

        if ready():
            cta.advance(path)
        else:
            cta.machine.counters.events["barrier waits"] += len(path.mask.warps)
            cta.block(path, lambda: f"for the cluster barrier: {barrier.progress()}", ready)


def _cluster_barrier(inst: Instruction, mods) -> Decoded:
    action = mods.one_of("arrive", "wait")
    order = mods.optional(*(("release", "relaxed") if action == "arrive" else ("acquire",)))
    aligned = mods.take("aligned")
    mods.done()
    if inst.operands:
        raise UnsupportedInstruction(f"barrier.cluster.{action} takes no operands")
    return ClusterArrive(aligned, order != "relaxed") if action == "arrive" else ClusterWait(aligned)
