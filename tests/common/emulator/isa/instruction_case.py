"""One instruction against a definition in Python integers: every form of use in one kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tests.common.emulator.ptx_kernels import run_lanes

LANES = 192
SENTINEL = 0x5A  # every byte of a destination before a predicated instruction
AMOUNTS = (0, 1, 2, 4, 5, 7, 8, 15, 16, 17, 23, 31, 32, 33, 47, 63, 64, 65, 127, 128, 255, 256, 1 << 31, (1 << 32) - 1)


def bits_of(kind: str) -> int:
    """Width of a PTX type in bits."""
    if kind == "pred":
        return 1
    return 32 if kind.endswith("x2") else int(kind.lstrip("busf"))


def as_number(bits: int, kind: str) -> int:
    """The integer that `bits` stand for: signed for the s types."""
    width = bits_of(kind)
    return bits - (1 << width) if kind.startswith("s") and not kind.endswith("x2") and bits >> (width - 1) else bits


@dataclass(frozen=True)
class Case:
    """`name` is the instruction with its modifiers, `oracle` gives the result (of any size: it wraps) from numbers.

    `amounts` are the positions of operands that are shift amounts, field positions or lengths. `tail` follows the last
    register operand. `nonzero` keeps zeros out of the last operand.
    """

    name: str
    result: str
    operands: tuple[str, ...]
    oracle: Callable[..., int]
    amounts: tuple[int, ...] = ()
    tail: str = ""
    nonzero: bool = False

    def __str__(self) -> str:
        return self.name + self.tail.replace(", ", "-")


def edges(kind: str) -> list[int]:
    """Bit patterns where integer instructions change their behaviour."""
    width = bits_of(kind)
    top = 1 << (width - 1)
    middle = 1 << (width // 2)
    values = [0, 1, 2, 3, top - 1, top, top + 1, 2 * top - 1, 2 * top - 2, middle, middle - 1, 0x5555_5555_5555_5555]
    return [value % (2 * top) for value in values]


def operand_values(case: Case, seed: int = 0) -> list[list[int]]:
    """Bits of each operand for every lane: pairs of edge values first, then random ones."""
    generator = np.random.default_rng(seed)
    columns = []
    for place, kind in enumerate(case.operands):
        chosen = list(AMOUNTS) if place in case.amounts else edges(kind)
        if case.nonzero and place == len(case.operands) - 1:
            chosen = [value for value in chosen if value]
        mask = (1 << bits_of(kind)) - 1
        stride = len(edges(kind)) ** place
        column = [chosen[lane // stride % len(chosen)] & mask for lane in range(LANES)]
        for lane in range(LANES * 2 // 3, LANES):
            drawn = int.from_bytes(generator.bytes(8), "little")
            column[lane] = (chosen[drawn % len(chosen)] if place in case.amounts else drawn) & mask
        if case.nonzero and place == len(case.operands) - 1:
            column = [value or 1 for value in column]
        columns.append(column)
    return columns


def literal(bits: int, kind: str) -> str:
    return str(as_number(bits, kind)) if kind.startswith("s") else hex(bits)


@dataclass(frozen=True)
class Built:
    """A case as a kernel: its body, inputs and outputs for `run_lanes`, and the expected outputs."""

    body: str
    inputs: dict[str, tuple[str, np.ndarray]]
    outputs: dict[str, str]
    expected: dict[str, np.ndarray]


def build(case: Case) -> Built:
    """The kernel with four uses: all lanes, some lanes (`@%go`), destination = first source, constant last source."""
    columns = operand_values(case)
    names = "abcd"[: len(columns)]
    sources = ", ".join(f"%{name}" for name in names)
    constant = columns[-1][LANES - 1]
    with_constant = ", ".join([*(f"%{name}" for name in names[:-1]), literal(constant, case.operands[-1])])
    width = bits_of(case.result)
    lines = [f"{case.name} %all, {sources}{case.tail};"]
    outputs = {"all": case.result, "some": case.result}
    if not case.operands[-1].endswith("x2"):  # ptxas takes no constants there
        outputs["const"] = case.result
        lines.append(f"{case.name} %const, {with_constant}{case.tail};")
    if case.result == "pred":
        lines.append("setp.eq.u32 %some, 0, 0;")
    else:
        lines.append(f"mov.b{width} %some, {hex(int.from_bytes(bytes([SENTINEL] * (width // 8)), 'little'))};")
    lines.append(f"@%go {case.name} %some, {sources}{case.tail};")
    if bits_of(case.operands[0]) == width and case.result != "pred":
        outputs["same"] = case.result
        rest = "".join(f", %{name}" for name in names[1:])
        lines.append(f"mov.b{width} %same, %a;\n{case.name} %same, %same{rest}{case.tail};")
    go = np.arange(LANES) % 3 != 1
    inputs = {name: (_plain(kind), _array(column, kind)) for name, kind, column in zip(names, case.operands, columns)}
    inputs["go"] = ("pred", go)
    rows = list(zip(*columns))
    results = _array([_apply(case, row) for row in rows], case.result)
    expected = {"all": results, "same": results}
    expected["const"] = _array([_apply(case, (*row[:-1], constant)) for row in rows], case.result)
    untouched = 1 if case.result == "pred" else int.from_bytes(bytes([SENTINEL] * (width // 8)), "little")
    expected["some"] = np.where(go, results, _array([untouched] * LANES, case.result))
    return Built("\n".join(lines), inputs, {n: _plain(k) for n, k in outputs.items()}, expected)


def check(case: Case) -> None:
    """Fails at the first lane and use of the instruction whose result differs from the definition."""
    built = build(case)
    actual = run_lanes(built.body, built.inputs, built.outputs)
    for name, values in actual.items():
        wrong = np.flatnonzero(values != built.expected[name])
        if wrong.size:
            lane = int(wrong[0])
            operands = [hex(int(values[lane])) for _, values in built.inputs.values()]
            raise AssertionError(
                f"{case} ({name}) lane {lane} of {operands}: {int(values[lane]):#x}, expected "
                f"{int(built.expected[name][lane]):#x}; {wrong.size} lanes differ"
            )


def _apply(case: Case, row: tuple[int, ...]) -> int:
    return int(case.oracle(*(as_number(bits, kind) for bits, kind in zip(row, case.operands))))


def _plain(kind: str) -> str:
    return kind if kind == "pred" else f"u{bits_of(kind)}"


def _array(values: list[int], kind: str) -> np.ndarray:
    if kind == "pred":
        return np.array([bool(value) for value in values])
    width = bits_of(kind)
    return np.array([value & ((1 << width) - 1) for value in values], f"u{width // 8}")
