"""What a `wgmma.mma_async` computes when its operation completes (PTX ISA 9.7.15.5 and 9.7.15.6).

A multiplicand has 32 bytes per row and instruction as stored, in every type. In registers, a warp holds 16 rows of A: a
register is 8 rows of 4 words, register after register go down the rows first, then along K. Of D a warp holds the same
rows, two neighbours of a row in each lane.

Products are exact and summed in float32, in an order that the ISA leaves open; f16 accumulators are rounded once per
instruction. Sums of products of integers are below 2**24: they are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from common.emulator.hardware.multiplicands import (
    ELEMENT_BYTES,
    WGMMA_PAIRS,
    Decoder,
    expand,
    nibbles_of,
    smem_decoder,
)
from common.emulator.hardware.operand_layout import OperandShape
from common.emulator.hardware.smem_descriptor import SmemDescriptor
from common.emulator.machine.mask import WARP
from common.emulator.machine.shared_operand import check_operand, load_operand, require_operand_fence
from common.emulator.numerics.modifiers import canonical_nan

if TYPE_CHECKING:
    from common.emulator.machine.thread_block import ThreadBlock

M = 64
WARPS = 4
WARPGROUP = WARPS * WARP
ROW_BYTES = 32  # of a row of A per instruction, as stored
A_REGISTERS = 4
_BLOCK, _THREADS = 8, 4  # rows of a register, lanes that hold a row
_S32_MIN, _S32_MAX = -(1 << 31), (1 << 31) - 1


@dataclass(frozen=True)
class WgmmaForm:
    """Shape and types: A is (64, k), B is (k, n)."""

    n: int
    k: int
    d: str
    a: str
    b: str
    sparse: bool
    saturate: bool

    @property
    def registers(self) -> int:
        """Of D, in each thread."""
        return self.n // 4 if self.d == "f16" else self.n // 2

    def __str__(self) -> str:
        return f"wgmma{'.sp' if self.sparse else ''} m{M}n{self.n}k{self.k} {self.a} {self.b} {self.d}"


@dataclass(frozen=True, eq=False)
class WgmmaPlan:
    """What an instruction of the program says: see `WgmmaForm`.

    `d` and `a`: frame slots of the registers, `a` empty with A in shared memory; `registers_d` and `registers_a` their
    numbers. `negate`: the product counts negatively. `selector`: which lanes hold the metadata of a sparse A.
    """

    form: WgmmaForm
    d: tuple[int, ...]
    a: tuple[int, ...]
    registers_d: frozenset[int]
    registers_a: frozenset[int]
    a_mn_major: bool
    b_mn_major: bool
    negate: bool
    selector: int

    @cached_property
    def a_shape(self) -> OperandShape:
        return OperandShape(M, ROW_BYTES, ELEMENT_BYTES.get(self.form.a, 1), self.a_mn_major)

    @cached_property
    def b_shape(self) -> OperandShape:
        k_bytes = ROW_BYTES * (2 if self.form.sparse else 1)
        return OperandShape(self.form.n, k_bytes, ELEMENT_BYTES.get(self.form.b, 1), self.b_mn_major)

    @cached_property
    def decode_a(self) -> Decoder:
        return smem_decoder(self.form.a, False)

    @cached_property
    def decode_b(self) -> Decoder:
        return smem_decoder(self.form.b, False)

    @cached_property
    def shared_bytes(self) -> int:
        """Bytes that the instruction reads from shared memory."""
        return (0 if self.a else M * ROW_BYTES) + self.b_shape.rows * self.b_shape.k_bytes

    def check(self, block: ThreadBlock, a: SmemDescriptor | None, b: SmemDescriptor) -> None:
        """Raises OutOfBounds for a place in shared memory that A or B cannot have."""
        check_operand(block, b, b.address, self.b_shape, "matrix B of wgmma")
        require_operand_fence(block, b, b.address, self.b_shape, "wgmma, for its matrix B,")
        if a is not None:
            check_operand(block, a, a.address, self.a_shape, "matrix A of wgmma")
            require_operand_fence(block, a, a.address, self.a_shape, "wgmma, for its matrix A,")

    def product(
        self, block: ThreadBlock, group: int, a: SmemDescriptor | None, b: SmemDescriptor, metadata: np.ndarray | None
    ) -> np.ndarray:
        """A B, float32 (64, n), of shared memory and of the A registers of warpgroup `group` as they are now."""
        if a is None:
            matrix = self.decode_a(_rows_of(registers(block, self.a, group)))
        else:
            matrix = load_operand(block, a, (a.address,), self.a_shape, self.decode_a)
        if metadata is not None:
            matrix = expand(matrix, _indices(metadata, self.form.a, self.selector), self.form.a, WGMMA_PAIRS)
        other = load_operand(block, b, (b.address,), self.b_shape, self.decode_b)
        return (-matrix if self.negate else matrix) @ other.T

    def accumulate(self, product: np.ndarray, old: np.ndarray | None) -> np.ndarray:
        """Registers of D, uint32 (registers, 128), from the product (64, n) and the registers it is added to."""
        blocks = product.reshape(WARPS, 2, _BLOCK, -1, _THREADS, 2)  # warp, half, row, column block, lane, neighbour
        return _ACCUMULATE[self.form.d](blocks, old, self.form.saturate)


def _accumulate_f32(blocks: np.ndarray, old: np.ndarray | None, saturate: bool) -> np.ndarray:
    total = blocks.transpose(3, 1, 5, 0, 2, 4).reshape(-1, WARPGROUP)
    if old is not None:
        total += old.view(np.float32)
    return canonical_nan(total).view(np.uint32)


def _accumulate_f16(blocks: np.ndarray, old: np.ndarray | None, saturate: bool) -> np.ndarray:
    total = blocks.transpose(3, 1, 0, 2, 4, 5).reshape(-1, 2 * WARPGROUP)
    if old is not None:
        total += old.view(np.float16)
    return canonical_nan(total.astype(np.float16)).view(np.uint32)


def _accumulate_s32(blocks: np.ndarray, old: np.ndarray | None, saturate: bool) -> np.ndarray:
    """Wraps, unless `saturate`."""
    total = blocks.transpose(3, 1, 5, 0, 2, 4).reshape(-1, WARPGROUP).astype(np.int64)
    if old is not None:
        total += old.view(np.int32)
    if saturate:
        np.clip(total, _S32_MIN, _S32_MAX, out=total)
    return total.astype(np.uint32)


_Accumulate = Callable[[np.ndarray, "np.ndarray | None", bool], np.ndarray]
_ACCUMULATE: dict[str, _Accumulate] = {"f32": _accumulate_f32, "f16": _accumulate_f16, "s32": _accumulate_s32}


def registers(block: ThreadBlock, slots: tuple[int, ...], group: int) -> np.ndarray:
    """A copy of registers of a warpgroup, uint32 (registers, 128)."""
    return read_lanes(block, slots, slice(group * WARPGROUP, (group + 1) * WARPGROUP))


def read_lanes(block: ThreadBlock, slots: tuple[int, ...], lanes: slice) -> np.ndarray:
    """A copy of registers of neighbouring lanes, uint32 (registers, lanes)."""
    together = block.slot.neighbours(slots)
    if together is not None:
        return together[:, lanes].copy()
    return np.stack([block.frame[slot][lanes] for slot in slots])


def write_lanes(block: ThreadBlock, slots: tuple[int, ...], lanes: slice, values: np.ndarray | np.uint32) -> None:
    """The inverse; `values` may be one for all."""
    together = block.slot.neighbours(slots)
    if together is not None:
        together[:, lanes] = values
        return
    for slot, words in zip(slots, np.broadcast_to(values, (len(slots), lanes.stop - lanes.start))):
        block.frame[slot][lanes] = words


def _rows_of(words: np.ndarray) -> np.ndarray:
    """Registers of A (4, 128) as rows of words, uint32 (64, 8)."""
    blocks = words.reshape(2, 2, WARPS, _BLOCK, _THREADS)  # along K, half, warp, row, lane
    return blocks.transpose(2, 1, 3, 0, 4).reshape(M, -1)


def _indices(metadata: np.ndarray, kind: str, selector: int) -> np.ndarray:
    """The 4-bit indices of every row of A, (64, chunks), from the metadata registers (128,).

    Of four neighbouring lanes, those two that the selector says hold rows r and r + 8 for types of 16 and 32 bits: each
    one half of K, row r in the low half of the register. For types of 8 bits all four do, and a register is half of a
    row: lanes 0 and 2 have row r, lanes 1 and 3 row r + 8 (so found on an H200; the ISA shows it in figures only).
    """
    words = metadata.reshape(WARPS, _BLOCK, _THREADS)
    if ELEMENT_BYTES.get(kind, 1) > 1:
        words = np.ascontiguousarray(words[..., 2 * selector : 2 * selector + 2]).view(np.uint16)
    parts = words.reshape(WARPS, _BLOCK, 2, 2)  # warp, row, half of K, row r or r + 8
    return nibbles_of(parts.transpose(0, 3, 1, 2).reshape(M, -1))
