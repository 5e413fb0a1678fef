"""Reads disassembled machine code for tests: its instructions, and the loops around one of them."""

from __future__ import annotations

import re

DIVISION = ("I2F", "F2I", "MUFU", "IMAD.HI", "CALL")  # what an integer division is made of
_LABEL = re.compile(r"^(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.+?)\s*;?\s*$")
_BRANCH = re.compile(r"\bBRA\S*\s.*`\((\.L_x_\d+)\)")


def instructions(sass: str) -> list[str]:
    """Every instruction in order, with its predicate, without address: `@!P0 BRA `(.L_x_6)`."""
    return _read(sass)[0]


def opcodes(code: list[str]) -> list[str]:
    """What each instruction does, without predicate and operands: `UTMALDG.2D`."""
    return [re.sub(r"^@\S+\s+", "", text).split()[0] for text in code]


def count(code: list[str], *names: str) -> int:
    """How many instructions have an opcode that starts with one of `names`."""
    return sum(name.startswith(names) for name in opcodes(code))


def innermost_loop(sass: str, opcode: str) -> list[str]:
    """The instructions of the smallest loop around the last instruction whose opcode starts with `opcode`.

    A loop ends with a conditional branch back. What runs only while a barrier is waited for stands behind the end of
    the kernel and jumps back without a condition: that is no loop. Empty when no loop contains the instruction.
    """
    code, labels = _read(sass)
    at = max(i for i, name in enumerate(opcodes(code)) if name.startswith(opcode))
    spans = []
    for end, text in enumerate(code):
        target = _BRANCH.search(text)
        conditional = text.startswith("@") or "BRA.U" in text
        if target and conditional and labels[target[1]] <= at <= end:
            spans.append((end - labels[target[1]], labels[target[1]], end))
    if not spans:
        return []
    _, first, last = min(spans)
    return code[first : last + 1]


def _read(sass: str) -> tuple[list[str], dict[str, int]]:
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := _LABEL.match(line.strip()):
            labels[label[1]] = len(code)
        elif found := _INSTRUCTION.search(line):
            code.append(found[1])
    return code, labels
