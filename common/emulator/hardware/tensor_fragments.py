"""Which registers of a warp hold which cells of tensor memory: the shapes of tcgen05.ld and .st (PTX ISA 9.7.16.2.3).

With t the lane in the warp and r the number of the register, a register holds the cell (lane, column)

    32x32b    t,                             r
    16x64b    t / 4 + 8 (t % 2),             t / 2 % 2 + 2 r
    16x128b   t / 4 + 8 (r % 2),             t % 4 + 4 (r / 2)
    16x256b   t / 4 + 8 (r / 2 % 2),         2 (t % 4) + r % 2 + 8 (r / 4)
    16x32bx2  t % 16,                        r, behind the split for t >= 16

which is what CUTLASS's `copy_traits_sm100.hpp` says. With pack::16b and unpack::16b a "cell" is the low halves of two
neighbouring columns. So every shape is a permutation of the axes of the rectangle of cells.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MOST_REGISTERS = 128


@dataclass(frozen=True)
class Shape:
    """`lanes` by `unit` columns per repetition, in each of `halves` rectangles.

    `split` are the axes that lanes and columns fall into (-1 for the repetitions), `order` puts those that number the
    registers first, then those that number the threads; the latter are `threads` axes.
    """

    lanes: int
    unit: int
    split: tuple[int, ...]
    order: tuple[int, ...]
    halves: int = 1

    def columns(self, count: int) -> int:
        """Columns of one rectangle with `.x<count>`, without packing."""
        return self.unit * count

    def registers(self, count: int) -> int:
        return self.lanes * self.unit * self.halves * count // 32

    def arrange(self, cells: np.ndarray) -> np.ndarray:
        """A view of one rectangle (lanes, columns), registers first, then threads."""
        return cells.reshape(self.split).transpose(self.order)


SHAPES = {
    "32x32b": Shape(32, 1, (32, -1), (1, 0)),
    "16x64b": Shape(16, 2, (2, 8, -1, 2), (2, 1, 3, 0)),
    "16x128b": Shape(16, 4, (2, 8, -1, 4), (2, 0, 1, 3)),
    "16x256b": Shape(16, 8, (2, 8, -1, 4, 2), (2, 0, 4, 1, 3)),
    "16x32bx2": Shape(16, 1, (16, -1), (1, 0), halves=2),
}


def cell_map(shape: Shape, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(rectangle, lane, column) of every register, intp (registers, 32); lane and column count within the rectangle."""
    threads = 32 // shape.halves
    lane, column = np.indices((shape.lanes, shape.columns(count)), np.intp)
    lanes, columns = (np.tile(shape.arrange(grid).reshape(-1, threads), shape.halves) for grid in (lane, column))
    return np.repeat(np.arange(shape.halves), threads)[None, :] + np.zeros_like(lanes), lanes, columns
