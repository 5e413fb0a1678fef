"""Which lanes of a CTA execute an instruction."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

WARP = 32


class LaneRange(NamedTuple):
    """Lanes `start` to `stop`: all of them, or with `step` above 1 those of every `step`-th warp."""

    start: int
    stop: int
    step: int


class Visitors(NamedTuple):
    """A mask as counters want it: bytes of the bool array (L / 32,) of its warps, and how many lanes it has."""

    warps: bytes
    lanes: int


class Mask:
    """A set of lanes of one CTA, with the forms that NumPy wants.

    `lanes` is the bool array (L,). `where` is `True` when every lane of the array is in the set, else `lanes`: pass
    it to a ufunc. `index` selects the lanes of an array: `slice(None)` or the lane numbers.
    """

    __slots__ = ("lanes", "where", "count", "_index", "_warps", "_numbers", "_present", "_range", "_visitors")

    def __init__(self, lanes: np.ndarray, count: int | None = None) -> None:
        self.lanes = lanes
        self.count = int(np.count_nonzero(lanes)) if count is None else count
        self.where = True if self.count == lanes.size else lanes
        self._index = slice(None) if self.where is True else None
        self._warps: np.ndarray | None = None
        self._numbers: np.ndarray | None = None
        self._present: np.ndarray | None = None
        self._visitors: Visitors | None = None
        self._range: LaneRange | None | bool = False  # False: not asked for yet

    @property
    def whole(self) -> bool:
        """Whether it has all 32 lanes of each of its warps."""
        return self.count == WARP * self.warps.size

    @property
    def first(self) -> int:
        """The lowest lane number."""
        return int(self.numbers[0])

    @property
    def visitors(self) -> Visitors:
        if self._visitors is None:
            self._visitors = Visitors(self.present.tobytes(), self.count)
        return self._visitors

    @property
    def range(self) -> LaneRange | None:
        """The lanes as a range, or None where they are none."""
        if self._range is False:
            self._range = self._find_range()
        return self._range

    def _find_range(self) -> LaneRange | None:
        first, last = int(self.numbers[0]), int(self.numbers[-1])
        if last - first + 1 == self.count:
            return LaneRange(first, last + 1, 1)
        warps = self.warps
        step = int(warps[1] - warps[0]) if warps.size > 1 else 0
        if not self.whole or (np.diff(warps) != step).any():
            return None
        return LaneRange(first, last + 1, step)

    @property
    def index(self) -> slice | np.ndarray:
        if self._index is None:
            self._index = self.numbers
        return self._index

    @property
    def numbers(self) -> np.ndarray:
        """Lane numbers, always as an int array."""
        if self._numbers is None:
            self._numbers = np.flatnonzero(self.lanes)
        return self._numbers

    @property
    def present(self) -> np.ndarray:
        """Bool array (L / 32,): which warps have a lane in the set."""
        if self._present is None:
            self._present = self.lanes.reshape(-1, WARP).any(axis=1)
        return self._present

    @property
    def warps(self) -> np.ndarray:
        """Numbers of the warps that have a lane in the set."""
        if self._warps is None:
            self._warps = np.flatnonzero(self.present)
        return self._warps

    def common(self, values: np.ndarray) -> int | float | bool | None:
        """The value that all lanes of the set have in an array (L,), or None where they differ."""
        first = values.item(self.first)
        return first if self.count == 1 or (values[self.index] == first).all() else None

    def narrow(self, predicate: np.ndarray, negated: bool = False) -> Mask | None:
        """The lanes of the set whose predicate holds, or None when there are none."""
        count = int(np.count_nonzero(predicate))
        if self.where is True:
            if count == (0 if negated else predicate.size):
                return self
            if count == (predicate.size if negated else 0):
                return None
            lanes = np.logical_not(predicate) if negated else predicate.copy()
            count = predicate.size - count if negated else count
            if count == 1 and lanes.ndim == 1:
                return single_lane(lanes.size, int(lanes.argmax()))
            return Mask(lanes, count)
        lanes = self.lanes > predicate if negated else self.lanes & predicate
        count = int(np.count_nonzero(lanes))
        if count == 0:
            return None
        if count == self.count:
            return self
        if count == 1 and lanes.ndim == 1:
            return single_lane(lanes.size, int(lanes.argmax()))
        return Mask(lanes, count)

    def split_by(self, chosen: np.ndarray) -> tuple[Mask | None, Mask | None]:
        """(lanes of the set in `chosen`, the others); None stands for an empty set."""
        return self.narrow(chosen), self.narrow(chosen, negated=True)

    def compute(self, operation: Callable[..., np.ndarray], out: np.ndarray, *operands: np.ndarray) -> None:
        """`out = operation(*operands)` in the lanes of the set; `operation` is a ufunc.

        A ufunc with `where=` is slower than the whole vector and a masked copy.
        """
        if self.where is True:
            operation(*operands, out=out)
        else:
            np.copyto(out, operation(*operands), where=self.where)

    def union(self, other: Mask) -> Mask:
        return Mask(self.lanes | other.lanes, self.count + other.count)


@lru_cache(maxsize=4096)
def single_lane(lanes: int, lane: int) -> Mask:
    """The mask of one lane of a CTA of `lanes`: what issues asynchronous work, again and again."""
    chosen = np.zeros(lanes, bool)
    chosen[lane] = True
    chosen.setflags(write=False)
    return Mask(chosen, 1)
