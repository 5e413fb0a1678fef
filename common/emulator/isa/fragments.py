"""Whole warps as rows: how the matrix instructions see registers (PTX ISA 9.7.14.5).

A matrix fragment spreads over the 32 lanes of a warp so that groups of four lanes hold a row: with a register seen as
(warps, 8, 4), the axes are the ISA's groupID and threadID_in_group.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from common.emulator.faults import DivergenceFault, UnsupportedInstruction
from common.emulator.isa.binder import Binder, size_of
from common.emulator.machine.mask import WARP, Mask
from common.emulator.ptx.module import Operand, Register, Vector

Selection = slice | np.ndarray


def whole_warps(m: Mask) -> Selection:
    """Index of the mask's warps into an array (warps of the CTA, ...). Raises DivergenceFault where a lane is missing.

    Warps at equal distances give a slice, so that indexing makes a view.
    """
    if m.where is True:
        return slice(None)
    if m.count != WARP * m.warps.size:
        raise DivergenceFault(
            "a matrix instruction needs all 32 lanes of its warps: some have exited or never existed", lanes=m.numbers
        )
    return _selection(m.warps.tobytes())


@lru_cache(maxsize=256)
def _selection(warps: bytes) -> Selection:
    numbers = np.frombuffer(warps, np.intp)
    step = int(numbers[1] - numbers[0]) if numbers.size > 1 else 1
    if (np.diff(numbers) == step).all():
        return slice(int(numbers[0]), int(numbers[-1]) + 1, step)
    return numbers


def words_of(f: list, slot: int, rows: Selection) -> np.ndarray:
    """A register of the selected warps: (warps, 32)."""
    return f[slot].reshape(-1, WARP)[rows]


def set_words(f: list, slot: int, rows: Selection, values: np.ndarray) -> None:
    """Writes (warps, 32) values to a register of the selected warps."""
    f[slot].reshape(-1, WARP)[rows] = values


def vector_items(operand: Operand) -> tuple[Operand, ...]:
    return operand.items if isinstance(operand, Vector) else (operand,)


def read_all(b: Binder, operand: Operand, kind: str) -> list[int]:
    """Slots of the registers of a vector operand or of a single one; UnsupportedInstruction for other widths."""
    items = vector_items(operand)
    for item in items:
        if not isinstance(item, Register) or item.bytes != size_of(kind):
            raise UnsupportedInstruction(f"a matrix fragment is made of .{kind} registers: {item} is none")
    return [b.read(item, kind) for item in items]


def write_all(b: Binder, operand: Operand, kind: str) -> list[int]:
    return [b.write(item, kind) for item in vector_items(operand)]
