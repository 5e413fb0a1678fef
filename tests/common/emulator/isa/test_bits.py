"""Bit and byte instructions against Python integers (PTX ISA 9.7.1.14 to 9.7.1.22, 9.7.9.7)."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from common.emulator import UnsupportedInstruction
from tests.common.emulator.isa.instruction_case import Case, bits_of, check
from tests.common.emulator.ptx_kernels import run_lanes

ALL_ONES = 0xFFFF_FFFF
PERMUTE_TABLES = {  # PTX ISA 9.7.9.7: source bytes of d.b3 d.b2 d.b1 d.b0 for selectors 0 to 3
    "f4e": ("3210", "4321", "5432", "6543"),
    "b4e": ("5670", "6701", "7012", "0123"),
    "rc8": ("0000", "1111", "2222", "3333"),
    "ecl": ("3210", "3211", "3222", "3333"),
    "ecr": ("0000", "1110", "2210", "3210"),
    "rc16": ("1010", "3232", "1010", "3232"),
}


def reverse(value: int, width: int) -> int:
    return int(f"{value:0{width}b}"[::-1], 2)


def find_highest(value: int, kind: str, shift_amount: bool) -> int:
    value = ~value if value < 0 else value
    if value == 0:
        return ALL_ONES
    place = value.bit_length() - 1
    return bits_of(kind) - 1 - place if shift_amount else place


def counted(number: int, width: int) -> int:
    """A position or length as an H200 takes it: modulo 256 for 32-bit operands, as it is for those of 64 bits."""
    return number & 0xFF if width == 32 else min(number, 256)


def extract(value: int, position: int, length: int, kind: str) -> int:
    """The loop of PTX ISA 9.7.1.19."""
    width = bits_of(kind)
    top, position, length = width - 1, counted(position, width), counted(length, width)
    bit = [value >> i & 1 for i in range(top + 1)]
    sign = 0 if kind.startswith("u") or length == 0 else bit[min(position + length - 1, top)]
    return sum((bit[position + i] if i < length and position + i <= top else sign) << i for i in range(top + 1))


def insert(field: int, value: int, position: int, length: int, width: int) -> int:
    """The loop of PTX ISA 9.7.1.20."""
    position, length = counted(position, width), counted(length, width)
    for i in range(length):
        if position + i < width:
            value = value & ~(1 << (position + i)) | (field >> i & 1) << (position + i)
    return value


def extend(value: int, width: int, kind: str, clamp: bool) -> int:
    """PTX ISA 9.7.1.21."""
    bits = width & 31
    too_large = width >= 32 and clamp
    mask = 0 if too_large else ALL_ONES << bits & ALL_ONES
    sign = kind == "s32" and bits != 0 and not too_large and value >> ((bits - 1) & 31) & 1
    return value & ~mask & ALL_ONES | (mask if sign else 0)


def bit_mask(position: int, width: int, clamp: bool) -> int:
    """PTX ISA 9.7.1.22."""
    a, b = position & 31, width & 31
    first, second = ALL_ONES << a & ALL_ONES, ALL_ONES << (a + b) & ALL_ONES
    overflow = a + b >= 32
    if clamp and position >= 32:
        first, overflow = 0, True
    if clamp and width >= 32:
        overflow = True
    if overflow:
        second = 0
    elif b == 0:
        second = ALL_ONES
    return first & ~second & ALL_ONES


def find_nth(mask: int, base: int, offset: int) -> int:
    """PTX ISA 9.7.1.17."""
    if offset == 0:
        return base if mask >> base & 1 else ALL_ONES
    count, step, place = abs(offset) - 1, 1 if offset > 0 else -1, base
    while 0 <= place < 32:
        if mask >> place & 1:
            if count == 0:
                return place
            count -= 1
        place += step
    return ALL_ONES


def permute(low: int, high: int, selector: int) -> int:
    source, result = high << 32 | low, 0
    for i in range(4):
        nibble = selector >> (4 * i) & 0xF
        byte = source >> (8 * (nibble & 7)) & 0xFF
        result |= ((0xFF if byte >> 7 else 0) if nibble & 8 else byte) << (8 * i)
    return result


def permute_by_mode(low: int, high: int, selector: int, mode: str) -> int:
    source = high << 32 | low
    row = PERMUTE_TABLES[mode][selector & 3]
    return sum((source >> (8 * int(byte)) & 0xFF) << (8 * i) for i, byte in enumerate(reversed(row)))


def cases() -> list[Case]:
    result = []
    for kind in ("b32", "b64"):
        width, field = bits_of(kind), (kind, kind, "u32", "u32")
        result += [
            Case(f"popc.{kind}", "u32", (kind,), int.bit_count),
            Case(f"clz.{kind}", "u32", (kind,), lambda a, n=width: n - a.bit_length()),
            Case(f"brev.{kind}", kind, (kind,), lambda a, n=width: reverse(a, n)),
            Case(f"bfi.{kind}", kind, field, lambda a, b, c, d, n=width: insert(a, b, c, d, n), (2, 3)),
        ]
    for kind in ("u32", "u64", "s32", "s64"):
        result += [
            Case(f"bfind.{kind}", "u32", (kind,), lambda a, k=kind: find_highest(a, k, False)),
            Case(f"bfind.shiftamt.{kind}", "u32", (kind,), lambda a, k=kind: find_highest(a, k, True)),
            Case(f"bfe.{kind}", kind, (kind, "u32", "u32"), lambda a, b, c, k=kind: extract(a, b, c, k), (1, 2)),
        ]
    for mode in ("clamp", "wrap"):
        clamp = mode == "clamp"
        result.append(Case(f"bmsk.{mode}.b32", "b32", ("u32", "u32"), lambda a, b, c=clamp: bit_mask(a, b, c), (0, 1)))
        for kind in ("u32", "s32"):
            operands = (kind, "u32")
            oracle = partial(extend, kind=kind, clamp=clamp)
            result.append(Case(f"szext.{mode}.{kind}", kind, operands, oracle, (1,)))
    result.append(Case("prmt.b32", "b32", ("b32",) * 3, permute))
    for mode in PERMUTE_TABLES:
        result.append(Case(f"prmt.b32.{mode}", "b32", ("b32",) * 3, partial(permute_by_mode, mode=mode)))
    return result


CASES = cases()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_instruction(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_extraction_at_a_constant_place(kind: str) -> None:
    values = [0x80000001_9ABCDEF0, 0x7FFFFFFF_FFFFFFFF, 0x01234567_89ABCDEF, (1 << 64) - 1] * 8
    values = [value & ((1 << bits_of(kind)) - 1) for value in values]
    places = [
        (position, length) for position in (0, 1, 7, 31, 32, 60, 63, 64, 255, 257) for length in (0, 1, 8, 32, 64, 255)
    ]
    raw = f"u{bits_of(kind)}"
    body = "\n".join(f"bfe.{kind} %d{i}, %a, {position}, {length};" for i, (position, length) in enumerate(places))
    inputs = {"a": (raw, np.array(values, object))}
    result = run_lanes(body, inputs, {f"d{i}": raw for i in range(len(places))})
    for i, (position, length) in enumerate(places):
        expected = [extract(value, position, length, kind) for value in values]
        assert [int(x) for x in result[f"d{i}"]] == expected, (position, length)


@pytest.mark.parametrize(
    "selector", [0x3210, 0x7654, 0x5410, 0x7632, 0x0123, 0x4321, 0x2107, 0xFFFF, 0x8A9B, 0xC840, 0x10000]
)
def test_permute_with_a_constant_selector(selector: int) -> None:
    generator = np.random.default_rng(5)
    low, high = (generator.integers(0, 1 << 32, 64, dtype=np.uint64).astype(np.uint32) for _ in "ab")
    result = run_lanes(f"prmt.b32 %d, %a, %b, {selector};", {"a": ("b32", low), "b": ("b32", high)}, {"d": "b32"})
    assert [int(x) for x in result["d"]] == [permute(int(a), int(b), selector) for a, b in zip(low, high)]


def test_find_nth_set_bit() -> None:
    generator = np.random.default_rng(6)
    masks = generator.integers(0, 1 << 32, 512, dtype=np.uint64) & generator.integers(0, 1 << 32, 512, dtype=np.uint64)
    bases, offsets = generator.integers(0, 32, 512), generator.integers(-12, 13, 512)
    masks[:4], bases[:4], offsets[:4] = 0xAAAAAAAA, (3, 3, 2, 2), (1, -1, 1, -1)  # the examples of the ISA
    inputs = {"a": ("b32", masks.astype(np.uint32)), "b": ("b32", bases), "c": ("b32", offsets)}
    found = run_lanes("fns.b32 %d, %a, %b, %c;", inputs, {"d": "b32"})["d"]
    assert found[:4].tolist() == [3, 3, 3, 1]
    assert found.tolist() == [find_nth(int(m), int(b), int(o)) for m, b, o in zip(masks, bases, offsets)]


@pytest.mark.parametrize(
    "text",
    [
        "popc.u32 %a, %a",
        "clz.b16 %a, %a",
        "brev.u32 %a, %a",
        "bfind.b32 %a, %a",
        "bfind.shiftamt.wrap.u32 %a, %a",
        "fns.u32 %a, %a, %a, %a",
        "bfe.b32 %a, %a, %a, %a",
        "bfi.u32 %a, %a, %a, %a, %a",
        "szext.u32 %a, %a, %a",
        "bmsk.b32 %a, %a, %a",
        "prmt.b32.f8e %a, %a, %a, %a",
        "prmt.u32 %a, %a, %a, %a",
    ],
)
def test_forms_that_do_not_exist_are_refused(text: str) -> None:
    with pytest.raises(UnsupportedInstruction):
        run_lanes(f"{text};", {"a": ("u32", 1)}, {"d": "u32"})
