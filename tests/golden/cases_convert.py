"""Every form of `cvt` that ptxas accepts for sm_90a (`cvt_forms.txt`), those from 16 bits and fewer on all values."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.golden.case import Case
from tests.golden.elementwise import Form, kernels, one

_STORAGE = {
    **dict.fromkeys(("u8", "s8", "u16", "s16", "f16", "bf16", "e4m3x2", "e5m2x2"), "b16"),
    **dict.fromkeys(("u32", "s32", "f32", "tf32", "f16x2", "bf16x2"), "b32"),
    **dict.fromkeys(("u64", "s64", "f64"), "b64"),
}
_PATTERNS = {"u32": "u32:0", "s32": "u32:0", "u64": "u64:0", "s64": "u64:0", "f32": "f32:0", "f64": "f64:0"}
_TO_WIDER_REGISTER = ("u8.s32", "rzi.u8.f32", "s8.s32", "rzi.s8.f32", "u16.s32", "rzi.s16.f32")
_PAIRED = ("f16x2", "bf16x2", "e4m3x2", "e5m2x2")


def _form(instruction: str) -> Form:
    *_, to, source = instruction.removesuffix(".b32").split(".")
    if instruction.startswith("cvt.pack"):
        sources = {"a": ("b32", "u32:1"), "b": ("b32", "u32:2"), "c": ("b32", "u32:3")}
        if not instruction.endswith(".b32"):
            del sources["c"]
        return one(instruction, "b32", **sources)
    if to in _PAIRED and source == "f32":
        return one(instruction, _STORAGE[to], a=("b32", "f32:0"), b=("b32", "f32:1"))
    if source == "f16x2":
        return one(instruction, _STORAGE[to], a=("b32", "all16x2"))
    return one(instruction, _STORAGE[to], a=(_STORAGE[source], _PATTERNS.get(source, "all16")))


def _wider(conversion: str) -> Form:
    """A conversion to less than the register's width: the ISA extends the value."""
    source = conversion.rsplit(".", 1)[1]
    text = f"cvt.{conversion} %d, %a;"
    return Form(f"cvt.{conversion} to 64 bits", text, {"d": "b64"}, {"a": ("b32", _PATTERNS[source])})


def cases() -> Iterator[Case]:
    listed = Path(__file__).with_name("cvt_forms.txt").read_text().split()
    forms = [_form(instruction) for instruction in listed]
    return kernels("convert", [*forms, *(_wider(conversion) for conversion in _TO_WIDER_REGISTER)])
