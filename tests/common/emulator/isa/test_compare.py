"""setp, set, selp and slct (PTX ISA 9.7.6, 9.7.7)."""

from __future__ import annotations

import math
import operator

import numpy as np
import pytest

from common.emulator import UnsupportedInstruction
from tests.common.emulator.isa.instruction_case import Case, bits_of, check
from tests.common.emulator.ptx_kernels import run_lanes

INTEGERS = ("u16", "u32", "u64", "s16", "s32", "s64")
BITS = ("b16", "b32", "b64")
FLOATS = ("f16", "bf16", "f32", "f64")
ORDERED = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip
UNSIGNED = {"lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge}
FLOAT_OPERATORS = (*ORDERED, "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")
COMBINE = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}
SUBNORMAL = {"f16": 2.0**-24, "bf16": 2.0**-133, "f32": 2.0**-149, "f64": 2.0**-1074}
ONE = {"f16": 0x3C00, "bf16": 0x3F80, "f32": 0x3F800000}


def compare(name: str, a: float, b: float) -> bool:
    """The tables of PTX ISA 9.3.1.2."""
    unordered = math.isnan(a) or math.isnan(b)
    if name == "num":
        return not unordered
    if name == "nan":
        return unordered
    if name in ORDERED:
        return not unordered and ORDERED[name](a, b)
    return unordered or ORDERED[name[:2]](a, b)


def numbers(kind: str) -> list[float]:
    tiny = SUBNORMAL[kind]
    return [0.0, -0.0, 1.0, -1.0, 1.5, -2.5, tiny, -tiny, 64.0, math.inf, -math.inf, math.nan]


def encode(values: list[float], kind: str) -> np.ndarray:
    """Values as the array `run_lanes` takes for a float type."""
    if kind == "bf16":
        return (np.array(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return np.array(values, {"f16": np.float16, "f32": np.float32, "f64": np.float64}[kind])


def pairs(kind: str) -> tuple[list[float], list[float]]:
    values = numbers(kind)
    return [a for a in values for _ in values], [b for _ in values for b in values]


def flushed(value: float, kind: str) -> float:
    return math.copysign(0.0, value) if abs(value) == SUBNORMAL[kind] else value


# -- setp ----------------------------------------------------------------------------------------------------------

INTEGER_CASES = [
    Case(f"setp.{name}.{kind}", "pred", (kind, kind), function)
    for kind in INTEGERS
    for name, function in ORDERED.items()
]
INTEGER_CASES += [
    Case(f"setp.{name}.{kind}", "pred", (kind, kind), function)
    for kind in INTEGERS[:3]
    for name, function in UNSIGNED.items()
]
INTEGER_CASES += [
    Case(f"setp.{name}.{kind}", "pred", (kind, kind), ORDERED[name]) for kind in BITS for name in ("eq", "ne")
]


@pytest.mark.parametrize("case", INTEGER_CASES, ids=str)
def test_integer_comparison(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("kind", FLOATS)
def test_float_comparison(kind: str) -> None:
    a, b = pairs(kind)
    body = "\n".join(f"setp.{name}.{kind} %{name}, %a, %b;" for name in FLOAT_OPERATORS)
    inputs = {"a": (kind, encode(a, kind)), "b": (kind, encode(b, kind))}
    result = run_lanes(body, inputs, dict.fromkeys(FLOAT_OPERATORS, "pred"))
    for name in FLOAT_OPERATORS:
        assert result[name].tolist() == [compare(name, x, y) for x, y in zip(a, b)], name


@pytest.mark.parametrize("kind", ["f32", "f16"])
def test_float_comparison_with_flush(kind: str) -> None:
    a, b = pairs(kind)
    body = "\n".join(f"setp.{name}.ftz.{kind} %{name}, %a, %b;" for name in FLOAT_OPERATORS)
    inputs = {"a": (kind, encode(a, kind)), "b": (kind, encode(b, kind))}
    result = run_lanes(body, inputs, dict.fromkeys(FLOAT_OPERATORS, "pred"))
    for name in FLOAT_OPERATORS:
        expected = [compare(name, flushed(x, kind), flushed(y, kind)) for x, y in zip(a, b)]
        assert result[name].tolist() == expected, name


@pytest.mark.parametrize("combine", COMBINE)
@pytest.mark.parametrize("negated", [False, True])
@pytest.mark.parametrize("kind", ["s32", "f32"])
def test_setp_with_two_destinations_and_a_source_predicate(combine: str, negated: bool, kind: str) -> None:
    a, b, c = np.arange(64) % 4, np.arange(64) // 4 % 4, np.arange(64) // 16 % 2 == 0
    source = "!%c" if negated else "%c"
    body = f"""
    setp.lt.{combine}.{kind} %p|%q, %a, %b, {source};
    setp.lt.{combine}.{kind} _|%only, %a, %b, {source};
    setp.lt.{combine}.{kind} %single, %a, %b, {source};
    setp.lt.{kind} %plain|%other, %a, %b;
    mov.pred %own, %c;
    setp.lt.{combine}.{kind} %own|%c, %a, %b, %own;"""
    inputs = {"a": (kind, a), "b": (kind, b), "c": ("pred", c)}
    names = ("p", "q", "only", "single", "plain", "other", "own")
    result = run_lanes(body, inputs, dict.fromkeys(names, "pred"))
    t, condition = a < b, ~c if negated else c
    for name in ("p", "single"):
        np.testing.assert_array_equal(result[name], COMBINE[combine](t, condition))
    for name in ("q", "only"):
        np.testing.assert_array_equal(result[name], COMBINE[combine](~t, condition))
    np.testing.assert_array_equal(result["plain"], t)
    np.testing.assert_array_equal(result["other"], ~t)
    np.testing.assert_array_equal(result["own"], COMBINE[combine](t, c))


def packed(values: list[float], others: list[float], part: str) -> np.ndarray:
    low, high = (encode(v, part).view(np.uint16).astype(np.uint32) for v in (values, others))
    return low | high << 16


@pytest.mark.parametrize("kind, flush", [("f16x2", False), ("f16x2", True), ("bf16x2", False)])
@pytest.mark.parametrize("combine", ["", *COMBINE])
def test_packed_comparison(kind: str, flush: bool, combine: str) -> None:
    part = kind.removesuffix("x2")
    a, b = pairs(part)
    c = np.arange(len(a)) % 2 == 0
    inputs = {
        "a": (kind, packed(a, b, part)), "b": (kind, packed(b, b[::-1], part)), "c": ("pred", c),
    }  # fmt: skip
    tail = ", %c" if combine else ""
    middle = f".{combine}" if combine else ""
    suffix = ".ftz" if flush else ""
    body = "\n".join(f"setp.{name}{middle}{suffix}.{kind} %{name}|%{name}h, %a, %b{tail};" for name in FLOAT_OPERATORS)
    outputs = {f"{name}{half}": "pred" for name in FLOAT_OPERATORS for half in ("", "h")}
    result = run_lanes(body, inputs, outputs)
    clean = (lambda v: flushed(v, part)) if flush else (lambda v: v)
    for name in FLOAT_OPERATORS:
        for half, (x, y) in {"": (a, b), "h": (b, b[::-1])}.items():
            t = np.array([compare(name, clean(p), clean(q)) for p, q in zip(x, y)])
            expected = COMBINE[combine](t, c) if combine else t
            np.testing.assert_array_equal(result[name + half], expected, err_msg=name + half)


def test_packed_comparison_with_one_destination_gives_the_low_half() -> None:
    a, b = np.array([0x3C003C00] * 4, np.uint32), np.array([0x3C003C00, 0x3C000000, 0x00003C00, 0], np.uint32)
    result = run_lanes("setp.eq.f16x2 %p, %a, %b;", {"a": ("f16x2", a), "b": ("f16x2", b)}, {"p": "pred"})
    assert result["p"].tolist() == [True, False, True, False]


# -- set -----------------------------------------------------------------------------------------------------------

SOURCES = (*BITS, *INTEGERS, *FLOATS)


@pytest.mark.parametrize("source", SOURCES)
def test_set(source: str) -> None:
    """Every destination type of every source type, with and without a source predicate."""
    half = source in ("f16", "bf16")
    targets = ("u32", "s32", "bf16") + (("u16", "s16") if half else ("f32",)) + (("f16",) if source != "bf16" else ())
    if source in FLOATS:
        a, b = pairs(source)
        inputs = {"a": (source, encode(a, source)), "b": (source, encode(b, source))}
    else:
        a, b = [lane % 5 for lane in range(64)], [lane // 5 % 5 for lane in range(64)]
        inputs = {"a": (source, np.array(a)), "b": (source, np.array(b))}
    name = "eq" if source in BITS else "le"
    c = np.arange(len(a)) % 2 == 0
    body = "\n".join(
        f"set.{name}.{t}.{source} %{t}, %a, %b; set.{name}.xor.{t}.{source} %{t}x, %a, %b, %c;" for t in targets
    )
    outputs = {f"{t}{x}": f"u{bits_of(t) if t != 'bf16' else 16}" for t in targets for x in ("", "x")}
    result = run_lanes(body, inputs | {"c": ("pred", c)}, outputs)
    holds = np.array([compare(name, x, y) for x, y in zip(a, b)])
    for target in targets:
        true = ONE.get(target, 0xFFFF if target.endswith("16") else 0xFFFF_FFFF)
        assert result[target].tolist() == (holds * true).tolist(), target
        assert result[f"{target}x"].tolist() == ((holds ^ c) * true).tolist(), target


@pytest.mark.parametrize("source", ["f16x2", "bf16x2"])
def test_set_packed(source: str) -> None:
    part = source.removesuffix("x2")
    a, b = pairs(part)
    c = np.arange(len(a)) % 2 == 0
    inputs = {"a": (source, packed(a, b, part)), "b": (source, packed(b, a, part)), "c": ("pred", c)}
    targets = (source, "u32", "s32")
    body = "\n".join(f"set.ltu.{t}.{source} %{t}, %a, %b; set.ltu.or.{t}.{source} %{t}x, %a, %b, %c;" for t in targets)
    result = run_lanes(body, inputs, {f"{t}{x}": "u32" for t in targets for x in ("", "x")})
    low = np.array([compare("ltu", x, y) for x, y in zip(a, b)])
    high = np.array([compare("ltu", y, x) for x, y in zip(a, b)])
    for target in targets:
        true = ONE[part] if target == source else 0xFFFF
        np.testing.assert_array_equal(result[target], low * true | (high * true) << 16)
        np.testing.assert_array_equal(result[f"{target}x"], (low | c) * true | ((high | c) * true) << 16)


def test_set_flushes_subnormals() -> None:
    inputs = {"a": ("f32", encode([SUBNORMAL["f32"]] * 32, "f32"))}
    body = "set.eq.ftz.u32.f32 %d, %a, 0f00000000; set.eq.u32.f32 %e, %a, 0f00000000;"
    result = run_lanes(body, inputs, {"d": "u32", "e": "u32"})
    assert (result["d"] == 0xFFFF_FFFF).all() and (result["e"] == 0).all()


# -- selp, slct ----------------------------------------------------------------------------------------------------

SELECTED = (*BITS, *INTEGERS, "f32", "f64")


@pytest.mark.parametrize("kind", SELECTED)
def test_selp(kind: str) -> None:
    generator = np.random.default_rng(7)
    raw = f"u{bits_of(kind)}"
    a, b = (generator.integers(0, 1 << 16, 64) for _ in "ab")
    p = np.arange(64) % 3 == 0
    q = np.arange(64) % 2 == 0
    body = f"""
    selp.{kind} %d, %a, %b, %p;
    selp.{kind} %n, %a, %b, !%p;
    mov.b{bits_of(kind)} %s, %b;
    @%q selp.{kind} %s, %a, %s, %p;
    mov.b{bits_of(kind)} %t, %a;
    selp.{kind} %t, %t, %b, %p;"""
    inputs = {"a": (raw, a), "b": (raw, b), "p": ("pred", p), "q": ("pred", q)}
    result = run_lanes(body, inputs, dict.fromkeys(("d", "n", "s", "t"), raw))
    np.testing.assert_array_equal(result["d"], np.where(p, a, b))
    np.testing.assert_array_equal(result["n"], np.where(p, b, a))
    np.testing.assert_array_equal(result["s"], np.where(p & q, a, b))
    np.testing.assert_array_equal(result["t"], np.where(p, a, b))


@pytest.mark.parametrize("kind", SELECTED)
def test_slct(kind: str) -> None:
    raw = f"u{bits_of(kind)}"
    a, b = np.arange(1, 13), np.arange(101, 113)
    values = numbers("f32")
    integers = [0, 1, -1, 5, -5, -(1 << 31), (1 << 31) - 1, 2, -2, 3, -3, 4]
    body = f"""
    slct.{kind}.f32 %d, %a, %b, %x;
    slct.ftz.{kind}.f32 %e, %a, %b, %x;
    slct.{kind}.s32 %i, %a, %b, %y;"""
    inputs = {"a": (raw, a), "b": (raw, b), "x": ("f32", encode(values, "f32")), "y": ("s32", np.array(integers))}
    result = run_lanes(body, inputs, dict.fromkeys("dei", raw))
    assert result["d"].tolist() == [int(x if v >= 0 else y) for x, y, v in zip(a, b, values)]
    assert result["e"].tolist() == [int(x if flushed(v, "f32") >= 0 else y) for x, y, v in zip(a, b, values)]
    assert result["i"].tolist() == [int(x if v >= 0 else y) for x, y, v in zip(a, b, integers)]


def test_a_selected_signalling_nan_keeps_its_bits() -> None:
    inputs = {"a": ("u32", 0x7F800001), "p": ("pred", True)}
    result = run_lanes("selp.f32 %d, %a, 0f3F800000, %p;", inputs, {"d": "u32"})
    assert (result["d"] == 0x7F800001).all()


@pytest.mark.parametrize(
    "text",
    [
        "setp.lo.s32 %p, %a, %a",
        "setp.lt.b32 %p, %a, %a",
        "setp.equ.u32 %p, %a, %a",
        "setp.lo.f32 %p, %a, %a",
        "setp.eq.ftz.s32 %p, %a, %a",
        "setp.eq.ftz.bf16x2 %p|%q, %a, %a",
        "setp.u32 %p, %a, %a",
        "setp.eq.and.u32 %p, %a, %a",
        "setp.eq.u32 %p, %a, %a, %q",
        "setp.eq.nand.u32 %p, %a, %a, %q",
        "set.eq.u16.u32 %a, %a, %a",
        "set.eq.f64.u32 %a, %a, %a",
        "set.eq.f16x2.f16 %a, %a, %a",
        "set.eq.ftz.u32.s32 %a, %a, %a",
        "set.lt.u32.b32 %a, %a, %a",
        "set.lt.f16.bf16 %h, %h, %h",
        "set.lt.f32.f16 %a, %h, %h",
        "selp.pred %p, %p, %q, %p",
        "selp.ftz.f32 %a, %a, %a, %p",
        "slct.u32.u32 %a, %a, %a, %a",
        "slct.ftz.u32.s32 %a, %a, %a, %a",
    ],
)
def test_forms_that_do_not_exist_are_refused(text: str) -> None:
    with pytest.raises(UnsupportedInstruction):
        inputs = {"a": ("u32", 1), "h": ("u16", 1), "p": ("pred", True), "q": ("pred", True)}
        run_lanes(f"{text};", inputs, {"d": "u32"})
