"""Tensor maps that a kernel makes, with `tensormap.replace` on a copy of another map or on zeros, and loads with them.

A map is made in shared memory and copied to global memory with `tensormap.cp_fenceproxy`, or made in global memory.
Results as for the loads of `cases_tma`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from tests.golden.case import HEADER, Buffer, Case, Dice, Map, Result
from tests.golden.cases_tma import box_bytes, describe, random_map
from tests.golden.copy_kernels import (
    BLOCK,
    DUMP,
    EMPTY,
    FILL,
    FLAGS,
    GLOBAL_WORDS,
    REGION,
    SHARED_BYTES,
    SHARED_DECLARATION,
    START,
    wait,
)

_ROOM = Buffer(np.zeros(128, np.uint8))
_PTX_TYPES = {0: 0, 1: 1, 2: 2, 4: 4, 6: 6, 7: 7, 8: 9, 9: 10}  # by the driver's number
_START_MAP = Map(0, 5, (40, 3, 2, 4, 2), (320, 960, 1920, 7680), (8, 2, 1, 2, 1), (1, 2, 1, 3, 1), 64, swizzle=2)


def _replacements(m: Map, space: str) -> str:
    """Instructions that make a map at %at like `m`, whose tensor begins at %o."""
    prefix = "tensormap.replace.tile"

    def scalar(field: str, value: object) -> str:
        return f"{prefix}.{field}.{space}.b1024.b32 [%at], {value};"

    rank = len(m.dims)
    lines = [f"{prefix}.global_address.{space}.b1024.b64 [%at], %o;", scalar("rank", rank - 1)]
    for place in range(rank):
        for field, values in (("box_dim", m.box), ("global_dim", m.dims), ("element_stride", m.element_strides)):
            lines.append(scalar(field, f"{place}, {values[place]}"))
    for place, stride in enumerate(m.strides):
        lines.append(f"mov.b64 %s, {stride}; {prefix}.global_stride.{space}.b1024.b64 [%at], {place}, %s;")
    lines += [scalar("elemtype", _PTX_TYPES[m.dtype]), scalar("interleave_layout", m.interleave)]
    lines += [scalar("swizzle_mode", m.swizzle), scalar("fill_mode", m.oob_fill)]
    return "\n".join(lines)


def _ptx(m: Map, coordinates: list[int], *, zeros: bool, shared: bool) -> str:
    """`first` has another map, or zeros are where it would be; the load is through `room`."""
    rank = len(m.dims)
    space, address = ("shared::cta", "%spot") if shared else ("global", "%map")
    copies = "".join(
        ("mov.b64 %s, 0;" if zeros else f"ld.param.b64 %s, [first+{8 * word}];")
        + f"st.{space}.b64 [{address}+{8 * word}], %s;"
        for word in range(16)
    )
    publish = (
        "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%map], [%spot], 128;"
        if shared
        else "fence.proxy.tensormap::generic.release.gpu;"
    )
    place = "{" + ", ".join(map(str, coordinates)) + "}"
    return f"""{HEADER}{SHARED_DECLARATION}
.visible .entry made(.param .align 64 .b8 first[128], .param .u32 offset, .param .u32 bytes, .param .u64 room,
 .param .u64 tensor, .param .u64 out, .param .u64 flags)
{{{START} .shared .align 128 .b8 made[128]; .reg .b64 %s; .reg .b32 %spot; .reg .pred %warp;
{FILL}
ld.param.u64 %map, [room]; cvta.to.global.u64 %map, %map; mov.u32 %spot, made;
ld.param.u64 %o, [tensor]; cvta.to.global.u64 %o, %o; add.u64 %o, %o, {m.offset};
setp.lt.u32 %warp, %thread, 32;
@!%warp bra SHOW;
@!%first bra MADE;
{copies}
{_replacements(m, space).replace("%at", address)}
MADE: bar.warp.sync 0xffffffff;
{publish}
@!%first bra SHOW;
fence.proxy.tensormap::generic.acquire.gpu [%map], 128;
mbarrier.init.shared::cta.b64 [%bar], 1; fence.proxy.async;
ld.param.u32 %bytes, [bytes];
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], %bytes;
cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
 [%offset], [%map, {place}], [%bar];
{wait("FIRST", 0, 1)} mbarrier.arrive.shared::cta.b64 _, [%bar]; {wait("SECOND", 1, 2)}
ld.param.u64 %g, [flags]; cvta.to.global.u64 %g, %g; st.global.u32 [%g], %said;
SHOW: bar.sync 0; {DUMP} ret; }}
"""


def cases() -> Iterator[Case]:
    dice = Dice(29)
    for rank in range(1, 6):
        for zeros in (False, True):
            for shared in (False, True):
                interleave, swizzle = (dice.below(3), 1) if rank > 2 else (0, dice.below(4))
                m, coordinates, offset = random_map(dice, rank, interleave, swizzle)
                ptx = _ptx(m, coordinates, zeros=zeros, shared=shared)
                args = (replace(_START_MAP, buffer=4), offset, box_bytes(m), _ROOM, GLOBAL_WORDS, EMPTY, FLAGS)
                results = (Result("shared memory", 5, 0, REGION), Result("phases", 6, 0, 4))
                origin = "zeros" if zeros else "another"
                name = f"{origin} in {'shared' if shared else 'global'}: {describe(m, coordinates)} to {offset}"
                yield Case(name, ptx, "made", args, results, 1, BLOCK, 1, SHARED_BYTES)
