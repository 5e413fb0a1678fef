"""Draws the README's two diagrams from the kernel itself: TMEM over time, and which barrier leads from role to role.

`python diagrams.py` prints both; `python diagrams.py FOLDER` writes them there as SVG.
"""

import re
import sys
from html import escape
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import flash_attention4 as stage

from common.drawing import NO_COLOUR, PALETTE, Grid, as_svg, as_text

CELL = 32  # columns of TMEM
ROLES = ("loader", "MMA", "softmax", "correction", "storer")
KINDS = {"TMABar": ("copy engine", 0), "TCGen05Bar": ("tensor core", 3), "MBarrier": ("threads", 5)}


# -- TMEM over time ----------------------------------------------------------------------------------------------------


def tmem_over_time(d: int, blocks: int = 2) -> Grid:
    """A row for each event that changes TMEM, a column for every CELL columns; a letter and a number of each owner."""
    columns = stage.tmem_columns(d)
    cells = [""] * (stage.TMEM_COLUMNS // CELL)
    names, rows = [], []

    def note(event: str, matrix: str, tile: int, block: int) -> None:
        taken = columns[matrix][tile]
        cells[taken.start // CELL : taken.stop // CELL] = [f"{matrix}{tile}.{block}"] * (len(taken) // CELL)
        names.append(event)
        rows.append(list(cells))

    for tile in range(stage.TILES):
        note(f"S{tile} = Q{tile} K0", "S", tile, 0)
    for block in range(blocks):
        for tile in range(stage.TILES):
            note(f"softmax {tile}: S{tile} -> P{tile}", "P", tile, block)
            note(f"O{tile} {'+' if block else ''}= P{tile} V{block}", "O", tile, block)
            if block + 1 < blocks:
                note(f"S{tile} = Q{tile} K{block + 1}", "S", tile, block + 1)
    labels = np.array(rows)
    colours = np.full(labels.shape, NO_COLOUR)
    for colour, matrix in enumerate("SPO"):
        for tile in range(stage.TILES):
            colours[np.char.startswith(labels, f"{matrix}{tile}")] = 2 * colour + tile
    starts = [str(CELL * cell) for cell in range(labels.shape[1])]
    return Grid(labels, colours, names, starts, "column of TMEM")


# -- barriers between roles --------------------------------------------------------------------------------------------


class Barrier(NamedTuple):
    name: str
    kind: str
    sender: str
    receiver: str
    meaning: str


def barriers() -> list[Barrier]:
    """What the kernel declares, with the comment behind each."""
    text = Path(stage.__file__).read_text(encoding="utf-8")
    text = text[text.index("def make_two_tiles") :]
    line = r"^ +(\w+) = (TMABar|TCGen05Bar|MBarrier)\(pool, .*?\)  # (\w+) -> (\w+): (.*)$"
    return [Barrier(*found) for found in re.findall(line, text, re.MULTILINE)]


def barriers_as_text() -> str:
    lines = [
        f"{b.sender:>10} -> {b.receiver:<10}  {b.name:<12}  {KINDS[b.kind][0]:<11}  {b.meaning}" for b in barriers()
    ]
    return "\n".join(lines)


def barriers_as_svg() -> str:
    """A line down for each role, an arrow across for each barrier, coloured by who arrives at it."""
    step, top, left, height = 190, 64, 90, 34
    found = barriers()
    bottom = top + height * (len(found) + 1)
    x = {role: left + step * number for number, role in enumerate(ROLES)}
    width = x[ROLES[-1]] + 560
    body = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{bottom + 60}" font-family="monospace" '
        f'font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for role in ROLES:
        body += [
            f'<line x1="{x[role]}" y1="{top}" x2="{x[role]}" y2="{bottom}" stroke="#999"/>',
            f'<rect x="{x[role] - 60}" y="{top - 36}" width="120" height="28" fill="#eee" stroke="#666"/>',
            f'<text x="{x[role]}" y="{top - 18}" text-anchor="middle" font-weight="bold">{role}</text>',
        ]
    for number, barrier in enumerate(found):
        y = top + height * (number + 1)
        start, stop = x[barrier.sender], x[barrier.receiver]
        tip = stop - 8 if stop > start else stop + 8
        colour = PALETTE[KINDS[barrier.kind][1]]
        body += [
            f'<line x1="{start}" y1="{y}" x2="{tip}" y2="{y}" stroke="{colour}" stroke-width="3"/>',
            f'<polygon points="{stop},{y} {tip},{y - 6} {tip},{y + 6}" fill="{colour}"/>',
            f'<text x="{(start + stop) / 2}" y="{y - 6}" text-anchor="middle">{barrier.name}</text>',
            f'<text x="{x[ROLES[-1]] + 40}" y="{y + 4}">{escape(barrier.meaning)}</text>',
        ]
    for number, (who, colour) in enumerate(KINDS.values()):
        at = left - 60 + 220 * number
        body += [
            f'<rect x="{at}" y="{bottom + 24}" width="16" height="16" fill="{PALETTE[colour]}"/>',
            f'<text x="{at + 24}" y="{bottom + 37}">arrival by {who}</text>',
        ]
    return "\n".join([*body, "</svg>"]) + "\n"


def drawings() -> dict[str, str]:
    """File name -> SVG."""
    title = "TMEM of one CTA over two blocks of keys, d = {}: 512 columns, after each event"
    notes = [
        "S0.1: scores of tile 0 and block 1. Between two events of one tile the other tile's events may come earlier."
    ]
    return {
        **{f"tmem_d{d}.svg": as_svg(title.format(d), notes, tmem_over_time(d)) for d in stage.POLYNOMIAL_PAIRS},
        "barriers.svg": barriers_as_svg(),
    }


def main() -> None:
    if len(sys.argv) > 1:
        for name, text in drawings().items():
            (Path(sys.argv[1]) / name).write_text(text, encoding="utf-8")
        return
    for d in stage.POLYNOMIAL_PAIRS:
        print(as_text(tmem_over_time(d), sys.stdout.isatty()), end="\n\n")
    print(barriers_as_text())


if __name__ == "__main__":
    main()
