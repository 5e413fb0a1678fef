"""Tensor memory to registers and back: tcgen05.ld, .ld.red, .st and .wait (PTX ISA 9.7.16.8).

Both are asynchronous. A load reads its cells when it completes; cells that another operation in flight is going to
write, at the issue or at the completion of the load, read as poison: nothing orders the two. An instruction that needs
the loaded registers waits for them (`machine.scoreboard`). A store has its registers read when it is issued.

The ISA orders the two with nothing but their `wait`, and puts `wait::st` between a store and a load of the same thread
(9.7.16.6.4.2, "Non-pipelined instructions, same thread"). Yet a load or a store of cells that an earlier store writes
comes after it, whichever warps issue them: only the warps of one window reach a lane. CUTLASS's attention for SM100
(example 77) hands row statistics from one warp to another with an mbarrier and no `wait::st`. The tensor core, and
whoever deallocates, has no such order: for them the `wait::st` is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import numpy as np

from common.emulator.faults import TensorMemoryFault, UnsupportedInstruction
from common.emulator.hardware.tensor_fragments import MOST_REGISTERS, SHAPES, Shape, cell_map
from common.emulator.isa.async_issue import Issuer, constant_operand
from common.emulator.isa.binder import Binder, Modifiers
from common.emulator.isa.fragments import Selection, set_words, vector_items, whole_warps, words_of
from common.emulator.isa.load_store import bind_address
from common.emulator.isa.registry import Control, Decoded, collective
from common.emulator.isa.tcgen05 import tcgen05_operation
from common.emulator.machine.events import Operation
from common.emulator.machine.mask import WARP, Mask
from common.emulator.machine.scoreboard import Load, Scoreboard, destinations
from common.emulator.machine.tensor_memory import (
    BLOCK,
    COLUMN_MASK,
    COLUMNS,
    LANE_SHIFT,
    LANES,
    POISON_CELL,
    Span,
    TensorMemory,
    tensor_memory,
)
from common.emulator.machine.tensor_pipeline import issue_writing
from common.emulator.numerics.minmax import maximum, minimum
from common.emulator.ptx.module import Instruction, Operand

if TYPE_CHECKING:
    from common.emulator.machine.thread_block import Path, ThreadBlock

COUNTS = tuple(f"x{1 << power}" for power in range(8))
WINDOW = 32  # lanes that a warp can reach
_UPPER_HALF = np.uint32(LANES << LANE_SHIFT)
_LOW_HALF = np.uint32(0xFFFF)


@dataclass(frozen=True)
class Cells:
    """Where the registers of some warps lie in tensor memory.

    `index` are positions in the flat memory, intp (parts, registers, warps, 32); with packing there are two parts, the
    cells of the lower and of the upper halves. `rectangles` are (first lane, first column), of `lanes` by `columns`
    cells each.
    """

    index: np.ndarray
    rectangles: tuple[tuple[int, int], ...]
    lanes: int
    columns: int

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first columns that occur."""
        return tuple({column for _, column in self.rectangles})

    @cached_property
    def mark_index(self) -> np.ndarray:
        """For every cell the position of its mark in `storing` and `computing`."""
        return self.index // (BLOCK * COLUMNS) * COLUMNS + self.index % COLUMNS

    def spans(self, memory: TensorMemory) -> list[Span]:
        return [Span(memory, lane, self.lanes, column, self.columns) for lane, column in self.rectangles]

    def require_allocated(self, memory: TensorMemory, what: str) -> None:
        """Raises TensorMemoryFault when the CTA no longer has the cells."""
        if not all(memory.owned[start : start + self.columns].all() for start in self.starts):
            for span in self.spans(memory):
                span.require_allocated(what)

    def overlaps(self, other: Cells) -> bool:
        """Whether some rectangle of the one shares cells with one of the other."""
        return any(
            -self.lanes < lane - first < other.lanes and -self.columns < column - start < other.columns
            for lane, column in self.rectangles
            for first, start in other.rectangles
        )

    def marked(self, *counts: np.ndarray) -> np.ndarray | None:
        """Which cells have a mark in one of `storing` and `computing`: bool like `index`; None when there are none."""
        for start in self.starts:
            columns = slice(start, start + self.columns)
            if any(marks[:, columns].any() for marks in counts):
                return np.logical_or.reduce([marks.reshape(-1)[self.mark_index] != 0 for marks in counts])
        return None

    def read(self, memory: TensorMemory, unknown: list[np.ndarray]) -> np.ndarray:
        """Registers (registers, warps, 32); the cells of the masks `unknown` read as poison."""
        parts = memory.data.reshape(-1)[self.index]
        for mask in unknown:
            parts[mask] = POISON_CELL
        return parts[0] if len(parts) == 1 else parts[0] & _LOW_HALF | parts[1] << np.uint32(16)

    def write(self, memory: TensorMemory, registers: np.ndarray) -> None:
        """The inverse. No document says what unpacking does to the upper halves of cells: here they become zero."""
        cells = memory.data.reshape(-1)
        if len(self.index) == 1:
            cells[self.index[0]] = registers
        else:
            cells[self.index[0]] = registers & _LOW_HALF
            cells[self.index[1]] = registers >> np.uint32(16)


@dataclass(eq=False)
class Store(Load):
    """A tcgen05.st in flight: `cells` are what it writes."""

    cells: Cells


class Stores(Scoreboard):
    """The tcgen05.st of a CTA that are in flight."""

    _loads: list[Store]

    def before(self, cells: Cells) -> tuple[Operation, ...]:
        """The stores that a transfer of `cells` comes after."""
        self._forget_finished()
        return tuple(store.operation for store in self._loads if store.cells.overlaps(cells))


@dataclass(frozen=True, eq=False)
class Transfer:
    """What a load and a store have in common. `split` is immHalfSplitoff, in columns."""

    name: str
    shape: Shape
    count: int
    halves: bool  # pack::16b or unpack::16b
    address: int | None
    offset: int
    split: int

    @property
    def columns(self) -> int:
        return self.shape.columns(self.count) * (2 if self.halves else 1)

    def cells(self, f: list, m: Mask, memory: TensorMemory) -> Cells:
        """What the warps of the mask access. Raises TensorMemoryFault."""
        if self.address is None:
            first = np.full(m.warps.size, self.offset, np.uint32)
        else:
            addresses = f[self.address].reshape(-1, WARP)[m.warps]
            first = addresses[:, 0] + np.uint32(self.offset & 0xFFFF_FFFF)
            if (addresses != addresses[:, :1]).any():
                raise TensorMemoryFault(
                    f"the threads of a warp give different values for the address of {self.name}", lanes=m.numbers
                )
        if memory.is_upper_half:
            first = first & ~_UPPER_HALF
        cells = _cells(self, first.tobytes(), m.visitors.warps)
        if not all(memory.owned[start : start + cells.columns].all() for start in cells.starts):
            self._refuse(m, memory, cells)
        return cells

    def _refuse(self, m: Mask, memory: TensorMemory, cells: Cells) -> None:
        try:
            for lane, column in cells.rectangles:
                memory.check(lane << LANE_SHIFT | column, cells.lanes, cells.columns, self.name)
        except TensorMemoryFault as fault:
            fault.lanes = tuple(m.numbers.tolist())
            raise


@lru_cache(maxsize=256)
def _cells(transfer: Transfer, addresses: bytes, warps: bytes) -> Cells:
    shape = transfer.shape
    rectangles = [
        _place(transfer, address, warp)
        for address, warp in zip(
            np.frombuffer(addresses, np.uint32).tolist(), np.flatnonzero(np.frombuffer(warps, bool))
        )
    ]
    half, lane, column = cell_map(shape, transfer.count)
    parts = 2 if transfer.halves else 1
    columns = column * parts + half * transfer.split
    index = np.array(
        [[(first + lane) * COLUMNS + start + columns + part for first, start in rectangles] for part in range(parts)]
    )
    places = tuple((first, start + transfer.split * n) for first, start in rectangles for n in range(shape.halves))
    if any(not 0 <= start <= COLUMNS - transfer.columns for _, start in places):
        raise TensorMemoryFault(f"{transfer.name} of columns beyond {COLUMNS - 1}: there are {COLUMNS} columns")
    return Cells(np.ascontiguousarray(index.swapaxes(1, 2)), places, shape.lanes, transfer.columns)


def _place(transfer: Transfer, address: int, warp: int) -> tuple[int, int]:
    """(first lane, first column). Programs give the lane with the warp's window, or without it."""
    window, lanes = warp % 4 * WINDOW, transfer.shape.lanes
    lane = address >> LANE_SHIFT
    within = lane if lane < WINDOW else lane - window
    if within in (0, WINDOW - lanes):
        return window + within, address & COLUMN_MASK
    reach = f"lanes {window}-{window + WINDOW - 1}"
    raise TensorMemoryFault(
        f"{transfer.name} of {lanes} lanes at {address:#010x} (lane {lane}): warp {warp} reaches {reach}"
        + (f", from lane {window} or {window + WINDOW - lanes} on" if lanes < WINDOW else ""),
        lanes=range(warp * WARP, (warp + 1) * WARP),
        address=address,
    )


def _bind(inst: Instruction, b: Binder, mods: Modifiers, address: Operand, rest: tuple[Operand, ...]) -> Transfer:
    """Takes shape, number and packing; `rest` is what follows the address and is no register."""
    name = f"tcgen05.{inst.modifiers[0]}"
    mods.one_of("sync")
    mods.one_of("aligned")
    shape = SHAPES[mods.one_of(*SHAPES)]
    count = int(mods.one_of(*COUNTS)[1:])
    halves = mods.take("pack::16b" if inst.modifiers[0] == "ld" else "unpack::16b")
    if shape.registers(count) > MOST_REGISTERS:
        raise UnsupportedInstruction(f"`{mods.opcode}`: {shape.registers(count)} registers are more than 128")
    if len(rest) != shape.halves - 1:
        raise UnsupportedInstruction(f"`{mods.opcode}`: immHalfSplitoff belongs to .16x32bx2, and is needed there")
    split = constant_operand(rest[0]) if rest else 0
    _, base, offset = bind_address(b, address, "shared")
    if base is not None:
        base = b.read(address.base, "u32")
    return Transfer(name, shape, count, halves, base, offset, split)


def _check_vector(inst: Instruction, operand: Operand, transfer: Transfer) -> tuple[Operand, ...]:
    items = vector_items(operand)
    if len(items) != transfer.shape.registers(transfer.count):
        raise UnsupportedInstruction(
            f"{transfer.name} with {len(items)} registers: this form has {transfer.shape.registers(transfer.count)}"
        )
    return items


@tcgen05_operation("ld")
def decode_load(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    mods.take("ld")
    reducing = mods.take("red")
    target, *rest = inst.operands
    result = rest.pop(0) if reducing else None
    transfer = _bind(inst, b, mods, rest[0], tuple(rest[1:]))
    reduce = _take_reduction(b, mods, transfer) if reducing else None
    if not reducing:
        mods.one_of("b32")
    mods.done()
    items = (*_check_vector(inst, target, transfer), *((result,) if reducing else ()))
    slots = tuple(b.write(item, "u32") for item in items)
    registers = destinations(inst)
    issuer = Issuer(inst)

    def load(f, m, cta) -> None:
        rows = whole_warps(m)
        memory = tensor_memory(cta)
        cells = transfer.cells(f, m, memory)
        computing = cells.marked(memory.computing)

        def complete() -> None:
            if cta.finished:  # its registers are gone, and nobody has read them
                return
            cells.require_allocated(memory, transfer.name)
            now = cells.marked(memory.storing, memory.computing)
            unknown = [mask for mask in (computing, now) if mask is not None]
            values = cells.read(memory, unknown)
            if reduce is not None:
                values = np.concatenate((values, reduce(values)[None]))
            _set_registers(cta, slots, rows, values)

        after = cta.unit(Stores).before(cells)
        operation = issuer(cta, m, transfer.name, [complete], after=after)
        if not operation.finished:
            cta.unit(Scoreboard).add(Load(operation, m.lanes, registers))
        cta.machine.counters.bytes["TMEM load"] += 4 * cells.index.size

    return collective(load)


def _set_registers(cta: ThreadBlock, slots: tuple[int, ...], rows: Selection, values: np.ndarray) -> None:
    """Writes (registers, warps, 32), in one go where the registers are neighbours in the frame."""
    together = cta.slot.neighbours(slots)
    if together is not None:
        together.reshape(len(slots), -1, WARP)[:, rows] = values
        return
    for slot, words in zip(slots, values):
        set_words(cta.frame, slot, rows, words)


def _get_registers(cta: ThreadBlock, slots: tuple[int, ...], rows: Selection) -> np.ndarray:
    """A copy (registers, warps, 32)."""
    together = cta.slot.neighbours(slots)
    if together is not None:
        return together.reshape(len(slots), -1, WARP)[:, rows].copy()
    return np.stack([words_of(cta.frame, slot, rows) for slot in slots])


def _take_reduction(b: Binder, mods: Modifiers, transfer: Transfer) -> Callable[[np.ndarray], np.ndarray]:
    """`.redOp{.abs}{.NaN}.type`: (registers, warps, 32) to (warps, 32), over what each thread loads."""
    if b.module.target.startswith("sm_100"):
        raise UnsupportedInstruction(f"`{mods.opcode}`: .red does not exist on {b.module.target}, but on sm_103a")
    choose = {"min": minimum, "max": maximum}[mods.one_of("min", "max")]
    absolute, keep_nan = mods.take("abs"), mods.take("NaN")
    kind = mods.one_of("u32", "s32", "f32")
    if transfer.halves or transfer.count < 2 or transfer.shape not in (SHAPES["32x32b"], SHAPES["16x32bx2"]):
        raise UnsupportedInstruction(f"`{mods.opcode}`: .red needs .32x32b or .16x32bx2, .x2 or more, and no packing")
    if kind != "f32":
        if absolute or keep_nan:
            raise UnsupportedInstruction(f"`{mods.opcode}`: .abs and .NaN belong to .f32")
        extreme = np.minimum if choose is minimum else np.maximum
        dtype = np.uint32 if kind == "u32" else np.int32
        return lambda values: extreme.reduce(values.view(dtype), axis=0).view(np.uint32)

    def reduce(values: np.ndarray) -> np.ndarray:
        floats = values.view(np.float32)
        result = floats[0]
        for other in floats[1:]:
            result = choose(result, other, propagate_nan=keep_nan, absolute=absolute)
        return np.ascontiguousarray(result).view(np.uint32)

    return reduce


@tcgen05_operation("st")
def decode_store(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    mods.take("st")
    address, *rest, source = inst.operands
    transfer = _bind(inst, b, mods, address, tuple(rest))
    mods.one_of("b32")
    mods.done()
    slots = tuple(b.read(item, "u32") for item in _check_vector(inst, source, transfer))
    issuer = Issuer(inst)

    def store(f, m, cta) -> None:
        rows = whole_warps(m)
        memory = tensor_memory(cta)
        cells = transfer.cells(f, m, memory)
        values = _get_registers(cta, slots, rows)
        steps = [lambda: cells.write(memory, values)]
        stores = cta.unit(Stores)
        after = stores.before(cells)
        operation = issue_writing(issuer, cta, m, transfer.name, steps, cells.spans(memory), "storing", after=after)
        if not operation.finished:
            stores.add(Store(operation, m.lanes, frozenset(), cells))
        cta.machine.counters.bytes["TMEM store"] += 4 * cells.index.size

    return collective(store)


class WaitTransfers(Control):
    """`wait::ld` or `wait::st`: the warps with transfers in flight wait for these, the other warps go on."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.board = Scoreboard if kind == "ld" else Stores

    def run(self, cta: ThreadBlock, path: Path) -> None:
        if not cta.whole_warps(path):
            return
        board = cta.unit(self.board)
        lanes = path.mask.lanes
        if not board.pending(lanes):
            cta.advance(path)
            return
        waiting = board.waiting(lanes)
        stay, go = path.mask.split_by(np.repeat(waiting.reshape(-1, WARP).any(axis=1), WARP))
        if go is not None:
            cta.fork(path, go, path.segment.next)
        path.mask = stay
        operations = board.pending(stay.lanes)
        cta.block(
            path,
            reason=lambda: f"for {sum(not o.finished for o in operations)} tcgen05.{self.kind} to complete",
            ready=lambda: all(o.finished for o in operations),
        )


@tcgen05_operation("wait::ld", "wait::st")
def decode_wait(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    kind = mods.one_of("wait::ld", "wait::st").removeprefix("wait::")
    mods.one_of("sync")
    mods.one_of("aligned")
    mods.done()
    return WaitTransfers(kind)
