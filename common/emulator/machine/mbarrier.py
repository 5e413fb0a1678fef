"""mbarrier objects: the counters behind a 64-bit word in shared memory (PTX ISA 9.7.13.15).

The word, which is also the opaque state that `mbarrier.arrive` returns:

    bits  0-19   pending arrivals of the current phase
    bits 20-39   expected arrivals of the next phase
    bits 40-60   tx-count in two's complement: bytes expected minus bytes that have come
    bits 61-62   number of the current phase, modulo 4
    bit  63      zero, so that poison is never an mbarrier

A phase completes when no arrivals are pending and the tx-count is zero. Functions take the CTA whose shared memory
holds the mbarrier and its `offset`: bytes from the start of that window. All raise BarrierFault for a location that
holds no live mbarrier and for counts that leave their range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from common.emulator.faults import BarrierFault
from common.emulator.machine.memory import POISON

if TYPE_CHECKING:
    from common.emulator.machine.scheduler import Machine
    from common.emulator.machine.thread_block import ThreadBlock

BYTES = 8
LIMIT = (1 << 20) - 1  # of every count
_TX_BITS = (1 << 21) - 1
_POISON_WORD = int.from_bytes(bytes([POISON]) * BYTES, "little")


@dataclass
class Mbarrier:
    """One live mbarrier. `phase` counts from 0 without wrapping; `name` is for messages."""

    offset: int
    name: str
    expected: int
    pending: int
    tx: int = 0
    phase: int = 0

    @property
    def word(self) -> int:
        return self.pending | self.expected << 20 | (self.tx & _TX_BITS) << 40 | (self.phase & 3) << 61

    def __str__(self) -> str:
        owed = f"{self.tx} bytes owed" if self.tx >= 0 else f"{-self.tx} bytes more than expected"
        return f"mbarrier {self.name} phase {self.phase}: {self.pending} of {self.expected} arrivals missing, {owed}"


def phase_of(state: int) -> int:
    """The phase, modulo 4, in a state word."""
    return state >> 61 & 3


class Mbarriers:
    """The live mbarriers of a CTA by offset."""

    def __init__(self, cta: ThreadBlock) -> None:
        self.cta = cta
        self.live: dict[int, Mbarrier] = {}
        self.invalidated: set[int] = set()
        cta.machine.unit(MbarrierReport)

    def word_at(self, offset: int) -> int:
        return int(self.cta.shared.view(BYTES)[offset // BYTES])

    def write(self, offset: int, word: int) -> None:
        self.cta.shared.view(BYTES)[offset // BYTES] = np.uint64(word)
        self.cta.activity()


class MbarrierReport:
    """Lists, for deadlock reports, the mbarriers of the CTAs that are stuck; of CTAs whose states are equal once."""

    SHOWN = 64

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def describe(self) -> list[str]:
        alike: dict[tuple[str, ...], list[ThreadBlock]] = {}
        for block in self.machine.stuck_blocks():
            states = tuple(str(barrier) for _, barrier in sorted(block.unit(Mbarriers).live.items()))
            alike.setdefault(states, []).append(block)
        lines = []
        for states, (first, *others) in alike.items():
            lines += [f"  CTA {first.ctaid} {state}" for state in states]
            if states and others:
                lines.append(f"  and the same of {len(others)} more CTA{'s' * (len(others) > 1)}")
        rest = [f"  ... and {len(lines) - self.SHOWN} more lines of mbarriers"] if len(lines) > self.SHOWN else []
        return lines[: self.SHOWN] + rest


def find(cta: ThreadBlock, offset: int, lanes: Sequence[int] = ()) -> Mbarrier:
    """The live mbarrier at `offset`. Raises BarrierFault when there is none, or its word has been overwritten."""
    barriers = cta.unit(Mbarriers)
    barrier, word = barriers.live.get(offset), barriers.word_at(offset)
    if barrier is not None and barrier.word == word:
        return barrier
    where = f"shared {cta.machine.shared_names.describe(offset)} of CTA rank {cta.rank}"
    if barrier is not None:
        problem = f"the mbarrier at {where} has been overwritten: the word is {word:#018x}, it was {barrier.word:#018x}"
    elif offset in barriers.invalidated:
        problem = f"the mbarrier at {where} has been invalidated (mbarrier.inval)"
    elif word == _POISON_WORD:
        problem = f"there is no mbarrier at {where}: the memory is uninitialised, mbarrier.init has not run"
    else:
        problem = f"there is no mbarrier at {where}: mbarrier.init has not run, the word is {word:#018x}"
    raise BarrierFault(problem, lanes=lanes, address=offset)


def init(cta: ThreadBlock, offset: int, count: int, lanes: Sequence[int] = ()) -> None:
    """`mbarrier.init`: phase 0, `count` arrivals per phase.

    To initialise a live mbarrier is undefined (PTX ISA, mbarrier.init). But where nobody has used it yet, and the count
    is the same, nothing changes: NVIDIA's tutorials for CuTe DSL let one thread of every warp initialise it.
    """
    _check_count(count, "count", offset, lanes)
    barriers = cta.unit(Mbarriers)
    fresh = Mbarrier(offset, cta.machine.shared_names.describe(offset), count, count)
    barrier = barriers.live.get(offset)
    if barrier is not None and barrier.word == barriers.word_at(offset):
        if barrier == fresh:
            return
        raise BarrierFault(
            f"mbarrier.init of a live mbarrier ({barrier}): mbarrier.inval it first", lanes=lanes, address=offset
        )
    barriers.live[offset] = fresh
    barriers.invalidated.discard(offset)
    barriers.write(offset, fresh.word)


def inval(cta: ThreadBlock, offset: int, lanes: Sequence[int] = ()) -> None:
    """`mbarrier.inval`: the memory is free for other use, and holds poison."""
    find(cta, offset, lanes)
    barriers = cta.unit(Mbarriers)
    del barriers.live[offset]
    barriers.invalidated.add(offset)
    barriers.write(offset, _POISON_WORD)


def expect_tx(cta: ThreadBlock, offset: int, size: int, lanes: Sequence[int] = ()) -> None:
    """expect-tx: the current phase is to see `size` more bytes."""
    _change_tx(cta, offset, size, lanes)


def complete_tx(cta: ThreadBlock, offset: int, size: int, lanes: Sequence[int] = ()) -> None:
    """complete-tx: `size` bytes have come. They may come before they are expected."""
    _change_tx(cta, offset, -size, lanes)


def _change_tx(cta: ThreadBlock, offset: int, change: int, lanes: Sequence[int]) -> None:
    barrier = find(cta, offset, lanes)
    if abs(barrier.tx + change) > LIMIT:
        raise BarrierFault(
            f"tx-count overflow: {barrier}; {change:+d} bytes leave the range of +-{LIMIT}", lanes=lanes, address=offset
        )
    barrier.tx += change
    _settle(cta, barrier)


def arrive(cta: ThreadBlock, offset: int, count: int = 1, lanes: Sequence[int] = (), drop: bool = False) -> int:
    """arrive-on: `count` arrivals; with `drop` later phases expect as many fewer. Returns the state before."""
    barrier = find(cta, offset, lanes)
    _check_count(count, "arrival count", offset, lanes)
    _check_pending(barrier, count, lanes)
    state = barrier.word
    if drop:
        _drop(barrier, count, lanes)
    barrier.pending -= count
    _settle(cta, barrier)
    return state


def arrive_each(cta: ThreadBlock, offset: int, counts: np.ndarray, lanes: np.ndarray, drop: bool = False) -> list[int]:
    """One arrival after another, with `counts` (one per lane); returns the state before each."""
    barrier = find(cta, offset, lanes)
    total = int(counts.sum(dtype=np.int64))
    if drop or len(counts) == 1 or total > barrier.pending or int(counts.min()) < 1:
        return [arrive(cta, offset, int(count), [lane], drop) for count, lane in zip(counts, lanes)]
    before = np.cumsum(counts, dtype=np.int64) - counts
    states = [barrier.word - int(arrived) for arrived in before]
    barrier.pending -= total
    _settle(cta, barrier)
    return states


def expect_arrivals(cta: ThreadBlock, offset: int, count: int, lanes: Sequence[int] = ()) -> None:
    """Raises the pending count of the current phase by `count`, as `cp.async.mbarrier.arrive` without .noinc does."""
    barrier = find(cta, offset, lanes)
    if barrier.pending + count > LIMIT:
        raise BarrierFault(
            f"pending count overflow: {barrier}; {count} more exceed {LIMIT}", lanes=lanes, address=offset
        )
    barrier.pending += count
    cta.unit(Mbarriers).write(offset, barrier.word)


def phase(cta: ThreadBlock, offset: int, lanes: Sequence[int] = ()) -> int:
    """Number of phases that have completed, which is the number of the current one."""
    return find(cta, offset, lanes).phase


def _settle(cta: ThreadBlock, barrier: Mbarrier) -> None:
    if barrier.pending == 0 and barrier.tx == 0:
        barrier.phase += 1
        barrier.pending = barrier.expected
    cta.unit(Mbarriers).write(barrier.offset, barrier.word)


def _drop(barrier: Mbarrier, count: int, lanes: Sequence[int]) -> None:
    if count > barrier.expected:
        raise BarrierFault(
            f"arrive_drop of {count} arrivals where later phases of the mbarrier expect {barrier.expected}",
            lanes=lanes,
            address=barrier.offset,
        )
    barrier.expected -= count


def _check_count(count: int, what: str, offset: int, lanes: Sequence[int]) -> None:
    if not 1 <= count <= LIMIT:
        raise BarrierFault(
            f"{what} {count} of the mbarrier at shared {offset:#x}: it must be 1 to {LIMIT}",
            lanes=lanes,
            address=offset,
        )


def _check_pending(barrier: Mbarrier, count: int, lanes: Sequence[int]) -> None:
    if count > barrier.pending:
        raise BarrierFault(
            f"more arrivals than the mbarrier expects: {barrier}; {count} arrive", lanes=lanes, address=barrier.offset
        )
