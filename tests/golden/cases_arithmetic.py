"""Floating-point arithmetic: every rounding, .ftz, .sat, .relu and .oob, min and max with their NaN rules, comparisons.

The approximate functions are in `cases_approximate.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.golden.case import Case
from tests.golden.elementwise import Form, kernels, one

_ROUNDINGS = ("rn", "rz", "rm", "rp")
_STORAGE = {"f16": "b16", "bf16": "b16", "f16x2": "b32", "bf16x2": "b32", "f32": "b32", "f64": "b64"}
_OPERATORS = ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")


def _sources(kind: str, count: int) -> dict[str, tuple[str, str]]:
    return {register: (_STORAGE[kind], f"{kind}:{place}") for place, register in enumerate("abc"[:count])}


def _plain(instruction: str, kind: str, count: int) -> Form:
    return one(f"{instruction}.{kind}", _STORAGE[kind], **_sources(kind, count))


def _unary(instruction: str, kind: str) -> Form:
    chosen = {"f16": "all16", "bf16": "all16", "f16x2": "all16x2", "bf16x2": "all16x2"}.get(kind, f"{kind}:0")
    return one(f"{instruction}.{kind}", _STORAGE[kind], a=(_STORAGE[kind], chosen))


def _rounded() -> Iterator[Form]:
    for rounding in _ROUNDINGS:
        for operation, count in (("add", 2), ("sub", 2), ("mul", 2), ("fma", 3)):
            for modifier in ("", ".ftz", ".sat", ".ftz.sat"):
                yield _plain(f"{operation}.{rounding}{modifier}", "f32", count)
            yield _plain(f"{operation}.{rounding}", "f64", count)
        for modifier in ("", ".ftz"):
            yield _plain(f"div.{rounding}{modifier}", "f32", 2)
            yield _unary(f"rcp.{rounding}{modifier}", "f32")
            yield _unary(f"sqrt.{rounding}{modifier}", "f32")
        yield _plain(f"div.{rounding}", "f64", 2)
        yield _unary(f"rcp.{rounding}", "f64")
        yield _unary(f"sqrt.{rounding}", "f64")


def _half() -> Iterator[Form]:
    for kind in ("f16", "f16x2"):
        for operation in ("add", "sub", "mul"):
            for modifier in ("", ".rn", ".ftz", ".sat", ".ftz.sat"):
                yield _plain(operation + modifier, kind, 2)
        for modifier in ("", ".ftz", ".sat", ".ftz.sat", ".relu", ".ftz.relu", ".oob", ".oob.relu"):
            yield _plain(f"fma.rn{modifier}", kind, 3)
    for kind in ("bf16", "bf16x2"):
        for operation in ("add", "sub", "mul"):
            yield _plain(operation, kind, 2)
        for modifier in ("", ".relu", ".oob", ".oob.relu"):
            yield _plain(f"fma.rn{modifier}", kind, 3)


def _out_of_bounds_nan() -> Iterator[Form]:
    """fma.oob with every 16-bit pattern in each place: which NaNs count as out of bounds."""
    for kind, unit in (("f16", "0x3C00"), ("bf16", "0x3F80")):
        for place in range(3):
            operands = ["%one"] * 3
            operands[place] = "%a"
            text = f".reg .b16 %one; mov.b16 %one, {unit}; fma.rn.oob.{kind} %d, {', '.join(operands)};"
            yield Form(f"fma.rn.oob.{kind} operand {place}", text, {"d": "b16"}, {"a": ("b16", "all16")})


def _signs() -> Iterator[Form]:
    for operation in ("neg", "abs"):
        for instruction, kind in (
            *((f"{operation}{ftz}", kind) for ftz in ("", ".ftz") for kind in ("f32", "f16", "f16x2")),
            *((operation, kind) for kind in ("f64", "bf16", "bf16x2")),
        ):
            yield _unary(instruction, kind)
    for kind in ("f32", "f64"):
        yield _plain("copysign", kind, 2)
        for test in ("finite", "infinite", "number", "notanumber", "normal", "subnormal"):
            yield one(f"testp.{test}.{kind}", "pred", a=(_STORAGE[kind], f"{kind}:0"))


def _minimum() -> Iterator[Form]:
    for operation in ("min", "max"):
        for modifier in ("", ".ftz", ".NaN", ".xorsign.abs", ".NaN.xorsign.abs", ".ftz.NaN.xorsign.abs"):
            yield _plain(operation + modifier, "f32", 2)
        yield _plain(operation, "f64", 2)
        for kind in ("f16", "bf16", "f16x2", "bf16x2"):
            flush = (".ftz",) if kind[0] == "f" else ()
            for modifier in ("", ".NaN", ".xorsign.abs", ".NaN.xorsign.abs", *flush):
                yield _plain(operation + modifier, kind, 2)


def _compared() -> Iterator[Form]:
    for operator in _OPERATORS:
        for instruction, kind in (
            *((f"setp.{operator}{ftz}", kind) for ftz in ("", ".ftz") for kind in ("f32", "f16")),
            *((f"setp.{operator}", kind) for kind in ("f64", "bf16")),
        ):
            yield one(f"{instruction}.{kind}", "pred", **_sources(kind, 2))
        for kind in ("f16x2", "bf16x2"):
            text = f"setp.{operator}.{kind} %d|%e, %a, %b;"
            yield Form(f"setp.{operator}.{kind}", text, {"d": "pred", "e": "pred"}, _sources(kind, 2))
            yield one(f"set.{operator}.{kind}.{kind}", "b32", **_sources(kind, 2))
    for kind in ("f32", "f64", "f16", "bf16"):
        for result in ("u32", "s32"):
            yield one(f"set.ltu.{result}.{kind}", "b32", **_sources(kind, 2))
    yield one("set.gt.f32.f32", "b32", **_sources("f32", 2))
    for flush in ("", ".ftz"):
        yield one(f"slct{flush}.b32.f32", "b32", a=("b32", "u32:0"), b=("b32", "u32:1"), c=("b32", "f32:0"))


def _nans() -> Iterator[Form]:
    """Which NaN comes out where several go in."""
    for kind in ("f32", "f64", "f16", "bf16"):
        sources = {register: (_STORAGE[kind], f"nan {kind}:{place}") for place, register in enumerate("abc")}
        two = [operation + (".rn" if operation in ("add", "mul") else "") for operation in ("add", "mul", "min", "max")]
        for instruction, count in (*((operation, 2) for operation in two), ("fma.rn", 3)):
            operands = ", ".join(f"%{register}" for register in ("d", *"abc"[:count]))
            name = f"{instruction}.{kind}"
            yield Form(f"{name} of NaNs", f"{name} {operands};", {"d": _STORAGE[kind]}, sources)


def cases() -> Iterator[Case]:
    forms = [*_nans(), *_rounded(), *_half(), *_out_of_bounds_nan(), *_signs(), *_minimum(), *_compared()]
    return kernels("arithmetic", forms)
