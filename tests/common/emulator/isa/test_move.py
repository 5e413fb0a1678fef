"""`mov` in all its forms (PTX ISA 9.7.9.3, 9.7.9.4)."""

from __future__ import annotations

import numpy as np
import pytest

from common.emulator import UnsupportedInstruction
from tests.common.emulator.ptx_kernels import run_lanes

GO = np.arange(64) % 3 != 0
GENERATOR = np.random.default_rng(8)


def draw(width: int) -> np.ndarray:
    return GENERATOR.integers(0, 1 << 64, 64, dtype=np.uint64).astype(f"u{width // 8}")


@pytest.mark.parametrize("kind", ["b16", "u16", "s16", "b32", "u32", "s32", "f32", "b64", "u64", "s64", "f64"])
def test_register_to_register(kind: str) -> None:
    raw = f"u{kind[1:]}"
    values = draw(int(kind[1:]))
    zero = {"f32": "0f00000000", "f64": "0d0000000000000000"}.get(kind, "0")
    body = f"mov.{kind} %d, %a; mov.{kind} %e, %d; @%go mov.{kind} %e, {zero};"
    result = run_lanes(body, {"a": (raw, values), "go": ("pred", GO)}, {"d": raw, "e": raw})
    np.testing.assert_array_equal(result["d"], values)
    np.testing.assert_array_equal(result["e"], np.where(GO, 0, values))


def test_wide_registers() -> None:
    values, others = GENERATOR.integers(0, 1 << 63, (2, 64, 2), dtype=np.uint64)
    inputs = {"a": ("b128", values), "b": ("b128", others), "go": ("pred", GO)}
    result = run_lanes("mov.b128 %d, %a; @%go mov.b128 %d, %b;", inputs, {"d": "b128"})
    np.testing.assert_array_equal(result["d"], np.where(GO[:, None], others, values))


@pytest.mark.parametrize(
    "text, kind, bits",
    [
        ("mov.u32 %d, 0xFFFFFFFF", "u32", 0xFFFF_FFFF),
        ("mov.s32 %d, -1", "u32", 0xFFFF_FFFF),
        ("mov.u16 %d, 0xABCD", "u16", 0xABCD),
        ("mov.u64 %d, 0x123456789ABCDEF0", "u64", 0x1234_5678_9ABC_DEF0),
        ("mov.f32 %d, 0f3FC00000", "u32", 0x3FC0_0000),
        ("mov.f32 %d, 1.5", "u32", 0x3FC0_0000),
        ("mov.f64 %d, 0d3FF8000000000000", "u64", 0x3FF8_0000_0000_0000),
        ("mov.b32 %d, 0f3FC00000", "u32", 0x3FC0_0000),
    ],
)
def test_constants(text: str, kind: str, bits: int) -> None:
    assert (run_lanes(f"{text};", {}, {"d": kind})["d"] == bits).all()


def test_predicates() -> None:
    result = run_lanes(
        "mov.pred %d, %p; mov.pred %e, !%p; mov.pred %one, 1; mov.pred %zero, 0; mov.pred %minus, -1;",
        {"p": ("pred", GO)},
        dict.fromkeys(("d", "e", "one", "zero", "minus"), "pred"),
    )
    np.testing.assert_array_equal(result["d"], GO)
    np.testing.assert_array_equal(result["e"], ~GO)
    assert result["one"].all() and not result["zero"].any() and result["minus"].all()


@pytest.mark.parametrize("scalar, element, count", [(32, 16, 2), (64, 32, 2), (64, 16, 4)])
def test_pack_and_unpack(scalar: int, element: int, count: int) -> None:
    raw, part = f"u{scalar}", f"u{element}"
    values, parts = draw(scalar), [draw(element) for _ in range(count)]
    names = [f"x{i}" for i in range(count)]
    body = f"""
    mov.b{scalar} %packed, {{{", ".join(f"%i{name}" for name in names)}}};
    mov.b{scalar} {{{", ".join(f"%{name}" for name in names)}}}, %whole;
    mov.b{scalar} %some, %whole;
    @%go mov.b{scalar} %some, {{{", ".join(f"%i{name}" for name in names)}}};
    mov.b{scalar} {{{", ".join(["_"] * (count - 1))}, %last}}, %whole;
    mov.b{element} %first, 7;
    @%go mov.b{scalar} {{%first{", _" * (count - 1)}}}, %whole;"""
    inputs = {f"i{name}": (part, values) for name, values in zip(names, parts)}
    inputs |= {"whole": (raw, values), "go": ("pred", GO)}
    outputs = {"packed": raw, "some": raw, "last": part, "first": part} | dict.fromkeys(names, part)
    result = run_lanes(body, inputs, outputs)
    joined = np.stack(parts, axis=1).view(f"u{scalar // 8}")[:, 0]
    split = values.view(f"u{element // 8}").reshape(64, count)
    np.testing.assert_array_equal(result["packed"], joined)
    np.testing.assert_array_equal(result["some"], np.where(GO, joined, values))
    for place, name in enumerate(names):
        np.testing.assert_array_equal(result[name], split[:, place])
    np.testing.assert_array_equal(result["last"], split[:, -1])
    np.testing.assert_array_equal(result["first"], np.where(GO, split[:, 0], 7))


@pytest.mark.parametrize("scalar, count", [(16, 2), (32, 4)])
def test_bytes(scalar: int, count: int) -> None:
    raw, values = f"u{scalar}", draw(scalar)
    names = [f"%b{i}" for i in range(count)]
    body = f"""
    .reg .b8 {", ".join(names)};
    mov.b{scalar} {{{", ".join(names)}}}, %a;
    mov.b{scalar} %d, {{{", ".join(reversed(names))}}};"""
    result = run_lanes(body, {"a": (raw, values)}, {"d": raw})
    np.testing.assert_array_equal(result["d"], values.byteswap())


@pytest.mark.parametrize("element, count", [(64, 2), (32, 4)])
def test_wide_vectors(element: int, count: int) -> None:
    part = f"u{element}"
    whole = GENERATOR.integers(0, 1 << 63, (64, 2), dtype=np.uint64)
    parts = [draw(element) for _ in range(count)]
    names = [f"x{i}" for i in range(count)]
    body = f"""
    mov.b128 {{{", ".join(f"%{name}" for name in names)}}}, %whole;
    mov.b128 %packed, {{{", ".join(f"%i{name}" for name in names)}}};
    mov.b128 %some, %whole;
    @%go mov.b128 %some, %packed;"""
    inputs = {f"i{name}": (part, values) for name, values in zip(names, parts)}
    inputs |= {"whole": ("b128", whole), "go": ("pred", GO)}
    result = run_lanes(body, inputs, {"packed": "b128", "some": "b128"} | dict.fromkeys(names, part))
    joined = np.stack(parts, axis=1).view(np.uint64)
    split = whole.view(f"u{element // 8}")
    np.testing.assert_array_equal(result["packed"], joined)
    np.testing.assert_array_equal(result["some"], np.where(GO[:, None], joined, whole))
    for place, name in enumerate(names):
        np.testing.assert_array_equal(result[name], split[:, place])


def test_special_registers() -> None:
    result = run_lanes(
        "mov.u32 %lane, %laneid; mov.u16 %x, %tid.x; mov.b32 %mask, %lanemask_lt; mov.u64 %c, %clock64;"
        " mov.b64 {%lo, %hi}, %clock64;",
        {},
        {"lane": "u32", "x": "u16", "mask": "u32", "c": "u64", "lo": "u32", "hi": "u32"},
        lanes=64,
    )
    np.testing.assert_array_equal(result["lane"], np.arange(64) % 32)
    np.testing.assert_array_equal(result["x"], np.arange(64))
    np.testing.assert_array_equal(result["mask"], (1 << (np.arange(64) % 32)) - 1)
    later = result["hi"].astype(np.uint64) << np.uint64(32) | result["lo"]
    assert (later > result["c"]).all()


def test_addresses_of_variables() -> None:
    body = """
    .reg .b64 %at; .shared .align 16 .b32 own[8];
    mov.u64 %at, table+8;
    ld.global.u32 %g, [%at];
    mov.u32 %s, own;
    mov.u32 %t, own+12;
    mov.u64 %wide, own;"""
    result = run_lanes(
        body, {}, {"g": "u32", "s": "u32", "t": "u32", "wide": "u64"}, variables=".global .u32 table[4] = {5, 6, 7, 8};"
    )
    assert (result["g"] == 7).all()
    np.testing.assert_array_equal(result["t"], result["s"] + 12)
    np.testing.assert_array_equal(result["wide"], result["s"])


def test_addresses_of_functions_differ() -> None:
    functions = ".func one() { ret; }\n.func two() { ret; }"
    result = run_lanes("mov.u64 %d, one; mov.u64 %e, two;", {}, {"d": "u64", "e": "u64"}, variables=functions)
    assert (result["d"] != result["e"]).all() and (result["d"] != 0).all()


@pytest.mark.parametrize(
    "text",
    [
        "mov.b8 %a, %a",
        "mov.u32 %w, %a",
        "mov.u64 %w, %a",
        "mov.u32 %p, %a",
        "mov.sat.u32 %a, %a",
        "mov.b64 %w, {%a, %a, %a}",
        "mov.b64 %w, {%w, %a}",
        "mov.b64 {%a, %w}, %w",
        "mov.b32 {%a, %a}, %a",
        "mov.b32 %a, nowhere",
    ],
)
def test_forms_that_do_not_exist_are_refused(text: str) -> None:
    with pytest.raises(UnsupportedInstruction):
        run_lanes(f"{text};", {"a": ("u32", 1), "w": ("u64", 1), "p": ("pred", True)}, {"d": "u32"})
