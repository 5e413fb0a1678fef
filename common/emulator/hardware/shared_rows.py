"""What every tensor copy has on its side of shared memory: rows of bytes, padded and swizzled, and their fill values.

Sources: PTX ISA 5.5.3 and 5.5.7, 9.7.9.27.1, and an H200 with driver 580 ("measured", see `tensor_map`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from common.emulator.hardware.reductions import REDUCTIONS, Reduction, reduction
from common.emulator.hardware.swizzle import swizzle_chunks, swizzle_pattern
from common.emulator.hardware.tensor_map import (
    CHUNK_BYTES,
    PADDED,
    DataType,
    OobFill,
    TensorMapAccessError,
    TensorMapDescriptor,
    TensorMapError,
    unit_storage,
)

SHARED_ALIGNMENT = 128
OOB_NAN = 0x7FF7
PADDING = 0xFF


class SharedRows(ABC):
    """One kind of copy through one tensor map, whose place in the tensor is still open.

    In shared memory it has `rows` rows of `units` units (elements, groups of packed elements, or slices). Bytes:
    `transaction_bytes` is what it moves and completes on its mbarrier, in bounds or not (measured): padding counts for
    nothing, neither the gaps between rows shorter than the swizzle span, nor those that the packed types get in shared
    memory (for these the ISA says "data copied" and nobody has measured it here). `shared_bytes` is what it occupies.

    A `place` is what an instruction says of where in the tensor: coordinates, then im2col offsets. Memory is uint8:
    the flat bytes of the allocation that starts at address `memory_address`, and shared memory from address 0 on, so
    that the bits of an address in it drive the swizzle.
    """

    def __init__(self, d: TensorMapDescriptor, units: int, rows: int) -> None:
        self.descriptor = d
        self.storage = unit_storage(d)
        self.units = units
        self.rows = rows
        pattern = swizzle_pattern(d.swizzle)
        self.granule = pattern.granule
        self.row = units * self.storage.shared
        self.pitch = self.row if d.interleave or not d.swizzle else pattern.span
        self.transaction_bytes = rows * units * self.storage.unit
        self.linear_bytes = rows * self.pitch
        self.shared_bytes = -(-self.linear_bytes // pattern.span) * pattern.span
        self.dense = self.row == self.pitch and self.shared_bytes == self.linear_bytes
        self.rounds = d.dtype in (DataType.TFLOAT32, DataType.TFLOAT32_FTZ)
        self.inner_extent = 1 if d.interleave else d.dims[0] // self.storage.elements
        per_chunk = max(1, CHUNK_BYTES // self.storage.unit)
        self.stored_extent = -(-self.inner_extent // per_chunk) * per_chunk
        if d.interleave:
            self.inner_multiple = 1
        elif d.dtype in PADDED:
            self.inner_multiple = 128
        else:
            self.inner_multiple = max(1, CHUNK_BYTES * self.storage.elements // self.storage.unit)
        self.item = np.dtype(np.complex128 if self.granule == CHUNK_BYTES else np.uint64)
        self._chunk_indices: dict[int, np.ndarray] = {}

    @abstractmethod
    def check(self, place: Sequence[int]) -> None:
        """Raises `TensorMapError` for a place that no copy of this kind may have (an H200 faults)."""

    def first_touched(self, place: Sequence[int]) -> int | None:
        """The first global address of the copy at `place`; None for one outside the tensor."""
        return self.descriptor.global_address

    @abstractmethod
    def load(
        self, place: Sequence[int], memory: np.ndarray, memory_address: int, smem: np.ndarray, address: int
    ) -> None:
        """Copies from global to shared memory; what is outside the tensor gets the fill value.

        Raises `TensorMapError` for a misaligned address or a place that is not allowed, `TensorMapAccessError` when an
        element inside the tensor is outside the allocation, or the rows outside shared memory.
        """

    @abstractmethod
    def store(
        self, place: Sequence[int], memory: np.ndarray, memory_address: int, smem: np.ndarray, address: int
    ) -> None:
        """Copies from shared to global memory; what is outside the tensor is dropped. Errors as for `load`.

        The inner dimension is clipped to whole 16-byte chunks, so a tensor whose rows end within one has the bytes
        after them written too: `TensorMapAccessError` when these lie outside the allocation.
        """

    @abstractmethod
    def reduce(
        self, place: Sequence[int], memory: np.ndarray, memory_address: int, smem: np.ndarray, address: int, op: str
    ) -> None:
        """Combines global memory with shared memory, as `cp.reduce.async.bulk.tensor`; clipped like a store.

        `op`: add, min, max, inc, dec, and, or, xor, on the descriptor's type; a type that the operation does not take
        raises `TensorMapError` (an H200 faults).
        """

    def poison(self, value: int, smem: np.ndarray, address: int) -> None:
        """Fills the bytes that a load will write, and no others, with `value`."""
        if self.dense or not self.descriptor.swizzle:
            smem[address : address + self.linear_bytes] = value
        else:
            self.scatter(np.full((self.rows, self.row), value, np.uint8), smem, address)

    def first_unit(self, coordinate: int) -> int:
        """A coordinate along the rows, in units; raises when it is not a multiple of 16 bytes."""
        if coordinate % self.inner_multiple:
            raise TensorMapError(
                f"coordinates[0]: must be a multiple of {self.inner_multiple} for dtype "
                f"{DataType(self.descriptor.dtype).name} (a row starts on {CHUNK_BYTES} bytes), got {coordinate}"
            )
        return coordinate // self.storage.elements

    def check_shared(self, smem: np.ndarray | None, address: int) -> None:
        if address % SHARED_ALIGNMENT:
            raise TensorMapError(
                f"shared memory address: must be a multiple of {SHARED_ALIGNMENT} for a tensor copy, got {address:#x}"
            )
        if smem is not None and not 0 <= address <= smem.size - self.shared_bytes:
            raise TensorMapAccessError(
                f"shared memory address: {self.shared_bytes} bytes at {address:#x} leave the {smem.size} bytes "
                "of shared memory",
                max(address, smem.size),
            )

    def check_written(self, coordinates: Sequence[int], what: str) -> None:
        """The rules of stores and reductions (PTX ISA 9.7.9.27.1.1; measured). `what`: for the message."""
        if self.descriptor.dtype == DataType.U4_ALIGN16B:
            raise TensorMapError(f"dtype: {what} to global memory does not take U4_ALIGN16B")
        if min(coordinates) < 0:
            raise TensorMapError(f"coordinates: {what} needs non-negative coordinates, got {list(coordinates)}")

    def outside(self, first: int, last: int, memory: np.ndarray, memory_address: int) -> TensorMapAccessError:
        """The error for an access to bytes `first` to `last` that leaves the allocation."""
        end = memory_address + memory.size
        return TensorMapAccessError(
            f"the tensor map describes memory outside the allocation: the access takes bytes {first:#x} to {last:#x} "
            f"of the tensor at {self.descriptor.global_address:#x}, the allocation is {memory_address:#x} to "
            f"{end - 1:#x}",
            first if first < memory_address else max(first, end),
        )

    def chunk_index(self, address: int) -> np.ndarray:
        """Swizzled place of each chunk of the rows, as a chunk number from `address` (int64, in SMEM order)."""
        phase = address % 1024
        if phase not in self._chunk_indices:
            row = np.arange(0, self.row, self.granule, dtype=np.int64)
            offsets = (np.arange(self.rows, dtype=np.int64)[:, None] * self.pitch + row).reshape(-1)
            self._chunk_indices[phase] = swizzle_chunks(self.descriptor.swizzle, phase, offsets) // self.granule
        return self._chunk_indices[phase]

    def shared_addresses(self, address: int) -> np.ndarray:
        """Absolute swizzled addresses of the rows at shared `address`, one per chunk in SMEM order (int64, 1-D).

        A chunk has 16 bytes, or 8 for the swizzle that flips 8-byte halves (`granule`).
        """
        self.check_shared(None, address)
        return address + self.chunk_index(address) * self.granule

    def blank(self) -> np.ndarray:
        """Rows of fill values, uint8 (rows, row); the padding of packed types, which the ISA leaves undefined, is
        poison."""
        staging = np.empty((self.rows, self.row), np.uint8)
        if self.descriptor.oob_fill == OobFill.NAN:
            staging.view(np.uint16)[...] = OOB_NAN
        else:
            staging[...] = 0
        if self.storage.unit != self.storage.shared:
            staging.reshape(-1, self.storage.shared)[:, self.storage.unit :] = PADDING
        return staging

    def scatter(self, staging: np.ndarray, smem: np.ndarray, address: int) -> None:
        """Writes rows to shared memory."""
        if not self.descriptor.swizzle:
            smem[address : address + self.linear_bytes] = staging.reshape(-1)
            return
        target = smem[address : address + self.shared_bytes].view(self.item)
        chunks = staging.reshape(-1).view(self.item)
        index = self.chunk_index(address)
        if self.dense:  # a swizzle is its own inverse, so the scatter can be a gather, which is faster
            np.take(chunks, index, out=target, mode="clip")
        else:
            target[index] = chunks

    def gather(self, smem: np.ndarray, address: int) -> np.ndarray:
        """Reads rows from shared memory, unswizzled and as they go to global memory: uint8 (rows, row)."""
        if self.descriptor.swizzle:
            source = smem[address : address + self.shared_bytes].view(self.item)
            staging = np.take(source, self.chunk_index(address)).view(np.uint8)
        else:
            staging = smem[address : address + self.linear_bytes]
        if self.descriptor.dtype == DataType.U6_ALIGN16B:
            staging = _pack_six_bits(staging)
        return staging.reshape(self.rows, self.row)


def _pack_six_bits(staging: np.ndarray) -> np.ndarray:
    """Type `.b6p2x16`: sixteen bytes with six bits each become twelve bytes, in front of each group (PTX 5.5.1.1)."""
    bits = np.unpackbits(staging.reshape(-1, 16, 1), axis=2, bitorder="little")[:, :, :6]
    packed = np.full(staging.shape, PADDING, np.uint8)
    packed.reshape(-1, 16)[:, :12] = np.packbits(bits.reshape(-1, 96), axis=1, bitorder="little")
    return packed


def round_tfloat32(source: np.ndarray) -> np.ndarray:
    """Round float32 bytes to 10 mantissa bits, to nearest even; any NaN becomes 0x7fffe000."""
    bits = np.ascontiguousarray(source).view(np.uint32)
    rounded = (bits + (np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1)))) & np.uint32(0xFFFFE000)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    special = magnitude >= np.uint32(0x7F800000)
    if special.any():
        rounded[special] = np.where(magnitude > np.uint32(0x7F800000), np.uint32(0x7FFFE000), bits)[special]
    return rounded.view(np.uint8)


# Element types each reduction takes on an H200 (measured): the table of PTX ISA 9.7.9.27.1.3, and for add also float64
# and the float32 variants. Bitwise operations take int32 but not int64.
_REDUCED_KINDS = {
    DataType.UINT32: "u32",
    DataType.INT32: "s32",
    DataType.UINT64: "u64",
    DataType.INT64: "s64",
    DataType.FLOAT16: "f16",
    DataType.BFLOAT16: "bf16",
    DataType.FLOAT32: "f32",
    DataType.TFLOAT32: "f32",
    DataType.FLOAT32_FTZ: "f32_flushed",
    DataType.TFLOAT32_FTZ: "f32_flushed",
    DataType.FLOAT64: "f64",
}


def tensor_reduction(op: str, dtype: int) -> Reduction:
    """The element-wise operation; raises `TensorMapError` for a type that it does not take."""
    if op not in REDUCTIONS:
        raise TensorMapError(f"op: unknown reduction {op!r}; known: {', '.join(REDUCTIONS)}")
    takes = [code for code, kind in _REDUCED_KINDS.items() if kind in REDUCTIONS[op]]
    if dtype not in takes:
        names = ", ".join(code.name for code in takes)
        raise TensorMapError(f"dtype: reduction {op} does not take {DataType(dtype).name}, only {names}")
    return reduction(op, _REDUCED_KINDS[DataType(dtype)])
