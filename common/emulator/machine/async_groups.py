"""Groups of asynchronous operations that a thread commits and waits for (PTX ISA 9.7.9.25.1.1).

Every thread has its own groups, and separate ones for `cp.async` (`CopyGroups`), for bulk copies (`BulkGroups`) and for
`wgmma` (`WgmmaGroups`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from common.emulator.machine.events import Operation
from common.emulator.machine.mask import Mask

if TYPE_CHECKING:
    from common.emulator.machine.thread_block import ThreadBlock

FOREIGN = 1 << 62  # group number of a lane that has no operation in the group


@dataclass
class Group:
    """Operations committed together. `numbers` (L,): which of its groups this is for each lane, or FOREIGN."""

    operations: list[Operation]
    numbers: np.ndarray


class AsyncGroups:
    """The groups of the threads of one CTA."""

    def __init__(self, cta: ThreadBlock) -> None:
        self._open: list[tuple[Operation, np.ndarray]] = []
        self._groups: list[Group] = []
        self._committed = np.zeros(cta.lanes, np.int64)

    def add(self, operation: Operation, lanes: np.ndarray) -> None:
        """An operation that the lanes (bool, (L,)) have issued and not committed yet."""
        if not operation.finished:
            self._open.append((operation, lanes))

    def commit(self, mask: Mask) -> None:
        """Makes a new group, perhaps an empty one, of what each lane has issued since its last commit."""
        collected: dict[bytes, Group] = {}
        left = []
        for operation, lanes in self._open:
            mine = lanes & mask.lanes
            if mine.any():
                group = collected.setdefault(mine.tobytes(), Group([], np.where(mine, self._committed, FOREIGN)))
                group.operations.append(operation)
                lanes = lanes & ~mask.lanes
            if lanes.any():
                left.append((operation, lanes))
        self._open = left
        self._groups.extend(collected.values())
        self._committed[mask.index] += 1

    def due(self, mask: Mask, latest: int, reading: bool) -> tuple[np.ndarray, list[Operation]]:
        """What `wait_group latest` waits for: the waiting lanes (bool, (L,)) and the operations.

        `reading`: an operation is over once its sources have been read.
        """
        self._groups = [group for group in self._groups if not all(o.finished for o in group.operations)]
        waiting = np.zeros(mask.lanes.size, bool)
        operations: list[Operation] = []
        for group in self._groups:
            lanes = (group.numbers < self._committed - latest) & mask.lanes
            pending = [o for o in group.operations if not over(o, reading)]
            if pending and lanes.any():
                waiting |= lanes
                operations.extend(pending)
        return waiting, operations

    def outstanding(self, mask: Mask) -> tuple[Operation, ...]:
        """All operations the lanes have issued that are not finished, committed or not."""
        found = [o for o, lanes in self._open if not o.finished and (lanes & mask.lanes).any()]
        for group in self._groups:
            if ((group.numbers != FOREIGN) & mask.lanes).any():
                found.extend(o for o in group.operations if not o.finished and o not in found)
        return tuple(found)


class CopyGroups(AsyncGroups):
    """Groups of `cp.async`."""


class BulkGroups(AsyncGroups):
    """Groups of bulk and tensor copies. The first step of their operations reads the source."""


class WgmmaGroups(AsyncGroups):
    """Groups of `wgmma.mma_async` (PTX ISA 9.7.15.7.2). All threads of a warp have the same."""


def over(operation: Operation, reading: bool) -> bool:
    return operation.passed(1) if reading else operation.finished
