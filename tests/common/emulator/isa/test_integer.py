"""Integer arithmetic against Python integers (PTX ISA 9.7.1, 9.7.2)."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.emulator import UnsupportedInstruction
from tests.common.emulator.isa.instruction_case import Case, bits_of, check
from tests.common.emulator.ptx_kernels import run_lanes

INTEGERS = ("u16", "u32", "u64", "s16", "s32", "s64")
SIGNED = ("s16", "s32", "s64")
WIDENED = {"u16": "u32", "u32": "u64", "s16": "s32", "s32": "s64"}


def clamp(value: int) -> int:
    return max(-(1 << 31), min((1 << 31) - 1, value))


def low_24(value: int, kind: str) -> int:
    value &= 0xFFFFFF
    return value - (1 << 24) if kind == "s32" and value >> 23 else value


def mad24_saturated(a: int, b: int, c: int) -> int:
    high = (low_24(a, "s32") * low_24(b, "s32") >> 16) & 0xFFFF_FFFF
    return clamp((high - (1 << 32) if high >> 31 else high) + c)


def halves(operation, signed: bool):
    """The operation on both 16-bit halves."""

    def part(value: int, place: int) -> int:
        half = value >> (16 * place) & 0xFFFF
        return half - 0x10000 if signed and half >> 15 else half

    return lambda a, b: sum((operation(part(a, i), part(b, i)) & 0xFFFF) << (16 * i) for i in range(2))


def parts(value: int, width: int, signed: bool) -> list[int]:
    result = [value >> (width * i) & ((1 << width) - 1) for i in range(32 // width)]
    return [x - (1 << width) if signed and x >> (width - 1) else x for x in result]


def truncated_quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def simple_cases() -> list[Case]:
    cases = []
    for kind in INTEGERS:
        two, three, width = (kind, kind), (kind, kind, kind), bits_of(kind)
        cases += [
            Case(f"add.{kind}", kind, two, lambda a, b: a + b),
            Case(f"sub.{kind}", kind, two, lambda a, b: a - b),
            Case(f"min.{kind}", kind, two, min),
            Case(f"max.{kind}", kind, two, max),
            Case(f"mul.lo.{kind}", kind, two, lambda a, b: a * b),
            Case(f"mul.hi.{kind}", kind, two, lambda a, b, n=width: a * b >> n),
            Case(f"mad.lo.{kind}", kind, three, lambda a, b, c: a * b + c),
            Case(f"mad.hi.{kind}", kind, three, lambda a, b, c, n=width: (a * b >> n) + c),
            Case(f"sad.{kind}", kind, three, lambda a, b, c: abs(a - b) + c),
            Case(f"div.{kind}", kind, two, truncated_quotient, nonzero=True),
            Case(f"rem.{kind}", kind, two, lambda a, b: a - b * truncated_quotient(a, b), nonzero=True),
        ]
    for kind in SIGNED:
        cases += [Case(f"abs.{kind}", kind, (kind,), abs), Case(f"neg.{kind}", kind, (kind,), lambda a: -a)]
    for kind, wide in WIDENED.items():
        cases += [
            Case(f"mul.wide.{kind}", wide, (kind, kind), lambda a, b: a * b),
            Case(f"mad.wide.{kind}", wide, (kind, kind, wide), lambda a, b, c: a * b + c),
        ]
    return cases


def special_cases() -> list[Case]:
    s32 = ("s32", "s32", "s32")
    cases = [
        Case("add.sat.s32", "s32", s32[:2], lambda a, b: clamp(a + b)),
        Case("sub.sat.s32", "s32", s32[:2], lambda a, b: clamp(a - b)),
        Case("mad.hi.sat.s32", "s32", s32, lambda a, b, c: clamp((a * b >> 32) + c)),
        Case("min.relu.s32", "s32", s32[:2], lambda a, b: max(min(a, b), 0)),
        Case("max.relu.s32", "s32", s32[:2], lambda a, b: max(a, b, 0)),
        Case("min.relu.s16x2", "s16x2", ("s16x2",) * 2, halves(lambda a, b: max(min(a, b), 0), True)),
        Case("max.relu.s16x2", "s16x2", ("s16x2",) * 2, halves(lambda a, b: max(a, b, 0), True)),
        Case("mad24.hi.sat.s32", "s32", s32, mad24_saturated),
    ]
    for kind, signed in (("u16x2", False), ("s16x2", True)):
        cases += [
            Case(f"add.{kind}", kind, (kind, kind), halves(lambda a, b: a + b, signed)),
            Case(f"min.{kind}", kind, (kind, kind), halves(min, signed)),
            Case(f"max.{kind}", kind, (kind, kind), halves(max, signed)),
        ]
    for kind in ("u32", "s32"):
        for part, shift in (("lo", 0), ("hi", 16)):

            def product(a: int, b: int, kind: str = kind, shift: int = shift) -> int:
                return low_24(a, kind) * low_24(b, kind) >> shift

            cases += [
                Case(f"mul24.{part}.{kind}", kind, (kind, kind), product),
                Case(f"mad24.{part}.{kind}", kind, (kind,) * 3, lambda a, b, c, product=product: product(a, b) + c),
            ]
    return cases


def dot(a: int, b: int, c: int, *, width: int, left: str, right: str, chosen: slice) -> int:
    signed_parts = zip(parts(a, width, left == "s32"), parts(b, 8, right == "s32")[chosen])
    return c + sum(x * y for x, y in signed_parts)


def dot_cases() -> list[Case]:
    cases = []
    for left, right in itertools.product(("u32", "s32"), repeat=2):
        for name, width, chosen in (("dp4a", 8, slice(4)), ("dp2a.lo", 16, slice(2)), ("dp2a.hi", 16, slice(2, 4))):
            oracle = partial(dot, width=width, left=left, right=right, chosen=chosen)
            cases.append(Case(f"{name}.{left}.{right}", "u32", ("u32",) * 3, oracle))
    return cases


CASES = simple_cases() + special_cases() + dot_cases()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_instruction(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("kind", INTEGERS)
def test_division_by_zero_gives_what_hardware_gives(kind: str) -> None:
    width = bits_of(kind)
    dividends = np.array([0, 1, 5, (1 << width) - 7, 1 << (width - 1)], object)
    unsigned = f"u{width}"
    body = f"div.{kind} %q, %a, %z; rem.{kind} %r, %a, %z; div.{kind} %qc, %a, 0;"
    result = run_lanes(
        body, {"a": (unsigned, dividends), "z": (unsigned, 0)}, {"q": unsigned, "r": unsigned, "qc": unsigned}
    )
    assert (result["q"] == (1 << width) - 1).all()
    assert (result["qc"] == (1 << width) - 1).all()
    assert (result["r"] == (1 << width) - 1).all()


# -- extended precision --------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, (1 << 128) - 1), st.integers(0, (1 << 128) - 1)), min_size=1, max_size=8))
@settings(max_examples=15, deadline=None)
@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("opcode", ["add", "sub"])
def test_long_addition_and_subtraction(opcode: str, kind: str, pairs: list[tuple[int, int]]) -> None:
    width = bits_of(kind)
    words = 128 // width
    chain = [f"{opcode}.cc.{kind} %d0, %a0, %b0;"]
    chain += [f"{opcode}c.cc.{kind} %d{i}, %a{i}, %b{i};" for i in range(1, words)]
    chain += [f"{opcode}c.{kind} %top, %zero, 0;"]
    unsigned = f"u{width}"
    inputs = {"zero": (unsigned, 0)}
    for i in range(words):
        inputs[f"a{i}"] = (unsigned, np.array([a >> (width * i) for a, _ in pairs], object))
        inputs[f"b{i}"] = (unsigned, np.array([b >> (width * i) for _, b in pairs], object))
    result = run_lanes(
        "\n".join(chain), inputs, {"top": unsigned} | {f"d{i}": unsigned for i in range(words)}, lanes=len(pairs)
    )
    for lane, (a, b) in enumerate(pairs):
        exact = (a + b if opcode == "add" else a - b) & ((1 << (128 + width)) - 1)
        value = sum(int(result[f"d{i}"][lane]) << (width * i) for i in range(words))
        assert value | int(result["top"][lane]) << 128 == exact


@pytest.mark.parametrize("kind", ["u32", "u64"])
def test_long_multiplication(kind: str) -> None:
    """[r3,r2,r1,r0] = [a1,a0] * [b1,b0], the example of PTX ISA 9.7.2.6."""
    width = bits_of(kind)
    generator = np.random.default_rng(3)
    mask = (1 << (2 * width)) - 1
    pairs = [(mask, mask), (mask, 1), (0, mask)]
    pairs += [tuple(int.from_bytes(generator.bytes(width // 4), "little") for _ in "ab") for _ in range(29)]
    body = f"""
    mul.lo.{kind} %r0, %a0, %b0;
    mul.hi.{kind} %r1, %a0, %b0;
    mad.lo.cc.{kind} %r1, %a1, %b0, %r1;
    madc.hi.{kind} %r2, %a1, %b0, 0;
    mad.lo.cc.{kind} %r1, %a0, %b1, %r1;
    madc.hi.cc.{kind} %r2, %a0, %b1, %r2;
    addc.{kind} %r3, 0, 0;
    mad.lo.cc.{kind} %r2, %a1, %b1, %r2;
    madc.hi.{kind} %r3, %a1, %b1, %r3;"""
    inputs = {}
    for i in range(2):
        inputs[f"a{i}"] = (kind, np.array([a >> (width * i) for a, _ in pairs], object))
        inputs[f"b{i}"] = (kind, np.array([b >> (width * i) for _, b in pairs], object))
    result = run_lanes(body, inputs, {f"r{i}": kind for i in range(4)})
    for lane, (a, b) in enumerate(pairs):
        assert sum(int(result[f"r{i}"][lane]) << (width * i) for i in range(4)) == a * b


@pytest.mark.parametrize("name", ["mad.lo.cc.s32", "mad.hi.cc.s32", "madc.lo.s32", "madc.lo.cc.s64", "madc.hi.s64"])
def test_signed_multiply_add_with_carry(name: str) -> None:
    kind = name.rsplit(".", 1)[1]
    width, unsigned = bits_of(kind), kind.replace("s", "u")
    generator = np.random.default_rng(4)
    a, b, c = ([int(x) for x in generator.integers(-(1 << 63), 1 << 63, 64) >> (64 - width)] for _ in "abc")
    body = f"add.cc.u32 %t, %k, 0xFFFFFFFF; {name} %d, %a, %b, %c; addc.u32 %out, 0, 0;"
    carry = np.arange(64) % 2
    inputs = {name: (unsigned, np.array(values, object)) for name, values in zip("abc", (a, b, c))}
    result = run_lanes(body, inputs | {"k": ("u32", carry)}, {"t": "u32", "d": unsigned, "out": "u32"})
    mask = (1 << width) - 1
    for lane in range(64):
        product = a[lane] * b[lane] >> (width if ".hi" in name else 0) & mask
        total = product + (c[lane] & mask) + (int(carry[lane]) if name.startswith("madc") else 0)
        assert int(result["d"][lane]) == total & mask
        assert int(result["out"][lane]) == (total >> width if ".cc" in name else carry[lane])


def test_the_carry_is_kept_per_lane_under_a_predicate() -> None:
    body = "add.cc.u32 %d, %a, 0; @%p add.cc.u32 %d, %a, 1; addc.u32 %out, 0, 0;"
    p = np.arange(64) % 2 == 0
    result = run_lanes(body, {"a": ("u32", 0xFFFFFFFF), "p": ("pred", p)}, {"d": "u32", "out": "u32"}, lanes=64)
    np.testing.assert_array_equal(result["out"], p.astype(np.uint32))


# -- forms that do not exist ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "add.sat.u32 %a, %a, %a",
        "add.u8 %a, %a, %a",
        "add.wide.u32 %a, %a, %a",
        "sub.u16x2 %a, %a, %a",
        "mul.u32 %a, %a, %a",
        "mul.wide.u64 %w, %w, %w",
        "mul.lo.sat.s32 %a, %a, %a",
        "mad.lo.sat.s32 %a, %a, %a, %a",
        "mad.hi.sat.u32 %a, %a, %a, %a",
        "min.relu.u32 %a, %a, %a",
        "max.relu.u16x2 %a, %a, %a",
        "abs.u32 %a, %a",
        "neg.u32 %a, %a",
        "div.full.s32 %a, %a, %a",
        "rem.sat.s32 %a, %a, %a",
        "mul24.wide.s32 %a, %a, %a",
        "mul24.hi.sat.s32 %a, %a, %a",
        "mad24.lo.sat.s32 %a, %a, %a, %a",
        "addc.sat.u32 %a, %a, %a",
        "add.cc.u16 %a, %a, %a",
        "mad.wide.cc.u32 %a, %a, %a, %a",
        "madc.u32 %a, %a, %a, %a",
        "sad.sat.u32 %a, %a, %a, %a",
        "dp4a.lo.u32.u32 %a, %a, %a, %a",
        "dp2a.u32.u32 %a, %a, %a, %a",
        "vadd.u32.u32.u32 %a, %a, %a",
        "add.u64 %w, %a, %w",
        "add.u32 %w, %a, %a",
    ],
)
def test_forms_that_do_not_exist_are_refused(text: str) -> None:
    with pytest.raises(UnsupportedInstruction):
        run_lanes(f"{text};", {"a": ("u32", 1), "w": ("u64", 1)}, {"d": "u32"})
