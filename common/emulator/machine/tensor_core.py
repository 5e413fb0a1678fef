"""The matrix unit: what a `tcgen05.mma` computes when its operation completes (PTX ISA 9.7.16.10).

Products are exact and summed in float32 in an order that the ISA leaves open; float64 is used where block scales could
leave float32's range. f16 accumulators are rounded once per instruction. int8 products are exact: 256 of them stay
below 2**24.

Consecutive instructions on one accumulator are *steps* of one `Mma`, computed as one product over their joined K.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from common.emulator.faults import DescriptorFault, Fault
from common.emulator.hardware.data_path import LANES, PARTITION, DataPath, data_path
from common.emulator.hardware.instruction_descriptor import InstructionDescriptor
from common.emulator.hardware.multiplicands import (
    ELEMENT_BYTES,
    Decoder,
    expand,
    nibbles_of,
    smem_decoder,
    tmem_decoder,
)
from common.emulator.hardware.operand_layout import OperandShape
from common.emulator.hardware.smem_descriptor import SmemDescriptor
from common.emulator.machine.shared_operand import check_operand, load_operand, require_operand_fence
from common.emulator.machine.tensor_memory import BLOCK, COLUMN_MASK, LANE_SHIFT, Span, tensor_memory
from common.emulator.numerics import formats

if TYPE_CHECKING:
    from common.emulator.machine.thread_block import ThreadBlock

ROW_BYTES = 32  # of a row of A per instruction, as stored
A_COLUMNS = ROW_BYTES // 4
MAX_STEPS = 8  # int8 sums stay exact
_FACTOR_BYTES = 4  # scale factors of a row lie in one 32-bit column
_SAFE_EXPONENTS = (67, 187)  # ue8m0 codes of 2**-60 and 2**60: scaled products stay within float32
_S32_MIN, _S32_MAX = -(1 << 31), (1 << 31) - 1
_UPPER_POISON = np.uint32(0xFFFF_0000)


@dataclass(eq=False)
class MmaPlan:
    """All that follows from the instruction descriptor and from where A lies. Made by `mma_plan`, once for each."""

    descriptor: InstructionDescriptor
    a_in_tmem: bool
    in_bounds: set[Hashable] = field(default_factory=set)  # places of A and B in shared memory that have been checked

    @cached_property
    def path(self) -> DataPath:
        return data_path(self.descriptor)

    @cached_property
    def fold_columns(self) -> int:
        """Columns of the accumulator: N over the folds."""
        return self.descriptor.n // self.path.folds

    @cached_property
    def packed(self) -> bool:
        """Two e2m1 to a byte."""
        return self.descriptor.form.kind in ("mxf4", "mxf4nvf4")

    @cached_property
    def a_shape(self) -> OperandShape:
        d = self.descriptor
        return OperandShape(self.path.rows, ROW_BYTES, ELEMENT_BYTES.get(d.a, 1), d.transpose_a)

    @cached_property
    def b_shape(self) -> OperandShape:
        """Of the part that one CTA's shared memory holds."""
        d = self.descriptor
        k_bytes = ROW_BYTES * (2 if d.form.sparse else 1)
        return OperandShape(d.n // d.form.group, k_bytes, ELEMENT_BYTES.get(d.b, 1), d.transpose_b)

    @cached_property
    def decode_a(self) -> Decoder:
        return (tmem_decoder if self.a_in_tmem else smem_decoder)(self.descriptor.a, self.packed)

    @cached_property
    def decode_b(self) -> Decoder:
        return smem_decoder(self.descriptor.b, self.packed)

    @cached_property
    def metadata_columns(self) -> int:
        """Columns of sparsity metadata one instruction reads: 32 bits per row for f16 and tf32, 64 for the others."""
        return 1 if self.descriptor.form.kind in ("f16", "tf32") else 2

    @cached_property
    def factor_columns(self) -> tuple[int, int]:
        """Columns of the scale factors of A and of B: one for each 32 rows, or columns of a fold."""
        return self.path.rows // PARTITION, -(-self.fold_columns // PARTITION)

    @cached_property
    def joinable(self) -> bool:
        """Whether a later instruction may join: not where each one rounds or saturates its accumulator."""
        return self.descriptor.d != "f16" and not self.descriptor.saturate

    @cached_property
    def label(self) -> str:
        return self.descriptor.label

    @cached_property
    def shared_bytes(self) -> int:
        """Bytes that an instruction reads from shared memory, of all its CTAs."""
        a = 0 if self.a_in_tmem else self.path.rows * ROW_BYTES
        return self.descriptor.form.group * (a + self.b_shape.rows * self.b_shape.k_bytes)


@lru_cache(maxsize=1024)
def mma_plan(descriptor: InstructionDescriptor, a_in_tmem: bool) -> MmaPlan:
    return MmaPlan(descriptor, a_in_tmem)


class Step(NamedTuple):
    """Where one instruction finds its operands: shared memory offsets of A and B in bytes, tensor memory addresses."""

    a: int
    b: int
    metadata: int = 0
    scale_a: int = 0
    scale_b: int = 0


@dataclass(eq=False)
class Mma:
    """One or more instructions D = A B + D on the same accumulator.

    `blocks`: the CTA, or both of the pair, the even one first. `a`, `b`: the descriptors whose addresses the steps
    replace (`a` is None with A in tensor memory), and `layouts` the other bits of both. `keep`: whether the first step
    reads D. `shift`: D counts 2**-shift times. `disabled`: bool (CTAs, 128), lanes that are not written, or None.
    `key`: equal for instructions that may be joined.
    """

    plan: MmaPlan
    blocks: tuple[ThreadBlock, ...]
    d: int
    a: SmemDescriptor | None
    b: SmemDescriptor
    layouts: tuple[int | None, int]
    keep: bool
    shift: int
    disabled: np.ndarray | None
    key: Hashable
    steps: list[Step] = field(default_factory=list)

    @property
    def accumulator(self) -> tuple:
        """Address of D, then shape: what orders two instructions."""
        descriptor = self.plan.descriptor
        return self.d, descriptor.m, descriptor.n, self.plan.path.name

    def __str__(self) -> str:
        return f"{self.plan.label} to tensor memory {self.d:#010x}"

    @property
    def takes_more(self) -> bool:
        return self.plan.joinable and len(self.steps) < MAX_STEPS

    def check(self) -> None:
        """Raises DescriptorFault for an address of D that the data path cannot have, or a transposed A in TMEM."""
        plan = self.plan
        plan.path.check_start(self.d >> LANE_SHIFT, "D of tcgen05.mma")
        if plan.a_in_tmem and plan.descriptor.transpose_a:
            raise DescriptorFault(
                "transpose A (bit 15 of the instruction descriptor): A in tensor memory is always K-major"
            )

    def add(self, step: Step) -> tuple[Span, ...]:
        """Adds an instruction; the tensor memory that it reads, but for D.

        Raises DescriptorFault, OutOfBounds, TensorMemoryFault for operands that it cannot have.
        """
        plan, form = self.plan, self.plan.descriptor.form
        self._check_shared(step)
        for block in self.blocks:
            require_operand_fence(block, self.b, step.b, plan.b_shape, "tcgen05.mma, for its matrix B,")
            if not plan.a_in_tmem:
                require_operand_fence(block, self.a, step.a, plan.a_shape, "tcgen05.mma, for its matrix A,")
        reads: list[Span] = []
        for block in self.blocks:
            if plan.a_in_tmem:
                reads.append(self._row_span(block, step.a, A_COLUMNS, "A of tcgen05.mma"))
            if form.sparse:
                reads.append(self._metadata_span(block, step.metadata))
            if form.scale_vector:
                reads.extend(_factor_spans(block, step, plan))
        self.steps.append(step)
        return tuple(reads)

    def _check_shared(self, step: Step) -> None:
        """Raises OutOfBounds or DescriptorFault for a place in shared memory that A or B cannot have."""
        plan = self.plan
        place = (step.a, step.b, self.layouts, self.blocks[0].shared.size)
        if place in plan.in_bounds:
            return
        for block in self.blocks:
            check_operand(block, self.b, step.b, plan.b_shape, "matrix B of tcgen05.mma")
            if not plan.a_in_tmem:
                check_operand(block, self.a, step.a, plan.a_shape, "matrix A of tcgen05.mma")
        plan.in_bounds.add(place)

    def written(self) -> tuple[Span, ...]:
        """The cells of D, lanes that are disabled left out. Raises TensorMemoryFault where they are not allocated."""
        path, start, columns = self.plan.path, self.d >> LANE_SHIFT, self.plan.fold_columns
        spans: list[Span] = []
        for number, block in enumerate(self.blocks):
            rectangles = path.rectangles(start)
            memory = tensor_memory(block)
            memory.check(self.d, rectangles[0][1], columns, "D of tcgen05.mma")
            if self.disabled is not None:
                enabled = [lane for fold in range(path.folds) for lane in self._enabled(number, fold)]
                rectangles = [(BLOCK * place, BLOCK) for place in sorted({lane // BLOCK for lane in enabled})]
            spans += [Span(memory, lane, lanes, self.d & COLUMN_MASK, columns) for lane, lanes in rectangles]
        return tuple(spans)

    def _enabled(self, number: int, fold: int) -> list[int]:
        lanes = self.plan.path.lanes(fold, self.d >> LANE_SHIFT)
        return lanes[~self.disabled[number][lanes]].tolist()

    def _row_span(self, block: ThreadBlock, address: int, columns: int, what: str) -> Span:
        """An operand that lies in the lanes of D's rows, once for each fold."""
        path, lane, start = self.plan.path, address >> LANE_SHIFT, self.d >> LANE_SHIFT
        path.check_start(lane, what)
        if lane != start:
            raise DescriptorFault(
                f"{what}: its lane {lane} must be that of D, {start}, for data path layout {path.name}"
            )
        return tensor_memory(block).span(address, path.extent * path.folds, columns, what)

    def _metadata_span(self, block: ThreadBlock, address: int) -> Span:
        if address & 1:
            raise DescriptorFault(
                f"sparsity metadata at tensor memory address {address:#010x}: its column must be even; the sparsity "
                "selector chooses the odd one"
            )
        selected = address + self.plan.descriptor.selector
        return self._row_span(block, selected, self.plan.metadata_columns, "sparsity metadata of tcgen05.mma")

    def run(self) -> None:
        """Reads all operands and writes D."""
        for block in self.blocks:
            _require_running(block)
        plan = self.plan
        parts = [
            load_operand(block, self.b, [step.b for step in self.steps], plan.b_shape, plan.decode_b)
            for block in self.blocks
        ]
        b = parts[0] if len(parts) == 1 else np.concatenate(parts)
        for number, block in enumerate(self.blocks):
            self._run_block(block, b, None if self.disabled is None else self.disabled[number])

    def _run_block(self, block: ThreadBlock, b: np.ndarray, disabled: np.ndarray | None) -> None:
        plan, width = self.plan, self.plan.fold_columns
        a = None
        for fold in range(plan.path.folds):
            if a is None or plan.a_in_tmem or plan.descriptor.form.sparse:
                a = self._load_a(block, fold)
            part = b[fold * width : (fold + 1) * width]
            if plan.descriptor.form.scale_vector:
                product = self._scaled_product(block, fold, a, part)
            else:
                product = a @ part.T
            self._accumulate(block, fold, product, disabled)

    # -- operands --------------------------------------------------------------------------------------------------

    def _load_a(self, block: ThreadBlock, fold: int) -> np.ndarray:
        """A of one fold in full, float32 (rows, K of all steps), with the sign of the product."""
        plan, d = self.plan, self.plan.descriptor
        if plan.a_in_tmem:
            a = self._a_from_tmem(block, fold)
        else:
            a = load_operand(block, self.a, [step.a for step in self.steps], plan.a_shape, plan.decode_a)
        if d.form.sparse:
            a = np.concatenate(
                [
                    expand(stored, self._metadata(block, fold, step), d.a)
                    for stored, step in zip(np.split(a, len(self.steps), axis=1), self.steps)
                ],
                axis=1,
            )
        return -a if d.negate_a != d.negate_b else a

    def _a_from_tmem(self, block: ThreadBlock, fold: int) -> np.ndarray:
        path = self.plan.path
        cells = [_fold_span(block, step.a, path, fold, A_COLUMNS, "A").read()[path.within] for step in self.steps]
        return self.plan.decode_a(np.ascontiguousarray(cells[0]) if len(cells) == 1 else np.concatenate(cells, axis=1))

    def _metadata(self, block: ThreadBlock, fold: int, step: Step) -> np.ndarray:
        """The 4-bit indices of each row, (rows, chunks)."""
        plan = self.plan
        selected = step.metadata + plan.descriptor.selector
        span = _fold_span(block, selected, plan.path, fold, plan.metadata_columns, "sparsity metadata")
        words = span.read()[plan.path.within]
        if plan.metadata_columns == 2:
            return nibbles_of(words)
        # 16 lanes hold 16 rows: lane r the first half of K of rows r and r + 8, lane r + 8 the second half.
        halves = np.ascontiguousarray(words).view(np.uint16).reshape(-1, 2, 8, 2)
        return nibbles_of(halves.transpose(0, 3, 2, 1).reshape(-1, 2))

    def _factors(self, block: ThreadBlock, columns: int, which: str) -> np.ndarray:
        """Scale factors as codes, uint8 (4 partitions, 32 * columns, factors per row of all steps)."""
        d = self.plan.descriptor
        first = getattr(d, which)
        parts = []
        for step in self.steps:
            address = getattr(step, which)
            cells = tensor_memory(block).span(address, LANES, columns, f"{which} factors").read()
            codes = np.ascontiguousarray(cells).view(np.uint8).reshape(-1, PARTITION, columns, _FACTOR_BYTES)
            chosen = codes[..., first : first + d.form.scale_vector]
            parts.append(chosen.transpose(0, 2, 1, 3).reshape(LANES // PARTITION, PARTITION * columns, -1))
        return np.concatenate(parts, axis=2)

    def _scaled_product(self, block: ThreadBlock, fold: int, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Every partition of 32 lanes takes the scale factors from its own lanes."""
        plan = self.plan
        d, rows = plan.descriptor, plan.path.rows
        columns_a, columns_b = plan.factor_columns
        partitions = slice(plan.path.first_lane(fold, 0) // PARTITION, plan.path.first_lane(fold + 1, 0) // PARTITION)
        codes_a = self._factors(block, columns_a, "scale_a")[partitions]
        codes_b = self._factors(block, columns_b, "scale_b")[partitions, : b.shape[0]]
        own = codes_a.reshape(-1, columns_a, PARTITION, codes_a.shape[2])[np.arange(columns_a), np.arange(columns_a)]
        scale = _scaler(d.scale_type, d.k // d.form.scale_vector, codes_a, codes_b)
        scaled_a = scale(a, own.reshape(rows, -1))
        if (codes_b == codes_b[0]).all():
            product = scaled_a @ scale(b, codes_b[0]).T
        else:
            product = np.concatenate(
                [part @ scale(b, codes).T for part, codes in zip(scaled_a.reshape(columns_a, PARTITION, -1), codes_b)]
            )
        return product.astype(np.float32, copy=False)

    # -- the accumulator -------------------------------------------------------------------------------------------

    def _accumulate(self, block: ThreadBlock, fold: int, product: np.ndarray, disabled: np.ndarray | None) -> None:
        path = self.plan.path
        span = _fold_span(block, self.d, path, fold, self.plan.fold_columns, "D")
        old = span.read()[path.within] if self.keep else None
        new = _COMBINE[self.plan.descriptor.d](product, old, self)
        if disabled is None:
            span.cells[path.within] = new
        else:
            enabled = ~disabled[path.lanes(fold, self.d >> LANE_SHIFT)]
            span.cells[np.arange(path.extent)[path.within][enabled]] = new[enabled]


def _combine_f32(product: np.ndarray, old: np.ndarray | None, mma: Mma) -> np.ndarray:
    if old is not None:
        product += old.view(np.float32) * np.float32(2.0**-mma.shift) if mma.shift else old.view(np.float32)
    return product.view(np.uint32)


def _combine_f16(product: np.ndarray, old: np.ndarray | None, mma: Mma) -> np.ndarray:
    """The upper halves of the cells belong to nobody: they get poison."""
    if old is not None:
        product += old.astype(np.uint16).view(np.float16) * np.float32(2.0**-mma.shift)
    return product.astype(np.float16).view(np.uint16) | _UPPER_POISON


def _combine_s32(product: np.ndarray, old: np.ndarray | None, mma: Mma) -> np.ndarray:
    """Wraps, unless the descriptor says saturate."""
    total = product.astype(np.int64)
    if old is not None:
        total += old.view(np.int32)
    if mma.plan.descriptor.saturate:
        np.clip(total, _S32_MIN, _S32_MAX, out=total)
    return total.astype(np.uint32)


_COMBINE = {"f32": _combine_f32, "f16": _combine_f16, "s32": _combine_s32}


def _scaler(scale_type: str, block: int, *codes: np.ndarray):
    """A function that scales (rows, K) by codes (rows, K / block), in float64 where float32 might not do."""
    low, high = _SAFE_EXPONENTS
    safe = scale_type != "ue8m0" or all(part.min() >= low and part.max() <= high for part in codes)
    values = _factor_values(scale_type).astype(np.float32 if safe else np.float64)

    def scale(matrix: np.ndarray, factors: np.ndarray) -> np.ndarray:
        blocks = matrix.reshape(*factors.shape, block)
        return (blocks * values.take(factors)[..., None]).reshape(matrix.shape)

    return scale


@cache
def _factor_values(scale_type: str) -> np.ndarray:
    """All 256 codes; ue4m3 has no sign: its top bit does not count."""
    return formats.decode(formats.FORMATS[scale_type], np.arange(256, dtype=np.uint8))


def _fold_span(block: ThreadBlock, address: int, path: DataPath, fold: int, columns: int, what: str) -> Span:
    lane = path.first_lane(fold, address >> LANE_SHIFT)
    cells = lane << LANE_SHIFT | address & COLUMN_MASK
    return tensor_memory(block).span(cells, path.extent, columns, f"tcgen05.mma {what}")


def _factor_spans(block: ThreadBlock, step: Step, plan: MmaPlan) -> list[Span]:
    spans = []
    for name, address, columns in zip("AB", (step.scale_a, step.scale_b), plan.factor_columns):
        what = f"scale factors of {name}"
        if address >> LANE_SHIFT:
            raise DescriptorFault(f"{what}: lane {address >> LANE_SHIFT} of the address must be 0")
        spans.append(tensor_memory(block).span(address, LANES, columns, what))
    return spans


def _require_running(block: ThreadBlock) -> None:
    if block.finished:
        raise Fault(
            f"CTA {block.ctaid} has exited before a tcgen05.mma on its memory has completed: wait for the mbarrier of "
            "a tcgen05.commit before the exit"
        )
