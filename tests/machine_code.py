"""Reads a kernel's SASS for the tests: which instructions its loops hold."""

from __future__ import annotations

import re

DIVISION = ("I2F", "F2I", "MUFU", "IMAD.HI", "CALL")  # what an integer division is made of


def loops(sass: str) -> list[list[str]]:
    """The instructions of every loop, outer loops with those of the inner ones: from a label to the branch back."""
    lines = [re.sub(r"/\*[0-9a-f]+\*/", "", line).strip() for line in sass.splitlines()]
    labels = {line[:-1]: number for number, line in enumerate(lines) if re.fullmatch(r"\.L_x_\d+:", line)}
    found = []
    for number, line in enumerate(lines):
        branch = re.search(r"\bBRA\b.*\((\.L_x_\d+)\)", line)
        if branch and labels.get(branch.group(1), number) < number:
            found.append([inside for inside in lines[labels[branch.group(1)] : number + 1] if inside.endswith(";")])
    return found


def innermost_loop(sass: str, opcode: str) -> list[str]:
    """The shortest loop that has `opcode`."""
    return min((loop for loop in loops(sass) if count(loop, opcode)), key=len)


def count(instructions: list[str], *opcodes: str) -> int:
    """How many instructions have one of these opcodes, with any modifiers."""
    return sum(any(re.search(rf"\b{re.escape(opcode)}\b", line) for opcode in opcodes) for line in instructions)
