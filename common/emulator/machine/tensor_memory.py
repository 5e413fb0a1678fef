"""Tensor memory: 128 lanes by 512 columns of 32 bits in every SM, and who holds which columns (PTX ISA 9.7.16.1, .7).

CTAs that share an SM share its columns. An address is `lane << 16 | column`. Cells hold poison when they are allocated.

Cells that an asynchronous operation in flight is going to write are marked: a reader that is not ordered behind the
writer gets poison. Marks are counts for blocks of 16 lanes by one column, in two arrays: `storing` for `tcgen05.st`,
`computing` for what the tensor core writes (mma, cp, shift).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from common.emulator.faults import TensorMemoryFault

if TYPE_CHECKING:
    from common.emulator.machine.scheduler import Machine
    from common.emulator.machine.thread_block import ThreadBlock

LANES = 128
COLUMNS = 512
UNIT = 32  # columns; allocations are powers of two of at least as many
BLOCK = 16  # lanes whose writes in flight are counted together
POISON_CELL = np.uint32(0xFFFF_FFFF)
LANE_SHIFT = 16
COLUMN_MASK = (1 << LANE_SHIFT) - 1


class Span(NamedTuple):
    """A rectangle of cells."""

    memory: TensorMemory
    lane: int
    lanes: int
    column: int
    columns: int

    @property
    def cells(self) -> np.ndarray:
        """View (lanes, columns) of uint32 of what the cells hold now, whoever is going to write them."""
        return self.memory.data[self.lane : self.lane + self.lanes, self.column : self.column + self.columns]

    def marks(self, counts: np.ndarray) -> np.ndarray:
        """The part of `storing` or `computing` that belongs to these cells: (blocks of 16 lanes, columns)."""
        last = -(-(self.lane + self.lanes) // BLOCK)
        return counts[self.lane // BLOCK : last, self.column : self.column + self.columns]

    def read(self) -> np.ndarray:
        """The cells (lanes, columns) of uint32 as the tensor core reads them: poison where a `tcgen05.st` is in flight.

        A view where nothing is: do not write to it.
        """
        storing = self.marks(self.memory.storing)
        if not storing.any():
            return self.cells
        blocks = np.arange(self.lane, self.lane + self.lanes) // BLOCK - self.lane // BLOCK
        return np.where(storing[blocks] != 0, POISON_CELL, self.cells)

    def require_allocated(self, what: str) -> None:
        """Raises TensorMemoryFault when the cells have been deallocated since the span was made."""
        if not self.memory.owned[self.column : self.column + self.columns].all():
            raise TensorMemoryFault(
                f"{what} touches {self} after these columns have been deallocated: wait for it before tcgen05.dealloc"
            )

    def overlaps(self, other: Span) -> bool:
        return (
            self.memory.sm is other.memory.sm
            and self.lane < other.lane + other.lanes
            and other.lane < self.lane + self.lanes
            and self.column < other.column + other.columns
            and other.column < self.column + self.columns
        )

    def __str__(self) -> str:
        lanes = f"lanes {self.lane}-{self.lane + self.lanes - 1}"
        return f"{lanes}, columns {self.column}-{self.column + self.columns - 1} of CTA {self.memory.cta.ctaid}"


@dataclass(eq=False)
class Request:
    """A `tcgen05.alloc` of one CTA or of a pair. `places` are the shared memory offsets that get the address."""

    columns: int
    places: list[tuple[TensorMemory, int]]
    granted: bool = False


def _no_marks() -> np.ndarray:
    return np.zeros((LANES // BLOCK, COLUMNS), np.int16)


@dataclass(eq=False)
class SmColumns:
    """The tensor memory of one SM. `taken` (512,): which columns are allocated, to any CTA."""

    number: int
    data: np.ndarray = field(default_factory=lambda: np.full((LANES, COLUMNS), POISON_CELL))
    storing: np.ndarray = field(default_factory=lambda: _no_marks())
    computing: np.ndarray = field(default_factory=lambda: _no_marks())
    taken: np.ndarray = field(default_factory=lambda: np.zeros(COLUMNS, bool))


class TensorMemories:
    """The tensor memory of all SMs of a machine, and the allocations that wait for free columns."""

    def __init__(self, machine: Machine) -> None:
        self._sms: dict[int, SmColumns] = {}
        self._waiting: list[Request] = []
        self.cta_group = 0

    def sm(self, number: int) -> SmColumns:
        if number not in self._sms:
            self._sms[number] = SmColumns(number)
        return self._sms[number]

    def ask(self, request: Request) -> None:
        self._waiting.append(request)
        self.serve()

    def serve(self) -> None:
        """Grants what fits, in the order of asking."""
        for request in list(self._waiting):
            start = _first_fit([memory.sm for memory, _ in request.places], request.columns)
            if start is None:
                continue
            for memory, place in request.places:
                memory.grant(start, request.columns, place)
            request.granted = True
            self._waiting.remove(request)


def _first_fit(sms: Sequence[SmColumns], columns: int) -> int | None:
    """First column, a multiple of the unit, from which `columns` are free in all SMs."""
    taken = np.logical_or.reduce([sm.taken for sm in sms]).reshape(-1, UNIT).any(axis=1)
    units = columns // UNIT
    for start in range(COLUMNS // UNIT - units + 1):
        if not taken[start : start + units].any():
            return start * UNIT
    return None


class TensorMemory:
    """What one CTA sees of its SM's tensor memory."""

    def __init__(self, cta: ThreadBlock) -> None:
        self.cta = cta
        self.machine_wide = cta.machine.unit(TensorMemories)
        self.sm = self.machine_wide.sm(cta.sm)
        self.data = self.sm.data
        self.storing, self.computing = self.sm.storing, self.sm.computing
        self.allocations: dict[int, int] = {}  # first column -> columns
        self.owned = np.zeros(COLUMNS, bool)
        self.freed = np.zeros(COLUMNS, bool)
        self.relinquished = False
        self.largest = COLUMNS  # what the next allocation may have: no more columns than the last one
        cta.at_exit.append(self.check_out)

    @property
    def is_upper_half(self) -> bool:
        """Whether this is the odd CTA of a pair that works together: lanes 128 to 255 are its lanes 0 to 127.

        Nowhere written; published two-CTA kernels that run on B200 add 128 lanes in the odd CTA.
        """
        return self.machine_wide.cta_group == 2 and self.cta.rank % 2 == 1

    def span(self, address: int, lanes: int, columns: int, what: str) -> Span:
        """The cells at a 32-bit address, after `check`."""
        self.check(address, lanes, columns, what)
        return Span(self, address >> LANE_SHIFT, lanes, address & COLUMN_MASK, columns)

    def check(self, address: int, lanes: int, columns: int, what: str) -> None:
        """Raises TensorMemoryFault where `lanes` by `columns` cells at `address` are not all allocated to the CTA."""
        lane, column = address >> LANE_SHIFT, address & COLUMN_MASK
        held = self.owned[column : column + columns]
        if lane + lanes <= LANES and held.size == columns and held.all():
            return
        raise TensorMemoryFault(
            f"{what} at {address:#010x} (lane {lane}, column {column}) takes {lanes} lanes and {columns} columns: "
            + self._problem(lane, lanes, column, columns),
            address=address,
        )

    def _problem(self, lane: int, lanes: int, column: int, columns: int) -> str:
        if lane + lanes > LANES or column + columns > COLUMNS:
            return f"tensor memory has {LANES} lanes and {COLUMNS} columns"
        missing = column + int(np.argmin(self.owned[column : column + columns]))
        if self.freed[missing]:
            return f"column {missing} has been deallocated"
        if not self.allocations:
            return f"CTA {self.cta.ctaid} has allocated no tensor memory"
        return f"column {missing} is outside the CTA's allocations ({self._list()})"

    def _list(self) -> str:
        return ", ".join(f"columns {first}-{first + count - 1}" for first, count in sorted(self.allocations.items()))

    def grant(self, start: int, columns: int, place: int) -> None:
        """The columns are the CTA's; their address goes to shared memory at offset `place`."""
        self.allocations[start] = self.largest = columns
        chosen = slice(start, start + columns)
        self.owned[chosen], self.sm.taken[chosen], self.freed[chosen] = True, True, False
        self.data[:, chosen] = POISON_CELL
        self.cta.shared.view(4)[place // 4] = start
        self.cta.activity()

    def free(self, address: int, columns: int) -> None:
        """`tcgen05.dealloc`. Raises TensorMemoryFault for what is not exactly one allocation."""
        start = address & COLUMN_MASK
        if address >> LANE_SHIFT or self.allocations.get(start) != columns:
            known = self._list() or "nothing"
            again = address < COLUMNS and self.freed[start] and start not in self.allocations
            raise TensorMemoryFault(
                f"tcgen05.dealloc of {columns} columns at {address:#010x}"
                + (", which have been deallocated already" if again else f": the CTA holds {known}"),
                address=address,
            )
        del self.allocations[start]
        chosen = slice(start, start + columns)
        self.owned[chosen], self.sm.taken[chosen], self.freed[chosen] = False, False, True
        self.machine_wide.serve()
        self.cta.activity()

    @property
    def free_columns(self) -> int:
        return int(np.count_nonzero(~self.sm.taken))

    def check_out(self) -> None:
        """The CTA exits. Raises TensorMemoryFault when it still holds columns."""
        if self.allocations:
            raise TensorMemoryFault(
                f"CTA {self.cta.ctaid} exits without tcgen05.dealloc of its tensor memory ({self._list()})"
            )


def tensor_memory(cta: ThreadBlock) -> TensorMemory:
    """The CTA's tensor memory."""
    return cta.unit(TensorMemory)


def use_cta_group(cta: ThreadBlock, group: int) -> None:
    """Every tcgen05 instruction of a kernel has the same .cta_group: raises TensorMemoryFault when one differs."""
    memories = cta.machine.unit(TensorMemories)
    if memories.cta_group not in (0, group):
        raise TensorMemoryFault(
            f".cta_group::{group} after .cta_group::{memories.cta_group}: all tcgen05 instructions of a kernel must "
            "have the same .cta_group"
        )
    memories.cta_group = group
    if group == 2 and len(cta.cluster.blocks) % 2:
        raise TensorMemoryFault(".cta_group::2 needs a cluster with an even number of CTAs")
