"""Exchanges within a warp: shfl, vote, match, redux, elect, with full and partial membermasks."""

from __future__ import annotations

from collections.abc import Iterator

from tests.golden.case import Case
from tests.golden.elementwise import Form, kernels

_FULL = 0xFFFF_FFFF
_PARTS = (0x0000_FFFF, 0xA5C3_F00F)
_CLAMPS = {"up": (0, 0x1800, 0x1C00, 0x0007), "other": (0x1F, 0x181F, 0x1C1F, 0x0F, 0x100F)}
_VALUES = {"a": ("b32", "u32:0"), "b": ("b32", "small32:1")}


def _some_lanes(mask: int) -> str:
    """Sets %in to whether the lane is one of the mask's, and %d to zero for those that are not."""
    return (
        f".reg .pred %in; {{ .reg .b32 %bit; shr.u32 %bit, {mask}, %lane; and.b32 %bit, %bit, 1; "
        "setp.ne.u32 %in, %bit, 0; } mov.b32 %d, 0;"
    )


def _shuffles() -> Iterator[Form]:
    for mode in ("up", "down", "bfly", "idx"):
        for clamp in _CLAMPS["up" if mode == "up" else "other"]:
            text = f"shfl.sync.{mode}.b32 %d|%e, %a, %b, {clamp:#x}, {_FULL:#x};"
            yield Form(f"shfl.sync.{mode}.b32 {clamp:#x}", text, {"d": "b32", "e": "pred"}, _VALUES)
    # Lanes 0 to 15 read from each other.
    text = _some_lanes(0xFFFF) + ".reg .b32 %x; and.b32 %x, %b, 15; @%in shfl.sync.idx.b32 %d, %a, %x, 0x1f, 0xffff;"
    yield Form("shfl.sync.idx.b32 lanes 0xffff", text, {"d": "b32"}, _VALUES)


def _votes() -> Iterator[Form]:
    for mode in ("all", "any", "uni", "ballot"):
        kind = "b32" if mode == "ballot" else "pred"
        # A few lanes differ, one does, none does: by warp.
        vote = ".reg .pred %v; setp.gt.u32 %v, %b, %c;"
        sources = {"b": ("b32", "small32:1"), "c": ("b32", "lane32:2")}
        text = f"{vote} vote.sync.{mode}.{kind} %d, %v, {_FULL:#x};"
        few = ".reg .b32 %x; and.b32 %x, %c, 0x3f; setp.gt.u32 %v, %b, %x;"
        mixed = f".reg .pred %v; {few} vote.sync.{mode}.{kind} %d, %v, {_FULL:#x};"
        yield Form(f"vote.sync.{mode}", text, {"d": kind}, sources)
        yield Form(f"vote.sync.{mode} mixed", mixed, {"d": kind}, sources)
    for part in _PARTS:
        text = (
            f"{_some_lanes(part)} .reg .pred %v; setp.gt.u32 %v, %b, 31; @%in vote.sync.ballot.b32 %d, %v, {part:#x};"
        )
        yield Form(f"vote.sync.ballot lanes {part:#x}", text, {"d": "b32"}, _VALUES)


def _matches() -> Iterator[Form]:
    sources = {"a": ("b32", "seen32:1"), "c": ("b32", "lane32:2")}
    for kind in ("b32", "b64"):
        wide = ".reg .b64 %x, %y; mov.b64 %x, {%c, %a}; mov.b64 %y, {%a, %c};" if kind == "b64" else ""
        seen, same = ("%x", "%y") if kind == "b64" else ("%a", "%c")
        yield Form(
            f"match.any.sync.{kind}", f"{wide} match.any.sync.{kind} %d, {seen}, {_FULL:#x};", {"d": "b32"}, sources
        )
        for label, register in (("seen", seen), ("same", same)):
            text = f"{wide} match.all.sync.{kind} %d|%e, {register}, {_FULL:#x};"
            yield Form(f"match.all.sync.{kind} {label}", text, {"d": "b32", "e": "pred"}, sources)
    for part in _PARTS:
        text = f"{_some_lanes(part)} @%in match.any.sync.b32 %d, %a, {part:#x};"
        yield Form(f"match.any.sync.b32 lanes {part:#x}", text, {"d": "b32"}, sources)


def _reductions() -> Iterator[Form]:
    for operation, kinds in (
        *((operation, ("u32", "s32")) for operation in ("add", "min", "max")),
        *((operation, ("b32",)) for operation in ("and", "or", "xor")),
    ):
        for kind in kinds:
            name = f"redux.sync.{operation}.{kind}"
            yield Form(name, f"{name} %d, %a, {_FULL:#x};", {"d": "b32"}, _VALUES)
            for part in _PARTS:
                text = f"{_some_lanes(part)} @%in {name} %d, %a, {part:#x};"
                yield Form(f"{name} lanes {part:#x}", text, {"d": "b32"}, _VALUES)


def _leaders() -> Iterator[Form]:
    for mask in (_FULL, *_PARTS, 0xFFFF_0000):
        text = f"{_some_lanes(mask)} setp.ne.u32 %e, 0, 0; @%in elect.sync %d|%e, {mask:#x};"
        yield Form(f"elect.sync {mask:#x}", text, {"d": "b32", "e": "pred"}, _VALUES)


def cases() -> Iterator[Case]:
    return kernels("warp", [*_shuffles(), *_votes(), *_matches(), *_reductions(), *_leaders()])
