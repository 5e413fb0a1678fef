"""The approximate functions: the ISA bounds their error and leaves the last bits open, so results differ a little."""

from __future__ import annotations

from collections.abc import Iterator

from tests.golden.case import Case
from tests.golden.elementwise import Form, kernels, one

FUNCTIONS = (
    *(
        f"{name}.approx{ftz}.f32"
        for name in ("rcp", "sqrt", "rsqrt", "sin", "cos", "lg2", "ex2")
        for ftz in ("", ".ftz")
    ),
    *(f"div.{name}{ftz}.f32" for name in ("approx", "full") for ftz in ("", ".ftz")),
    "tanh.approx.f32",
    "rcp.approx.ftz.f64",
    "rsqrt.approx.f64",
    "rsqrt.approx.ftz.f64",
    "tanh.approx.f16",
    "ex2.approx.f16",
    "tanh.approx.bf16",
    "ex2.approx.ftz.bf16",
)


def _form(instruction: str) -> Form:
    kind = instruction.rsplit(".", 1)[1]
    storage = {"f16": "b16", "bf16": "b16", "f32": "b32", "f64": "b64"}[kind]
    pattern = "all16" if storage == "b16" else f"near {kind}:0"
    sources = {"a": (storage, pattern)}
    if instruction.startswith("div"):
        sources["b"] = (storage, f"near {kind}:1")
    return one(instruction, storage, **sources)


def cases() -> Iterator[Case]:
    return kernels("approximate", [_form(instruction) for instruction in FUNCTIONS])
