"""What can go wrong on the machine, as exceptions that say where and why.

Every fault knows the PTX line, the CUDA source line where the compiler recorded one, the CTA, the warp and the lanes
that caused it. Code deep inside the machine raises a fault with only its own facts; the thread block that runs the
instruction adds the place (`at`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Where an instruction stands and who ran it."""

    instruction: str
    ptx_line: int
    source: str | None
    cta: tuple[int, int, int] | None = None
    warps: tuple[int, ...] = ()
    lanes: tuple[int, ...] = ()

    def __str__(self) -> str:
        lines = [f"  instruction  {self.instruction}", f"  PTX line     {self.ptx_line}"]
        if self.source:
            lines.append(f"  source       {self.source}")
        if self.cta is not None:
            lines.append(f"  CTA          {self.cta}")
        if self.warps:
            lines.append(f"  warps        {ranges(self.warps)}")
        if self.lanes:
            lines.append(f"  threads      {ranges(self.lanes)} of the CTA")
        return "\n".join(lines)


def ranges(numbers: Sequence[int]) -> str:
    """`[0, 1, 2, 5]` as `0-2, 5`."""
    parts: list[list[int]] = []
    for number in sorted(int(n) for n in numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)


class EmulatorError(Exception):
    """Base of everything the emulator raises about a program."""

    def __init__(self, message: str, *, lanes: Sequence[int] = (), address: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.lanes = tuple(int(lane) for lane in lanes)
        self.address = address
        self.place: Place | None = None

    def at(self, place: Place) -> EmulatorError:
        """Adds the place once; the innermost caller knows best."""
        if self.place is None:
            self.place = place
        return self

    def __str__(self) -> str:
        return self.message if self.place is None else f"{self.message}\n{self.place}"


class PtxSyntaxError(EmulatorError):
    """The text is not PTX that this parser understands."""


class UnsupportedInstruction(EmulatorError):
    """An instruction, or a modifier of it, that the emulator does not execute."""


class LaunchError(EmulatorError, ValueError):
    """The launch itself is impossible: wrong arguments, too many threads, too much SMEM."""


class Fault(EmulatorError):
    """The program did something that a GPU would stop for, or that the ISA leaves undefined."""


class OutOfBounds(Fault):
    """An access outside every allocation, or across the end of one."""


class Misaligned(Fault):
    """An address that is not a multiple of the access size."""


class InvalidAddress(Fault):
    """An address of the wrong state space, a read-only target, or freed or never initialised storage."""


class BarrierFault(Fault):
    """Misuse of a barrier: wrong counts, an uninitialised mbarrier, overflow of its counters."""


class DivergenceFault(Fault):
    """A warp-collective instruction executed by the wrong set of lanes."""


class DescriptorFault(Fault):
    """A tensor map or matrix descriptor that the hardware would refuse."""


class MissingFence(Fault):
    """An asynchronous operation reads what threads have written to shared memory, with no `fence.proxy.async` since."""


class TensorMemoryFault(Fault):
    """Misuse of tensor memory: an access outside an allocation, a leak, a bad address or column count."""


class ProgramTrap(Fault):
    """The program executed `trap`, or a device-side assertion failed."""


class Deadlock(EmulatorError):
    """Nothing can run, nothing is in flight, and the grid has not finished."""
