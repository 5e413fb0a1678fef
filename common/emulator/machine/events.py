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
TENSOR_CORE = frozenset(f"tcgen05.{name}" for name in ("mma", "cp", "cp.4x256b", "shift", "commit"))


@dataclass(eq=False)
class Operation:
    """One asynchronous operation in flight.

    `steps` run in order, each at a moment of its own. `after` lists operations that must have finished first.
    `str(detail)` says what is under way ("64x128 tile of tensor map A to shared 0x400"), for deadlock reports;
    `place()` is where it was issued. Both are asked only when something is wrong.
    """

    kind: str
    steps: list[Callable[[], None]]
    detail: object = ""
    place: Callable[[], Place] | None = None
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
        return not self.after or all(operation.finished for operation in self.after)


class Events:
    """The operations in flight, and the schedule that completes them."""

    def __init__(self, schedule: str, generator: random.Random) -> None:
        self.schedule = schedule
        self.pending: list[Operation] = []
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
        """Runs one step of one eligible operation: `_latest`, or under `random` any. False when there is none."""
        operation = self._choose()
        if operation is None:
            return False
        self._step(operation)
        if operation.finished:
            self.pending.remove(operation)
            self._release_early()
        return True

    def _choose(self) -> Operation | None:
        if self.schedule != "random":
            return self._latest()
        candidates = [operation for operation in self.pending if operation.eligible]
        return self._random.choice(candidates) if candidates else None

    def _latest(self) -> Operation | None:
        """The operation that was issued last: what came before it is not done, so whoever does not wait misses it.

        But the tensor core takes its own in their order. So what it has let go early is used again under what it has
        yet to do.
        """
        latest = next((operation for operation in reversed(self.pending) if operation.eligible), None)
        if latest is None or latest.kind not in TENSOR_CORE:
            return latest
        return next(one for one in self.pending if one.kind in TENSOR_CORE and one.eligible)

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
        try:
            step()
        except EmulatorError as error:
            if operation.place is not None:
                error.at(operation.place())
            raise
