"""Copies of tensor tiles: `cp.async.bulk.tensor`, `cp.reduce.async.bulk.tensor`, the prefetch (PTX ISA 9.7.9.27.1).

The tensor map is read from memory when the instruction is issued, so a map changed later does not change the copy.
Only the tile mode is implemented.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from common.emulator.faults import (
    DescriptorFault,
    InvalidAddress,
    Misaligned,
    OutOfBounds,
    UnsupportedInstruction,
)
from common.emulator.hardware.tensor_map import (
    DESCRIPTOR_BYTES,
    MAX_BOX_BYTES,
    TensorMapAccessError,
    TensorMapDescriptor,
    TensorMapError,
    load_tile,
    reduce_tile,
    store_tile,
)
from common.emulator.isa.async_issue import (
    BARRIER_BYTES,
    COMPLETION,
    WAIT_READ,
    Issuer,
    SharedSpan,
    bind_options,
    bind_pointer,
    global_span,
    issue_store,
    masked_blocks,
    per_lane,
    poisons,
    require_receiver,
    require_source,
    shared_span,
    signal,
    take_cache_hint,
)
from common.emulator.isa.binder import Binder, Modifiers
from common.emulator.isa.registry import Decoded
from common.emulator.machine.memory import POISON, Region, refuse_write
from common.emulator.ptx.module import Address, Instruction, Operand, Vector

if TYPE_CHECKING:
    from common.emulator.machine.thread_block import ThreadBlock

MAP_ALIGNMENT = 64
TILE_ALIGNMENT = 128
SWIZZLE_PERIOD = 1024  # swizzles repeat at multiples of this shared memory address
DIMENSIONS = ("1d", "2d", "3d", "4d", "5d")
OTHER_MODES = ("tile::gather4", "tile::scatter4", "im2col", "im2col::w", "im2col::w::128", "im2col_no_offs")
REDUCTIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")

_POISON_BOX = np.full(MAX_BOX_BYTES, POISON, np.uint8)


class Tile(NamedTuple):
    """A box of a tensor in global memory."""

    map: TensorMapDescriptor
    coordinates: list[int]
    region: Region

    def __str__(self) -> str:
        box = "x".join(str(extent) for extent in self.map.box[: self.map.rank])
        return f"tile {box} at {self.coordinates} of {self.region.name}"


class Movement(NamedTuple):
    """Between which places an operation moves data."""

    tile: Tile
    direction: str
    span: SharedSpan

    def __str__(self) -> str:
        return f"{self.tile} {self.direction} {self.span}"


TileReader = Callable[[list, int, "ThreadBlock"], Tile]


class _Faults:
    """A context in which what the tensor map module refuses becomes a fault of the program."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, TensorMapAccessError):
            raise OutOfBounds(str(error), address=error.address) from None
        if isinstance(error, TensorMapError):
            raise DescriptorFault(str(error)) from None


_FAULTS = _Faults()


def _take_common(mods: Modifiers) -> int:
    """Consumes what all tensor instructions share; the number of dimensions."""
    mods.one_of("async")
    mods.one_of("bulk")
    mods.one_of("tensor")
    dimensions = int(mods.one_of(*DIMENSIONS)[0])
    mode = mods.optional("tile", *OTHER_MODES)
    if mode in OTHER_MODES:
        raise UnsupportedInstruction(f"tensor copies in mode .{mode} are not supported: only .tile is")
    return dimensions


def _bind_tile(b: Binder, operand: Operand, dimensions: int) -> TileReader:
    """A reader of `[tensorMap, {c0, c1, ...}]`."""
    if not isinstance(operand, Address) or len(operand.items) != 1 or not isinstance(operand.items[0], Vector):
        raise UnsupportedInstruction(f"{operand} is no tensor operand: it needs the form [map, {{coordinates}}]")
    coordinates = operand.items[0].items
    if len(coordinates) != dimensions:
        raise UnsupportedInstruction(f".{dimensions}d needs {dimensions} coordinates, not {len(coordinates)}")
    pointer = bind_pointer(b, Address(operand.base, operand.offset), "generic")
    slots = [b.read(coordinate, "s32") for coordinate in coordinates]

    def tile(f: list, lane: int, cta: ThreadBlock) -> Tile:
        descriptor = _read_map(cta, pointer(f, lane), lane)
        region = cta.machine.memory.region_at(descriptor.global_address)
        if region is None:
            raise OutOfBounds(
                f"the tensor map's global address {descriptor.global_address:#x} lies in no allocation",
                lanes=[lane], address=descriptor.global_address,
            )  # fmt: skip
        where = [int(f[slot][lane]) for slot in slots]
        with _FAULTS:
            descriptor.plan.first_unit(where)
        return Tile(descriptor, where, region)

    return tile


def _read_map(cta: ThreadBlock, address: int, lane: int) -> TensorMapDescriptor:
    """The tensor map at a generic address. Raises DescriptorFault for anything else there."""
    if address % MAP_ALIGNMENT:
        raise DescriptorFault(f"a tensor map must be {MAP_ALIGNMENT}-byte aligned, not at {address:#x}", lanes=[lane])
    if cta.machine.memory.region_at(address) is None:
        raise DescriptorFault(
            f"no tensor map at {address:#x}: it must be in .param, .const or .global memory",
            lanes=[lane],
            address=address,
        )
    span = global_span(cta, address, DESCRIPTOR_BYTES, MAP_ALIGNMENT, lane, writes=False)
    with _FAULTS:
        return TensorMapDescriptor.from_bytes(span.bytes(DESCRIPTOR_BYTES).tobytes())


def decode_tensor_copy(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    dimensions = _take_common(mods)
    spaces = ("global", "shared::cta", "shared::cluster")
    target, source = mods.one_of(*spaces), mods.one_of(*spaces)
    if source == "global" and target != "global":
        return _decode_load(inst, b, mods, dimensions, target)
    if (target, source) == ("global", "shared::cta"):
        return _decode_store(inst, b, mods, dimensions)
    raise UnsupportedInstruction(f"cp.async.bulk.tensor from .{source} to .{target} does not exist")


def _decode_load(inst: Instruction, b: Binder, mods: Modifiers, dimensions: int, space: str) -> Decoded:
    """global -> shared::cta or shared::cluster."""
    mods.one_of(COMPLETION)
    paired = mods.one_of("cta_group::1", "cta_group::2", default="cta_group::1") == "cta_group::2"
    multicast = "u16" if space == "shared::cluster" and mods.take("multicast::cluster") else None
    policy = take_cache_hint(mods)
    mods.done()
    into, source, signalled = inst.operands[:3]
    pointer, read_tile = bind_pointer(b, into, space), _bind_tile(b, source, dimensions)
    barrier_pointer = bind_pointer(b, signalled, "shared::cluster")
    mask, _ = bind_options(b, inst.operands[3:], multicast, policy)
    issuer = Issuer(inst)
    own = space == "shared::cta"

    def load(f, lane, cta) -> None:
        tile = read_tile(f, lane, cta)
        target = _tile_span(cta, pointer(f, lane), tile, lane, own=own)
        own_barrier = own and not paired
        barrier = shared_span(cta, barrier_pointer(f, lane), BARRIER_BYTES, BARRIER_BYTES, lane, own=own_barrier)
        _check_barrier(barrier, target, paired, lane)
        blocks = [target.block] if mask is None else masked_blocks(cta, int(f[mask][lane]), lane)
        size = tile.map.plan.transaction_bytes
        steps = []
        for block in blocks:
            steps.append(_delivery(tile, target.in_block(block), _signalled(barrier, block, paired), size))
            if poisons(cta):
                _poison_shared(tile.map, target.in_block(block))
        issuer(cta, lane, "TMA load", steps, Movement(tile, "to", target))
        cta.machine.counters.bytes["TMA load"] += size * len(blocks)

    return per_lane(load)


def _tile_span(cta: ThreadBlock, address: int, tile: Tile, lane: int, *, own: bool) -> SharedSpan:
    if address % TILE_ALIGNMENT:
        raise Misaligned(
            f"shared address {address:#x} of a tensor copy must be a multiple of {TILE_ALIGNMENT}",
            lanes=[lane], address=address,
        )  # fmt: skip
    return shared_span(cta, address, tile.map.plan.shared_bytes, TILE_ALIGNMENT, lane, own=own)


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


def _delivery(tile: Tile, target: SharedSpan, barrier: SharedSpan, size: int) -> Callable[[], None]:
    """Writes the tile, then signals."""

    def deliver() -> None:
        require_receiver(target.block, "a tensor copy")
        with _FAULTS:
            load_tile(*tile[:2], tile.region.data, tile.region.base, target.block.shared.data, target.offset)
        signal(barrier, size)

    return deliver


def _poison_shared(descriptor: TensorMapDescriptor, target: SharedSpan) -> None:
    """Poisons the bytes a load will write, and no others: rows shorter than the swizzle span leave gaps."""
    plan = descriptor.plan
    if plan.dense or not descriptor.swizzle:
        target.bytes(plan.linear_bytes)[...] = POISON
    else:
        plan.scatter(np.full(plan.staging_shape, POISON, np.uint8), target.block.shared.data, target.offset)


def _decode_store(inst: Instruction, b: Binder, mods: Modifiers, dimensions: int) -> Decoded:
    """shared::cta -> global."""
    mods.one_of("bulk_group")
    policy = take_cache_hint(mods)
    mods.done()
    read_tile, pointer = _bind_store(inst, b, dimensions, policy)
    issuer = Issuer(inst)

    def store(f, lane, cta) -> None:
        tile = read_tile(f, lane, cta)
        source = _tile_span(cta, pointer(f, lane), tile, lane, own=True)
        _check_writable(tile, lane)
        if poisons(cta):
            with _FAULTS:
                store_tile(*tile[:2], tile.region.data, tile.region.base, _POISON_BOX, 0)

        def write(data: np.ndarray) -> None:
            with _FAULTS:
                store_tile(*tile[:2], tile.region.data, tile.region.base, data, source.offset % SWIZZLE_PERIOD)

        issue_store(issuer, cta, lane, "TMA store", _reader(cta, tile, source), write, Movement(tile, "from", source))
        cta.machine.counters.bytes["TMA store"] += tile.map.plan.transaction_bytes

    return per_lane(store)


def _bind_store(
    inst: Instruction, b: Binder, dimensions: int, policy: str | None
) -> tuple[TileReader, Callable[[list, int], int]]:
    """Readers of `[map, coordinates], [source]`."""
    target, source = inst.operands[:2]
    bind_options(b, inst.operands[2:], policy)
    return _bind_tile(b, target, dimensions), bind_pointer(b, source, "shared::cta")


def _reader(cta: ThreadBlock, tile: Tile, source: SharedSpan) -> Callable[[], np.ndarray]:
    """Reads a box from shared memory, from the last multiple of the swizzle period on."""

    def read() -> np.ndarray:
        require_source(cta, WAIT_READ)
        start = source.offset - source.offset % SWIZZLE_PERIOD
        return cta.shared.data[start : source.offset + tile.map.plan.shared_bytes].copy()

    return read


def _check_writable(tile: Tile, lane: int) -> None:
    if tile.region.read_only:
        refuse_write(tile.region, np.array([lane]), tile.map.global_address)


def decode_tensor_reduction(inst: Instruction, b: Binder) -> Decoded:
    mods = b.modifiers(inst)
    mods.one_of("reduce")
    dimensions = _take_common(mods)
    for name in ("global", "shared::cta"):
        mods.one_of(name)
    op = mods.one_of(*REDUCTIONS)
    mods.one_of("bulk_group")
    policy = take_cache_hint(mods)
    mods.done()
    read_tile, pointer = _bind_store(inst, b, dimensions, policy)
    issuer = Issuer(inst)

    def reduce(f, lane, cta) -> None:
        tile = read_tile(f, lane, cta)
        source = _tile_span(cta, pointer(f, lane), tile, lane, own=True)
        _check_writable(tile, lane)

        def write(data: np.ndarray) -> None:
            with _FAULTS:
                reduce_tile(*tile[:2], tile.region.data, tile.region.base, data, source.offset % SWIZZLE_PERIOD, op)

        movement = Movement(tile, "from", source)
        issue_store(issuer, cta, lane, "TMA reduction", _reader(cta, tile, source), write, movement)
        cta.machine.counters.bytes["TMA reduction"] += tile.map.plan.transaction_bytes

    return per_lane(reduce)


def decode_tensor_prefetch(inst: Instruction, b: Binder) -> Decoded:
    """A hint: it moves nothing, but its tensor map and coordinates are checked."""
    mods = b.modifiers(inst)
    mods.one_of("prefetch")
    dimensions = _take_common(mods)
    for name in ("L2", "global"):
        mods.one_of(name)
    policy = take_cache_hint(mods)
    mods.done()
    read_tile = _bind_tile(b, inst.operands[0], dimensions)
    bind_options(b, inst.operands[1:], policy)

    def prefetch(f, lane, cta) -> None:
        cta.machine.counters.bytes["L2 prefetch"] += read_tile(f, lane, cta).map.plan.transaction_bytes

    return per_lane(prefetch)
