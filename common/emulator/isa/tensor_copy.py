"""Copies through tensor maps: `cp.async.bulk.tensor`, `cp.reduce.async.bulk.tensor`, the prefetch (PTX ISA 9.7.9.27.1).

The tensor map is read when the instruction is issued, so a map changed later does not change the copy. What a mode
moves is in `hardware/tile_copy.py` and `hardware/row_copy.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from common.emulator.faults import DescriptorFault, InvalidAddress, Misaligned, OutOfBounds, UnsupportedInstruction
from common.emulator.hardware.row_copy import ColumnCopy, GatherCopy, WideColumnCopy
from common.emulator.hardware.shared_rows import SharedRows
from common.emulator.hardware.tensor_map import MAX_BOX_BYTES, Mode
from common.emulator.hardware.tile_copy import TileCopy
from common.emulator.isa.async_issue import (
    BARRIER_BYTES,
    COMPLETION,
    Issuer,
    SharedSpan,
    bind_options,
    bind_pointer,
    issue_store,
    masked_blocks,
    per_lane,
    poisons,
    require_receiver,
    shared_span,
    signal,
    take_cache_hint,
)
from common.emulator.isa.binder import Binder, Modifiers
from common.emulator.isa.registry import Decoded
from common.emulator.isa.tensormap import FAULTS, read_map
from common.emulator.machine.memory import POISON, GlobalMemory, Region, refuse_write
from common.emulator.ptx.module import Address, Instruction, Operand, Vector

if TYPE_CHECKING:
    from common.emulator.machine.thread_block import ThreadBlock

TILE_ALIGNMENT = 128
SWIZZLE_PERIOD = 1024  # swizzles repeat at multiples of this shared memory address
DIMENSIONS = ("1d", "2d", "3d", "4d", "5d")
REDUCTIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")

_POISON_ROWS = np.full(MAX_BOX_BYTES, POISON, np.uint8)
_NOWHERE = Region("no allocation", 0, np.zeros(0, np.uint8))  # of a copy that lies outside its tensor


@dataclass(frozen=True)
class LoadMode:
    """What `.load_mode` says: the kind of copy, whether a load has im2col operands, of which map.

    `rows` coordinates come after the first, instead of one per dimension. `wide` is the mode whose copies depend on
    the first im2col operand, wHalo.
    """

    copy: type[SharedRows]
    rows: int | None = None
    offsets: bool = False
    wide: Mode | None = None


_TILE = {"tile": LoadMode(TileCopy)}
LOAD_MODES = _TILE | {
    "tile::gather4": LoadMode(GatherCopy, rows=4),
    "im2col": LoadMode(ColumnCopy, offsets=True),
    "im2col::w": LoadMode(WideColumnCopy, offsets=True, wide=Mode.IM2COL_W),
    "im2col::w::128": LoadMode(WideColumnCopy, offsets=True, wide=Mode.IM2COL_W128),
}
REDUCTION_MODES = _TILE | {"im2col_no_offs": LoadMode(ColumnCopy)}
STORE_MODES = REDUCTION_MODES | {"tile::scatter4": LoadMode(GatherCopy, rows=4)}


class Movement(NamedTuple):
    """A copy between a place of a tensor in global memory and shared memory."""

    copy: SharedRows
    place: list[int]
    region: Region
    direction: str = ""
    span: SharedSpan | None = None

    def __str__(self) -> str:
        return f"{self.copy} at {self.place} of {self.region.name} {self.direction} {self.span}"

    def load(self, target: SharedSpan) -> None:
        with FAULTS:
            self.copy.load(*self._tensor, target.block.shared.data, target.offset)

    def store(self, data: np.ndarray, address: int, op: str | None = None) -> None:
        """`data`: bytes of shared memory, with the rows at `address`. `op`: of a reduction."""
        with FAULTS:
            if op is None:
                self.copy.store(*self._tensor, data, address)
            else:
                self.copy.reduce(*self._tensor, data, address, op)

    @property
    def _tensor(self) -> tuple[list[int], np.ndarray, int]:
        return self.place, self.region.data, self.region.base


TensorReader = Callable[[list, int, "ThreadBlock"], Movement]


@dataclass(frozen=True)
class Form:
    """What all tensor instructions share: `.Nd` and the load mode."""

    dimensions: int
    mode: LoadMode

    @property
    def coordinates(self) -> int:
        return self.dimensions if self.mode.rows is None else 1 + self.mode.rows

    @property
    def offsets(self) -> int:
        """Values of the operand `im2colInfo`."""
        if not self.mode.offsets:
            return 0
        return 2 if self.mode.wide else self.dimensions - 2


def _take_form(mods: Modifiers, modes: dict[str, LoadMode]) -> Form:
    mods.one_of("async")
    mods.one_of("bulk")
    mods.one_of("tensor")
    dimensions = int(mods.one_of(*DIMENSIONS)[0])
    mode = modes[mods.one_of(*modes, default="tile")]
    if mode.rows is not None and dimensions != 2:
        raise UnsupportedInstruction(f"gather4 and scatter4 are .2d, not .{dimensions}d")
    if issubclass(mode.copy, (ColumnCopy, WideColumnCopy)) and dimensions < 3:
        raise UnsupportedInstruction(f"im2col needs .3d or more, not .{dimensions}d")
    return Form(dimensions, mode)


def _vector(b: Binder, operand: Operand, count: int, kind: str) -> list[int]:
    """Slots of `{a, b, ...}`."""
    if not isinstance(operand, Vector) or len(operand.items) != count:
        raise UnsupportedInstruction(f"{operand} is no vector of {count} values, which this form needs")
    return [b.read(item, kind) for item in operand.items]


def _bind_tensor(b: Binder, operand: Operand, form: Form, info: Operand | None = None) -> TensorReader:
    """A reader of `[tensorMap, {c0, c1, ...}]` and `im2colInfo`."""
    if not isinstance(operand, Address) or len(operand.items) != 1:
        raise UnsupportedInstruction(f"{operand} is no tensor operand: it needs the form [map, {{coordinates}}]")
    pointer = bind_pointer(b, Address(operand.base, operand.offset), "generic")
    slots = _vector(b, operand.items[0], form.coordinates, "s32")
    details: list[int] = []
    if info is not None:
        offsets = _vector(b, info, form.offsets, "u16")
        details = offsets[: form.mode.wide is not None]
        slots += offsets[len(details) :]
    kind, wide = form.mode.copy, form.mode.wide

    def tensor(f: list, lane: int, cta: ThreadBlock) -> Movement:
        descriptor = read_map(cta, pointer(f, lane), lane)
        if descriptor.rank != form.dimensions:
            raise DescriptorFault(
                f"a .{form.dimensions}d copy through a tensor map of rank {descriptor.rank}", lanes=[lane]
            )
        place = [int(f[slot][lane]) for slot in slots]
        with FAULTS:
            if wide is not None:
                descriptor.require(wide)
            copy = descriptor.plan(kind, *(int(f[slot][lane]) for slot in details))
            copy.check(place)
        region = _region_of(cta.machine.memory, copy, place, lane)
        return Movement(copy, place, region)

    return tensor


def _region_of(memory: GlobalMemory, copy: SharedRows, place: list[int], lane: int) -> Region:
    """The allocation of what the copy touches. A tensor may start before it, if no copy touches its first elements."""
    start = copy.descriptor.global_address
    region = memory.region_at(start)
    if region is not None:
        return region
    with FAULTS:
        touched = copy.first_touched(place)
    if touched is None:
        return _NOWHERE
    region = memory.region_at(touched)
    if region is None:
        raise OutOfBounds(
            f"the tensor map's global address {start:#x} lies in no allocation, nor does {touched:#x}, the first that "
            "the copy touches",
            lanes=[lane], address=touched,
        )  # fmt: skip
    return region


def decode_tensor_copy(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    spaces = ("global", "shared::cta", "shared::cluster")
    target, source = mods.one_of(*spaces), mods.one_of(*spaces)
    if source == "global" and target != "global":
        return _decode_load(inst, b, mods, target)
    if (target, source) == ("global", "shared::cta"):
        return _decode_store(inst, b, mods, _take_form(mods, STORE_MODES), None)
    raise UnsupportedInstruction(f"cp.async.bulk.tensor from .{source} to .{target} does not exist")


def _decode_load(inst: Instruction, b: Binder, mods: Modifiers, space: str) -> Decoded:
    """global -> shared::cta or shared::cluster."""
    form = _take_form(mods, LOAD_MODES)
    mods.one_of(COMPLETION)
    paired = mods.one_of("cta_group::1", "cta_group::2", default="cta_group::1") == "cta_group::2"
    multicast = "u16" if space == "shared::cluster" and mods.take("multicast::cluster") else None
    policy = take_cache_hint(mods)
    mods.done()
    into, source, signalled, *more = inst.operands
    info, more = _split_info(form, more)
    pointer, read_tensor = bind_pointer(b, into, space), _bind_tensor(b, source, form, info)
    barrier_pointer = bind_pointer(b, signalled, "shared::cluster")
    mask, _ = bind_options(b, more, multicast, policy)
    issuer = Issuer(inst)
    own = space == "shared::cta"

    def load(f, lane, cta) -> None:
        tensor = read_tensor(f, lane, cta)
        target = _rows_span(cta, pointer(f, lane), tensor.copy, lane, own=own)
        own_barrier = own and not paired
        barrier = shared_span(cta, barrier_pointer(f, lane), BARRIER_BYTES, BARRIER_BYTES, lane, own=own_barrier)
        _check_barrier(barrier, target, paired, lane)
        blocks = [target.block] if mask is None else masked_blocks(cta, int(f[mask][lane]), lane)
        size = tensor.copy.transaction_bytes
        steps = []
        for block in blocks:
            steps.append(_delivery(tensor, target.in_block(block), _signalled(barrier, block, paired), size))
            if poisons(cta):
                tensor.copy.poison(POISON, block.shared.data, target.offset)
        issuer(cta, lane, "TMA load", steps, tensor._replace(direction="to", span=target))
        cta.machine.counters.bytes["TMA load"] += size * len(blocks)

    return per_lane(load)


def _split_info(form: Form, operands: Sequence[Operand]) -> tuple[Operand | None, Sequence[Operand]]:
    """`im2colInfo`, where the form has it, and the operands after it."""
    if not form.mode.offsets:
        return None, operands
    if not operands:
        raise UnsupportedInstruction("the operand with the im2col offsets is missing")
    return operands[0], operands[1:]


def _rows_span(cta: ThreadBlock, address: int, copy: SharedRows, lane: int, *, own: bool) -> SharedSpan:
    if address % TILE_ALIGNMENT:
        raise Misaligned(
            f"shared address {address:#x} of a tensor copy must be a multiple of {TILE_ALIGNMENT}",
            lanes=[lane], address=address,
        )  # fmt: skip
    return shared_span(cta, address, copy.shared_bytes, TILE_ALIGNMENT, lane, own=own)


def _check_barrier(barrier: SharedSpan, target: SharedSpan, paired: bool, lane: int) -> None:
    """The mbarrier's CTA: the destination's, or with `.cta_group::2` either CTA of its pair."""
    same = barrier.block.rank >> paired == target.block.rank >> paired
    if not same:
        where = "the pair of CTAs it writes to" if paired else "the CTA it writes to (without .cta_group::2)"
        raise InvalidAddress(
            f"the mbarrier of a tensor copy must be in {where}: it is in CTA rank {barrier.block.rank}, the "
            f"destination in rank {target.block.rank}",
            lanes=[lane],
        )


def _signalled(barrier: SharedSpan, block: ThreadBlock, paired: bool) -> SharedSpan:
    """The mbarrier that a delivery to `block` signals.

    Its own, or with `.cta_group::2` that of the CTA in its pair whose rank has the parity of the operand's CTA.
    """
    if not paired:
        return barrier.in_block(block)
    return barrier.in_block(block.peer(block.rank & ~1 | barrier.block.rank & 1))


def _delivery(tensor: Movement, target: SharedSpan, barrier: SharedSpan, size: int) -> Callable[[], None]:
    """Writes the rows, then signals."""

    def deliver() -> None:
        require_receiver(target.block, "a tensor copy")
        tensor.load(target)
        target.overwritten(tensor.copy.shared_bytes)
        signal(barrier, size)

    return deliver


def _decode_store(inst: Instruction, b: Binder, mods: Modifiers, form: Form, op: str | None) -> Decoded:
    """shared::cta -> global: a copy, or the reduction `op`."""
    mods.one_of("bulk_group")
    policy = take_cache_hint(mods)
    mods.done()
    into, source, *more = inst.operands
    read_tensor, pointer = _bind_tensor(b, into, form), bind_pointer(b, source, "shared::cta")
    bind_options(b, more, policy)
    issuer = Issuer(inst)
    what = "TMA store" if op is None else "TMA reduction"

    def store(f, lane, cta) -> None:
        tensor = read_tensor(f, lane, cta)
        source = _rows_span(cta, pointer(f, lane), tensor.copy, lane, own=True)
        if tensor.region.read_only:
            refuse_write(tensor.region, np.array([lane]), tensor.copy.descriptor.global_address)
        source.require_fence(tensor.copy.shared_bytes, f"the {what}")
        if op is None and poisons(cta):
            tensor.store(_POISON_ROWS, 0)

        def write(data: np.ndarray) -> None:
            tensor.store(data, source.offset % SWIZZLE_PERIOD, op)

        detail = tensor._replace(direction="from", span=source)
        issue_store(issuer, cta, lane, what, _reader(cta, tensor, source), write, detail)
        cta.machine.counters.bytes[what] += tensor.copy.transaction_bytes

    return per_lane(store)


def _reader(cta: ThreadBlock, tensor: Movement, source: SharedSpan) -> Callable[[], np.ndarray]:
    """Reads rows from shared memory, from the last multiple of the swizzle period on."""

    def read() -> np.ndarray:
        start = source.offset - source.offset % SWIZZLE_PERIOD
        return cta.shared.data[start : source.offset + tensor.copy.shared_bytes].copy()

    return read


def decode_tensor_reduction(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    mods.one_of("reduce")
    form = _take_form(mods, REDUCTION_MODES)
    for name in ("global", "shared::cta"):
        mods.one_of(name)
    return _decode_store(inst, b, mods, form, mods.one_of(*REDUCTIONS))


def decode_tensor_prefetch(inst: Instruction, b: Binder) -> Decoded:
    """A hint: it moves nothing, but its tensor map and coordinates are checked."""
    mods = b.modifiers(inst)
    mods.one_of("prefetch")
    form = _take_form(mods, LOAD_MODES)
    for name in ("L2", "global"):
        mods.one_of(name)
    policy = take_cache_hint(mods)
    mods.done()
    source, *more = inst.operands
    info, more = _split_info(form, more)
    read_tensor = _bind_tensor(b, source, form, info)
    bind_options(b, more, policy)

    def prefetch(f, lane, cta) -> None:
        cta.machine.counters.bytes["L2 prefetch"] += read_tensor(f, lane, cta).copy.transaction_bytes

    return per_lane(prefetch)
