"""A grid of labelled, coloured cells, drawn in the terminal and as SVG. Knows nothing of what the cells mean."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

NO_COLOUR = -1
# Eight hues that stay apart in print and for most colour-blind readers, light enough for black text.
PALETTE = ("#f4a3a3", "#f6c98a", "#f3ec8c", "#b5e09a", "#98ddd0", "#9cc4f2", "#c3b1f0", "#efb0dc")
LETTERS = "abcdefgh"

_CHARACTER, _CELL_HEIGHT, _LINE, _MARGIN = 7.3, 22, 18, 16  # pixels, for 12-pixel monospaced text


@dataclass(frozen=True)
class Grid:
    """`labels` (rows, columns) of str, `colours` (rows, columns) of palette numbers or NO_COLOUR, names of both edges.

    `corner` names what the rows and columns are.
    """

    labels: np.ndarray
    colours: np.ndarray
    row_names: Sequence[str]
    column_names: Sequence[str]
    corner: str = ""


def as_text(grid: Grid, colour: bool) -> str:
    """The grid for a terminal. Without colours each cell carries its colour's letter, a to h."""
    labels = [[_plain(grid, r, c, colour) for c in range(grid.labels.shape[1])] for r in range(grid.labels.shape[0])]
    width = max(len(text) for row in (*labels, grid.column_names) for text in row) + 2
    left = max(len(name) for name in (*grid.row_names, grid.corner)) + 1
    lines = [f"{grid.corner:<{left}}" + "".join(f"{name:^{width}}" for name in grid.column_names)]
    for r, row in enumerate(labels):
        cells = (_painted(f"{text:^{width}}", int(grid.colours[r, c]), colour) for c, text in enumerate(row))
        lines.append(f"{grid.row_names[r]:<{left}}" + "".join(cells))
    return "\n".join(line.rstrip() for line in lines)


def _plain(grid: Grid, row: int, column: int, colour: bool) -> str:
    number = int(grid.colours[row, column])
    mark = "" if colour or number == NO_COLOUR else LETTERS[number]
    return str(grid.labels[row, column]) + mark


def _painted(text: str, number: int, colour: bool) -> str:
    if not colour or number == NO_COLOUR:
        return text
    red, green, blue = (int(PALETTE[number][at : at + 2], 16) for at in (1, 3, 5))
    return f"\x1b[48;2;{red};{green};{blue};38;2;0;0;0m{text}\x1b[0m"


def as_svg(title: str, notes: Sequence[str], grid: Grid) -> str:
    """An SVG document: title, grid, notes below it."""
    longest = max(len(str(text)) for text in (*grid.labels.flat, *grid.column_names))
    cell = (longest + 2) * _CHARACTER
    left = _MARGIN + (max(len(name) for name in (*grid.row_names, grid.corner)) + 1) * _CHARACTER
    top = _MARGIN + 2 * _LINE
    rows, columns = grid.labels.shape
    bottom = top + rows * _CELL_HEIGHT
    width = max(left + columns * cell, _MARGIN + _CHARACTER * max(len(line) for line in (title, *notes))) + _MARGIN
    height = bottom + _LINE * (len(notes) + 1) + _MARGIN
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'font-family="monospace" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        _text(_MARGIN, _MARGIN + 8, title, weight="bold"),
        _text(_MARGIN, top - 6, grid.corner),
        *(_text(left + (c + 0.5) * cell, top - 6, name, "middle") for c, name in enumerate(grid.column_names)),
        *_cells(grid, left, top, cell),
        *(_text(_MARGIN, bottom + (n + 1) * _LINE, note) for n, note in enumerate(notes)),
        "</svg>",
    ]
    return "\n".join(body) + "\n"


def _cells(grid: Grid, left: float, top: float, cell: float) -> Iterator[str]:
    for r, name in enumerate(grid.row_names):
        y = top + r * _CELL_HEIGHT
        yield _text(_MARGIN, y + 15, name)
        for c in range(grid.labels.shape[1]):
            number = int(grid.colours[r, c])
            fill = "white" if number == NO_COLOUR else PALETTE[number]
            x = left + c * cell
            yield (
                f'<rect x="{x:.1f}" y="{y}" width="{cell:.1f}" height="{_CELL_HEIGHT}" fill="{fill}" stroke="#666"/>'
            )
            yield _text(x + cell / 2, y + 15, str(grid.labels[r, c]), "middle")


def _text(x: float, y: float, text: str, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{escape(text)}</text>'
