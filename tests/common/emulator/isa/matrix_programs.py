"""What the tests of matrix instructions share: fragments, lane by lane, from the formulas of PTX ISA 9.7.14.5."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Place = Callable[[int, int, int], tuple[int, int]]  # (i, groupID, threadID_in_group) to (row, column)


@dataclass(frozen=True)
class Layout:
    """Where element i of a lane's fragments of A, B and C lies, for one shape and width of the multiplicands."""

    a: Place
    b: Place
    c: Place


def _c8(i: int, group: int, thread: int) -> tuple[int, int]:
    return group, thread * 2 + i


def _c16(i: int, group: int, thread: int) -> tuple[int, int]:
    return group if i < 2 else group + 8, thread * 2 + (i & 1)


LAYOUTS = {
    ("m8n8k4", 64): Layout(lambda i, g, t: (g, t), lambda i, g, t: (t, g), _c8),
    ("m16n8k4", 64): Layout(lambda i, g, t: ((g, g + 8)[i], t), lambda i, g, t: (t, g), _c16),
    ("m16n8k8", 64): Layout(
        lambda i, g, t: (g if i in (0, 2) else g + 8, t if i in (0, 1) else t + 4),
        lambda i, g, t: ((t, t + 4)[i], g),
        _c16,
    ),
    ("m16n8k16", 64): Layout(
        lambda i, g, t: (g, i * 2 + t) if i % 2 == 0 else (g + 8, i * 2 - 2 + t),
        lambda i, g, t: (t + i * 4, g),
        _c16,
    ),
    ("m16n8k4", 32): Layout(lambda i, g, t: ((g, g + 8)[i], t), lambda i, g, t: (t, g), _c16),
    ("m16n8k8", 32): Layout(
        lambda i, g, t: (g if i in (0, 2) else g + 8, t if i in (0, 1) else t + 4),
        lambda i, g, t: ((t, t + 4)[i], g),
        _c16,
    ),
    ("m16n8k8", 16): Layout(
        lambda i, g, t: (g if i < 2 else g + 8, t * 2 + (i & 1)), lambda i, g, t: (t * 2 + i, g), _c16
    ),
    ("m16n8k16", 16): Layout(
        lambda i, g, t: (g if 0 <= i < 2 or 4 <= i < 6 else g + 8, t * 2 + (i & 1) + (0 if i < 4 else 8)),
        lambda i, g, t: (t * 2 + (i & 1) + (0 if i < 2 else 8), g),
        _c16,
    ),
    ("m8n8k16", 8): Layout(lambda i, g, t: (g, t * 4 + i), lambda i, g, t: (t * 4 + i, g), _c8),
    ("m16n8k16", 8): Layout(
        lambda i, g, t: (g if i < 4 else g + 8, t * 4 + (i & 3)), lambda i, g, t: (t * 4 + i, g), _c16
    ),
    ("m16n8k32", 8): Layout(
        lambda i, g, t: (g if 0 <= i < 4 or 8 <= i < 12 else g + 8, t * 4 + (i & 3) + (0 if i < 8 else 16)),
        lambda i, g, t: (t * 4 + (i & 3) + (0 if i < 4 else 16), g),
        _c16,
    ),
    ("m8n8k32", 4): Layout(lambda i, g, t: (g, t * 8 + i), lambda i, g, t: (t * 8 + i, g), _c8),
    ("m16n8k32", 4): Layout(
        lambda i, g, t: (g if i < 8 else g + 8, t * 8 + (i & 7)), lambda i, g, t: (t * 8 + (i & 7), g), _c16
    ),
    ("m16n8k64", 4): Layout(
        lambda i, g, t: (g if 0 <= i < 8 or 16 <= i < 24 else g + 8, t * 8 + (i & 7) + (0 if i < 16 else 32)),
        lambda i, g, t: (t * 8 + (i & 7) + (0 if i < 8 else 32), g),
        _c16,
    ),
}


def pack(matrices: np.ndarray, place: Place, elements: int, bits: int) -> np.ndarray:
    """Registers of all lanes, (registers, 32 * warps), from one matrix of element bits per warp (warps, rows, columns).

    Each lane holds `elements` of them, the first in the lowest bits of its first register.
    """
    width = max(bits, 32)
    per_register = width // bits
    registers = np.zeros((elements // per_register, 32 * len(matrices)), f"u{width // 8}")
    for warp, matrix in enumerate(matrices):
        for lane in range(32):
            for i in range(elements):
                row, column = place(i, lane >> 2, lane % 4)
                value = int(matrix[row, column]) << bits * (i % per_register)
                registers[i // per_register, 32 * warp + lane] |= registers.dtype.type(value)
    return registers


def unpack(registers: np.ndarray, place: Place, rows: int, columns: int, bits: int) -> np.ndarray:
    """The inverse of `pack`: element bits (warps, rows, columns); fails unless the lanes hold every element."""
    width = 8 * registers.dtype.itemsize
    per_register = width // bits
    matrices = np.zeros((registers.shape[1] // 32, rows, columns), f"u{max(bits, 8) // 8}")
    seen = np.zeros(matrices.shape, bool)
    for lane in range(registers.shape[1]):
        for i in range(registers.shape[0] * per_register):
            row, column = place(i, lane % 32 >> 2, lane % 4)
            word = int(registers[i // per_register, lane]) >> bits * (i % per_register)
            matrices[lane // 32, row, column] = word & ((1 << bits) - 1)
            seen[lane // 32, row, column] = True
    assert seen.all()
    return matrices
