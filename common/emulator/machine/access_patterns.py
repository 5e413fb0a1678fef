"""What an access pattern costs: wavefronts of shared memory, sectors of global memory.

Shared memory has 32 banks of 4 bytes; in one wavefront each bank serves one word, to as many lanes as want it (CUDA C++
Programming Guide, "Shared Memory"). A wavefront carries 128 bytes, so a warp's access of 8 bytes per lane takes two
phases of 16 lanes, one of 16 bytes four phases of 8 lanes, and lanes of different phases cannot conflict. Loads take
half as many phases where all lanes n and n ^ 1, or all lanes n and n ^ 2, have the same address (NVIDIA on its forum,
"Unexpected shared memory bank conflict"). A matrix of ldmatrix and stmatrix is one phase of eight 16-byte rows. Atomics
serve one lane per bank and wavefront. A phase without an active lane costs nothing.

Global memory moves in sectors of 32 bytes: a request (one warp-instruction) touches one to 32 of them (NVIDIA on its
forum, "Understanding L1/TEX Cache Sectors/Req"). Atomics of lanes at one address go one after the other.

An H200's own counters agree with all of this (`tests/golden/counters.md`), but that scattered atomics now and then take
a sector or two more.

Both are measured on rows: int64 arrays (rows, lanes) of byte offsets, aligned to the access's width, INACTIVE where a
lane takes no part. Patterns that differ only by where they lie are measured once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from common.emulator.machine.mask import WARP

INACTIVE = -1
BANK_BYTES = 4
WAVEFRONT_BYTES = 128
SECTOR_BYTES = 32
_KNOWN = 1024  # patterns remembered for each instruction


class Cost(NamedTuple):
    """What rows cost, and the least that any arrangement of the same bytes would have cost."""

    actual: int
    ideal: int


class SharedPattern:
    """Wavefronts of one kind of access: "load", "store", "atomic" or "matrix", of `width` bytes per lane.

    `lanes` of a warp supply addresses: all, or one for each row of the matrices. The ideal is one wavefront per phase
    that has an active lane, so `actual - ideal` counts bank conflicts.
    """

    def __init__(self, width: int, kind: str, lanes: int = WARP) -> None:
        unit = max(width, BANK_BYTES)
        self.lanes = lanes
        self._shift = unit.bit_length() - 1
        self._banks = WAVEFRONT_BYTES // unit  # groups of banks that serve one lane's access together
        self._phase = self._banks  # lanes whose accesses one wavefront can carry
        self._pairs = kind == "load" and self._phase < WARP
        self._serial = kind == "atomic"

    def relative(self, rows: np.ndarray) -> np.ndarray:
        """Offsets in units of an access, from one of the row's own: what differs by where it lies becomes equal."""
        units = (rows >> self._shift).astype(np.int32)
        return _distances(units, _reference(units, rows), rows)

    def measure(self, rows: np.ndarray) -> np.ndarray:
        """(rows, 2): wavefronts and ideal wavefronts of each row that `relative` made."""
        if not self._pairs:
            return self._measure(rows, self._phase)
        paired = _same_as_partner(rows, 1) | _same_as_partner(rows, 2)
        return np.where(paired[:, None], self._measure(rows, 2 * self._phase), self._measure(rows, self._phase))

    def _measure(self, rows: np.ndarray, lanes: int) -> np.ndarray:
        passes = self._passes(rows.reshape(-1, lanes)).reshape(len(rows), -1)
        return np.stack((passes.sum(axis=1), np.count_nonzero(passes, axis=1)), axis=1)

    def _passes(self, phases: np.ndarray) -> np.ndarray:
        """How many units the busiest bank of each phase has to serve."""
        ordered = np.sort(phases, axis=1)
        counted = _active(ordered) if self._serial else _first_of_equals(ordered, ordered)
        places = np.arange(len(ordered))[:, None] * self._banks + (ordered & (self._banks - 1))
        served = np.bincount(places[counted], minlength=len(ordered) * self._banks)
        return served.reshape(len(ordered), self._banks).max(axis=1)


class SectorPattern:
    """Sectors that accesses of `width` bytes per lane (1 to 32) touch; the ideal packs the same bytes densely.

    `kind` "atomic": lanes at one address take turns, and each turn touches its sectors anew.
    """

    lanes = WARP

    def __init__(self, width: int, kind: str) -> None:
        self._width = width
        self._serial = kind == "atomic"
        self._shift = width.bit_length() - 1
        self._per_sector = SECTOR_BYTES // width

    def relative(self, rows: np.ndarray) -> np.ndarray:
        """Elements, from the start of one of the row's own sectors, so that each keeps its place in its sector."""
        elements = rows >> self._shift
        return _distances(elements, _reference(elements, rows) & -self._per_sector, rows)

    def measure(self, rows: np.ndarray) -> np.ndarray:
        """(rows, 2): sectors and ideal sectors of each row that `relative` made."""
        elements = np.sort(rows, axis=1)
        sectors = elements >> (self._per_sector.bit_length() - 1)
        needed = _first_of_equals(elements, elements).sum(axis=1) * self._width
        if self._serial:
            elements = sectors = _sectors_by_turn(elements, sectors)
        touched = _first_of_equals(elements, sectors).sum(axis=1)
        return np.stack((touched, -(-needed // SECTOR_BYTES)), axis=1)


Pattern = SharedPattern | SectorPattern


def _reference(units: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """(rows, 1): the place of some active lane, chosen by the pattern alone."""
    return units[:, :1] if rows[:, 0].min() >= 0 else units.max(axis=1, keepdims=True)


def _distances(units: np.ndarray, origin: np.ndarray, rows: np.ndarray) -> np.ndarray:
    distances = units - origin
    if rows.min() < 0:
        distances[rows < 0] = np.iinfo(distances.dtype).min
    return distances


def _active(distances: np.ndarray) -> np.ndarray:
    return distances != np.iinfo(distances.dtype).min


def _first_of_equals(ordered: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """Marks the active entries of sorted distances whose part differs from that of the entry before."""
    first = _active(ordered)
    first[:, 1:] &= parts[:, 1:] != parts[:, :-1]
    return first


def _sectors_by_turn(elements: np.ndarray, sectors: np.ndarray) -> np.ndarray:
    """Of sorted elements: their sectors, numbered anew for each lane that has the same element; sorted."""
    lanes = np.arange(elements.shape[1])
    same = np.zeros(elements.shape, bool)
    same[:, 1:] = elements[:, 1:] == elements[:, :-1]
    turns = lanes - np.maximum.accumulate(np.where(same, 0, lanes), axis=1)
    return np.sort(np.where(_active(elements), sectors * WARP + turns, elements), axis=1)


def _same_as_partner(rows: np.ndarray, distance: int) -> np.ndarray:
    """Bool (rows,): whether lanes n and n ^ distance, where both are active, agree everywhere."""
    pairs = rows.reshape(len(rows), -1, 2, distance)
    low, high = pairs[:, :, 0], pairs[:, :, 1]
    return ((low == high) | ~_active(low) | ~_active(high)).all(axis=(1, 2))


class PatternCosts:
    """Costs of many rows of one instruction, remembered by pattern."""

    def __init__(self, pattern: Pattern) -> None:
        self._pattern = pattern
        self._known: dict[bytes, Cost] = {}

    def total(self, rows: np.ndarray) -> Cost:
        """The costs of byte offsets (rows, lanes), summed."""
        rows = self._pattern.relative(rows)
        changes = np.bitwise_or.reduce((rows[1:] != rows[:-1]).view(np.uint64), axis=1)  # eight lanes in a word
        starts = np.concatenate(([0], np.flatnonzero(changes) + 1))
        lengths = np.diff(starts, append=len(rows)).tolist()
        patterns = rows[starts].view(f"V{rows.itemsize * rows.shape[1]}").reshape(-1).tolist()
        self._learn(dict.fromkeys(patterns), rows.dtype)
        costs = [self._known[pattern] for pattern in patterns]
        return Cost(
            sum(cost.actual * length for cost, length in zip(costs, lengths)),
            sum(cost.ideal * length for cost, length in zip(costs, lengths)),
        )

    def _learn(self, patterns: Iterable[bytes], dtype: np.dtype) -> None:
        unknown = [pattern for pattern in patterns if pattern not in self._known]
        if not unknown:
            return
        if len(self._known) > _KNOWN:
            self._known = {pattern: self._known[pattern] for pattern in patterns if pattern in self._known}
        rows = np.frombuffer(b"".join(unknown), dtype).reshape(len(unknown), -1)
        for pattern, cost in zip(unknown, self._pattern.measure(rows).tolist()):
            self._known[pattern] = Cost(*cost)
