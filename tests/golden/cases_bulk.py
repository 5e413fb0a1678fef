"""Copies without a tensor map: cp.async.bulk and its reductions, st.async and red.async, cp.async."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tests.golden.case import HEADER, Buffer, Case, Dice, Result
from tests.golden.copy_kernels import (
    BLOCK,
    DUMP,
    DUMP_BY_RANK,
    FILL,
    FLAGS,
    GLOBAL,
    GLOBAL_WORDS,
    READ_SOURCE,
    READ_SOURCE_BY_RANK,
    REGION,
    SHARED_BYTES,
    SHARED_DECLARATION,
    SHARED_WORDS,
    START,
    numbered,
    special_values,
    wait,
)
from tests.golden.elementwise import Form, kernels

_BITWISE = ("and", "or", "xor")
_GLOBAL_REDUCTIONS = {
    "add": ("u32", "s32", "u64", "f32", "f64", "noftz.f16", "noftz.bf16"),
    **dict.fromkeys(("min", "max"), ("u32", "s32", "u64", "s64", "f16", "bf16")),
    **dict.fromkeys(("inc", "dec"), ("u32",)),
    **dict.fromkeys(_BITWISE, ("b32", "b64")),
}
_SHARED_REDUCTIONS = {
    "add": ("u32", "s32", "u64"),
    **dict.fromkeys(("min", "max"), ("u32", "s32")),
    **dict.fromkeys(("inc", "dec"), ("u32",)),
    **dict.fromkeys(_BITWISE, ("b32",)),
}
_ASYNC_STORES = ("b32", "b64", "v2.b32", "v4.b32", "v2.b64", "f64", "s32")
_RECEIVE = f"{wait('FIRST', 0, 1)} mbarrier.arrive.shared::cta.b64 _, [%bar]; {wait('SECOND', 1, 2)}"
_SHOW_FLAGS = (
    "ld.param.u64 %g, [flags]; cvta.to.global.u64 %g, %g; mul.wide.u32 %o, %rank, 4; add.u64 %g, %g, %o; "
    "st.global.u32 [%g], %said;"
)
_TABLE = (
    "ld.param.u64 %g, [table]; cvta.to.global.u64 %g, %g; mul.wide.u32 %o, %rank, 16; add.u64 %g, %g, %o; "
    "ld.global.v4.b32 {%c0, %bytes, %c1, %c2}, [%g];"
)
_BARRIER = """
@%first mbarrier.init.shared::cta.b64 [%bar], 1;
@%first mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], %bytes;
fence.mbarrier_init.release.cluster; fence.proxy.async;
"""
_CLUSTER = "barrier.cluster.arrive; barrier.cluster.wait;"
_PARAMETERS = ".param .u32 offset, .param .u64 table, .param .u64 tensor, .param .u64 source, .param .u64 out"


def _kernel(name: str, body: str) -> str:
    return f".visible .entry {name}({_PARAMETERS}, .param .u64 flags)\n{{{START} {_TABLE}\n{body} ret; }}\n"


def _global(register: str) -> str:
    """%map becomes the global address that is `register` bytes into the memory."""
    start = "ld.param.u64 %map, [tensor]; cvta.to.global.u64 %map, %map;"
    return f"{start} cvt.u64.u32 %o, {register}; add.u64 %map, %map, %o;"


def _load(space: str) -> str:
    """Row of the table: start in global memory, bytes, unused."""
    return f"""{FILL} {_BARRIER} bar.sync 0; @!%first bra SHOW; {_global("%c0")}
cp.async.bulk.{space}.global.mbarrier::complete_tx::bytes [%offset], [%map], %bytes, [%bar];
{_RECEIVE} {_SHOW_FLAGS} SHOW: bar.sync 0; {DUMP}"""


def _multicast() -> str:
    """Row: mask, expected bytes, size, offset (also the start in global memory)."""
    return f"""{FILL} {_BARRIER} {_CLUSTER} @!%first bra SHOW; {_global("%c2")} add.u32 %offset, %offset, %c2;
.reg .b16 %targets; cvt.u16.u32 %targets, %c0; setp.ne.u32 %q, %c0, 0;
@%q cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
 [%offset], [%map], %c1, [%bar], %targets;
{_RECEIVE} {_SHOW_FLAGS} SHOW: {_CLUSTER} {DUMP_BY_RANK} {_CLUSTER}"""


def _store(instruction: str) -> str:
    """Row: start in global memory, bytes."""
    return f"""{READ_SOURCE} fence.proxy.async; bar.sync 0; @!%first ret; {_global("%c0")}
{instruction} [%map], [%offset], %bytes; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"""


_PEER = "xor.b32 %x, %rank, 1; mapa.shared::cluster.u32 %y, %offset, %x; mapa.shared::cluster.u32 %c3, %bar, %x;"


def _exchange(instruction: str) -> str:
    """From a CTA to its neighbour. Row: start in the source, bytes."""
    return f"""{READ_SOURCE_BY_RANK} {_BARRIER} {_CLUSTER} @!%first bra SHOW; {_PEER} add.u32 %c0, %c0, %base;
{instruction} [%y], [%c0], %bytes, [%c3];
{_RECEIVE} {_SHOW_FLAGS} SHOW: {_CLUSTER} {DUMP_BY_RANK} {_CLUSTER}"""


def _from_registers(instruction: str, width: int, registers: str) -> str:
    """64 threads store 16 bytes apart. Row: unused, expected bytes (64 times the width)."""
    return f"""{READ_SOURCE_BY_RANK} {_BARRIER} {_CLUSTER} {_PEER}
mad.lo.u32 %y, %thread, 16, %y; mul.lo.u32 %v0, %thread, 0x01234567; add.u32 %v0, %v0, %rank; not.b32 %v1, %v0;
xor.b32 %v2, %v0, 0x55555555; xor.b32 %v3, %v1, 0x0f0f0f0f;
.reg .b64 %l<2>; mov.b64 %l0, {{%v0, %v1}}; mov.b64 %l1, {{%v2, %v3}}; setp.lt.u32 %q, %thread, 64;
@%q {instruction} [%y], {registers}, [%c3];
@!%first bra SHOW; {_RECEIVE} {_SHOW_FLAGS} SHOW: {_CLUSTER} {DUMP_BY_RANK} {_CLUSTER}"""


_TO_PEER = "shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
_WIDTHS = {"b32": 4, "b64": 8, "v2.b32": 8, "v4.b32": 16, "v2.b64": 16, "f64": 8, "s32": 4, "u32": 4, "u64": 8}
_REGISTERS = {
    "b32": "%v0", "s32": "%v0", "u32": "%v0", "b64": "%l0", "u64": "%l0", "f64": "%l0", "v2.b32": "{%v0, %v1}",
    "v4.b32": "{%v0, %v1, %v2, %v3}", "v2.b64": "{%l0, %l1}",
}  # fmt: skip


def _identifier(*parts: str) -> str:
    return "_".join(parts).replace(".", "_").replace("::", "_")


def _bodies() -> dict[str, str]:
    """Kernels by name."""
    bodies = {"load_cluster": _load("shared::cluster"), "load_cta": _load("shared::cta"), "multicast": _multicast()}
    bodies["store"] = _store("cp.async.bulk.global.shared::cta.bulk_group")
    for operation, kinds in _GLOBAL_REDUCTIONS.items():
        for kind in kinds:
            instruction = f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{operation}.{kind}"
            bodies[_identifier("reduce", operation, kind)] = _store(instruction)
    bodies["exchange"] = _exchange(f"cp.async.bulk.{_TO_PEER}")
    for operation, kinds in _SHARED_REDUCTIONS.items():
        for kind in kinds:
            instruction = f"cp.reduce.async.bulk.{_TO_PEER}.{operation}.{kind}"
            bodies[_identifier("exchange", operation, kind)] = _exchange(instruction)
            instruction = f"red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.{operation}.{kind}"
            bodies[_identifier("red_async", operation, kind)] = _from_registers(
                instruction, _WIDTHS[kind], _REGISTERS[kind]
            )
    for kind in _ASYNC_STORES:
        instruction = f"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.{kind}"
        bodies[_identifier("st_async", kind)] = _from_registers(instruction, _WIDTHS[kind], _REGISTERS[kind])
    return bodies


_BODIES = _bodies()
_PTX = HEADER + SHARED_DECLARATION + "".join(_kernel(name, body) for name, body in _BODIES.items())
_NOTHING = Buffer(np.zeros(16, np.uint8))


def _launch(
    name: str, kernel: str, offset: int, rows: list[tuple[int, ...]], memory: Buffer, source: Buffer, what: str
) -> Case:
    """`what`: whether the result is global memory, or shared memory (and the phases) of each CTA."""
    cluster = len(rows)
    table = Buffer(np.array(rows, np.uint32).view(np.uint8).reshape(-1))
    stored = what == "global"
    out = _NOTHING if stored else Buffer(np.zeros(cluster * REGION, np.uint8))
    args = (offset, table, memory, source, out, FLAGS)
    if stored:
        results: tuple[Result, ...] = (Result("global memory", 2, 0, GLOBAL),)
    else:
        results = (Result("shared memory", 4, 0, cluster * REGION), Result("phases", 5, 0, 4 * cluster))
    return Case(name, _PTX, kernel, args, results, cluster, BLOCK, cluster, SHARED_BYTES)


def _loads(dice: Dice) -> Iterator[Case]:
    for kernel in ("load_cluster", "load_cta"):
        for size in (16, 32, 48, 128, 1008, 4096, 16384):
            offset, start = 16 * dice.below(64), 16 * dice.below(64)
            name = f"{kernel} {size} bytes at {start} to {offset}"
            yield _launch(name, kernel, offset, [(start, size, 0, 0)], GLOBAL_WORDS, _NOTHING, "shared")


def _multicasts(dice: Dice) -> Iterator[Case]:
    for cluster in (2, 4):
        for number in range(4):
            masks = [dice.below(1 << cluster) if number else (1 << cluster) - 1 for _ in range(cluster)]
            sizes = [16 * dice.between(1, 128) for _ in range(cluster)]
            received = [sum(size for size, mask in zip(sizes, masks) if mask >> rank & 1) for rank in range(cluster)]
            rows = [(masks[rank], received[rank], sizes[rank], 2048 * rank) for rank in range(cluster)]
            name = f"multicast {cluster} CTAs masks {masks} sizes {sizes}"
            yield _launch(name, "multicast", 16 * dice.below(8), rows, GLOBAL_WORDS, _NOTHING, "shared")


def _stores(dice: Dice) -> Iterator[Case]:
    for size in (16, 48, 1008, 16384):
        offset, start = 16 * dice.below(64), 16 * dice.below(64)
        name = f"store {size} bytes from {offset} to {start}"
        yield _launch(name, "store", offset, [(start, size, 0, 0)], GLOBAL_WORDS, SHARED_WORDS, "global")
    for operation, kinds in _GLOBAL_REDUCTIONS.items():
        for kind in kinds:
            element = kind.removeprefix("noftz.").translate(str.maketrans("sb", "uu"))
            element = "bf16" if kind.endswith("bf16") else element
            size = int(element.removeprefix("b")[1:]) // 8
            old, new = special_values(element, GLOBAL // size), special_values(element, REGION // size)
            table = old.view(f"u{size}").copy()
            for row in range(16):
                table[64 * row : 64 * row + 64] = np.roll(table[64 * row : 64 * row + 64], row)
            memory, source = Buffer(table.view(np.uint8)), Buffer(new)
            kernel = _identifier("reduce", operation, kind)
            yield _launch(f"reduce {operation}.{kind}", kernel, 0, [(0, 8192, 0, 0)], memory, source, "global")


def _exchanges(dice: Dice) -> Iterator[Case]:
    for kernel in _BODIES:
        if not kernel.startswith(("exchange", "red_async", "st_async")):
            continue
        if kernel == "exchange" or kernel.startswith("st_async"):
            source = Buffer(np.concatenate([numbered(REGION, 0x2000_0000), numbered(REGION, 0x3000_0000)]))
        else:
            width = 8 if kernel.endswith("64") else 4
            source = Buffer(special_values(f"u{8 * width}", 2 * REGION // width))
        if kernel.startswith("exchange"):
            sizes = [1024, 512]
        else:
            kind = kernel.removeprefix("st_async_").removeprefix("red_async_").split("_", kernel.startswith("red"))[-1]
            sizes = [64 * _WIDTHS[kind.replace("_", ".")]] * 2
        offset = 16 * dice.below(32)
        # Each expects what its neighbour sends; both send the same number of bytes.
        rows = [(4096, sizes[0], 0, 0)] * 2
        yield _launch(f"{kernel} to {offset}", kernel, offset, rows, _NOTHING, source, "shared")


def _small_copies() -> Iterator[Case]:
    """cp.async of 4, 8 and 16 bytes, of fewer (the rest are zeros), and of none."""
    forms = []
    sources = {register: ("b32", f"u32:{place}") for place, register in enumerate("abce")}
    for cache, size in (("ca", 4), ("ca", 8), ("ca", 16), ("cg", 16)):
        for given in ("", *(f", {count}" for count in (0, 1, size - 1, size)), ", %n"):
            text = (
                f".reg .b32 %n; and.b32 %n, %lane, {size - 1}; st.global.v4.b32 [%m], {{%a, %b, %c, %e}}; "
                "st.shared.v4.b32 [%s], {%e, %c, %b, %a}; membar.gl; "
                f"cp.async.{cache}.shared.global [%s], [%m], {size}{given}; cp.async.wait_all; "
                "ld.shared.v4.b32 {%d, %f, %g, %h}, [%s];"
            )
            forms.append(Form(f"cp.async.{cache} {size}{given}", text, dict.fromkeys("dfgh", "b32"), sources))
    return kernels("copy", forms)


def cases() -> Iterator[Case]:
    dice = Dice(12)
    yield from _loads(dice)
    yield from _multicasts(dice)
    yield from _stores(dice)
    yield from _exchanges(dice)
    yield from _small_copies()
