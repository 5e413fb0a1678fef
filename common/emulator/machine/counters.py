"""What a launch did, counted: instructions by opcode and warp, bytes by path."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from common.emulator.machine.program import Program
    from common.emulator.machine.thread_block import ThreadBlock


class Counters:
    """`bytes[path]` counts bytes by path ("global load", "shared store", "TMA load", ...); `events[name]` anything
    else.

    Instructions are counted per segment and warp while running and broken down on request: `warp_instructions` counts
    one per warp that has an active lane, before guards, as the hardware's inst_executed does.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self.bytes: Counter[str] = Counter()
        self.events: Counter[str] = Counter()
        self._executed: np.ndarray | None = None

    def add_block(self, block: ThreadBlock) -> None:
        """Called once per CTA, when it has finished."""
        if self._executed is None:
            self._executed = np.zeros_like(block.executed)
        self._executed += block.executed

    @property
    def warp_instructions(self) -> int:
        if self._executed is None:
            return 0
        lengths = [len(segment.instructions) for segment in self._program.segments]
        return int(self._executed.sum(axis=1) @ np.array(lengths))

    def by_opcode(self) -> Counter[str]:
        """Warp-instructions by opcode, summed over CTAs."""
        total: Counter[str] = Counter()
        for segment, executed in zip(self._program.segments, self._per_segment()):
            for inst in segment.instructions:
                total[inst.opcode] += int(executed.sum())
        return total

    def by_warp(self) -> list[int]:
        """Warp-instructions by warp number within the CTA, summed over CTAs."""
        lengths = np.array([len(segment.instructions) for segment in self._program.segments])
        return [] if self._executed is None else (lengths @ self._executed).tolist()

    def _per_segment(self) -> np.ndarray:
        return np.zeros((len(self._program.segments), 1), np.int64) if self._executed is None else self._executed
