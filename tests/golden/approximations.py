"""How far the approximate functions are from the truth: a GPU's, as captured, and the emulator's."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.golden.case import Buffer, Case

TABLE = Path(__file__).with_name("approximations.json")
MARKDOWN = Path(__file__).with_name("approximations.md")
_FORMATS = {
    "f16": (np.float16, 10, -14),
    "bf16": (None, 7, -126),
    "f32": (np.float32, 23, -126),
    "f64": (np.float64, 52, -1022),
}
_TRUTH: dict[str, Callable[..., np.ndarray]] = {
    "rcp": lambda a: 1 / a,
    "sqrt": np.sqrt,
    "rsqrt": lambda a: 1 / np.sqrt(a),
    "sin": np.sin,
    "cos": np.cos,
    "lg2": np.log2,
    "ex2": np.exp2,
    "tanh": np.tanh,
    "div": lambda a, b: a / b,
}
_ABSOLUTE = {  # functions whose absolute error the ISA bounds, and where
    "sin": (lambda a: np.abs(a) <= np.pi, "-pi to pi"),
    "cos": (lambda a: np.abs(a) <= np.pi, "-pi to pi"),
    "lg2": (lambda a: (a > 0.5) & (a < 2), "1/2 to 2"),
}
_BOUNDS = {  # PTX ISA 9.7.3 and 9.7.4
    "rcp.approx": "1 ulp",
    "sqrt.approx": "relative 2^-23",
    "rsqrt.approx": "relative 2^-22.9",
    "sin.approx": "2^-20.5",
    "cos.approx": "2^-20.5",
    "lg2.approx": "2^-22",
    "ex2.approx": "2 ulp",
    "div.approx": "2 ulp",
    "div.full": "2 ulp",
    "tanh.approx.f32": "relative 2^-11",
    "tanh.approx.f16": "absolute 2^-10.987",
    "tanh.approx.bf16": "absolute 2^-8",
    "ex2.approx.f16": "relative 2^-9.9",
    "ex2.approx.ftz.bf16": "relative 2^-7",
    "rcp.approx.ftz.f64": "none given",
    "rsqrt.approx.f64": "none given",
    "rsqrt.approx.ftz.f64": "none given",
}


@dataclass(frozen=True)
class Worst:
    """The largest error found: `unit` is "ulp" or "absolute"."""

    gpu: float
    emulator: float
    unit: str
    where: str


def _numbers(bits: np.ndarray, kind: str) -> np.ndarray:
    """Bytes of a format to float64, or longdouble for f64."""
    if kind == "bf16":
        return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return bits.view(_FORMATS[kind][0]).astype(np.longdouble if kind == "f64" else np.float64)


def worst_errors(case: Case, results: dict[str, np.ndarray]) -> dict[str, tuple[float, str, str]]:
    """The largest error of each function, its unit, and where: over all inputs whose true result is a normal number.

    `results`: bytes by name, of a case of `cases_approximate`.
    """
    found = {}
    with np.errstate(all="ignore"):
        for name, data in results.items():
            kind, function = name.rsplit(".", 1)[1], name.split(".", 1)[0]
            inputs = [_numbers(argument.initial, kind) for argument in case.args if isinstance(argument, Buffer)]
            inputs = inputs[: 2 if function == "div" else 1]
            found[name] = _worst(name, function, kind, inputs, _numbers(data, kind))
    return found


def _worst(name: str, function: str, kind: str, inputs: list, got: np.ndarray) -> tuple[float, str, str]:
    _, mantissa, least = _FORMATS[kind]
    if name in ("rcp.approx.ftz.f64", "rsqrt.approx.ftz.f64"):  # the upper words of operand and result
        mantissa = 20
        inputs = [_numbers(inputs[0].astype(np.float64).view(np.uint64) & np.uint64(0xFFFFFFFF << 32), "f64")]
    truth = _TRUTH[function](*inputs)
    normal = np.isfinite(truth) & np.isfinite(got) & (np.abs(truth) >= 2.0**least)
    for values in inputs:
        normal &= (np.abs(values) >= 2.0**least) & np.isfinite(values)
    where = "normal results"
    if function in _ABSOLUTE:
        inside, where = _ABSOLUTE[function]
        return float(np.abs(got - truth)[normal & inside(inputs[0])].max()), "absolute", where
    if name.startswith("div.approx"):
        normal &= np.abs(inputs[1]) <= 2.0**126
        where = "divisor up to 2^126"
    exponent = np.frexp(truth.astype(np.float64))[1] - 1
    errors = np.abs(got - truth) / np.ldexp(np.ones_like(truth), exponent - mantissa)
    return float(errors[normal].max()), "ulp" if mantissa != 20 else "ulp of the upper word", where


def write(gpu: dict, emulator: dict, device: str) -> None:
    """Writes the table, as JSON and as Markdown."""
    rows = {name: Worst(gpu[name][0], emulator[name][0], *gpu[name][1:]) for name in gpu}
    TABLE.write_text(json.dumps({name: vars(row) for name, row in rows.items()}, indent=1) + "\n")
    lines = [
        "Largest error found over the inputs of `cases_approximate.py`, against float64 (f64: against long double).",
        "",
        f"| function | {device} | emulator | unit | over | the ISA's bound |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        bound = next(text for start, text in sorted(_BOUNDS.items(), reverse=True) if name.startswith(start))
        lines.append(f"| `{name}` | {row.gpu:.3g} | {row.emulator:.3g} | {row.unit} | {row.where} | {bound} |")
    MARKDOWN.write_text("\n".join(lines) + "\n")


def load() -> dict[str, Worst]:
    return {name: Worst(**row) for name, row in json.loads(TABLE.read_text()).items()}


def classes(data: np.ndarray, name: str) -> np.ndarray:
    """What each result is: NaN, infinity, zero or another number, and its sign; the signs of NaNs do not count.

    Of sines and cosines only whether it is a NaN: far from zero a GPU's have large errors.
    """
    numbers = _numbers(data, name.rsplit(".", 1)[1])
    if name.startswith(("sin", "cos")):
        return np.isnan(numbers)
    kind = 1 * np.isnan(numbers) + 2 * np.isinf(numbers) + 3 * (numbers == 0)
    return np.where(np.isnan(numbers), kind, kind + 4 * np.signbit(numbers))
