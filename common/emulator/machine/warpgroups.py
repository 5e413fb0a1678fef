"""The `wgmma` operations of a CTA between their issue and their completion (PTX ISA 9.7.15.5 and 9.7.15.7).

The four warps of a warpgroup come to a `wgmma.mma_async` one after the other and go on at once; the operation starts
when all have come. Until it is complete its accumulators belong to no warp: the registers read as poison. An
instruction on the same accumulators that is issued in the meantime gets them from its predecessor, warp by warp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from common.emulator.faults import DivergenceFault, Fault
from common.emulator.hardware.smem_descriptor import SmemDescriptor
from common.emulator.machine.events import Operation
from common.emulator.machine.mask import WARP
from common.emulator.machine.wgmma import WARPGROUP, WARPS, WgmmaPlan, read_lanes, write_lanes

if TYPE_CHECKING:
    from common.emulator.machine.thread_block import ThreadBlock

_POISON = np.uint32(0xFFFF_FFFF)


class Inputs(NamedTuple):
    """What all warps of a warpgroup must give alike: descriptors as bits (A's is None in registers), and scale-d."""

    a: int | None
    b: int
    keep: bool


class Wgmma:
    """One instruction of a warpgroup. `joined`: bool (4,), which of its warps have come to it."""

    def __init__(self, plan: WgmmaPlan, block: ThreadBlock, group: int, inputs: Inputs) -> None:
        self.plan = plan
        self.block = block
        self.group = group
        self.inputs = inputs
        self.a = None if inputs.a is None else SmemDescriptor.from_wgmma_bits(inputs.a)
        self.b = SmemDescriptor.from_wgmma_bits(inputs.b)
        plan.check(block, self.a, self.b)
        self.joined = np.zeros(WARPS, bool)
        self.operation: Operation | None = None
        self.predecessors: set[Operation] = set()
        self._values = np.empty((plan.form.registers, WARPGROUP), np.uint32)
        self._metadata = np.empty(WARPGROUP, np.uint32) if plan.form.sparse else None
        self._heirs: list[Wgmma | None] = [None] * WARPS

    def __str__(self) -> str:
        return f"{self.plan.form} of warpgroup {self.group}"

    def join(self, warp: int, predecessor: Wgmma | None, metadata: np.ndarray | None, poison: bool) -> None:
        """A warp (0 to 3) hands in its accumulators: those that `predecessor` is to compute, or its registers."""
        self.joined[warp] = True
        if self._metadata is not None:
            self._metadata[_lanes(warp)] = metadata
        if predecessor is not None:
            predecessor._heirs[warp] = self
            self.predecessors.add(predecessor.operation)
            return
        lanes = self._frame_lanes(warp)
        if self.inputs.keep:
            self._values[:, _lanes(warp)] = read_lanes(self.block, self.plan.d, lanes)
        if poison:
            write_lanes(self.block, self.plan.d, lanes, _POISON)

    def run(self) -> None:
        """Reads A and B, and gives every warp its accumulators."""
        block, plan = self.block, self.plan
        if block.finished:  # its registers are gone, and nobody has read them
            return
        product = plan.product(block, self.group, self.a, self.b, self._metadata)
        result = plan.accumulate(product, self._values if self.inputs.keep else None)
        if not any(self._heirs):
            write_lanes(block, plan.d, slice(self.group * WARPGROUP, (self.group + 1) * WARPGROUP), result)
            return
        for warp, heir in enumerate(self._heirs):
            if heir is None:
                write_lanes(block, plan.d, self._frame_lanes(warp), result[:, _lanes(warp)])
            else:
                heir._values[:, _lanes(warp)] = result[:, _lanes(warp)]

    def _frame_lanes(self, warp: int) -> slice:
        return _lanes(self.group * WARPS + warp)


class Warpgroups:
    """The instructions of a CTA's warpgroups that are under way."""

    def __init__(self, cta: ThreadBlock) -> None:
        self.cta = cta
        self.fenced = np.zeros(cta.lanes // WARP, bool)  # warps that have executed a wgmma.fence
        self._gathering: dict[int, list[Wgmma]] = {}  # of each warpgroup: those some of its warps have yet to come to
        self._in_flight: dict[int, list[Wgmma]] = {}  # of each warp

    def join(self, plan: WgmmaPlan, warp: int, inputs: Inputs, metadata: np.ndarray | None) -> Wgmma:
        """Warp `warp` of the CTA comes to an instruction. Returns it; its warps are complete when all have `joined`.

        Raises DivergenceFault where warps of the warpgroup execute different instructions or have exited; Fault for
        operands that differ from warp to warp, for registers that an operation in flight uses, and where no
        `wgmma.fence` came first; OutOfBounds and DescriptorFault for the operands.
        """
        lanes = range(warp * WARP, (warp + 1) * WARP)
        if not self.fenced[warp]:
            raise Fault("wgmma.mma_async without a wgmma.fence before the warp's first one", lanes=lanes)
        predecessor = self._predecessor(plan, warp)
        wgmma = self._find(plan, warp, inputs)
        wgmma.join(warp % WARPS, predecessor, metadata, poison=self.cta.machine.schedule != "early")
        self._in_flight[warp].append(wgmma)
        if wgmma.joined.all():
            self._gathering[wgmma.group].remove(wgmma)
        return wgmma

    def missing(self, operations: list[Operation]) -> Wgmma | None:
        """The first of the operations that some warps have yet to come to."""
        gathering = (wgmma for group in self._gathering.values() for wgmma in group)
        return next((wgmma for wgmma in gathering if wgmma.operation in operations), None)

    def _find(self, plan: WgmmaPlan, warp: int, inputs: Inputs) -> Wgmma:
        """The oldest instruction that the warp has yet to come to, or a new one."""
        group, member = divmod(warp, WARPS)
        gathering = self._gathering.setdefault(group, [])
        found = next((wgmma for wgmma in gathering if not wgmma.joined[member]), None)
        lanes = range(warp * WARP, (warp + 1) * WARP)
        if found is None:
            self._require_warps(group, lanes)
            found = Wgmma(plan, self.cta, group, inputs)
            gathering.append(found)
        elif found.plan is not plan:
            raise DivergenceFault(
                f"warps of warpgroup {group} execute different instructions: {found.plan.form} and {plan.form}, or two "
                "of the same kind",
                lanes=lanes,
            )
        elif found.inputs != inputs:
            raise Fault(
                f"warps of warpgroup {group} give different descriptors or scale-d: {found.inputs} and {inputs}",
                lanes=lanes,
            )
        return found

    def _require_warps(self, group: int, lanes: range) -> None:
        alive = self.cta.alive[group * WARPGROUP : (group + 1) * WARPGROUP]
        if np.count_nonzero(alive) < WARPGROUP:
            raise DivergenceFault(
                f"wgmma needs all 128 threads of warpgroup {group}: {np.count_nonzero(alive)} are there", lanes=lanes
            )

    def _predecessor(self, plan: WgmmaPlan, warp: int) -> Wgmma | None:
        """The operation in flight that computes the warp's accumulators, if there is one."""
        flying = [wgmma for wgmma in self._in_flight.get(warp, ()) if not wgmma.operation.finished]
        self._in_flight[warp] = flying
        predecessor = None
        for wgmma in flying:
            other = wgmma.plan
            if other.d == plan.d:
                predecessor = wgmma
            elif other.registers_d & plan.registers_d:
                self._refuse(wgmma, "accumulators that overlap those of", warp)
            if other.registers_d & plan.registers_a:
                self._refuse(wgmma, "registers of A that are accumulators of", warp)
            if other.registers_a & plan.registers_d:
                self._refuse(wgmma, "accumulators that are registers of A of", warp)
        return predecessor

    def _refuse(self, wgmma: Wgmma, what: str, warp: int) -> None:
        raise Fault(
            f"{what} a {wgmma.plan.form} in flight: a wgmma.wait_group is missing",
            lanes=range(warp * WARP, (warp + 1) * WARP),
        )


def _lanes(warp: int) -> slice:
    return slice(warp * WARP, (warp + 1) * WARP)
