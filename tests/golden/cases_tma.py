"""Tiled tensor copies: loads, multicast loads, stores and reductions through tensor maps.

Loads: the bytes in shared memory afterwards, whether the phase completes with exactly the bytes of the box, and whether
the next one completes with none (so that neither too few nor too many were counted). Stores: all of global memory.
Swizzles are those of Hopper: none, 32B, 64B, 128B (the atoms of 32 and 64 bytes came with Blackwell).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from tests.golden.case import HEADER, Buffer, Case, Dice, Map, Result
from tests.golden.copy_kernels import (
    BLOCK,
    DUMP,
    DUMP_BY_RANK,
    EMPTY,
    FILL,
    FLAGS,
    GLOBAL,
    GLOBAL_WORDS,
    REGION,
    SHARED_BYTES,
    SHARED_DECLARATION,
    SHARED_WORDS,
    START,
    special_values,
    wait,
)
from tests.golden.tensor_kernels import ORIGIN, SPANS, TENSOR, TYPES, coordinates_of, parameters, store_kernel

SIZES = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2, 10: 4, 11: 4, 12: 4}
NAMES = {
    2: "u32",
    3: "u32",
    4: "u64",
    5: "u64",
    6: "f16",
    7: "f32",
    8: "f64",
    9: "bf16",
    10: "f32",
    11: "f32",
    12: "f32",
}
_REDUCTIONS = {
    "add": (2, 3, 4, 6, 7, 8, 9, 10, 11, 12),
    "min": (2, 3, 4, 5, 6, 9),
    "max": (2, 3, 4, 5, 6, 9),
    "inc": (2,),
    "dec": (2,),
    "and": (2, 3, 4),
    "or": (2, 3, 4),
    "xor": (2, 3, 4),
}


# -- kernels -------------------------------------------------------------------------------------------------------

_MEMORY = (".param .u64 tensor", ".param .u64 out", ".param .u64 flags")


def _load_kernel(rank: int) -> str:
    loads, coordinates = coordinates_of(rank)
    return f"""
.visible .entry load{rank}({parameters(rank, ".param .u32 bytes", *_MEMORY)})
{{{START} {TENSOR}{FILL}
@%first mbarrier.init.shared::cta.b64 [%bar], 1;
fence.proxy.async; bar.sync 0;
@!%first bra SHOW;
{loads} ld.param.u32 %bytes, [bytes];
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], %bytes;
cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
 [%offset], [%map, {coordinates}], [%bar];
{wait("FIRST", 0, 1)} mbarrier.arrive.shared::cta.b64 _, [%bar]; {wait("SECOND", 1, 2)}
and.b32 %x, %base, 1023; setp.eq.u32 %p, %x, 0; selp.u32 %x, 4, 0, %p; or.b32 %said, %said, %x;
ld.param.u64 %g, [flags]; cvta.to.global.u64 %g, %g; st.global.u32 [%g], %said;
SHOW: bar.sync 0; {DUMP} ret; }}
"""


def _multicast_kernel() -> str:
    """Each CTA delivers a tile to those of its mask; `table` has (mask, expected bytes, offset, column) by rank."""
    loads, _ = coordinates_of(2)
    return f"""
.visible .entry multicast({parameters(2, ".param .u64 table", *_MEMORY)})
{{{START} {TENSOR}{FILL} {loads}
.reg .b32 %mask, %column, %slot; .reg .b16 %targets;
ld.param.u64 %g, [table]; cvta.to.global.u64 %g, %g;
mul.wide.u32 %o, %rank, 16; add.u64 %g, %g, %o; ld.global.v4.b32 {{%mask, %bytes, %slot, %column}}, [%g];
add.u32 %offset, %offset, %slot; cvt.u16.u32 %targets, %mask; add.u32 %c0, %c0, %column;
@%first mbarrier.init.shared::cta.b64 [%bar], 1;
@%first mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], %bytes;
fence.mbarrier_init.release.cluster; fence.proxy.async;
barrier.cluster.arrive; barrier.cluster.wait;
@!%first bra SHOW;
setp.ne.u32 %q, %mask, 0;
@%q cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster
 [%offset], [%map, {{%c0, %c1}}], [%bar], %targets;
{wait("FIRST", 0, 1)} mbarrier.arrive.shared::cta.b64 _, [%bar]; {wait("SECOND", 1, 2)}
ld.param.u64 %g, [flags]; cvta.to.global.u64 %g, %g; mul.wide.u32 %o, %rank, 4; add.u64 %g, %g, %o;
st.global.u32 [%g], %said;
SHOW: barrier.cluster.arrive; barrier.cluster.wait;
{DUMP_BY_RANK}
barrier.cluster.arrive; barrier.cluster.wait; ret; }}
"""


def _ptx() -> str:
    kernels = [_load_kernel(rank) for rank in range(1, 6)] + [_multicast_kernel()]
    for rank in range(1, 6):
        store = f"cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group"
        kernels.append(store_kernel(f"store{rank}", rank, store))
        for operation in _REDUCTIONS if rank == 2 else ("add",):
            reduce = f"cp.reduce.async.bulk.tensor.{rank}d.global.shared::cta.{operation}.tile.bulk_group"
            kernels.append(store_kernel(f"{operation}{rank}", rank, reduce))
    return HEADER + SHARED_DECLARATION + "".join(kernels)


PTX = _ptx()


# -- tensor maps ---------------------------------------------------------------------------------------------------


def box_bytes(m: Map) -> int:
    """What a copy of the whole box moves, which is what an mbarrier is told of."""
    steps = [-(-extent // step) for extent, step in zip(m.box, m.element_strides)]
    if not m.interleave:
        return m.box[0] * math.prod(steps[1:]) * SIZES[m.dtype]
    del steps[len(steps) - 2]  # the slices of C/8: one of them
    return math.prod(steps) * 16 * m.interleave


def _fits(m: Map, offset: int) -> bool:
    rows = box_bytes(m)
    if m.swizzle and not m.interleave:
        rows = rows // (m.box[0] * SIZES[m.dtype]) * SPANS[m.swizzle]
    alignment = 32 if m.interleave == 2 else 16
    return offset + rows <= REGION and m.box[0] <= 256 and all(stride % alignment == 0 for stride in m.strides)


def random_map(dice: Dice, rank: int, interleave: int, swizzle: int) -> tuple[Map, list[int], int]:
    """A tensor map, coordinates inside the tensor as far as they can be, and a shared offset, that go together."""
    while True:
        kind = dice.pick(TYPES)
        size, unit = SIZES[kind], max(1, 16 // SIZES[kind])
        dims = [dice.between(2, 11) for _ in range(rank)]
        box = [dice.between(1, 6) for _ in range(rank)]
        steps = [dice.between(2, 3) if dice.chance(25) else 1 for _ in range(rank)]
        alignment = 32 if interleave == 2 else 16
        if interleave:
            row = dims[0] * 16 * interleave
            box[0] = dice.between(1, 2) * unit
        else:
            dims[0] = dice.between(8, 200 // size + 8)
            row = dims[0] * size
            box[0] = dice.between(1, min(SPANS[swizzle] // 16, 256 // unit)) * unit
        strides, row = [], -(-row // alignment) * alignment + alignment * dice.below(3)
        for extent in dims[1:]:
            strides.append(row)
            row = row * extent + alignment * dice.below(3)
        fill = int(kind in (6, 7, 8, 9) and dice.chance(35))
        start = ORIGIN + alignment * dice.below(16)
        m = Map(0, kind, tuple(dims), tuple(strides), tuple(box), tuple(steps), start, interleave, swizzle, fill)
        coordinates = [dice.below(max(1, extent - b + 1)) for extent, b in zip(dims, box)]
        offset = 128 * dice.below(9)
        if row <= GLOBAL - 2 * ORIGIN and _fits(m, offset):
            return m, _aligned(m, coordinates), offset


def _aligned(m: Map, coordinates: Sequence[int]) -> list[int]:
    """The first coordinate moved down to a multiple of 16 bytes, as the hardware requires without interleave."""
    unit = 1 if m.interleave else max(1, 16 // SIZES[m.dtype])
    return [coordinates[0] // unit * unit, *coordinates[1:]]


def _beyond(m: Map, coordinates: list[int], dimension: int, low: bool) -> list[int]:
    """The box moved so that about half of it leaves the tensor along one dimension."""
    moved = list(coordinates)
    half = -(-m.box[dimension] // 2)
    moved[dimension] = -half if low else max(0, m.dims[dimension] - half)
    if m.interleave or dimension:
        return moved
    return _aligned(m, moved)


# -- cases ---------------------------------------------------------------------------------------------------------


def _launch(
    name: str,
    kernel: str,
    m: Map,
    numbers: Sequence[int],
    buffers: Sequence[Buffer],
    results: Sequence[Result],
    cluster=1,
) -> Case:
    """`numbers` and `buffers` are the arguments after the map; `m.buffer` and those of the results count buffers."""
    first = 1 + len(numbers)
    m = replace(m, buffer=first + m.buffer)
    results = tuple(replace(result, buffer=first + result.buffer) for result in results)
    args = (m, *numbers, *buffers)
    return Case(name, PTX, kernel, args, results, cluster, BLOCK, cluster, SHARED_BYTES)


def _load(name: str, m: Map, coordinates: Sequence[int], offset: int) -> Case:
    numbers = (*coordinates, offset, box_bytes(m))
    results = (Result("shared memory", 1, 0, REGION), Result("phases", 2, 0, 4))
    return _launch(name, f"load{len(m.dims)}", m, numbers, (GLOBAL_WORDS, EMPTY, FLAGS), results)


def _store(name: str, kernel: str, m: Map, coordinates: Sequence[int], offset: int, data: Sequence[Buffer]) -> Case:
    """`data`: global and shared memory before."""
    return _launch(name, kernel, m, (*coordinates, offset), data, (Result("global memory", 0, 0, GLOBAL),))


def describe(m: Map, coordinates: Sequence[int]) -> str:
    interleave = f" interleave {16 * m.interleave}B" if m.interleave else ""
    swizzle = f" swizzle {SPANS[m.swizzle]}B" if m.swizzle else ""
    steps = f" steps {'x'.join(map(str, m.element_strides))}" if max(m.element_strides) > 1 else ""
    fill = " NaN" if m.oob_fill else ""
    box, dims = "x".join(map(str, m.box)), "x".join(map(str, m.dims))
    return f"type {m.dtype} {box} of {dims} at {list(coordinates)}{interleave}{swizzle}{steps}{fill}"


def _modes() -> Iterator[tuple[int, int, int]]:
    """(rank, interleave, swizzle) of Hopper's tile modes."""
    for rank in range(1, 6):
        for swizzle in range(4):
            yield rank, 0, swizzle
            if rank >= 3:
                yield rank, 1, swizzle
        if rank >= 3:
            yield rank, 2, 1


def _loads(dice: Dice) -> Iterator[Case]:
    for rank, interleave, swizzle in _modes():
        for variant in range(-1, 2 * rank):
            m, coordinates, offset = random_map(dice, rank, interleave, swizzle)
            if variant >= 0:
                coordinates = _beyond(m, coordinates, variant // 2, bool(variant % 2))
            yield _load(f"load {describe(m, coordinates)} to {offset}", m, coordinates, offset)
        m, _, offset = random_map(dice, rank, interleave, swizzle)
        away = [1 << 20] * rank
        yield _load(f"load outside {describe(m, away)} to {offset}", m, away, offset)


def _special_loads() -> Iterator[Case]:
    """Types that change bits on the way in, on special values, and the NaN that fills what is outside."""
    for kind in (6, 7, 8, 9, 10, 11, 12):
        size = SIZES[kind]
        data = Buffer(special_values(NAMES[kind], GLOBAL // size))
        m = Map(0, kind, (64, 16), (64 * size,), (64, 16), (1, 1), 0)
        for fill, coordinates in ((0, (0, 0)), (1, (-16, -2))):
            case = _load(f"load special type {kind} fill {fill}", replace(m, oob_fill=fill), coordinates, 0)
            yield replace(case, args=tuple(data if argument is GLOBAL_WORDS else argument for argument in case.args))


def _stores(dice: Dice) -> Iterator[Case]:
    for rank, interleave, swizzle in _modes():
        for variant in range(-1, rank):
            m, coordinates, offset = random_map(dice, rank, interleave, swizzle)
            m = replace(m, oob_fill=0)
            if variant >= 0:
                coordinates = _beyond(m, coordinates, variant, low=False)
            adds = {2: 9, 4: 2, 8: 4}.get(SIZES[m.dtype]) if dice.chance(40) else None
            m = m if adds is None else replace(m, dtype=adds)
            kernel = f"{'store' if adds is None else 'add'}{rank}"
            name = f"{kernel} {describe(m, coordinates)} from {offset}"
            yield _store(name, kernel, m, coordinates, offset, (GLOBAL_WORDS, SHARED_WORDS))


def _reductions() -> Iterator[Case]:
    """Every operation and type: special values with one another, then random ones."""
    for operation, kinds in _REDUCTIONS.items():
        for kind in kinds:
            size = SIZES[kind]
            old, new = special_values(NAMES[kind], GLOBAL // size), special_values(NAMES[kind], REGION // size)
            width = 64
            table = old.view(f"u{size}").copy()
            for row in range(16):  # element j of row i meets every special value in turn
                table[row * width : (row + 1) * width] = np.roll(table[row * width : (row + 1) * width], row)
            m = Map(0, kind, (width, 30), (width * size,), (width, 32), (1, 1), 0)
            data = (Buffer(table.view(np.uint8)), Buffer(new))
            yield _store(f"{operation} special type {kind}", f"{operation}2", m, (0, 0), 0, data)


def _multicasts(dice: Dice) -> Iterator[Case]:
    for cluster in (2, 4):
        for swizzle in range(4):
            for number in range(4):
                columns = SPANS[swizzle] // 2 if swizzle else 64
                m = Map(0, 6, (4 * columns, 24), (8 * columns,), (columns, 8), (1, 1), ORIGIN, swizzle=swizzle)
                masks = [dice.below(1 << cluster) if number else (1 << cluster) - 1 for _ in range(cluster)]
                if number == 1:
                    masks[0] = 1 << cluster - 1
                size = box_bytes(m)
                received = [size * sum(mask >> rank & 1 for mask in masks) for rank in range(cluster)]
                slots = [2048 * rank for rank in range(cluster)]
                rows = [(masks[rank], received[rank], slots[rank], columns * rank) for rank in range(cluster)]
                table = np.array(rows, np.uint32).view(np.uint8).reshape(-1)
                coordinates, offset = (0, dice.pick((0, 5, 20, -3))), 128 * dice.below(5)
                out = Buffer(np.zeros(cluster * REGION, np.uint8))
                results = (Result("shared memory", 2, 0, cluster * REGION), Result("phases", 3, 0, 4 * cluster))
                name = f"multicast {cluster} CTAs swizzle {swizzle} masks {masks} at {coordinates} to {offset}"
                buffers = (Buffer(table), GLOBAL_WORDS, out, FLAGS)
                m = replace(m, buffer=1)
                yield _launch(name, "multicast", m, (*coordinates, offset), buffers, results, cluster)


def cases() -> Iterator[Case]:
    dice = Dice(11)
    yield from _loads(dice)
    yield from _special_loads()
    yield from _stores(dice)
    yield from _reductions()
    yield from _multicasts(dice)
