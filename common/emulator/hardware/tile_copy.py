"""Tensor copies in tile mode: one box of a tensor, with up to five dimensions (PTX ISA 5.5.3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from common.emulator.hardware.shared_rows import SHARED_ALIGNMENT, SharedRows, round_tfloat32, tensor_reduction
from common.emulator.hardware.tensor_map import Mode, TensorMapDescriptor, TensorMapError, box_units

ADDRESS_BITS = (1 << 64) - 1  # addresses wrap: with large strides a tensor can reach what lies before its start


class _Part(NamedTuple):
    """The part of a box inside the tensor: index ranges of the box, and where they lie in global memory."""

    low: tuple[int, ...]
    high: tuple[int, ...]
    address: int
    row_bytes: int
    last_address: int


class TileCopy(SharedRows):
    """Copies of the map's box. A place is one coordinate per dimension, in elements, innermost first."""

    def __init__(self, d: TensorMapDescriptor) -> None:
        d.require(Mode.TILED)
        self.counts = box_units(d)
        super().__init__(d, self.counts[0], math.prod(self.counts[1:]))
        self.rank = d.rank
        inner = d.dims[0] if d.interleave else self.inner_extent
        self.extents = (inner, *d.dims[1 : d.rank])
        self.written_extents = (inner if d.interleave else self.stored_extent, *d.dims[1 : d.rank])
        self.strides = (self.storage.unit, *d.strides[: d.rank - 1])
        self.steps = d.element_strides[: d.rank] if d.interleave else (1, *d.element_strides[1 : d.rank])
        # A row is one run of bytes in global and in shared memory, unless units are padded or skipped.
        self.solid_rows = self.steps[0] == 1 and self.storage.unit == self.storage.shared
        self.staging_shape = (*self.counts[:0:-1], self.row)
        self._direct_indices: dict[int, np.ndarray] = {}
        # Boxes that lie wholly inside the tensor move as one gather or scatter of 16-byte (or 8-byte) items.
        geometry = zip(self.extents, self.counts, self.steps, self.strides, strict=True)
        self.bounds = [(extent - (count - 1) * step, stride) for extent, count, step, stride in geometry]
        self.reach = self.storage.unit + sum(
            (count - 1) * step * stride
            for count, step, stride in zip(self.counts, self.steps, self.strides, strict=True)
        )
        self.direct = self.dense and self.storage.elements == 1

    def __str__(self) -> str:
        return f"tile {'x'.join(str(extent) for extent in self.descriptor.box[: self.rank])}"

    def check(self, place: Sequence[int]) -> None:
        self.first(place)

    def first_touched(self, place: Sequence[int]) -> int | None:
        part = self._clip(self.first(place), self.extents)
        return None if part is None else part.address

    def load(
        self, place: Sequence[int], memory: np.ndarray, memory_address: int, smem: np.ndarray, address: int
    ) -> None:
        whole = self.whole(place, memory, memory_address, smem, address)
        if whole is not None:
            source, target = whole
            source.take(self._direct_index(address), out=target, mode="clip")
            if self.rounds:
                target[...] = round_tfloat32(target).view(self.item)
            return
        first = self.first(place)
        self.check_shared(smem, address)
        part = self._clip(first, self.extents)
        staging = self.blank()
        if part is not None:
            source = self._window(part, memory, memory_address)
            self._cut(staging, part)[...] = round_tfloat32(source) if self.rounds else source
        self.scatter(staging, smem, address)

    def store(
        self, place: Sequence[int], memory: np.ndarray, memory_address: int, smem: np.ndarray, address: int
    ) -> None:
        whole = self.whole(place, memory, memory_address, smem, address)
        if whole is not None:
            target, source = whole
            target[self._direct_index(address)] = source
            return
        written = self._written(place, memory, memory_address, smem, address, "a store")
        if written is not None:
            target, source = written
            target[...] = source

    def reduce(
        self, place: Sequence[int], memory: np.ndarray, memory_address: int, smem: np.ndarray, address: int, op: str
    ) -> None:
        combine = tensor_reduction(op, self.descriptor.dtype)
        written = self._written(place, memory, memory_address, smem, address, "a reduction")
        if written is None:
            return
        target, source = written
        if not self.overlaps:
            combine(target, source)
            return
        for row in np.ndindex(target.shape[: self.rank - 1]):  # rows share bytes: one after the other
            combine(target[row], source[row])

    @cached_property
    def overlaps(self) -> bool:
        """Whether two units of one box can share global bytes."""
        reach = ((self.counts[0] - 1) * self.steps[0] + 1) * self.storage.unit
        geometry = zip(self.strides[1:], self.steps[1:], self.counts[1:], strict=True)
        outer = sorted((stride * step, count) for stride, step, count in geometry if count > 1)
        for step, count in outer:
            if step < reach:
                return True
            reach += (count - 1) * step
        return False

    def _direct_index(self, address: int) -> np.ndarray:
        """For each item of a dense box in shared memory at `address`, its place in global memory, in items (int64)."""
        phase = address % 1024
        if phase not in self._direct_indices:
            places = np.zeros(1, np.int64)
            for count, step, stride in zip(self.counts[::-1], self.steps[::-1], self.strides[::-1], strict=True):
                places = (places[:, None] + np.arange(count, dtype=np.int64) * (step * stride)).reshape(-1)
            units_per_item = max(1, self.granule // self.storage.unit)
            parts = np.arange(0, max(self.storage.unit, self.granule), self.granule, dtype=np.int64)
            items = (places[::units_per_item, None] + parts).reshape(-1) // self.granule
            # A swizzle is its own inverse: what lands at chunk i is the chunk that i swizzles to.
            self._direct_indices[phase] = items[self.chunk_index(address)]
        return self._direct_indices[phase]

    def whole(
        self, place: Sequence[int], memory: np.ndarray, memory_address: int, smem: np.ndarray, address: int
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Global and shared memory as items, for a box that a gather or scatter can move; None for any other.

        The caller takes the slow path then, which also finds what is wrong with wrong arguments.
        """
        if not self.direct or len(place) != self.rank or place[0] % self.inner_multiple:
            return None
        begin = self.descriptor.global_address - memory_address
        for coordinate, (bound, stride) in zip(place, self.bounds):
            if not 0 <= coordinate < bound:
                return None
            begin += coordinate * stride
        begin &= ADDRESS_BITS
        if begin + self.reach > memory.size:
            return None
        if address % SHARED_ALIGNMENT or not 0 <= address <= smem.size - self.shared_bytes:
            return None
        size = self.granule
        flat = np.ndarray((self.reach // size,), self.item, memory, begin)
        return flat, np.ndarray((self.shared_bytes // size,), self.item, smem, address)

    def first(self, place: Sequence[int]) -> tuple[int, ...]:
        """Coordinates in units; raises when their number or the inner alignment is wrong."""
        if len(place) != self.rank:
            raise TensorMapError(f"coordinates: a tensor map of rank {self.rank} needs {self.rank}, got {list(place)}")
        inner, *outer = (int(coordinate) for coordinate in place)
        return (self.first_unit(inner), *outer)

    def _clip(self, first: tuple[int, ...], extents: tuple[int, ...]) -> _Part | None:
        """The part of the box at `first` within `extents`; None when there is none."""
        low, high = [], []
        address = last = self.descriptor.global_address
        geometry = zip(first, self.steps, self.counts, extents, self.strides, strict=True)
        for start, step, count, extent, stride in geometry:
            lo = max(0, -(start // step))
            hi = min(count, -((start - extent) // step))
            if lo >= hi:
                return None
            low.append(lo)
            high.append(hi)
            address += (start + lo * step) * stride
            last += (start + (hi - 1) * step) * stride
        row_bytes = (high[0] - low[0]) * self.storage.unit
        last = (last + self.storage.unit - 1) & ADDRESS_BITS
        return _Part(tuple(low), tuple(high), address & ADDRESS_BITS, row_bytes, last)

    def _window(self, part: _Part, memory: np.ndarray, memory_address: int) -> np.ndarray:
        """The part's global bytes as a view: outer dimensions, then bytes of a row (or units, bytes of a unit)."""
        if part.address < memory_address or part.last_address >= memory_address + memory.size:
            raise self.outside(part.address, part.last_address, memory, memory_address)
        shape = [high - low for low, high in zip(part.low[:0:-1], part.high[:0:-1], strict=True)]
        strides = [stride * step for stride, step in zip(self.strides[:0:-1], self.steps[:0:-1], strict=True)]
        if self.solid_rows:
            shape, strides = [*shape, part.row_bytes], [*strides, 1]
        else:
            shape = [*shape, part.high[0] - part.low[0], self.storage.unit]
            strides = [*strides, self.strides[0] * self.steps[0], 1]
        return np.ndarray(shape, np.uint8, memory, part.address - memory_address, strides)

    def _cut(self, staging: np.ndarray, part: _Part) -> np.ndarray:
        """The part of a staged box, shaped as `_window`."""
        staging = staging.reshape(self.staging_shape)
        outer = tuple(slice(low, high) for low, high in zip(part.low[:0:-1], part.high[:0:-1], strict=True))
        if self.solid_rows:
            start = part.low[0] * self.storage.unit
            return staging[(*outer, slice(start, start + part.row_bytes))]
        units = staging.reshape(*self.staging_shape[:-1], self.counts[0], self.storage.shared)
        return units[(*outer, slice(part.low[0], part.high[0]), slice(0, self.storage.unit))]

    def _written(
        self, place: Sequence[int], memory: np.ndarray, memory_address: int, smem: np.ndarray, address: int, what: str
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Global view and shared bytes of what a store or reduction writes; None for a box outside the tensor."""
        first = self.first(place)
        self.check_written(place, what)
        self.check_shared(smem, address)
        part = self._clip(first, self.written_extents)
        if part is None:
            return None
        return self._window(part, memory, memory_address), self._cut(self.gather(smem, address), part)
