"""One access by one warp: shared memory, global memory and matrices, in many patterns of addresses.

For the counters: what is recorded is not memory but wavefronts and sectors, see `counters.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tests.golden.case import HEADER, Buffer, Case, Result, random_bits

LANES = 32
_INACTIVE = 0xFFFF_FFFF
_MEMORY_BYTES = 1 << 15
_lane = np.arange(LANES)

# Elements of the access's width, by lane; -1 where a lane takes no part.
_ELEMENTS = {
    "consecutive": _lane,
    "one for all": 0 * _lane,
    "reversed": 31 - _lane,
    "stride 2": 2 * _lane,
    "stride 4": 4 * _lane,
    "stride 8": 8 * _lane,
    "stride 32": 32 * _lane,
    "stride 33": 33 * _lane,
    "from 1": 1 + _lane,
    "pairs 1": _lane // 2,
    "pairs 2": _lane // 4 * 2 + _lane % 2,
    "pairs 4": _lane // 8 * 4 + _lane % 4,
    "pairs 16": _lane % 16,
    "spread pairs 1": _lane // 2 * 3,
    "spread pairs 2": (_lane // 4 * 2 + _lane % 2) * 3,
    "fours": _lane // 4,
    "eights": _lane // 8,
    "8 rows of 128 bytes": None,
    "lane 5": np.where(_lane == 5, 3, -1),
    "even lanes": np.where(_lane % 2 == 0, _lane, -1),
    "first 16": np.where(_lane < 16, _lane, -1),
    "first 8": np.where(_lane < 8, _lane, -1),
    "every eighth": np.where(_lane % 8 == 0, _lane, -1),
    "every eighth of one bank": np.where(_lane % 8 == 0, 32 * _lane, -1),
    "pairs 1, odd lanes off": np.where(_lane % 2 == 0, _lane // 2 * 3, -1),
    "random of 8": None,
    "random of 64": None,
    "random of 1024": None,
    "random of 64, half": None,
    "random pairs": None,
}
# Global memory knows sectors only: where in them the bytes lie, and which are the same.
_OF_GLOBAL = (
    "consecutive", "one for all", "reversed", "stride 2", "stride 8", "stride 33", "from 1", "pairs 4",
    "8 rows of 128 bytes", "even lanes", "every eighth", "random of 64", "random of 1024", "random of 64, half",
)  # fmt: skip
_KINDS = {1: "b8", 2: "b16", 4: "b32", 8: "v2.b32", 16: "v4.b32"}
_ATOMICS = ("red.{space}.add.u32", "atom.{space}.add.u32", "atom.{space}.exch.b64", "red.{space}.max.s32")


def _elements(pattern: str, width: int) -> np.ndarray:
    """int64 (32,): which element of `width` bytes each lane accesses; -1 for none."""
    if pattern == "8 rows of 128 bytes":
        return _lane % 8 * (128 // width) + _lane // 8
    if not pattern.startswith("random"):
        return _ELEMENTS[pattern]
    bits = (random_bits(sum(map(ord, pattern)) + width, 2 * LANES) >> np.uint64(8)).astype(np.int64)
    if pattern == "random pairs":
        return bits[:LANES][_lane // 2] % 256
    chosen = bits[:LANES] % int(pattern.split()[2].rstrip(","))
    return np.where(bits[LANES:] % 2, chosen, -1) if pattern.endswith("half") else chosen


def _program(access: str) -> str:
    """A kernel whose lanes do `access` at `%at` (shared) or `%from` (global), with `%on` where they take part."""
    return f"""{HEADER}
.visible .entry access(.param .u64 offsets, .param .u64 memory, .param .u64 results)
{{
    .shared .align 1024 .b8 tile[{_MEMORY_BYTES}];
    .reg .pred %on;
    .reg .b16 %h;
    .reg .b32 %lane, %offset, %at, %a, %b, %c, %d;
    .reg .b64 %table, %from, %results, %wide, %l;
    mov.u32 %lane, %tid.x;
    ld.param.u64 %table, [offsets];
    ld.param.u64 %from, [memory];
    ld.param.u64 %results, [results];
    mul.wide.u32 %wide, %lane, 4;
    add.u64 %table, %table, %wide;
    add.u64 %results, %results, %wide;
    ld.global.u32 %offset, [%table];
    setp.ne.u32 %on, %offset, {_INACTIVE};
    mov.u32 %at, tile;
    add.u32 %at, %at, %offset;
    cvt.u64.u32 %wide, %offset;
    add.u64 %from, %from, %wide;
    mov.b32 %a, %lane;
    mov.b32 %b, %offset;
    xor.b32 %c, %a, %b;
    not.b32 %d, %a;
    cvt.u16.u32 %h, %lane;
    mov.b64 %l, {{%a, %b}};
    {access}
    xor.b32 %a, %a, %b;
    xor.b32 %c, %c, %d;
    xor.b32 %a, %a, %c;
    cvt.u32.u16 %b, %h;
    xor.b32 %a, %a, %b;
    mov.b64 {{%b, %c}}, %l;
    xor.b32 %b, %b, %c;
    xor.b32 %a, %a, %b;
    st.global.u32 [%results], %a;
    ret;
}}
"""


def _case(name: str, access: str, offsets: np.ndarray) -> Case:
    table = np.where(offsets < 0, _INACTIVE, offsets).astype(np.uint32).view(np.uint8)
    memory, results = np.zeros(_MEMORY_BYTES, np.uint8), np.zeros(4 * LANES, np.uint8)
    return Case(
        name,
        _program(access),
        "access",
        (Buffer(table), Buffer(memory), Buffer(results)),
        (Result("results", 2, 0, results.size),),
        block=LANES,
    )


def _register(width: int) -> str:
    return {1: "%h", 2: "%h", 4: "%a", 8: "{%a, %b}", 16: "{%a, %b, %c, %d}"}[width]


def _accesses(space: str) -> Iterator[tuple[str, str, int]]:
    """(name, PTX, bytes per lane) of loads, stores and atomics."""
    place = "[%at]" if space == "shared" else "[%from]"
    for width, kind in _KINDS.items():
        yield f"ld.{space}.{kind}", f"@%on ld.{space}.{kind} {_register(width)}, {place};", width
        yield f"st.{space}.{kind}", f"@%on st.{space}.{kind} {place}, {_register(width)};", width
    for template in _ATOMICS:
        opcode = template.format(space=space)
        register, width = ("%l", 8) if opcode.endswith("64") else ("%a", 4)
        result = f"{register}, " if opcode.startswith("atom") else ""
        yield opcode, f"@%on {opcode} {result}{place}, {register};", width


def _matrices() -> Iterator[Case]:
    """ldmatrix and stmatrix: lanes name rows of 16 bytes."""
    rows = {
        "rows back to back": 16 * _lane,
        "rows of 128 bytes": _lane % 8 * 128 + _lane // 8 * 16,
        "rows of 256 bytes": _lane % 8 * 256 + _lane // 8 * 16,
        "rows of 64 bytes": _lane % 8 * 64 + _lane // 8 * 16,
        "rows of 144 bytes": _lane % 8 * 144 + _lane // 8 * 16,
        "swizzled 128B": _lane % 8 * 128 + (_lane // 8 ^ _lane % 8) * 16,
        "swizzled 32B": _lane % 8 * 256 + (_lane // 8 ^ _lane // 4 % 2) * 16,
        "one row": 0 * _lane,
        "random rows": (random_bits(77, LANES) >> np.uint64(8)).astype(np.int64) % 256 * 16,
    }
    registers = {1: "{%a}", 2: "{%a, %b}", 4: "{%a, %b, %c, %d}"}
    for number, register in registers.items():
        form = f"sync.aligned.m8n8.x{number}.shared.b16"
        for name, offsets in rows.items():
            yield _case(f"ldmatrix.x{number}: {name}", f"ldmatrix.{form} {register}, [%at];", offsets)
            yield _case(f"stmatrix.x{number}: {name}", f"stmatrix.{form} [%at], {register};", offsets)


def cases() -> Iterator[Case]:
    for space, patterns in (("shared", _ELEMENTS), ("global", _OF_GLOBAL)):
        for opcode, access, width in _accesses(space):
            for pattern in patterns:
                elements = _elements(pattern, width)
                yield _case(f"{opcode}: {pattern}", access, np.where(elements < 0, -1, elements * width))
    yield from _matrices()
