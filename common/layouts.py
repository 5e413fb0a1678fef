"""The layouts of the stages, read from the TIRx objects, compared with the emulator's address logic, and drawn.

A TIRx layout says where a logical element lives: on which value of each named axis (`m`, memory or a register number;
`laneid`, `tid_in_wg`, `wid_in_wg`: threads; `TLane`, `TCol`: tensor memory). `places` evaluates it for all elements at
once. The emulator says the same from the other side: which address a tensor map, a descriptor or an instruction
reaches. A `View` holds both and a drawing; where they differ, `View.check` raises.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from tvm.backend.cuda.tile_primitive.tma_utils import mma_shared_layout
from tvm.tirx.layout import (
    ComposeLayout,
    S,
    TileLayout,
    laneid,
    tcgen05_atom_layout,
    tmem_datapath_layout,
)

from common.drawing import NO_COLOUR, Grid, as_svg, as_text
from common.emulator import Emulator, TensorMap
from common.emulator.hardware.data_path import data_path
from common.emulator.hardware.instruction_descriptor import InstructionDescriptor, MmaForm
from common.emulator.hardware.operand_layout import OperandShape, element_addresses
from common.emulator.hardware.smem_descriptor import CODES, SmemDescriptor
from common.emulator.hardware.swizzle import Swizzle, swizzle_pattern
from common.emulator.hardware.tensor_fragments import SHAPES, cell_map
from common.emulator.hardware.tile_copy import TileCopy

ELEMENT = 2  # bytes: float16 throughout, where a layout depends on the type
CHUNK = 16  # bytes
PER_CHUNK = CHUNK // ELEMENT
BANK_GROUPS = 8  # 16-byte groups of the 32 banks
BANKS = "colour (without colours: letter): the four banks of the chunk, a, red: 0-3, b, orange: 4-7, ... h, pink: 28-31"


class LayoutMismatch(AssertionError):
    """TIRx and the emulator disagree about where an element lives."""


def places(layout: TileLayout | ComposeLayout, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Where each element of `shape` lives: axis name -> int64 array of that shape. Axes that stay 0 are left out.

    Replicas are left out as well: an element also lives wherever a replica's stride leads from here.
    """
    if isinstance(layout, ComposeLayout):
        axes = places(layout.tile_layout, shape)
        return {**axes, "m": swizzled(layout, axes["m"])}
    left = np.arange(prod(shape)).reshape(shape)
    axes: dict[str, np.ndarray] = {}
    # The shard splits the row-major number of an element into digits, the last one the fastest.
    for part in reversed(list(layout.shard)):
        extent, stride, axis = int(part.extent), int(part.stride), part.axis.name
        axes[axis] = axes.get(axis, 0) + left % extent * stride
        left = left // extent
    for axis, offset in layout.offset.items():
        axes[axis.name] = axes.get(axis.name, np.zeros(shape, np.int64)) + int(offset)
    return axes


def swizzled(layout: ComposeLayout, elements: np.ndarray) -> np.ndarray:
    """The XOR of a ComposeLayout on element numbers: bits [S, S+B) of the chunk number change its bits [0, B)."""
    chunk = elements >> layout.per_element
    chunk = chunk ^ (chunk >> layout.atom_len & ((1 << layout.swizzle_len) - 1))
    return chunk << layout.per_element | elements & ((1 << layout.per_element) - 1)


@dataclass(frozen=True)
class View:
    """One layout. `tirx` and `emulated` are integer arrays of one shape, an entry for each logical element.

    `emulated` is None for a layout that no hardware unit computes; `notes` are lines of text under the drawing.
    """

    name: str
    title: str
    notes: tuple[str, ...]
    grid: Grid
    tirx: np.ndarray
    emulated: np.ndarray | None

    def check(self) -> str:
        """What was compared, in words. Raises LayoutMismatch at the first element on which the two sides differ."""
        if self.emulated is None:
            return "no hardware unit computes this layout, so there is nothing to compare it with"
        wrong = self.tirx != self.emulated
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            raise LayoutMismatch(
                f"{self.title}: element {at} is at {self.tirx[at]:#x} for TIRx and at {self.emulated[at]:#x} "
                f"for the emulator ({int(wrong.sum())} of {wrong.size} differ)"
            )
        return f"TIRx and the emulator's address logic agree on all {wrong.size} elements"


def _short(layout: TileLayout | ComposeLayout) -> str:
    return str(layout).replace("T.", "").replace("Axis.", "").replace(" @ ", "@")


def _chunk_grid(offsets: np.ndarray, corner: str, rows: int = 8) -> Grid:
    """Byte offsets (lines, elements) as chunks: each labelled with its offset, coloured by its banks."""
    starts = offsets[:rows, ::PER_CHUNK]
    return Grid(
        labels=starts.astype(str),
        colours=starts // CHUNK % BANK_GROUPS,
        row_names=[str(row) for row in range(len(starts))],
        column_names=[f"{PER_CHUNK * c}" for c in range(starts.shape[1])],
        corner=corner,
    )


def wavefronts(offsets: np.ndarray) -> int:
    """Wavefronts of SMEM for eight rows of one chunk: the worst of all such blocks of a tile (rows, elements) of bytes.

    A wavefront serves each bank once, and a chunk takes four banks.
    """
    blocks = (offsets[:, ::PER_CHUNK] // CHUNK % BANK_GROUPS).T.reshape(-1, 8)
    return max(int(np.bincount(block).max()) for block in blocks)


# Tiles of stage 04 -------------------------------------------------------------------------------------------------


def tile_views(layouts: Mapping[str, TileLayout | ComposeLayout], side: int = 128) -> Iterator[View]:
    """The tile of stage 04 in each layout, `layouts` (1, side, side) float16 elements by name."""
    for name, layout in layouts.items():
        offsets = places(layout, (1, side, side))["m"][0] * ELEMENT
        worst = wavefronts(offsets)
        notes = (
            _short(layout),
            *_xor_notes(layout),
            f"ldmatrix takes eight rows of one chunk: {worst} wavefront{'s' if worst > 1 else ''} for each 8 x 8 block",
            BANKS,
        )
        yield View(
            f"tile_{name}",
            f"SMEM tile of {side} x {side} float16, layout {name}: byte offset of each 16-byte chunk",
            notes,
            _chunk_grid(offsets, "row \\ column"),
            offsets,
            None if name == "pad" else _boxes(layout, side),
        )


def _xor_notes(layout: TileLayout | ComposeLayout) -> tuple[str, ...]:
    if isinstance(layout, TileLayout):
        return ()
    low, high = 4, 4 + layout.swizzle_len - 1
    change = f"bit {low}" if high == low else f"bits {low}-{high}"
    by = f"bit {low + layout.atom_len}" if high == low else f"bits {low + layout.atom_len}-{high + layout.atom_len}"
    return (f"of a byte address, {change} ^= {by}",)


def _boxes(layout: TileLayout | ComposeLayout, side: int) -> np.ndarray:
    """Byte offsets where the copy engine puts the elements of a tile, box after box: (side, side)."""
    swizzle = Swizzle(layout.swizzle_len if isinstance(layout, ComposeLayout) else 0)
    span = swizzle_pattern(swizzle).span if swizzle else side * ELEMENT
    width = span // ELEMENT
    tensor_map = TensorMap("float16", 0, (side, side), (side * ELEMENT,), (width, side), swizzle=int(swizzle))
    parts = []
    for box in range(side // width):
        chunks = tensor_map.descriptor(0).plan(TileCopy).shared_addresses(box * side * span).reshape(side, -1)
        parts.append((chunks[:, :, None] + np.arange(0, CHUNK, ELEMENT)).reshape(side, width))
    return np.concatenate(parts, axis=1)


# Operands of tcgen05.mma -------------------------------------------------------------------------------------------

OPERAND_BASE = 0x2000
OPERAND_ROWS, OPERAND_K, STEP_K = 128, 64, 16


@dataclass(frozen=True)
class Operand:
    """A float16 operand of 128 rows (M or N) and K 64 in SMEM; `layout` is over (128, 64), or (64, 128) if MN-major."""

    swizzle: Swizzle
    mn_major: bool

    @property
    def shape(self) -> tuple[int, int]:
        return (OPERAND_K, OPERAND_ROWS) if self.mn_major else (OPERAND_ROWS, OPERAND_K)

    @property
    def layout(self) -> TileLayout | ComposeLayout:
        return mma_shared_layout("float16", int(self.swizzle), self.shape)

    @property
    def linear(self) -> np.ndarray:
        """Byte offsets before swizzling, of `shape`: what start address, LBO and SBO count in."""
        layout = self.layout
        return places(getattr(layout, "tile_layout", layout), self.shape)["m"] * ELEMENT

    def descriptor(self, step: int) -> SmemDescriptor:
        """The descriptor of the MMA that takes K from 16 `step` on."""
        linear, span = self.linear, swizzle_pattern(self.swizzle).span // ELEMENT
        next_group, next_atom = int(linear[8, 0]), int(linear[0, span]) if span < linear.shape[1] else 0
        if self.mn_major and self.swizzle is Swizzle.NONE:
            lbo, sbo = next_group, next_atom
        else:
            lbo, sbo = next_atom, next_group
        start = int(linear[STEP_K * step, 0] if self.mn_major else linear[0, STEP_K * step])
        return SmemDescriptor(OPERAND_BASE + start, lbo, sbo, 0, self.swizzle)

    def view(self) -> View:
        tirx = places(self.layout, self.shape)["m"] * ELEMENT + OPERAND_BASE
        if self.mn_major:
            tirx = tirx.T
        shape = OperandShape(OPERAND_ROWS, STEP_K * ELEMENT, ELEMENT, self.mn_major)
        steps = [element_addresses(self.descriptor(step), shape) for step in range(OPERAND_K // STEP_K)]
        major = "MN" if self.mn_major else "K"
        drawn = (tirx.T if self.mn_major else tirx) - OPERAND_BASE
        mode = "no swizzle" if self.swizzle is Swizzle.NONE else f"{swizzle_pattern(self.swizzle).span}B swizzle"
        return View(
            f"operand_{major}_{self.swizzle.name}",
            f"{major}-major operand, 128 x K 64 float16, {mode}: byte offset of each chunk from {OPERAND_BASE:#x}",
            (_short(self.layout), *self.descriptor_notes(), BANKS),
            _chunk_grid(drawn, "k \\ row" if self.mn_major else "row \\ k"),
            tirx,
            np.concatenate(steps, axis=1),
        )

    def descriptor_notes(self) -> tuple[str, ...]:
        first, second = self.descriptor(0), self.descriptor(1)
        unused = " (not used by K-major swizzled operands)" if not self.mn_major and self.swizzle else ""
        return (
            f"descriptor {first.to_bits():#018x}: address {first.address:#x} >> 4, LBO {first.lbo} >> 4{unused}, "
            f"SBO {first.sbo} >> 4, version 1, swizzle code {CODES[self.swizzle]}",
            f"the next K step of 16 adds {(second.address - first.address) >> 4} to the address field",
        )


def operands() -> list[Operand]:
    """Every layout of a 16-bit operand: K-major and MN-major, without and with each swizzle."""
    modes = (Swizzle.NONE, Swizzle.B32, Swizzle.B64, Swizzle.B128)
    return [Operand(mode, mn_major) for mn_major in (False, True) for mode in modes]


# Tensor memory -----------------------------------------------------------------------------------------------------

DATA_PATH_COLUMNS = 64
LANES, LANE_BLOCK = 128, 16
# Name, rows of one CTA, M of the instruction, CTAs that share it.
DATA_PATHS = (("D", 128, 128, 1), ("F", 64, 64, 1), ("B", 64, 128, 2))


def data_path_view(name: str, rows: int, m: int, group: int) -> View:
    """Which lane and column of tensor memory holds which element of a float32 accumulator of 64 columns."""
    layout = tmem_datapath_layout(name, rows, DATA_PATH_COLUMNS)
    axes = places(layout, (rows, DATA_PATH_COLUMNS))
    instruction = InstructionDescriptor(MmaForm("f16", group), m, DATA_PATH_COLUMNS, 16, "f16", "f16", "f32")
    path = data_path(instruction)
    width = DATA_PATH_COLUMNS // path.folds
    emulated = np.concatenate(
        [path.lanes(fold)[:, None] << 16 | np.arange(width) for fold in range(path.folds)], axis=1
    )
    return View(
        f"data_path_{name}",
        f"tensor memory, data path {name}: M {m}, cta_group::{group}, N {DATA_PATH_COLUMNS}, as one CTA sees it",
        (_short(layout), "an address is lane << 16 | column; colour: the warp whose tcgen05.ld reaches the lanes"),
        _data_path_grid(axes["TLane"], axes["TCol"]),
        axes["TLane"] << 16 | axes["TCol"],
        emulated,
    )


def _data_path_grid(lanes: np.ndarray, columns: np.ndarray) -> Grid:
    quarter = DATA_PATH_COLUMNS // 4
    labels = np.full((LANES // LANE_BLOCK, 4), "-", dtype=object)
    colours = np.full(labels.shape, NO_COLOUR)
    for block, part in np.ndindex(labels.shape):
        m, n = np.nonzero((lanes // LANE_BLOCK == block) & (columns // quarter == part))
        if m.size:
            labels[block, part] = f"m {m.min()}-{m.max()} n {n.min()}-{n.max()}"
            colours[block, part] = block // 2
    return Grid(
        labels,
        colours,
        [f"{LANE_BLOCK * b}-{LANE_BLOCK * (b + 1) - 1}" for b in range(len(labels))],
        [f"{quarter * p}-{quarter * (p + 1) - 1}" for p in range(4)],
        "lanes \\ columns",
    )


FRAGMENTS = ("32x32b", "16x64b", "16x128b", "16x256b")
FRAGMENT_COLUMNS = 8


def fragment_view(name: str) -> View:
    """Which thread and register of a warpgroup gets which cell with `tcgen05.ld.<name>`, 8 columns of float32."""
    shape = SHAPES[name]
    warps, rows = 4, shape.lanes
    layout = tcgen05_atom_layout(name, (warps * rows, FRAGMENT_COLUMNS), "float32")
    axes = places(layout, (warps * rows, FRAGMENT_COLUMNS))
    thread = axes["tid_in_wg"] if "tid_in_wg" in axes else axes["wid_in_wg"] * 32 + axes["laneid"]
    _, lane, column = cell_map(shape, FRAGMENT_COLUMNS // shape.unit)
    register, owner = np.indices(lane.shape)
    one_warp = np.empty((rows, FRAGMENT_COLUMNS), np.int64)
    one_warp[lane, column] = register << 8 | owner
    drawn = min(rows, 16)
    return View(
        f"fragment_{name}",
        f"tcgen05.ld.{name}.x{FRAGMENT_COLUMNS // shape.unit}: thread and register of each cell of warp 0",
        (
            _short(layout),
            f"a warp takes {rows} lanes of tensor memory; {len(lane)} registers each"
            + (f"; the first {drawn} lanes are drawn" if drawn < rows else ""),
            "tN rM: thread N of the warp, its register M; colour: threads by fours",
        ),
        Grid(
            np.array([[f"t{t} r{r}" for t, r in zip(*pair)] for pair in zip(thread[:drawn], axes["m"][:drawn])]),
            thread[:drawn] // 4 % 8,
            [str(row) for row in range(drawn)],
            [str(column) for column in range(FRAGMENT_COLUMNS)],
            "lane \\ column",
        ),
        axes["m"] << 8 | thread,
        np.concatenate([one_warp + 32 * warp for warp in range(warps)]),
    )


# Registers of a warp -----------------------------------------------------------------------------------------------

# Stores the numbers 0 to 63 as an 8 x 8 matrix of b16, loads it with ldmatrix, and writes out each lane's register.
_LDMATRIX = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry load(.param .u64 out)
{
    .reg .b32 %r<8>;
    .reg .b64 %d<4>;
    .shared .align 16 .b8 matrix[128];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, matrix;
    mad.lo.u32 %r3, %r1, 0x20002, 0x10000;
    shl.b32 %r4, %r1, 2;
    add.u32 %r5, %r2, %r4;
    st.shared.b32 [%r5], %r3;
    bar.warp.sync 0xffffffff;
    and.b32 %r5, %r1, 7;
    mad.lo.u32 %r5, %r5, 16, %r2;
    ldmatrix.sync.aligned.m8n8.x1@TRANS@.shared.b16 {%r6}, [%r5];
    ld.param.u64 %d1, [out];
    mul.wide.u32 %d2, %r1, 4;
    add.u64 %d3, %d1, %d2;
    st.global.b32 [%d3], %r6;
    ret;
}
"""

_MATRIX_FRAGMENTS = {
    "ldmatrix": TileLayout(S[(8, 4, 2) : (4 @ laneid, 1 @ laneid, 1)]),
    "ldmatrix.trans": TileLayout(S[(4, 2, 8) : (1 @ laneid, 1, 4 @ laneid)]),
}


def matrix_fragment_view(name: str) -> View:
    """Which lane and half of its register gets which element of an 8 x 8 block of 16-bit elements."""
    layout = _MATRIX_FRAGMENTS[name]
    axes = places(layout, (8, 8))
    got = np.zeros(32, np.uint32)
    Emulator().launch(_LDMATRIX.replace("@TRANS@", name[len("ldmatrix") :]), "load", grid=1, block=32, args=[got])
    halves = got.view(np.uint16)
    at = np.argsort(halves).reshape(8, 8)
    return View(
        f"fragment_{name}",
        f"{name}.m8n8.x1: lane and half of its register of each 16-bit element",
        (_short(layout), "tN .M: lane N, low (0) or high (1) half; colour: lanes by fours"),
        Grid(
            np.array([[f"t{t} .{h}" for t, h in zip(*pair)] for pair in zip(axes["laneid"], axes["m"])]),
            axes["laneid"] // 4,
            [str(row) for row in range(8)],
            [str(column) for column in range(8)],
            "row \\ column",
        ),
        axes["laneid"] * 2 + axes["m"],
        at,
    )


_TILES = """\
Tiles in shared memory
A TileLayout splits the row-major number of an element into digits and multiplies each with a stride: S[(extents) :
(strides)]. Without a name a stride counts elements of memory (axis m). A ComposeLayout then XORs bits of the result.
SMEM has 32 banks of 4 bytes: 16-byte chunks whose numbers are equal modulo 8 share banks, and wait for each other."""

_REGISTERS = """\
Blocks of 8 x 8 in the registers of a warp
A stride with a name counts something else: 4@laneid is 4 lanes further. So one expression says which thread owns an
element, and in which of its registers (axis m, here a half of one). Transposing on the way swaps the digits' owners."""

_OPERANDS = """\
Operands of tcgen05.mma
The tensor core reads SMEM through a 64-bit descriptor: start address, two strides, a swizzle. A K-major operand keeps
neighbours along K together, an MN-major one neighbours along M or N. The hardware XORs bits of the absolute address
that it arrives at, so a K step inside a swizzled row just adds its bytes to the start address."""

_TENSOR_MEMORY = """\
Tensor memory
128 lanes by 512 columns of 32 bits. Where the accumulator lies depends on M and on how many CTAs share the
instruction: data path D uses all lanes, F half of each warp's, B folds the columns over two halves of the lanes."""

_FRAGMENTS = """\
Fragments of tcgen05.ld
A warp reads its own 32 lanes. The shape of the load decides which thread gets which cell: a row each (32x32b), or
the patterns of mma.sync and stmatrix (16x128b, 16x256b)."""


def sections(tiles: Mapping[str, TileLayout | ComposeLayout]) -> list[tuple[str, Iterable[View]]]:
    """Every layout that the stages use, by what it describes: (explanation, views). `tiles`: those of stage 04."""
    return [
        (_TILES, tile_views(tiles)),
        (_REGISTERS, map(matrix_fragment_view, _MATRIX_FRAGMENTS)),
        (_OPERANDS, (operand.view() for operand in operands())),
        (_TENSOR_MEMORY, (data_path_view(*path) for path in DATA_PATHS)),
        (_FRAGMENTS, map(fragment_view, FRAGMENTS)),
    ]


def show(tiles: Mapping[str, TileLayout | ComposeLayout], folder: Path | None = None) -> None:
    """Explain and print every view, compared with the emulator; with a folder, write each there as SVG too.

    The folder is made when missing. Raises LayoutMismatch when TIRx and the emulator disagree.
    """
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    for explanation, views in sections(tiles):
        title, text = explanation.split("\n", 1)
        print(title, "-" * len(title), text, sep="\n", end="\n\n")
        for view in views:
            notes = (*view.notes, view.check())
            print(view.title, as_text(view.grid, colour=sys.stdout.isatty()), *notes, sep="\n", end="\n\n")
            if folder is not None:
                (folder / f"{view.name}.svg").write_text(as_svg(view.title, notes, view.grid), encoding="utf-8")
