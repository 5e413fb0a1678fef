import xml.etree.ElementTree as ElementTree

import numpy as np

from common.drawing import NO_COLOUR, PALETTE, Grid, as_svg, as_text

GRID = Grid(np.array([["a<b", "7"]], dtype=object), np.array([[2, NO_COLOUR]]), ["row"], ["left", "right"], "corner")


def test_text_without_colours_carries_letters() -> None:
    header, row = as_text(GRID, colour=False).splitlines()
    assert header.split() == ["corner", "left", "right"]
    assert row.split() == ["row", "a<bc", "7"]


def test_text_with_colours_paints_coloured_cells_only() -> None:
    row = as_text(GRID, colour=True).splitlines()[1]
    red, green, blue = (int(PALETTE[2][at : at + 2], 16) for at in (1, 3, 5))
    assert row.count("\x1b[48;") == 1 and f"48;2;{red};{green};{blue}" in row and row.rstrip().endswith("7")


def test_svg_is_well_formed_and_holds_every_cell() -> None:
    svg = ElementTree.fromstring(as_svg("title", ["note & more"], GRID))
    texts = [node.text for node in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert {"title", "note & more", "a<b", "7", "row", "left", "right", "corner"} <= set(texts)
    assert [n.get("fill") for n in svg.iter("{http://www.w3.org/2000/svg}rect")] == ["white", PALETTE[2], "white"]
    width = float(svg.get("width"))
    assert all(float(n.get("x", 0)) < width for n in svg.iter("{http://www.w3.org/2000/svg}rect"))
