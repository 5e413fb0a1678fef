"""Integer arithmetic, carries, bits, bytes, logic, shifts, comparisons and selections."""

from __future__ import annotations

from collections.abc import Iterator

from tests.golden.case import Case
from tests.golden.elementwise import Form, kernels, one

_KINDS = ("u16", "u32", "u64", "s16", "s32", "s64")
_SMALL = ("b32", "small32:7")
_SIZES = {"u16": "u32", "u32": "u64", "s16": "s32", "s32": "s64"}
_PERMUTE_MODES = ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")
_LOOK_UP_TABLES = (0x00, 0x01, 0x17, 0x1E, 0x3C, 0x55, 0x69, 0x80, 0x96, 0xAA, 0xB8, 0xC0, 0xCA, 0xE2, 0xE8, 0xF8, 0xFE)


def _width(kind: str) -> str:
    return f"b{kind[1:]}"


def _operand(kind: str, place: int) -> tuple[str, str]:
    return _width(kind), f"u{kind[1:]}:{place}"


def _binary(instruction: str, kind: str, result: str | None = None) -> Form:
    return one(f"{instruction}.{kind}", result or _width(kind), a=_operand(kind, 0), b=_operand(kind, 1))


def _ternary(instruction: str, kind: str, addend: str | None = None) -> Form:
    wide = addend or kind
    sources = {"a": _operand(kind, 0), "b": _operand(kind, 1), "c": _operand(wide, 2)}
    return one(f"{instruction}.{kind}", _width(wide), **sources)


def _arithmetic() -> Iterator[Form]:
    for kind in _KINDS:
        for instruction in ("add", "sub", "min", "max", "mul.lo", "mul.hi", "div", "rem"):
            yield _binary(instruction, kind)
        for instruction in ("mad.lo", "mad.hi", "sad"):
            yield _ternary(instruction, kind)
    for kind, wide in _SIZES.items():
        yield _binary("mul.wide", kind, _width(wide))
        yield _ternary("mad.wide", kind, wide)
    for kind in ("s16", "s32", "s64"):
        for instruction in ("abs", "neg"):
            yield one(f"{instruction}.{kind}", _width(kind), a=_operand(kind, 0))
    for instruction in ("add.sat", "sub.sat", "min.relu", "max.relu"):
        yield _binary(instruction, "s32")
    yield _ternary("mad.hi.sat", "s32")
    for kind in ("u16x2", "s16x2"):
        for instruction in ("add", "min", "max"):
            yield one(f"{instruction}.{kind}", "b32", a=("b32", "u32:0"), b=("b32", "u32:1"))
    for instruction in ("min.relu.s16x2", "max.relu.s16x2"):
        yield one(instruction, "b32", a=("b32", "u32:0"), b=("b32", "u32:1"))
    for kind in ("u32", "s32"):
        for part in ("lo", "hi"):
            yield _binary(f"mul24.{part}", kind)
            yield _ternary(f"mad24.{part}", kind)
    yield _ternary("mad24.hi.sat", "s32")
    for left in ("u32", "s32"):
        for right in ("u32", "s32"):
            for instruction in ("dp4a", "dp2a.lo", "dp2a.hi"):
                yield _ternary(f"{instruction}.{left}", right)


def _carries() -> Iterator[Form]:
    """Chains of three: carry out, carry in and out, carry in."""
    for kind in ("u32", "s32", "u64", "s64"):
        sources = {register: _operand(kind, place) for place, register in enumerate("abc")}
        results = {register: _width(kind) for register in ("d", "e", "f")}
        for add, addc in (("add", "addc"), ("sub", "subc")):
            text = f"{add}.cc.{kind} %d, %a, %b; {addc}.cc.{kind} %e, %b, %c; {addc}.{kind} %f, %c, %a;"
            yield Form(f"{add}.cc.{kind}", text, results, sources)
        for low, high in (("lo", "hi"), ("hi", "lo")):
            text = (
                f"mad.{low}.cc.{kind} %d, %a, %b, %c; madc.{high}.cc.{kind} %e, %b, %c, %a; "
                f"madc.{low}.{kind} %f, %c, %a, %b;"
            )
            yield Form(f"mad.{low}.cc.{kind}", text, results, sources)


def _bits() -> Iterator[Form]:
    for kind in ("b32", "b64"):
        source = _operand(kind, 0)
        for instruction in ("popc", "clz"):
            yield one(f"{instruction}.{kind}", "b32", a=source)
        yield one(f"brev.{kind}", kind, a=source)
        yield one(f"bfi.{kind}", kind, a=source, b=_operand(kind, 1), c=("b32", "small32:5"), e=("b32", "small32:6"))
    for kind in ("u32", "u64", "s32", "s64"):
        for instruction in ("bfind", "bfind.shiftamt"):
            yield one(f"{instruction}.{kind}", "b32", a=_operand(kind, 0))
        yield one(f"bfe.{kind}", _width(kind), a=_operand(kind, 0), c=("b32", "small32:5"), e=("b32", "small32:6"))
    for mode in ("clamp", "wrap"):
        for kind in ("u32", "s32"):
            yield one(f"szext.{mode}.{kind}", "b32", a=("b32", "u32:0"), c=_SMALL)
        yield one(f"bmsk.{mode}.b32", "b32", a=("b32", "small32:5"), c=("b32", "small32:6"))
        for side in ("l", "r"):
            yield one(f"shf.{side}.{mode}.b32", "b32", a=("b32", "u32:0"), b=("b32", "u32:1"), c=_SMALL)
    yield one("prmt.b32", "b32", a=("b32", "u32:0"), b=("b32", "u32:1"), c=("b32", "u32:2"))
    for mode in _PERMUTE_MODES:
        yield one(f"prmt.b32.{mode}", "b32", a=("b32", "u32:0"), b=("b32", "u32:1"), c=("b32", "seen32:3"))
    # Anything but an offset of 0 to 31 in magnitude finds nothing; the base is a bit number.
    text = (
        ".reg .b32 %x, %y; and.b32 %x, %b, 31; and.b32 %y, %c, 15; sub.s32 %y, %y, 8;"
        "setp.eq.s32 %z, %y, 0; @%z mov.u32 %x, 9; fns.b32 %d, %a, %x, %y;"
    )
    yield Form(
        "fns.b32",
        ".reg .pred %z; " + text,
        {"d": "b32"},
        {"a": ("b32", "u32:0"), "b": ("b32", "u32:1"), "c": ("b32", "u32:2")},
    )


def _logic() -> Iterator[Form]:
    for kind in ("b16", "b32", "b64"):
        for instruction in ("and", "or", "xor"):
            yield _binary(instruction, kind)
        for instruction in ("not", "cnot"):
            yield one(f"{instruction}.{kind}", kind, a=_operand(kind, 0))
        yield one(f"shl.{kind}", kind, a=_operand(kind, 0), c=_SMALL)
        for other in ("b", "u", "s"):
            yield one(f"shr.{other}{kind[1:]}", kind, a=_operand(kind, 0), c=_SMALL)
    sources = {register: _operand("b32", place) for place, register in enumerate("abc")}
    for table in _LOOK_UP_TABLES:
        yield Form(f"lop3.b32 {table:#04x}", f"lop3.b32 %d, %a, %b, %c, {table};", {"d": "b32"}, sources)
    for join in ("or", "and"):
        text = f".reg .pred %q; setp.lt.s32 %q, %a, %b; lop3.{join}.b32 %d|%e, %a, %b, %c, 0x96, %q;"
        yield Form(f"lop3.{join}.b32", text, {"d": "b32", "e": "pred"}, sources)


def _comparisons() -> Iterator[Form]:
    for kind in (*_KINDS, "b16", "b32", "b64"):
        operators = ("eq", "ne") if kind[0] == "b" else ("eq", "ne", "lt", "le", "gt", "ge")
        for operator in (*operators, *(("lo", "ls", "hi", "hs") if kind[0] == "u" else ())):
            yield _binary(f"setp.{operator}", kind, "pred")
            yield _binary(f"set.{operator}.u32", kind, "b32")
        text = f".reg .pred %q; setp.ne.{kind} %q, %a, %b; selp.{kind} %d, %a, %c, %q;"
        sources = {register: _operand(kind, place) for place, register in enumerate("abc")}
        yield Form(f"selp.{kind}", text, {"d": _width(kind)}, sources)
        text = f".reg .b32 %x; cvt.s32.s{kind[1:]} %x, %c; slct.{kind}.s32 %d, %a, %b, %x;"
        yield Form(f"slct.{kind}.s32", text, {"d": _width(kind)}, sources)
    for combine in ("and", "or", "xor"):
        text = f".reg .pred %q; setp.gt.s32 %q, %b, %a; setp.lt.{combine}.u32 %d|%e, %a, %b, %q;"
        sources = {"a": _operand("u32", 0), "b": _operand("u32", 1)}
        yield Form(f"setp.lt.{combine}.u32", text, {"d": "pred", "e": "pred"}, sources)


def cases() -> Iterator[Case]:
    return kernels("integer", [*_arithmetic(), *_carries(), *_bits(), *_logic(), *_comparisons()])
