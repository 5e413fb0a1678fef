"""Asynchronous operations: what has been issued, what it waits for, and when it completes.

An operation has one or more steps (read the source, write the destination, signal). A schedule decides when the next
step of an operation runs, within the order that `after` records; nothing else orders two operations.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from common.emulator.faults import EmulatorError, Place

SCHEDULES = ("late", "early", "random")


@dataclass(eq=False)
class Operation:
    """One asynchronous operation in flight.

    `steps` run in order, each at a moment of its own. `after` lists operations that must have finished first.
    `detail` says in words what is under way ("64x128 tile of tensor map A to shared 0x400"), for deadlock reports.
    """

    kind: str
    steps: list[Callable[[], None]]
    detail: str = ""
    place: Place | None = None
    after: tuple[Operation, ...] = ()
    position: int = 0
    tags: dict[str, object] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        return self.position == len(self.steps)

    def passed(self, steps: int) -> bool:
        """Whether at least `steps` of its steps have run."""
        return self.position >= steps

    @property
    def eligible(self) -> bool:
        return all(operation.finished for operation in self.after)


class Events:
    """The operations in flight, and the schedule that completes them."""

    def __init__(self, schedule: str, generator: random.Random) -> None:
        self.schedule = schedule
        self.pending: list[Operation] = []
        self.completed = 0
        self._random = generator

    def issue(self, operation: Operation) -> Operation:
        """Puts an operation in flight; under `early` it completes at once."""
        if self.schedule == "early" and operation.eligible:
            while not operation.finished:
                self._step(operation)
            return operation
        self.pending.append(operation)
        return operation

    def advance(self) -> bool:
        """Runs one step of one eligible operation: the oldest, or under `random` any. False when there is none."""
        candidates = [operation for operation in self.pending if operation.eligible]
        if not candidates:
            return False
        operation = self._random.choice(candidates) if self.schedule == "random" else candidates[0]
        self._step(operation)
        if operation.finished:
            self.pending.remove(operation)
            self._release_early()
        return True

    def _release_early(self) -> None:
        """Under `early`, operations that only waited for an earlier one complete as soon as it has."""
        while self.schedule == "early":
            ready = next((operation for operation in self.pending if operation.eligible), None)
            if ready is None:
                return
            while not ready.finished:
                self._step(ready)
            self.pending.remove(ready)

    def _step(self, operation: Operation) -> None:
        step = operation.steps[operation.position]
        operation.position += 1
        self.completed += 1
        try:
            step()
        except EmulatorError as error:
            if operation.place is not None:
                error.at(operation.place)
            raise
