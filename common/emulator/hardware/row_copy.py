"""Tensor copies whose rows lie anywhere in the tensor: im2col columns, and the four rows of gather4 and scatter4.

Sources: PTX ISA 5.5.3.4 (gather4, scatter4), 5.5.4 (im2col), 5.5.5 (im2col::w), 9.7.9.27.1.1; CUTLASS's
`copy_traits_sm90_im2col.hpp`; for `.im2col`, an H200 ("measured"). The other modes have come with Blackwell and are
unmeasured here.

- An im2col column starts at a position of the pixel box and goes along W, then H, then D, by the element strides; past
  the box's upper corner it begins again at the lower corner, and past the last of them it goes on to the next image, by
  N's element stride (measured, also for starts that the element strides do not reach from the lower corner).
- With interleave a pixel is one slice, whatever the number of channels (measured).
- The offsets are added to every position. A pixel outside the tensor is filled (measured).
- A start outside the pixel box stops an H200 with an illegal instruction (measured).
- `.im2col::w` keeps H and D, so that a column goes from the end of a row to the next image. The halo after a group of
  pixels is what comes next in that order. The text does not say what a halo beyond the end of a row is: this is our
  reading of it. In `.im2col::w::128` it comes again at the start of the next group of 32.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from common.emulator.hardware.shared_rows import SharedRows, round_tfloat32, tensor_reduction
from common.emulator.hardware.tensor_map import (
    CHUNK_BYTES,
    MAX_BOX_BYTES,
    W128_PIXELS,
    Mode,
    TensorMapDescriptor,
    TensorMapError,
    box_units,
    channel_units,
)

GATHERED_ROWS = 4
W128_GROUP = 32  # pixels after which .im2col::w::128 has a halo
_OFFSET_LIMITS = {3: 1 << 16, 4: 1 << 8, 5: 1 << 5}  # PTX ISA 5.5.4.1, by rank
_HALO_LIMITS = {Mode.IM2COL_W: 512, Mode.IM2COL_W128: 32}  # 9.7.9.27.1.2
_WIDE_OFFSETS = 32


class _Part(NamedTuple):
    """The rows inside the tensor, and which units of them: `view[index]` are their bytes in global memory."""

    inside: np.ndarray
    low: int
    high: int
    view: np.ndarray
    index: np.ndarray


class RowCopy(SharedRows):
    """Copies of rows along dimension 0 (or of slices), each with an address of its own."""

    @abstractmethod
    def locate(self, place: Sequence[int]) -> tuple[int, np.ndarray, np.ndarray]:
        """The first unit, the address of unit 0 of each row (int64, bytes), and which rows are inside the tensor."""

    def load(
        self, place: Sequence[int], memory: np.ndarray, memory_address: int, smem: np.ndarray, address: int
    ) -> None:
        self.check(place)
        self.check_shared(smem, address)
        part = self._part(place, self.inner_extent, memory, memory_address)
        staging = self.blank()
        if part is not None:
            source = part.view[part.index]
            source = round_tfloat32(source) if self.rounds else source
            self._units(staging)[part.inside, part.low : part.high, : self.storage.unit] = source.reshape(
                -1, part.high - part.low, self.storage.unit
            )
        self.scatter(staging, smem, address)

    def store(
        self, place: Sequence[int], memory: np.ndarray, memory_address: int, smem: np.ndarray, address: int
    ) -> None:
        part = self._written(place, memory, memory_address, smem, address, "a store")
        if part is not None:
            part.view[part.index] = self._taken(part, smem, address)

    def reduce(
        self, place: Sequence[int], memory: np.ndarray, memory_address: int, smem: np.ndarray, address: int, op: str
    ) -> None:
        combine = tensor_reduction(op, self.descriptor.dtype)
        part = self._written(place, memory, memory_address, smem, address, "a reduction")
        if part is not None:
            for row, source in zip(part.index, self._taken(part, smem, address)):  # rows may share bytes
                combine(part.view[row], source)

    def _written(
        self, place: Sequence[int], memory: np.ndarray, memory_address: int, smem: np.ndarray, address: int, what: str
    ) -> _Part | None:
        self.check(place)
        self.check_written(place, what)
        self.check_shared(smem, address)
        return self._part(place, self.stored_extent, memory, memory_address)

    def _part(self, place: Sequence[int], extent: int, memory: np.ndarray, memory_address: int) -> _Part | None:
        first, addresses, inside = self.locate(place)
        low, high = max(0, -first), min(self.units, extent - first)
        if low >= high or not inside.any():
            return None
        starts = addresses[inside] + (first + low) * self.storage.unit
        width = (high - low) * self.storage.unit
        begin, end = int(starts.min()), int(starts.max()) + width
        if begin < memory_address or end > memory_address + memory.size:
            raise self.outside(begin, end - 1, memory, memory_address)
        # Rows start at multiples of 16 bytes: a view of all runs of `width` bytes that do gives them by number.
        runs = (end - width - begin) // CHUNK_BYTES + 1
        view = np.ndarray((runs, width), np.uint8, memory, begin - memory_address, (CHUNK_BYTES, 1))
        return _Part(inside, low, high, view, (starts - begin) // CHUNK_BYTES)

    def _taken(self, part: _Part, smem: np.ndarray, address: int) -> np.ndarray:
        """The rows' bytes from shared memory, shaped as `part.view[part.index]`."""
        units = self._units(self.gather(smem, address))
        return units[part.inside, part.low : part.high, : self.storage.unit].reshape(len(part.index), -1)

    def _units(self, staging: np.ndarray) -> np.ndarray:
        return staging.reshape(self.rows, self.units, self.storage.shared)


class GatherCopy(RowCopy):
    """`.tile::gather4` and `.tile::scatter4`: a place is a column and four row numbers of a matrix."""

    def __init__(self, d: TensorMapDescriptor) -> None:
        d.require(Mode.TILED)
        if d.rank != 2 or d.box[1] != 1 or d.interleave:
            raise TensorMapError(
                "gather4 and scatter4 need a matrix in boxes of one row, without interleave: the tensor map has rank "
                f"{d.rank}, box {list(d.box[: d.rank])}, interleave {d.interleave}"
            )
        super().__init__(d, box_units(d)[0], GATHERED_ROWS)

    def __str__(self) -> str:
        return f"{GATHERED_ROWS} rows of {self.descriptor.box[0]}"

    def check(self, place: Sequence[int]) -> None:
        self.first_unit(place[0])

    def locate(self, place: Sequence[int]) -> tuple[int, np.ndarray, np.ndarray]:
        numbers = np.array(place[1:], np.int64)
        addresses = self.descriptor.global_address + numbers * self.descriptor.strides[0]
        return self.first_unit(place[0]), addresses, (numbers >= 0) & (numbers < self.descriptor.dims[1])


class _Columns(RowCopy):
    """Pixels of an im2col map, with all their channels. `numbers`: where in the walk through the pixel box each is.

    A place is one coordinate per dimension, then offsets: as many as `offset_limits` has, or none. `moving`: of the
    dimensions W, H and D, how many the walk goes along.
    """

    def __init__(self, d: TensorMapDescriptor, numbers: np.ndarray, moving: int, offset_limits: Sequence[int]) -> None:
        super().__init__(d, channel_units(d), numbers.size)
        self.numbers = numbers
        self.moving = moving
        self.offset_limits = offset_limits
        # Of each pixel dimension: its number, and the first and last position of the box.
        corners = zip(d.pixel_axes, d.lower_corner, d.upper_corner)
        self.boxes = [(axis, lower, d.dims[axis] - 1 + upper) for axis, lower, upper in corners]

    def __str__(self) -> str:
        return f"column of {self.rows} pixels of {self.descriptor.channels_per_pixel} channels"

    def check(self, place: Sequence[int]) -> None:
        d = self.descriptor
        offsets = place[d.rank :]
        if len(place) < d.rank or len(offsets) not in (0, len(self.offset_limits)):
            raise TensorMapError(
                f"coordinates: a copy through an im2col tensor map of rank {d.rank} needs {d.rank}, and "
                f"{len(self.offset_limits)} offsets, got {list(place)}"
            )
        for axis, low, high in self.boxes[: self.moving]:
            if not self.may_start(place[axis], low, high):
                raise TensorMapError(
                    f"coordinates[{axis}]: must be in the pixel box, {low} to {high}, got {place[axis]}"
                )
        for offset, limit in zip(offsets, self.offset_limits):
            if not 0 <= offset < limit:
                raise TensorMapError(f"im2col offsets: must be 0 to {limit - 1} here, got {list(offsets)}")
        if not d.interleave:
            self.first_unit(place[0])

    def may_start(self, position: int, low: int, high: int) -> bool:
        return low <= position <= high

    def locate(self, place: Sequence[int]) -> tuple[int, np.ndarray, np.ndarray]:
        d = self.descriptor
        offsets = (*place[d.rank :], 0, 0, 0)
        steps = self.numbers
        positions: dict[int, np.ndarray | int] = {}
        for number, (axis, low, high) in enumerate(self.boxes):
            positions[axis] = place[axis] + offsets[number]
            if number < self.moving:
                walked, steps = _walk(place[axis], low, high, d.element_strides[axis], steps)
                positions[axis] = walked + offsets[number]
        positions[d.rank - 1] = place[d.rank - 1] + steps * d.element_strides[d.rank - 1]
        if d.interleave:
            positions[d.rank - 2] = place[d.rank - 2]
        strides = (self.storage.unit, *d.strides)
        addresses, inside = np.full(self.rows, d.global_address, np.int64), np.ones(self.rows, bool)
        for axis, where in positions.items():
            addresses += where * strides[axis]
            inside &= (where >= 0) & (where < d.dims[axis])
        return 0 if d.interleave else self.first_unit(place[0]), addresses, inside


class ColumnCopy(_Columns):
    """`.im2col` with an offset for each of W, H and D, and `.im2col_no_offs` without."""

    def __init__(self, d: TensorMapDescriptor) -> None:
        d.require(Mode.IM2COL)
        axes = len(d.pixel_axes)
        super().__init__(d, np.arange(d.pixels_per_column, dtype=np.int64), axes, [_OFFSET_LIMITS[d.rank]] * axes)

    def check_written(self, coordinates: Sequence[int], what: str) -> None:
        super().check_written(coordinates, what)
        d = self.descriptor
        if min(d.lower_corner) < 0 or max(d.upper_corner) > 0:
            raise TensorMapError(
                f"pixel box: {what} needs a box inside the tensor, but its corners are {list(d.lower_corner)} and "
                f"{list(d.upper_corner)}"
            )


class WideColumnCopy(_Columns):
    """`.im2col::w` and `.im2col::w::128`, with `wHalo` pixels after each group, and an offset for W, `wOffset`."""

    def __init__(self, d: TensorMapDescriptor, halo: int) -> None:
        d.require(Mode.IM2COL_W, Mode.IM2COL_W128)
        limit = _HALO_LIMITS[Mode(d.mode)]
        if not 0 <= halo < limit:
            raise TensorMapError(f"wHalo: must be 0 to {limit - 1} in mode {Mode(d.mode).name}, got {halo}")
        whole = W128_PIXELS if d.mode == Mode.IM2COL_W128 else d.pixels_per_column
        group = W128_GROUP if d.mode == Mode.IM2COL_W128 else whole
        starts = np.arange(0, whole, group, dtype=np.int64)
        numbers = (starts[:, None] + np.arange(group + halo, dtype=np.int64)).reshape(-1)
        super().__init__(d, numbers, 1, [_WIDE_OFFSETS])
        if self.transaction_bytes > MAX_BOX_BYTES:
            raise TensorMapError(
                f"wHalo: a column must fit in the {MAX_BOX_BYTES} bytes of shared memory, got {self.transaction_bytes}"
            )

    def may_start(self, position: int, low: int, high: int) -> bool:
        """A column may also begin on the left of its box (PTX ISA 5.5.5.1)."""
        return position <= high


def _walk(start: int, low: int, high: int, step: int, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where steps with these numbers lead from `start`, and how often they have come past `high` and back to `low`."""
    first = 1 + (high - start) // step
    later = numbers - first
    lap = 1 + (high - low) // step
    again = later >= 0
    positions = np.where(again, low + later % lap * step, start + numbers * step)
    return positions, np.where(again, 1 + later // lap, 0)
