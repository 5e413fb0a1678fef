"""Stage 04, layouts: a matrix transpose, B = A^T, in which nothing changes but the layout of one SMEM tile.

A is (rows, cols), B is (cols, rows), of one type: float16, bfloat16 or float32. Nothing is computed: every bit arrives.

Ring and barriers are those of stage 02. What lies in a stage is now a square tile, which the copy engine brings in rows
of A and takes away in rows of B, and which the compute warps turn over in between. Whoever fills a matrix by rows and
empties it by columns crosses the grain once. In SMEM that means bank conflicts, and the cure is not in the code
that crosses it but in the layout: one expression, of which the kernel below knows nothing.

    --layout none   rows back to back                     TileLayout(S[(T, T) : (T, 1)])
             pad    16 unused bytes after each row         TileLayout(S[(T, T) : (T + 16 bytes, 1)])
             32B    swizzles: 16-byte chunks of a row      ComposeLayout(swizzle, TileLayout(...))
             64B    trade places, by an XOR with bits
             128B   of the row's number

Run `python tirx_layouts.py --help`, or `make stage-04`. `--show` explains and draws these layouts and those that the
later stages use; `--show FOLDER` also writes them there as SVG. `make diff-04` shows what changed since stage 03.
"""

import argparse
import sys
from pathlib import Path

import torch
from tvm.backend.cuda.lang.pipeline import MBarrier, PipelineState, TMABar
from tvm.backend.cuda.tile_primitive.tma_utils import mma_shared_layout
from tvm.script import tirx as T
from tvm.script.tirx import tile as Tx
from tvm.tirx.layout import S, TileLayout

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.harness import BadSize, Config, Option, Size, Stage, Tolerance, run_stage

LANES = 32  # of a warp
WARPS = 16  # of a CTA that turn tiles over
CHUNK_BYTES = 16  # what a swizzle moves as one piece; also the grain of TMA's strides
ROW_BYTES = 256  # of a tile; a square of 128 x 128 16-bit elements is 32 KB
BLOCK = 8  # a warp turns blocks of 8 x 8 elements
CTA_SMEM_BYTES = 227 * 1024  # the most that one CTA can have
BARRIER_BYTES = 1024  # the barriers need less, the ring starts where every swizzle pattern does
MAX_STAGES = 8

SWIZZLES = {"32B": 1, "64B": 2, "128B": 3}
SPANS = {"32B": 32, "64B": 64, "128B": 128}  # bytes of a row that stay together: the widest box of each swizzle


def tile_layout(name: str, dtype: str, itemsize: int, stages: int):
    """Layout of a ring of `stages` square tiles, (stages, side, side) elements with ROW_BYTES per row."""
    side = ROW_BYTES // itemsize
    if name in SWIZZLES:
        return mma_shared_layout(dtype, SWIZZLES[name], (stages, side, side))
    pitch = side + (CHUNK_BYTES // itemsize if name == "pad" else 0)
    return TileLayout(S[(stages, side, side) : (side * pitch, pitch, 1)])


def make_kernel(config: Config):
    """The TIRx function for one size, type and layout: transpose(A, B)."""
    rows, cols, dtype, itemsize = config.rows, config.cols, config.dtype, config.itemsize
    SIDE = ROW_BYTES // itemsize
    PADDED = config.layout == "pad"
    TILE_BYTES = SIDE * ROW_BYTES
    STAGE_BYTES = TILE_BYTES + (SIDE * CHUNK_BYTES if PADDED else 0)
    STAGES = min(MAX_STAGES, (CTA_SMEM_BYTES - BARRIER_BYTES) // STAGE_BYTES)
    LAYOUT = tile_layout(config.layout, dtype, itemsize, STAGES)
    BOX = SPANS.get(config.layout, ROW_BYTES) // itemsize  # columns of a box: what is contiguous in the layout
    BOXES = SIDE // BOX

    TILE_ROWS, TILE_COLS = -(-rows // SIDE), -(-cols // SIDE)
    TILES = TILE_ROWS * TILE_COLS
    CTAS = min(TILES, config.ctas, config.sms)
    LOADER, STORER = WARPS, WARPS + 1

    BLOCKS = SIDE // BLOCK  # along one side
    WARP_BLOCKS = BLOCKS * BLOCKS // WARPS
    WORDS = TILE_BYTES // (WARPS * LANES * 4)  # that a lane holds while the tile is turned

    @T.prim_func
    def transpose(A: T.Buffer((rows, cols), dtype), B: T.Buffer((cols, rows), dtype)):
        T.device_entry()
        cta = T.cta_id([CTAS])
        warp = T.warp_id([WARPS + 2])
        lane = T.lane_id([LANES])
        thread = T.thread_id([(WARPS + 2) * LANES])

        pool = T.SMEMPool()
        full = TMABar(pool, STAGES)  # loader -> compute warps: the tile of A has landed
        ready = MBarrier(pool, STAGES)  # compute warps -> storer: it is a tile of B now
        empty = MBarrier(pool, STAGES)  # storer -> loader: it has left, the stage may be overwritten
        ring = pool.alloc((STAGES, SIDE, SIDE), dtype, layout=LAYOUT, align=BARRIER_BYTES)
        pool.move_base_to(BARRIER_BYTES + STAGES * STAGE_BYTES)  # the pool counts elements, not the gaps of a layout
        pool.commit()

        full.init(1)
        ready.init(WARPS)
        empty.init(1)
        # The copy engine must see initialised barriers before it signals one.
        T.ptx.fence.mbarrier_init.release.cluster()
        T.ptx.fence.proxy.async_.shared__cta()
        T.cuda.cta_sync()

        held = T.alloc_local((WORDS,), "uint32" if itemsize == 2 else dtype)
        tile: T.int32 = cta
        row: T.int32
        col: T.int32
        slot = PipelineState(STAGES)

        @T.inline
        def locate():
            # Down the columns of A, so along the rows of B: memory minds scattered writes more than scattered reads.
            row = tile % TILE_ROWS * SIDE
            col = tile // TILE_ROWS * SIDE

        @T.inline
        def request():
            locate()
            empty.wait(slot.stage, slot.phase)
            if PADDED:
                # A box lands without gaps, so a padded tile is no box: each row is a copy of its own, which clips
                # itself, and the barrier owes what is copied. Nobody fills the rest.
                width: T.let = T.min(cols - col, SIDE)
                height: T.let = T.min(rows - row, SIDE)
                if lane == 0:
                    full.arrive(slot.stage, height * width * itemsize)
                T.cuda.warp_sync()
                for step in T.serial(SIDE // LANES, unroll=False):
                    line: T.let = step * LANES + lane
                    if line < height:
                        T.ptx.cp.async_.bulk.shared__cta.global_.mbarrier__complete_tx__bytes(
                            ring.ptr_to([slot.stage, line, 0]),
                            A.ptr_to([row + line, col]),
                            T.cast(width * itemsize, "uint32"),
                            full.ptr_to([slot.stage]),
                        )
            elif T.cuda.elect_sync():
                # Elements past an edge of A arrive as zeros and count in full.
                full.arrive(slot.stage, TILE_BYTES)
                for box in T.unroll(BOXES):
                    Tx.copy_async(
                        ring[slot.stage, :, box * BOX : box * BOX + BOX],
                        A[row : row + SIDE, col + box * BOX : col + box * BOX + BOX],
                        dispatch="tma_auto",
                        mbar=full.ptr_to([slot.stage]),
                    )
            slot.advance()

        @T.inline
        def send():
            locate()
            ready.wait(slot.stage, slot.phase)
            if PADDED:
                width: T.let = T.min(rows - row, SIDE)
                height: T.let = T.min(cols - col, SIDE)
                for step in T.serial(SIDE // LANES, unroll=False):
                    line: T.let = step * LANES + lane
                    if line < height:
                        T.ptx.cp.async_.bulk.global_.shared__cta.bulk_group(
                            B.ptr_to([col + line, row]),
                            ring.ptr_to([slot.stage, line, 0]),
                            T.cast(width * itemsize, "uint32"),
                        )
            elif T.cuda.elect_sync():
                # Elements past an edge of B are dropped.
                for box in T.unroll(BOXES):
                    Tx.copy_async(
                        B[col : col + SIDE, row + box * BOX : row + box * BOX + BOX],
                        ring[slot.stage, :, box * BOX : box * BOX + BOX],
                        dispatch="tma_auto",
                    )
            # Each lane waits for its own copies, in the case of boxes for none. Then all have been read from SMEM.
            T.ptx.cp.async_.bulk.commit_group()
            T.ptx.cp.async_.bulk.wait_group.read(0)
            T.cuda.warp_sync()
            if lane == 0:
                empty.arrive(slot.stage)
            slot.advance()

        @T.inline
        def pick_up(i):
            if itemsize == 2:
                # Lanes 8 q to 8 q + 7 name the eight rows of block q. Transposed, each lane gets two neighbours of a
                # column in one register: 8 rows x 16 bytes are 128 bytes, one wavefront if no two rows share banks.
                block: T.let = warp * WARP_BLOCKS + 4 * i + lane // BLOCK
                T.ptx.ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16(
                    held[4 * i],
                    held[4 * i + 1],
                    held[4 * i + 2],
                    held[4 * i + 3],
                    ring.ptr_to([slot.stage, block // BLOCKS * BLOCK + lane % BLOCK, block % BLOCKS * BLOCK]),
                )
            else:
                # Words go one by one: no instruction transposes them. Two accesses make a block of 8 x 8, each takes
                # two quadrants on a diagonal, so that rows and columns are met alike on the way in and out.
                for j in T.unroll(4):
                    block: T.let = warp * WARP_BLOCKS + 2 * i + j // 2
                    held[4 * i + j] = ring[
                        slot.stage,
                        block // BLOCKS * BLOCK + lane // 4,
                        block % BLOCKS * BLOCK + (lane // 16 + j) % 2 * 4 + lane % 4,
                    ]

        @T.inline
        def put_down(i):
            if itemsize == 2:
                block: T.let = warp * WARP_BLOCKS + 4 * i + lane // BLOCK
                T.ptx.stmatrix.sync.aligned.m8n8.x4.shared.b16(
                    ring.ptr_to([slot.stage, block % BLOCKS * BLOCK + lane % BLOCK, block // BLOCKS * BLOCK]),
                    held[4 * i],
                    held[4 * i + 1],
                    held[4 * i + 2],
                    held[4 * i + 3],
                )
            else:
                for j in T.unroll(4):
                    block: T.let = warp * WARP_BLOCKS + 2 * i + j // 2
                    ring[
                        slot.stage,
                        block % BLOCKS * BLOCK + (lane // 16 + j) % 2 * 4 + lane % 4,
                        block // BLOCKS * BLOCK + lane // 4,
                    ] = held[4 * i + j]

        @T.inline
        def turn():
            full.wait(slot.stage, slot.phase)
            for i in T.unroll(WORDS // 4):
                pick_up(i)
            # The whole tile is in registers when all have passed, and only then is there room to put it down. A named
            # barrier, because the loader and the storer are elsewhere.
            T.ptx.bar.sync(T.uint32(1), T.uint32(WARPS * LANES))
            for i in T.unroll(WORDS // 4):
                put_down(i)

        @T.inline
        def hand_over():
            # Each thread that wrote fences its own stores towards the copy engine, then one lane speaks for the warp.
            T.ptx.fence.proxy.async_.shared__cta()
            T.cuda.warp_sync()
            if lane == 0:
                ready.arrive(slot.stage)
            slot.advance()

        if warp == LOADER:
            slot.init(1)  # a fresh ring is empty: the first wait for the phase before the first passes at once
            while tile < TILES:
                request()
                tile = tile + CTAS
        elif warp == STORER:
            slot.init(0)
            while tile < TILES:
                send()
                tile = tile + CTAS
        else:
            slot.init(0)
            while tile < TILES:
                turn()
                hand_over()
                tile = tile + CTAS

    return transpose


def check(config: Config) -> None:
    """Refuse what a tensor map cannot express. The rows of A and of B must be multiples of 16 bytes."""
    for matrix, name, length in (("A", "cols", config.cols), ("B", "rows", config.rows)):
        row_bytes = length * config.itemsize
        if row_bytes % CHUNK_BYTES:
            raise BadSize(
                f"a row of {matrix} is {length} elements of {config.dtype}, {row_bytes} bytes: the stride between the "
                f"rows of a TMA tensor must be a multiple of {CHUNK_BYTES} bytes, so {name} a multiple of "
                f"{CHUNK_BYTES // config.itemsize}"
            )


def make_inputs(config: Config, generator: torch.Generator) -> tuple[torch.Tensor]:
    """A, normally distributed."""
    a = torch.randn(config.rows, config.cols, generator=generator, device=generator.device)
    return (a.to(config.torch_dtype),)


STAGE = Stage(
    number=4,
    title="Layouts",
    arch="sm_90a",
    sizes=[
        Size("rows", default=520, quick=136, gpu=16384, help="rows of A"),
        Size("cols", default=392, quick=264, gpu=16384, help="columns of A"),
        Size("ctas", default=2, gpu=1 << 16, help="CTAs at most, never more than there are SMs"),
    ],
    options=[
        Option(
            "layout",
            ["none", "pad", *SWIZZLES],
            "128B",
            help="layout of the tile in SMEM; --show [FOLDER] draws them all instead of running",
        )
    ],
    dtypes=["float16", "bfloat16", "float32"],
    check=check,
    kernel=make_kernel,
    inputs=make_inputs,
    outputs=lambda config: [((config.cols, config.rows), config.torch_dtype)],
    reference=lambda config, a: a.t().double(),
    tolerance=Tolerance(terms=0, roundings=0, norm=0.0),  # no arithmetic, no error
    bytes_moved=lambda config: 2 * config.rows * config.cols * config.itemsize,
    flops=lambda config: 0,
    baselines={"torch transpose": lambda config, a: a.t().contiguous()},
)


def main() -> None:
    """`--show [FOLDER]` draws the layouts; everything else is the command line of every stage."""
    if "--show" not in sys.argv:
        run_stage(STAGE)
    from common.layouts import show

    parser = argparse.ArgumentParser(description="Draw the layouts of this stage and of those to come.")
    parser.add_argument("--show", nargs="?", metavar="FOLDER", type=Path, help="also write each drawing there, as SVG")
    folder = parser.parse_args().show
    show({name: tile_layout(name, "float16", 2, 1) for name in ("none", "pad", *SWIZZLES)}, folder)


if __name__ == "__main__":
    main()
