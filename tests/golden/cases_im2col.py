"""Tensor copies through tensor maps for im2col: loads with offsets, stores and a reduction without.

Results as for `cases_tma`: the bytes in shared memory, and whether exactly the bytes of the column were counted; after
a store, all of global memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tests.golden.case import HEADER, Case, ColumnMap, Dice, Result
from tests.golden.cases_tma import SIZES
from tests.golden.copy_kernels import (
    BLOCK,
    DUMP,
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
    wait,
)
from tests.golden.tensor_kernels import ORIGIN, SPANS, TENSOR, TYPES, coordinates_of, parameters, store_kernel

_MODES = (*((0, swizzle) for swizzle in range(4)), (1, 0), (1, 1), (1, 3), (2, 1))  # interleave, swizzle


# -- kernels -------------------------------------------------------------------------------------------------------


def _load_kernel(rank: int) -> str:
    loads, coordinates = coordinates_of(rank)
    shifts = range(rank - 2)
    steps = "".join(f"ld.param.u32 %x, [f{place}]; cvt.u16.u32 %f{place}, %x;" for place in shifts)
    operand = "{" + ", ".join(f"%f{place}" for place in shifts) + "}"
    more = [f".param .u32 f{place}" for place in shifts] + [".param .u32 bytes", ".param .u64 tensor"]
    return f"""
.visible .entry load{rank}({parameters(rank, *more, ".param .u64 out", ".param .u64 flags")})
{{{START} {TENSOR}{FILL} .reg .b16 %f<3>;
@%first mbarrier.init.shared::cta.b64 [%bar], 1;
fence.proxy.async; bar.sync 0;
@!%first bra SHOW;
{loads} {steps} ld.param.u32 %bytes, [bytes];
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], %bytes;
cp.async.bulk.tensor.{rank}d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes
 [%offset], [%map, {coordinates}], [%bar], {operand};
{wait("FIRST", 0, 1)} mbarrier.arrive.shared::cta.b64 _, [%bar]; {wait("SECOND", 1, 2)}
ld.param.u64 %g, [flags]; cvta.to.global.u64 %g, %g; st.global.u32 [%g], %said;
SHOW: bar.sync 0; {DUMP} ret; }}
"""


def _ptx() -> str:
    kernels = [_load_kernel(rank) for rank in range(3, 6)]
    for rank in range(3, 6):
        copy = f"cp.async.bulk.tensor.{rank}d.global.shared::cta.im2col_no_offs.bulk_group"
        add = f"cp.reduce.async.bulk.tensor.{rank}d.global.shared::cta.add.im2col_no_offs.bulk_group"
        kernels += [store_kernel(f"store{rank}", rank, copy), store_kernel(f"add{rank}", rank, add)]
    return HEADER + SHARED_DECLARATION + "".join(kernels)


PTX = _ptx()


# -- tensor maps ---------------------------------------------------------------------------------------------------


def column_bytes(m: ColumnMap) -> int:
    """What a copy moves, which is what an mbarrier is told of."""
    return m.pixels * (16 * m.interleave or m.channels * SIZES[m.dtype])


def _pitch(m: ColumnMap) -> int:
    if m.interleave:
        return 16 * m.interleave
    return SPANS[m.swizzle] if m.swizzle else m.channels * SIZES[m.dtype]


def _random_map(
    dice: Dice, rank: int, interleave: int, swizzle: int, *, stored: bool = False
) -> tuple[ColumnMap, list[int], list[int], int]:
    """A tensor map, coordinates on its pixel box, offsets, and a shared offset, that go together.

    `stored`: with a pixel box inside the tensor, as stores need it.
    """
    while True:
        kind = dice.pick(TYPES)
        size, unit = SIZES[kind], max(1, 16 // SIZES[kind])
        space = range(rank - 2)
        pixels = [dice.between(2, 9) for _ in space]
        steps = [dice.between(2, 3) if dice.chance(25) else 1 for _ in space]
        lower = [dice.between(0, 2) if stored else dice.between(-3, 2) for _ in space]
        upper = [dice.between(-2, 0) if stored else dice.between(-4, 2) for _ in space]
        counts = [1 + (pixels[i] - 1 + upper[i] - lower[i]) // steps[i] for i in space]
        alignment = 32 if interleave == 2 else 16
        if interleave:
            channels = 16 * interleave // size
            dims, steps = [*pixels, dice.between(1, 4), dice.between(1, 4)], [*steps, 1, 1]
            row = dims[0] * 16 * interleave
        else:
            channels = dice.between(1, min(SPANS[swizzle] // 16, 256 // unit)) * unit
            dims, steps = [dice.between(8, 200 // size + 8), *pixels, dice.between(1, 4)], [1, *steps, 1]
            row = dims[0] * size
        strides, row = [], -(-row // alignment) * alignment + alignment * dice.below(3)
        for extent in dims[1:]:
            strides.append(row)
            row = row * extent + alignment * dice.below(3)
        fill = int(kind in (6, 7, 8, 9) and not stored and dice.chance(35))
        start = ORIGIN + alignment * dice.below(16)
        column, offset = dice.between(1, 96), 128 * dice.below(9)
        m = ColumnMap(
            0, kind, tuple(dims), tuple(strides), tuple(lower), tuple(upper), channels, column, tuple(steps), start,
            interleave, swizzle, fill,
        )  # fmt: skip
        if min(counts) < 1 or row > GLOBAL - 2 * ORIGIN or offset + _pitch(m) * column > REGION:
            continue
        axes = range(rank - 2) if interleave else range(1, rank - 1)
        place = [lower[i] + steps[axis] * dice.below(counts[i]) for i, axis in enumerate(axes)]
        image = dice.below(dims[-1])
        coordinates = (
            [*place, dice.below(dims[-2]), image] if interleave else [dice.below(dims[0]) // unit * unit, *place, image]
        )
        return m, coordinates, [dice.below(4) for _ in space], offset


def _describe(m: ColumnMap, coordinates: Sequence[int], offsets: Sequence[int]) -> str:
    interleave = f" interleave {16 * m.interleave}B" if m.interleave else ""
    swizzle = f" swizzle {SPANS[m.swizzle]}B" if m.swizzle else ""
    steps = f" steps {'x'.join(map(str, m.element_strides))}" if max(m.element_strides) > 1 else ""
    fill = " NaN" if m.oob_fill else ""
    box = f"{list(m.lower)} to {list(m.upper)}"
    column = f"{m.channels}x{m.pixels} of {'x'.join(map(str, m.dims))}"
    return f"type {m.dtype} {column} box {box} at {list(coordinates)}+{list(offsets)}{interleave}{swizzle}{steps}{fill}"


# -- cases ---------------------------------------------------------------------------------------------------------


def _load(m: ColumnMap, coordinates: Sequence[int], offsets: Sequence[int], at: int) -> Case:
    rank = len(m.dims)
    numbers = (*coordinates, at, *offsets, column_bytes(m))
    first = 1 + len(numbers)
    results = (Result("shared memory", first + 1, 0, REGION), Result("phases", first + 2, 0, 4))
    args = (replace(m, buffer=first), *numbers, GLOBAL_WORDS, EMPTY, FLAGS)
    name = f"load {_describe(m, coordinates, offsets)} to {at}"
    return Case(name, PTX, f"load{rank}", args, results, 1, BLOCK, 1, SHARED_BYTES)


def _store(kernel: str, m: ColumnMap, coordinates: Sequence[int], at: int) -> Case:
    rank = len(m.dims)
    numbers = (*coordinates, at)
    first = 1 + len(numbers)
    args = (replace(m, buffer=first), *numbers, GLOBAL_WORDS, SHARED_WORDS)
    results = (Result("global memory", first, 0, GLOBAL),)
    name = f"{kernel} {_describe(m, coordinates, ())} from {at}"
    return Case(name, PTX, f"{kernel}{rank}", args, results, 1, BLOCK, 1, SHARED_BYTES)


def _loads(dice: Dice) -> Iterator[Case]:
    for rank in range(3, 6):
        for interleave, swizzle in _MODES:
            for _ in range(3):
                yield _load(*_random_map(dice, rank, interleave, swizzle))
            axes = range(rank - 2) if interleave else range(1, rank - 1)
            m, coordinates, offsets, at = _random_map(dice, rank, interleave, swizzle)
            for i, axis in enumerate(axes):  # anywhere in the pixel box, not only where the steps lead
                coordinates[axis] = m.lower[i] + dice.below(m.dims[axis] + m.upper[i] - m.lower[i])
            yield _load(m, coordinates, offsets, at)
            m, coordinates, offsets, at = _random_map(dice, rank, interleave, swizzle)
            yield _load(m, coordinates, [dice.below(12) for _ in offsets], at)
            m, coordinates, offsets, at = _random_map(dice, rank, interleave, swizzle)
            coordinates[-1] += dice.between(-2, 2)
            if interleave:
                coordinates[-2] += dice.between(-2, 2)
            else:
                coordinates[0] += dice.between(-2, 3) * max(1, 16 // SIZES[m.dtype])
            yield _load(m, coordinates, offsets, at)


def _stores(dice: Dice) -> Iterator[Case]:
    for rank in range(3, 6):
        for interleave, swizzle in _MODES:
            for number in range(4):
                m, coordinates, _, at = _random_map(dice, rank, interleave, swizzle, stored=True)
                adds = {2: 9, 4: 2, 8: 4}.get(SIZES[m.dtype]) if number % 2 else None
                yield _store("store" if adds is None else "add", replace(m, dtype=adds or m.dtype), coordinates, at)


def cases() -> Iterator[Case]:
    dice = Dice(23)
    yield from _loads(dice)
    yield from _stores(dice)
