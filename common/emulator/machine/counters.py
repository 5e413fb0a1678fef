"""What a launch did, counted: instructions, memory traffic, arithmetic and waits, by PTX instruction and source line.

Nothing here slows a launch by much, so it is always on. Instructions are counted per segment and warp while running and
broken down on request; addresses are kept for a while and measured many at a time (`access_patterns`).

Not counted as wavefronts or sectors: local, constant and parameter memory, the shared memory of other CTAs, mbarriers,
and what the asynchronous engines (TMA, bulk copies, tensor cores) read and write. Those have their bytes in `bytes`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from common.emulator.machine.access_patterns import INACTIVE, Pattern, PatternCosts, SectorPattern, SharedPattern
from common.emulator.machine.mask import WARP
from common.emulator.machine.memory import GLOBAL_BASE, Piece
from common.emulator.machine.operations import operations_of
from common.emulator.ptx.module import Instruction

if TYPE_CHECKING:
    from common.emulator.machine.mask import Mask
    from common.emulator.machine.program import Program
    from common.emulator.machine.tensor_core import MmaPlan
    from common.emulator.machine.thread_block import ThreadBlock

_BATCH = 64  # accesses of an instruction that are measured together
_COUNTED = ("global", "shared", "shared::cluster", "generic")


@dataclass
class Figures:
    """Counts of one PTX instruction, of a source line or of a launch.

    `instructions`: warp-instructions. `wavefronts` of shared memory and `sectors` (32 bytes) of global memory, each
    with the number of requests (warp-instructions that reached that memory) and the least that their bytes need.
    `flops`: floating-point operations of all units but the special function unit. `waits`: how often a warp had to
    stop here, for a barrier, an mbarrier, a group of copies, or for lanes of its own.
    """

    instructions: int = 0
    shared_requests: int = 0
    wavefronts: int = 0
    ideal_wavefronts: int = 0
    global_requests: int = 0
    sectors: int = 0
    ideal_sectors: int = 0
    flops: int = 0
    waits: int = 0

    @property
    def conflicts(self) -> int:
        """Wavefronts that bank conflicts cost."""
        return self.wavefronts - self.ideal_wavefronts

    @property
    def excess_sectors(self) -> int:
        return self.sectors - self.ideal_sectors

    def add(self, other: Figures) -> None:
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))

    @property
    def badness(self) -> tuple[int, int, int]:
        """Sorts by what is wasted, then by traffic, then by instructions."""
        return self.conflicts + self.excess_sectors, self.wavefronts + self.sectors, self.instructions


class Role(NamedTuple):
    """Neighbouring warps of the CTA that run the same code: numbers of the first and last, warp-instructions."""

    first: int
    last: int
    opcodes: Counter[str]


class Traffic:
    """How one load, store or atomic of the program uses memory: made when it is decoded, `count` at each execution.

    `kind` is "load", "store", "atomic" or "matrix", `width` the bytes of a lane, `lanes` how many lanes of a warp
    supply an address (`access_patterns.SharedPattern`).
    """

    def __init__(self, inst: Instruction, width: int, kind: str, lanes: int = WARP) -> None:
        self.inst = inst
        self.wavefronts = SharedPattern(width, kind, lanes)
        self.sectors = SectorPattern(width, kind)

    def count(self, cta: ThreadBlock, pieces: list[Piece], m: Mask) -> None:
        """`pieces` is where the lanes of `m` access memory, as `cta.locate` found it."""
        for piece in pieces:
            if piece.region is cta.shared:
                tally = cta.machine.counters.tally(self, self.wavefronts)
            elif piece.region.base >= GLOBAL_BASE:
                tally = cta.machine.counters.tally(self, self.sectors)
            else:
                continue
            if type(piece.chosen) is slice:
                tally.add(piece.offsets, None if m.count == WARP * m.warps.size else m.numbers)
            else:
                tally.add(piece.offsets, m.numbers[piece.chosen])

    def count_rows(self, cta: ThreadBlock, offsets: np.ndarray) -> None:
        """For matrices in the CTA's shared memory: the offsets of the rows of whole warps."""
        cta.machine.counters.tally(self, self.wavefronts).add(offsets, None)


def traffic_of(inst: Instruction, space: str, width: int, kind: str) -> Traffic | None:
    """None for spaces whose traffic is not counted."""
    return Traffic(inst, width, kind) if space in _COUNTED else None


class Tally:
    """Costs of one instruction in one kind of memory during one launch."""

    def __init__(self, pattern: Pattern) -> None:
        self.requests = self.actual = self.ideal = 0
        self._lanes = pattern.lanes
        self._costs = PatternCosts(pattern)
        self._whole: list[np.ndarray] = []  # offsets of all lanes of some warps
        self._partial: list[tuple[np.ndarray, np.ndarray]] = []  # offsets and lane numbers

    def add(self, offsets: np.ndarray, numbers: np.ndarray | None) -> None:
        """One execution: byte offsets of the lanes `numbers` (ascending), of whole warps when that is None. The arrays
        are kept: the caller must not change them."""
        if numbers is None:
            self._whole.append(offsets)
            if len(self._whole) == _BATCH:
                self._settle_whole()
        else:
            self._partial.append((offsets, numbers))
            if len(self._partial) == _BATCH:
                self._settle_partial()

    def settle(self) -> None:
        """Measures what has been kept."""
        if self._whole:
            self._settle_whole()
        if self._partial:
            self._settle_partial()

    def _settle_whole(self) -> None:
        rows = np.concatenate(self._whole).reshape(-1, self._lanes)
        self._whole.clear()
        self._measure(rows)

    def _settle_partial(self) -> None:
        offsets = np.concatenate([offsets for offsets, _ in self._partial])
        lanes = np.concatenate([numbers for _, numbers in self._partial])
        starts = np.zeros(lanes.size, bool)  # where another warp or execution begins
        starts[np.cumsum([0, *(numbers.size for _, numbers in self._partial[:-1])])] = True
        warps = lanes // WARP
        starts[1:] |= warps[1:] != warps[:-1]
        rows = np.full((int(np.count_nonzero(starts)), WARP), INACTIVE, np.int64)
        rows[np.cumsum(starts) - 1, lanes % WARP] = offsets
        self._partial.clear()
        self._measure(rows)

    def _measure(self, rows: np.ndarray) -> None:
        cost = self._costs.total(rows)
        self.requests += len(rows)
        self.actual += cost.actual
        self.ideal += cost.ideal


class Counters:
    """`bytes[path]` counts bytes by path ("global load", "shared store", "TMA load", ...); `events[name]` anything
    else.

    `warp_instructions` counts one per warp that has an active lane, before guards, as the hardware's inst_executed
    does. `by_instruction` and `by_source` say where the `Figures` of the launch come from.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self.bytes: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        self.guarded_lanes: Counter[int] = Counter()  # by id of a guarded arithmetic instruction: lanes that executed
        self._tallies: dict[Pattern, tuple[Instruction, Tally]] = {}
        self._issued: dict[int, Counter[str]] = {}  # by id of an instruction: operations it had the tensor core do
        self._mmas: Counter[tuple[int, MmaPlan]] = Counter()  # by id of an instruction and what it computes
        segments = len(program.segments)
        self._executed = np.zeros((segments, 1), np.int64)  # grows to the warps of a CTA with the first of them
        self._lanes = np.zeros(segments, np.int64)
        self._waits = np.zeros(segments, np.int64)

    # -- while running ---------------------------------------------------------------------------------------------

    def add_block(self, block: ThreadBlock) -> None:
        """Called once per CTA, when it has finished."""
        by_warp, lanes = block.executed()
        self._executed = self._executed + by_warp
        self._lanes += lanes
        self._waits += block.waits

    def count_mma(self, inst: Instruction, plan: MmaPlan) -> None:
        """A `tcgen05.mma`, whose size is known only when it runs."""
        self._mmas[id(inst), plan] += 1

    def settle(self) -> None:
        """Called when the launch is complete: breaks down what has been counted in short."""
        for (instruction, plan), times in self._mmas.items():
            shape = plan.descriptor
            operations = times * 2 * shape.m * shape.n * shape.k
            self._issued.setdefault(instruction, Counter())[f"tensor {shape.form.kind}"] += operations
            self.events[plan.label] += times
            self.bytes["MMA shared read"] += times * plan.shared_bytes
        self._mmas.clear()

    def tally(self, traffic: Traffic, pattern: Pattern) -> Tally:
        if pattern not in self._tallies:
            self._tallies[pattern] = traffic.inst, Tally(pattern)
        return self._tallies[pattern][1]

    # -- afterwards ------------------------------------------------------------------------------------------------

    @property
    def warp_instructions(self) -> int:
        return sum(self.by_warp())

    def by_opcode(self) -> Counter[str]:
        """Warp-instructions by opcode, summed over CTAs."""
        return sum(self.opcodes_by_warp(), Counter())

    def by_warp(self) -> list[int]:
        """Warp-instructions by warp number within the CTA, summed over CTAs."""
        return [opcodes.total() for opcodes in self.opcodes_by_warp()]

    def opcodes_by_warp(self) -> list[Counter[str]]:
        """Warp-instructions by opcode for each warp number: what each role of a specialised kernel spends time on."""
        mixes: list[Counter[str]] = [Counter() for _ in range(self._executed.shape[1])]
        for segment, inst in self._instructions():
            for mix, executed in zip(mixes, self._executed[segment].tolist()):
                if executed:
                    mix[inst.opcode] += executed
        return mixes

    def roles(self) -> list[Role]:
        """`opcodes_by_warp` with neighbours that executed the same set of segments taken together."""
        roles: list[Role] = []
        visited = (self._executed > 0).T
        for warp, opcodes in enumerate(self.opcodes_by_warp()):
            if warp and (visited[warp] == visited[warp - 1]).all():
                roles[-1] = roles[-1]._replace(last=warp, opcodes=roles[-1].opcodes + opcodes)
            else:
                roles.append(Role(warp, warp, opcodes))
        return roles

    @property
    def flops(self) -> Counter[str]:
        """Operations by unit: "fp32 fma" (two for each), "fp16 add", "fp32 special", "tensor f16", ..."""
        total: Counter[str] = Counter()
        for segment, inst in self._instructions():
            total.update(self._operations(segment, inst))
        return total

    def by_instruction(self) -> list[tuple[Instruction, Figures]]:
        """Every PTX instruction that was executed, worst first (`Figures.badness`)."""
        return sorted(self._figures(), key=lambda pair: pair[1].badness, reverse=True)

    def by_source(self) -> dict[str, Figures]:
        """`kernel.cu:42` to figures, worst first. What was inlined counts for the line in the kernel that called it;
        PTX without line information for `PTX:<line>`."""
        lines: dict[str, Figures] = {}
        for inst, figures in self._figures():
            lines.setdefault(inst.called_from or inst.source or f"PTX:{inst.line}", Figures()).add(figures)
        return dict(sorted(lines.items(), key=lambda pair: pair[1].badness, reverse=True))

    def total(self) -> Figures:
        """Everything that the launch did."""
        total = Figures()
        for _, figures in self._figures():
            total.add(figures)
        return total

    def _instructions(self) -> Iterator[tuple[int, Instruction]]:
        """(segment, instruction): each once, though one that blocks may stand before and after its wait."""
        previous = None
        for segment in self._program.segments:
            for inst in segment.instructions:
                if inst is not previous:
                    yield segment.index, inst
                previous = inst

    def _operations(self, segment: int, inst: Instruction) -> Counter[str]:
        issued = self._issued.get(id(inst), Counter())
        known = operations_of(inst)
        if known is None:
            return issued
        unit, per_lane = known
        lanes = int(self._lanes[segment]) if inst.guard is None else self.guarded_lanes[id(inst)]
        return issued + Counter({unit: per_lane * lanes})

    def _figures(self) -> Iterator[tuple[Instruction, Figures]]:
        traffic: dict[int, Figures] = {}
        for pattern, (inst, tally) in self._tallies.items():
            tally.settle()
            traffic.setdefault(id(inst), Figures()).add(_traffic_figures(pattern, tally))
        executed = self._executed.sum(axis=1).tolist()
        for segment, inst in self._instructions():
            if not executed[segment]:
                continue
            operations = self._operations(segment, inst)
            figures = traffic.get(id(inst), Figures())
            figures.instructions = executed[segment]
            figures.flops = sum(count for unit, count in operations.items() if not unit.endswith("special"))
            figures.waits = self._waits_of(segment, inst)
            yield inst, figures

    def _waits_of(self, segment: int, inst: Instruction) -> int:
        last = self._program.segments[segment]
        return int(self._waits[segment]) if last.control is not None and inst is last.instructions[-1] else 0


def _traffic_figures(pattern: Pattern, tally: Tally) -> Figures:
    if isinstance(pattern, SharedPattern):
        return Figures(shared_requests=tally.requests, wavefronts=tally.actual, ideal_wavefronts=tally.ideal)
    return Figures(global_requests=tally.requests, sectors=tally.actual, ideal_sectors=tally.ideal)
