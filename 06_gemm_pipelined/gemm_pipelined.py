"""Stage 06, the pipelined matrix product: loads run ahead of the tensor core, and CTAs stay.

D = A B^T. A is (m, k), B is (n, k), D is (m, n), as a linear layer has them: A the activations, B the weights. Both are
K-major: what is multiplied and summed up is contiguous. float16 or bfloat16 in, sums in float32, D rounded once to the
type of A and B. Any m and n; k a multiple of 8, since the rows of a TMA tensor are multiples of 16 bytes.

In stage 05 the copy engine waited for the tensor core and the tensor core for the copy engine. Here SMEM is a ring of
stages, as deep as fits, and the loads are always a ring ahead of the products. One CTA per SM takes tile after tile, in
an order in which those that run together share operands in L2. The loads do not stop at the end of a tile: while the
warps store one, the operands of the next arrive.

`make stage-06` runs it, `make diff-06` shows what changed since stage 05. Run this script with `--help` for its flags.
From elsewhere: `build(m, n, k, dtype)` returns the kernel.
"""

import sys
from pathlib import Path

import torch
from tvm.backend.cuda.lang.pipeline import PipelineState, TCGen05Bar, TMABar
from tvm.backend.cuda.tile_primitive.tma_utils import mma_shared_layout
from tvm.script import tirx as T
from tvm.script.tirx import tile as Tx
from tvm.tirx.layout import tmem_datapath_layout

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.build import Kernel, open_if_one
from common.harness import BadSize, Config, Size, Stage, Tolerance, run_stage

LANES = 32  # of a warp
WARPS = 4  # of a CTA: one warpgroup, because each of its warps reaches a quarter of TMEM's 128 lanes
CHUNK_BYTES = 16  # the grain of TMA's strides
ATOM_BYTES = 128  # of a row that a 128-byte swizzle keeps together: the widest box, and the width of a stage
SWIZZLE = 3  # TIRx's name for 128 bytes

BLOCK_M, BLOCK_N = 128, 128  # rows of A, and of B, in a stage of SMEM
BLOCK_K = 64  # of K in a stage: ATOM_BYTES of either type, four instructions of 16
TILE_M, TILE_N = BLOCK_M, BLOCK_N  # of D: a row for each lane of TMEM, a column of TMEM for each column
TMEM_LANES = 128
TMEM_COLUMNS = TILE_N  # of the 512
MAX_STAGES = 16  # of SMEM for A and B, if so many fit
D_STAGES = 2  # of SMEM for D: one is filled while the other is read
CTA_SMEM_BYTES = 227 * 1024  # the most that one CTA can have
BARRIER_BYTES = 1024  # more than the barriers need: the ring starts where a swizzle pattern does


def make_kernel(config: Config):
    """The TIRx function for one size and type: gemm(A, B, D)."""
    m, n, k, dtype = config.m, config.n, config.k, config.dtype
    M, N = open_if_one(m), open_if_one(n)
    TILES_M, TILES_N = -(-m // TILE_M), -(-n // TILE_N)
    TILES = TILES_M * TILES_N
    CTAS = min(TILES, config.ctas, config.sms)
    K_BLOCKS = -(-k // BLOCK_K)
    STAGE_BYTES = (BLOCK_M + BLOCK_N) * ATOM_BYTES
    RING_BYTES = CTA_SMEM_BYTES - BARRIER_BYTES - D_STAGES * BLOCK_M * ATOM_BYTES
    STAGES = min(config.stages, RING_BYTES // STAGE_BYTES)

    CHUNK = ATOM_BYTES // config.itemsize  # columns of D that are rounded, and stored, at a time
    CHUNKS = TILE_N // CHUNK
    D_LAYOUT = mma_shared_layout(dtype, SWIZZLE, (D_STAGES, BLOCK_M, CHUNK))
    BY_TMA = n * config.itemsize % CHUNK_BYTES == 0  # or else no tensor map can express the rows of D

    GROUP = 2048 // TILE_M  # rows of tiles walked together: what runs at one time covers a block near a square
    # Down the columns of a group, then the next group. With rows one after the other, CTAs that run together would
    # share one row of A and read all of B. The last group may have fewer rows: two divisors, both constants.
    WHOLE, REST = TILES_M // GROUP * GROUP * TILES_N, max(TILES_M % GROUP, 1)

    def first_row(tile):
        at = tile % (GROUP * TILES_N)
        return (tile // (GROUP * TILES_N) * GROUP + T.if_then_else(tile < WHOLE, at % GROUP, at % REST)) * TILE_M

    def first_col(tile):
        at = tile % (GROUP * TILES_N)
        return T.if_then_else(tile < WHOLE, at // GROUP, at // REST) * TILE_N

    @T.prim_func
    def gemm(A: T.Buffer((M, k), dtype), B: T.Buffer((N, k), dtype), D: T.Buffer((M, N), dtype)):
        T.device_entry()
        cta = T.cta_id([CTAS])
        warpgroup = T.warpgroup_id([WARPS // 4])
        warp = T.warp_id([WARPS])
        lane = T.lane_id([LANES])
        thread = T.thread_id([WARPS * LANES])

        pool = T.SMEMPool()
        full = TMABar(pool, STAGES)  # copy engine -> tensor core: the operands have landed
        empty = TCGen05Bar(pool, STAGES)  # tensor core -> copy engine: they were read, the stage may be overwritten
        finished = TCGen05Bar(pool, 1)  # tensor core -> epilogue: the sums of the tile are complete
        tmem_address = pool.alloc((1,), "uint32")
        a_ring = pool.alloc_tcgen05_mma_AB((STAGES, BLOCK_M, BLOCK_K), dtype)
        b_ring = pool.alloc_tcgen05_mma_AB((STAGES, BLOCK_N, BLOCK_K), dtype)
        d_ring = pool.alloc((D_STAGES, BLOCK_M, CHUNK), dtype, layout=D_LAYOUT, align=1024)
        pool.commit()
        tmem = T.TMEMPool(pool, total_cols=TMEM_COLUMNS, tmem_addr=tmem_address)
        tmem.commit()

        full.init(1)
        empty.init(1)
        finished.init(1)
        # The copy engine and the tensor core must see initialised barriers before they signal one, and every thread the
        # address that warp 0 was given.
        T.ptx.fence.mbarrier_init.release.cluster()
        T.ptx.fence.proxy.async_.shared__cta()
        T.ptx.tcgen05.fence__before_thread_sync()
        T.cuda.cta_sync()
        T.ptx.tcgen05.fence__after_thread_sync()
        first_column: T.let = tmem_address[0]
        sums = T.decl_buffer(
            (TMEM_LANES, TMEM_COLUMNS),
            "float32",
            scope="tmem",
            allocated_addr=first_column,
            layout=tmem_datapath_layout("D", TMEM_LANES, TMEM_COLUMNS),
        )

        tile: T.int32 = cta
        slot = PipelineState(STAGES, 0)  # of the ring: what is multiplied next
        acc = PipelineState(1, 0)  # of the sums: a ring of one
        ahead = PipelineState(STAGES, 1)  # what is loaded next; a fresh ring is empty: the first waits pass at once
        ahead_tile: T.int32 = cta
        ahead_row: T.int32 = first_row(cta)
        ahead_col: T.int32 = first_col(cta)
        ahead_block: T.int32 = 0
        fragment = T.alloc_tcgen05_ldst_frag("32x32b", (TMEM_LANES, CHUNK), "float32")
        rounded = T.alloc_cast_frag(fragment, dtype)

        @T.inline
        def request(stage, phase, row, col, block):
            # Without this wait the boxes would overwrite what the tensor core still reads.
            empty.wait(stage, phase)
            # Elements past an edge of A or B arrive as zeros and count in full: they add nothing to any sum.
            full.arrive(stage, STAGE_BYTES)
            Tx.copy_async(
                a_ring[stage, :, :],
                A[row : row + BLOCK_M, block * BLOCK_K : block * BLOCK_K + BLOCK_K],
                dispatch="tma_auto",
                mbar=full.ptr_to([stage]),
            )
            Tx.copy_async(
                b_ring[stage, :, :],
                B[col : col + BLOCK_N, block * BLOCK_K : block * BLOCK_K + BLOCK_K],
                dispatch="tma_auto",
                mbar=full.ptr_to([stage]),
            )

        @T.inline
        def multiply(stage, phase, block):
            full.wait(stage, phase)
            T.ptx.tcgen05.fence__after_thread_sync()
            # Nobody clears TMEM: the first block overwrites the sums, the others add to them.
            Tx.gemm_async(sums[:, :], a_ring[stage, :, :], b_ring[stage, :, :], accum=(block != 0))
            empty.arrive(stage)

        @T.inline
        def run_ahead():
            # One block further, perhaps into the next tile of this CTA.
            if ahead_tile < TILES:
                request(ahead.stage, ahead.phase, ahead_row, ahead_col, ahead_block)
                ahead.advance()
                ahead_block = ahead_block + 1
                if ahead_block == K_BLOCKS:
                    ahead_block = 0
                    ahead_tile = ahead_tile + CTAS
                    ahead_row = first_row(ahead_tile)
                    ahead_col = first_col(ahead_tile)

        @T.inline
        def round_chunk(chunk):
            # Thread t reads lane t of TMEM, a row of the tile; a warp reaches no other lanes than its 32.
            Tx.wg.copy_async(fragment[:, :], sums[:, chunk * CHUNK : chunk * CHUNK + CHUNK])
            T.ptx.tcgen05.wait__ld.sync.aligned()
            Tx.wg.cast(rounded[:, :], fragment[:, :])
            # The stage was read: by the copy engine, or by all lanes.
            if T.cuda.elect_sync():
                T.ptx.cp.async_.bulk.wait_group.read(D_STAGES - 1)
            T.cuda.warp_sync()
            # Neighbouring rows of a swizzled atom: no two of a quarter-warp meet in a bank of SMEM.
            Tx.copy(d_ring[chunk % D_STAGES, thread, :], rounded.local()[:])
            # Each thread fences its own stores towards the copy engine, then the whole warp has written.
            T.ptx.fence.proxy.async_.shared__cta()
            T.cuda.warp_sync()

        @T.inline
        def store_chunk(row, col, chunk):
            top: T.let = warp * LANES  # of the rows of this warp, which needs no other to store them
            if BY_TMA:
                # Elements past an edge of D are dropped.
                if T.cuda.elect_sync():
                    Tx.copy_async(
                        D[row + top : row + top + LANES, col + chunk * CHUNK : col + chunk * CHUNK + CHUNK],
                        d_ring[chunk % D_STAGES, top : top + LANES, :],
                        dispatch="tma_auto",
                    )
                    T.ptx.cp.async_.bulk.commit_group()
            else:
                for i in T.serial(LANES, unroll=False):
                    for j in T.unroll(CHUNK // LANES):
                        at: T.let = col + chunk * CHUNK + j * LANES + lane
                        if (row + top + i < m) & (at < n):
                            D[row + top + i, at] = d_ring[chunk % D_STAGES, top + i, j * LANES + lane]

        # The first blocks. One stage stays free: the loads never wait for the newest product.
        if warp == 0:
            if T.cuda.elect_sync():
                for _ in T.serial(STAGES - 1, unroll=False):
                    run_ahead()
            T.cuda.warp_sync()

        while tile < TILES:
            # Load and multiply: one thread asks for both.
            row: T.let = first_row(tile)
            col: T.let = first_col(tile)
            if warp == 0:
                if T.cuda.elect_sync():
                    for block in T.serial(K_BLOCKS, unroll=False):
                        multiply(slot.stage, slot.phase, block)
                        slot.advance()
                        run_ahead()
                    finished.arrive(0)
                T.cuda.warp_sync()

            # Epilogue: all threads.
            finished.wait(acc.stage, acc.phase)
            T.ptx.tcgen05.fence__after_thread_sync()
            for chunk in T.unroll(CHUNKS):
                round_chunk(chunk)
                store_chunk(row, col, chunk)
            # The next tile's products overwrite the sums, which must be in registers everywhere.
            T.ptx.tcgen05.fence__before_thread_sync()
            T.cuda.cta_sync()
            T.ptx.tcgen05.fence__after_thread_sync()
            acc.advance()
            tile = tile + CTAS

        # SMEM belongs to the CTA, which must not end before the copy engine has read it.
        T.ptx.cp.async_.bulk.wait_group.read(0)
        tmem.dealloc()

    return gemm


def check(config: Config) -> None:
    """Refuse what a tensor map cannot express."""
    if config.k * config.itemsize % CHUNK_BYTES:
        raise BadSize(
            f"a row of A and of B is {config.k} elements of {config.dtype}, {config.k * config.itemsize} bytes: the "
            f"stride between the rows of a TMA tensor must be a multiple of {CHUNK_BYTES} bytes, so k a multiple of "
            f"{CHUNK_BYTES // config.itemsize} (pad A and B with columns of zeros)"
        )


def make_inputs(config: Config, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """A normally distributed, B too but smaller, as weights are, so that D is about the size of A."""

    def normal(rows: int) -> torch.Tensor:
        return torch.randn(rows, config.k, generator=generator, device=generator.device)

    return normal(config.m).to(config.torch_dtype), (normal(config.n) * config.k**-0.5).to(config.torch_dtype)


def build(m: int, n: int, k: int, dtype: str = "float16", **options: int | str) -> Kernel:
    """The kernel for one problem: call it as `kernel(A, B, D)` with A (m, k), B (n, k) and D (m, n), contiguous.

    CUDA tensors run on the GPU, CPU tensors on the emulator. Raises BadSize for a k that is no multiple of 8.
    """
    return STAGE.build(m=m, n=n, k=k, dtype=dtype, scale="gpu", **options)


STAGE = Stage(
    number=6,
    title="A pipelined GEMM",
    arch="sm_100a",
    sizes=[
        Size("m", default=384, quick=200, gpu=4096, help="rows of A and D"),
        Size("n", default=320, quick=136, gpu=4096, help="rows of B, columns of D"),
        Size("k", default=520, quick=136, gpu=4096, help="columns of A and B: the length of one sum"),
        Size("ctas", default=4, gpu=1 << 16, help="CTAs at most, never more than there are SMs"),
        Size("stages", default=MAX_STAGES, minimum=2, help="stages of the ring at most, never more than SMEM holds"),
    ],
    dtypes=["float16", "bfloat16"],
    check=check,
    kernel=make_kernel,
    inputs=make_inputs,
    outputs=lambda config: [((config.m, config.n), config.torch_dtype)],
    reference=lambda config, a, b: a.double() @ b.double().t(),
    tolerance=lambda config: Tolerance(terms=config.k),
    bytes_moved=lambda config: (config.m * config.k + config.n * config.k + config.m * config.n) * config.itemsize,
    flops=lambda config: 2 * config.m * config.n * config.k,
    baselines={"torch matmul": lambda config, a, b: a @ b.t()},
)

if __name__ == "__main__":
    run_stage(STAGE)
