"""`setmaxnreg` (PTX ISA 9.7.19.5): warpgroups hand registers to one another through the CTA's pool.

The pool exists where the PTX fixes the number of registers a thread has at entry: `.maxnreg`, or `.minnctapersm` with
`.maxntid` or `.reqntid`. Elsewhere ptxas drops the instruction, and so it has no effect here.
"""

from __future__ import annotations

import numpy as np

from common.emulator.faults import DivergenceFault, Fault, UnsupportedInstruction
from common.emulator.isa.binder import Binder
from common.emulator.isa.registry import Control, Decoded, instruction
from common.emulator.machine.mask import WARP, Mask
from common.emulator.ptx.module import Immediate, Instruction

WARPGROUP = 4 * WARP
_UNIT = 8  # registers per thread are allocated in multiples of this
_MOST = 256


@instruction("setmaxnreg")
def decode_set_register_count(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    action = mods.one_of("inc", "dec")
    for required in ("sync", "aligned", "u32"):
        mods.one_of(required)
    mods.done()
    (count,) = inst.operands
    if not isinstance(count, Immediate) or not 24 <= int(count.value) <= _MOST or int(count.value) % _UNIT:
        raise UnsupportedInstruction("the register count of setmaxnreg is a constant multiple of 8 from 24 to 256")
    return SetRegisterCount(action, int(count.value))


class Request:
    """One warpgroup at its setmaxnreg: `arrived` holds its lanes that are there, `granted` says that they may go on.

    `wanted[w]` is what warp w of the CTA asked for, or 0: "the same instruction" of the ISA is read as the same action,
    because kernels whose warps have roles of their own begin each role with a count of its own.
    """

    def __init__(self, control: SetRegisterCount, group: int, lanes: int) -> None:
        self.control = control
        self.group = group
        self.arrived = np.zeros(lanes, bool)
        self.wanted = np.zeros(lanes // WARP, np.int64)
        self.granted = False


class RegisterPool:
    """The registers of a CTA that no warp owns. `counts[w]` is what a thread of warp w has."""

    def __init__(self, cta) -> None:
        self.cta = cta
        self.entry = entry_count(cta.program.kernel.directives, cta.machine.launch.limits.registers_per_sm)
        self.counts = np.full(cta.lanes // WARP, self.entry or 0, np.int64)
        self.free = 0
        self._requests: dict[int, Request] = {}

    def join(self, control: SetRegisterCount, group: int, lanes: np.ndarray) -> Request:
        """Adds lanes of a warpgroup that reached `control`.

        Raises DivergenceFault where other warps of it ask for the other action, or other lanes of a warp for another
        count; Fault for a change in the wrong direction.
        """
        request = self._requests.setdefault(group, Request(control, group, self.cta.lanes))
        warps = np.unique(np.flatnonzero(lanes) // WARP)
        wanted = request.wanted[warps]
        if request.control.action != control.action or ((wanted != 0) & (wanted != control.count)).any():
            raise DivergenceFault(
                f"warps of warpgroup {group} execute different instructions: {request.control} and {control}",
                lanes=np.flatnonzero(lanes),
            )
        self._check_direction(control, warps)
        request.arrived |= lanes
        request.wanted[warps] = control.count
        return request

    def grant(self, request: Request) -> bool:
        """Whether the warpgroup may go on."""
        if not request.granted and self._complete(request) and self.missing(request) <= self.free:
            self.free -= self.missing(request)
            np.copyto(self.counts, request.wanted, where=request.wanted != 0)
            request.granted = True
            del self._requests[request.group]
            self.cta.activity()
        return request.granted

    def missing(self, request: Request) -> int:
        """Registers the request takes from the pool; negative when it gives some back."""
        asking = request.wanted != 0
        return int((request.wanted - self.counts)[asking].sum()) * WARP

    def describe(self, request: Request) -> str:
        """What a request waits for."""
        if not self._complete(request):
            return f"for the other warps of warpgroup {request.group} to execute {request.control}"
        return (
            f"for {self.missing(request)} registers ({request.control} in warpgroup {request.group}): "
            f"the CTA's pool has {self.free}"
        )

    def _check_direction(self, control: SetRegisterCount, warps: np.ndarray) -> None:
        change = (control.count - self.counts[warps]) * (1 if control.action == "inc" else -1)
        if (change < 0).any():
            warp = int(warps[change < 0][0])
            raise Fault(
                f"{control} in warp {warp}, whose threads have {self.counts[warp]} registers: "
                "the wrong direction is undefined"
            )

    def _complete(self, request: Request) -> bool:
        window = slice(request.group * WARPGROUP, (request.group + 1) * WARPGROUP)
        return not (self.cta.alive[window] & ~request.arrived[window]).any()


def entry_count(directives: dict[str, tuple[int, ...]], registers_per_sm: int) -> int | None:
    """Registers per thread when a kernel starts, or None where its directives do not fix it."""
    limits = []
    if "maxnreg" in directives:
        limits.append(-(-directives["maxnreg"][0] // _UNIT) * _UNIT)
    extent = directives.get("reqntid") or directives.get("maxntid")
    if "minnctapersm" in directives and extent:
        threads = -(-int(np.prod(extent)) // WARP) * WARP * max(directives["minnctapersm"][0], 1)
        limits.append(registers_per_sm // threads // _UNIT * _UNIT)
    return min(*limits, _MOST) if limits else None


class SetRegisterCount(Control):
    def __init__(self, action: str, count: int) -> None:
        super().__init__()
        self.action, self.count = action, count

    def __str__(self) -> str:
        return f"setmaxnreg.{self.action} {self.count}"

    def run(self, cta, path) -> None:
        pool = cta.unit(RegisterPool)
        if pool.entry is None:
            cta.advance(path)
            return
        waiting = []
        for group in np.unique(path.mask.numbers // WARPGROUP).tolist():
            lanes = path.mask.lanes & (np.arange(cta.lanes) // WARPGROUP == group)
            request = pool.join(self, group, lanes)
            if not pool.grant(request):
                waiting.append((request, lanes))
        if not waiting:
            cta.advance(path)
            return
        here = path.segment
        granted = path.mask.narrow(np.logical_or.reduce([lanes for _, lanes in waiting]), negated=True)
        if granted is not None:
            cta.fork(path, granted, here.next)
        for request, lanes in waiting[1:]:
            self._wait(cta, cta.fork(path, Mask(lanes), here.index), pool, request)
        path.mask = Mask(waiting[0][1])
        self._wait(cta, path, pool, waiting[0][0])

    @staticmethod
    def _wait(cta, path, pool: RegisterPool, request: Request) -> None:
        cta.block(path, lambda: pool.describe(request), lambda: pool.grant(request))
