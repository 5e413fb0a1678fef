"""Shared memory to tensor memory, and shifting rows: tcgen05.cp and .shift (PTX ISA 9.7.16.9).

A copy takes rows of 16 or 32 bytes where a K-major matrix descriptor finds them. The rows go to these lanes:

    128x256b, 128x128b      row i to lane i
    64x128b.warpx2::02_13   row i to lanes i and i + 64
    64x128b.warpx2::01_23   row i to lanes i and i + 32, counted without lanes 32-63 (rows 32-63 start at lane 64)
    32x128b.warpx4          row i to lanes i, i + 32, i + 64, i + 96
    4x256b                  row i to lane 32 i, counted from the lane of the address

as in CUTLASS (`copy_traits_sm100.hpp`) and TIRx (`tcgen05_cp.py`). With .cta_group::2 each CTA of the pair copies from
its own shared memory, at the same offset, to its own tensor memory.

PTX draws the shift and no document spells it out. "Down" is taken to be towards lower lanes, with the last of a warp's
32 lanes left alone: that is what a convolution needs, whose next filter tap finds input row i + 1 in row i, and what a
4x256b copy then completes in the last lane of every warp ("refresh", CUTLASS).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from common.emulator.faults import OutOfBounds, TensorMemoryFault, UnsupportedInstruction
from common.emulator.hardware.operand_layout import CHUNK, PERIOD, ChunkMap, OperandShape, chunk_map
from common.emulator.hardware.smem_descriptor import SmemDescriptor
from common.emulator.isa.async_issue import Issuer, per_lane, require_source
from common.emulator.isa.binder import Binder
from common.emulator.isa.load_store import bind_address
from common.emulator.isa.registry import Decoded
from common.emulator.isa.tcgen05 import take_cta_group, tcgen05_operation
from common.emulator.machine.generic_writes import require_fence
from common.emulator.machine.memory import RESERVED_SHARED
from common.emulator.machine.tensor_memory import LANE_SHIFT, LANES, Span, tensor_memory, use_cta_group
from common.emulator.machine.tensor_pipeline import issue_tcgen05
from common.emulator.ptx.module import Instruction, Operand

if TYPE_CHECKING:
    from common.emulator.machine.thread_block import ThreadBlock

WINDOW = 32
SHIFTED_COLUMNS = 8
WAIT_COMMIT = "a tcgen05.commit and a wait for its mbarrier are missing"


@dataclass(frozen=True)
class CopyShape:
    """`rows` of `columns` 32-bit words; `lanes` lists, for each copy that is made of the rows, their lanes."""

    rows: int
    columns: int
    lanes: tuple[np.ndarray, ...]


_ROWS = np.arange(LANES)
SHAPES = {
    ("128x256b", None): CopyShape(128, 8, (_ROWS,)),
    ("128x128b", None): CopyShape(128, 4, (_ROWS,)),
    ("64x128b", "warpx2::02_13"): CopyShape(64, 4, (_ROWS[:64], _ROWS[64:])),
    ("64x128b", "warpx2::01_23"): CopyShape(
        64, 4, tuple(np.concatenate((_ROWS[first : first + 32], _ROWS[first + 64 : first + 96])) for first in (0, 32))
    ),
    ("32x128b", "warpx4"): CopyShape(32, 4, tuple(_ROWS.reshape(4, 32))),
    ("4x256b", None): CopyShape(4, 8, (_ROWS[::32],)),
}


@tcgen05_operation("cp")
def decode_copy(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    mods.take("cp")
    group = take_cta_group(mods)
    name = mods.one_of(*{name for name, _ in SHAPES})
    multicast = mods.optional("warpx2::02_13", "warpx2::01_23", "warpx4")
    source = mods.one_of("b6x16_p32", "b4x16_p64") if mods.take("b8x16") else None
    mods.done()
    if (name, multicast) not in SHAPES:
        raise UnsupportedInstruction(f"`{mods.opcode}`: 64x128b needs .warpx2, 32x128b .warpx4, other shapes neither")
    shape = SHAPES[name, multicast]
    kind = "cp.4x256b" if name == "4x256b" else "cp"
    target, matrix = inst.operands
    address, descriptor = _bind_address(b, target), b.read(matrix, "u64")
    issuer = Issuer(inst)

    def copy(f, lane, cta) -> None:
        place = SmemDescriptor.from_bits(int(f[descriptor][lane]))
        parts = [Part(block, shape, place, source, address(f, lane)) for block in members(cta, group)]
        for part in parts:
            part.require_fence()
        writes = tuple(span for part in parts for span in part.spans())
        detail = f"{name} from shared {place.address:#x} to {writes[0]}"
        steps = [lambda: [part.perform() for part in parts]]
        issue_tcgen05(issuer, cta, lane, kind, steps, group=group, writes=writes, detail=detail)
        cta.machine.counters.bytes["TMEM copy"] += 4 * shape.rows * shape.columns * len(parts)

    return per_lane(copy)


def members(cta: ThreadBlock, group: int) -> list[ThreadBlock]:
    """The CTAs whose tensor memory an operation of that .cta_group touches. Raises TensorMemoryFault for another
    .cta_group than the kernel's, InvalidAddress when the peer has exited."""
    use_cta_group(cta, group)
    return [cta] if group == 1 else [cta, cta.peer(cta.rank ^ 1)]


def _bind_address(b: Binder, operand: Operand):
    """A reader of one lane's tensor memory address."""
    _, base, offset = bind_address(b, operand, "shared")
    if base is None:
        return lambda f, lane: offset
    base = b.read(operand.base, "u32")
    return lambda f, lane: int(f[base][lane]) + offset & 0xFFFF_FFFF


@dataclass(frozen=True)
class Part:
    """What one CTA does for a copy. `source` is the packed format to expand, if any."""

    cta: ThreadBlock
    shape: CopyShape
    descriptor: SmemDescriptor
    source: str | None
    address: int

    def spans(self) -> list[Span]:
        """The cells that are written. Raises TensorMemoryFault."""
        memory, columns = tensor_memory(self.cta), self.shape.columns
        if self.shape.rows != 4:
            return [memory.span(self.address, LANES, columns, "tcgen05.cp")]
        if self.address >> LANE_SHIFT >= WINDOW:
            raise TensorMemoryFault(f"tcgen05.cp.4x256b at {self.address:#010x}: the lane must be below {WINDOW}")
        places = [self.address + (int(lane) << LANE_SHIFT) for lane in self.shape.lanes[0]]
        return [memory.span(place, 1, columns, "tcgen05.cp.4x256b") for place in places]

    @property
    def _chunks(self) -> ChunkMap:
        return chunk_map(self.descriptor, OperandShape(self.shape.rows, 4 * self.shape.columns, 1, False))

    def require_fence(self) -> None:
        """Raises MissingFence where threads have written the source and no `fence.proxy.async` came after."""
        if self.cta.shared.generic_writes.any:
            base = self.descriptor.address // PERIOD * (PERIOD // CHUNK)
            require_fence(self.cta, base + self._chunks.places, "tcgen05.cp")

    def perform(self) -> None:
        words = self._read()
        column, lane = self.address & 0xFFFF, self.address >> LANE_SHIFT
        data = tensor_memory(self.cta).data
        for lanes in self.shape.lanes:
            data[lanes + lane, column : column + self.shape.columns] = words

    def _read(self) -> np.ndarray:
        """The rows as uint32 (rows, columns). Raises OutOfBounds, DescriptorFault."""
        require_source(self.cta, WAIT_COMMIT)
        chunks = self._chunks
        base = self.descriptor.address // PERIOD * (PERIOD // CHUNK)
        first, last = CHUNK * (base + chunks.first), CHUNK * (base + chunks.last + 1)
        if first < RESERVED_SHARED or last > self.cta.shared.size:
            raise OutOfBounds(
                f"tcgen05.cp reads shared memory from {first:#x} to {last:#x}: the CTA has "
                f"[{RESERVED_SHARED:#x}, {self.cta.shared.size:#x})",
                address=self.descriptor.address,
            )
        rows = self.cta.shared.view(4, 4)[base + chunks.places]
        return (rows if self.source is None else expand(rows, self.source)).reshape(self.shape.rows, -1)


def expand(chunks: np.ndarray, source: str) -> np.ndarray:
    """Chunks of 16 packed elements and padding, uint32 (..., 4), to 16 bytes of one element each.

    A 6-bit element fills the low bits of its byte. A 4-bit one (E2M1) stands at bits 2-5, where it has the value of an
    E2M3 with two zeros appended: the container that `tcgen05.mma` reads.
    """
    data = np.ascontiguousarray(chunks).view(np.uint8)
    if source == "b4x16_p64":
        packed = data[..., :8]
        elements = np.stack((packed & 0xF, packed >> 4), axis=-1) << 2
    else:
        triples = data[..., :12].reshape(*data.shape[:-1], 4, 3)  # four elements in three bytes
        first, second, third = (triples[..., place] for place in range(3))
        elements = np.stack(
            (first & 0x3F, first >> 6 | (second & 0xF) << 2, second >> 4 | (third & 0x3) << 4, third >> 2), axis=-1
        )
    return np.ascontiguousarray(elements.reshape(data.shape)).view(np.uint32)


@tcgen05_operation("shift")
def decode_shift(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    mods.take("shift")
    mods.one_of("down")
    group = take_cta_group(mods)
    mods.done()
    address = _bind_address(b, inst.operands[0])
    issuer = Issuer(inst)

    def shift(f, lane, cta) -> None:
        place = address(f, lane)
        if (place >> LANE_SHIFT) % WINDOW:
            raise TensorMemoryFault(
                f"tcgen05.shift at {place:#010x}: the lane must be a multiple of {WINDOW}", address=place
            )
        spans = tuple(
            tensor_memory(block).span(place, WINDOW, SHIFTED_COLUMNS, "tcgen05.shift") for block in members(cta, group)
        )
        steps = [lambda: [_move_down(span) for span in spans]]
        issue_tcgen05(
            issuer, cta, lane, "shift", steps, group=group, reads=spans, writes=spans, detail=f"of {spans[0]}"
        )

    return per_lane(shift)


def _move_down(span: Span) -> None:
    span.cells[:-1] = span.read()[1:].copy()
