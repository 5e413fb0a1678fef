"""Stage 01, the execution model: one row's sum climbs from a lane to a warp, a CTA and a cluster.

RMSNorm: y = x * rsqrt(mean(x^2) + eps) * w, the mean over a row. x and y are (rows, cols), w is (cols,), all of one
type: float16, bfloat16 or float32. Sums and products are float32; y is rounded once.

The kernel moves memory: read x, write y, almost nothing to compute. The one trap is to read x twice, since no element
can be scaled before its whole row has been summed. So x waits in registers, and a row takes as much of the machine as
it needs for that: lanes of one warp, then more warps, then more CTAs. Its sum climbs the same ladder.

    level    who                    how the sum gets there            what must be waited for
    lane     one thread             registers                         nothing
    warp     32 lanes               shuffles, register to register    nothing: a shuffle waits for its lanes
    CTA      up to 8 warps          SMEM                              the CTA's barrier
    cluster  up to 8 CTAs           the SMEM of other CTAs (DSMEM)    the cluster's barrier
    grid     everyone else          never: rows need nothing of one another

Run `python execution_model.py --help`, or `make stage-01`.
"""

import sys
from dataclasses import dataclass
from math import gcd
from pathlib import Path

import torch
from tvm.script import tirx as T
from tvm.script.tirx import tile as Tx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.harness import BadSize, Config, Size, Stage, Tolerance, run_stage

EPS = 1e-6

LANES = 32  # of a warp: the hardware's number, not ours
WARPS = 8  # of a CTA. The registers of an SM hold two such CTAs or more: while one waits, the others load
MAX_CLUSTER = 8  # CTAs of a cluster: the most that every GPU with clusters takes
VECTOR_BYTES = 16  # the widest load of one lane; the 32 of a warp make 512 contiguous bytes
LANE_BYTES = 128  # of x that a lane keeps in registers: eight vector loads in flight at once


@dataclass(frozen=True)
class Split:
    """How one row is spread over the machine. Each level takes what the level below could not hold."""

    vector: int  # elements of one load
    vectors: int  # loads of one lane
    warps: int  # warps of one CTA that share a row; the CTA takes WARPS / warps rows
    cluster: int  # CTAs that share a row
    chunks: int  # 1, or how often the whole cluster must move along a row that outgrows even its registers


def split_row(cols: int, itemsize: int) -> Split:
    """The smallest part of the machine whose registers hold a row of `cols` elements of `itemsize` bytes."""
    # Row r starts at element r * cols, so a vector can be no longer than what divides cols: a row of 4096 takes 16-byte
    # loads, one of 4098 float32 8-byte loads, one of 4097 goes element by element. Coalescing survives (32 neighbours
    # are still fetched together), but each instruction moves less.
    vector = gcd(cols, VECTOR_BYTES // itemsize)
    per_warp = LANES * LANE_BYTES // itemsize
    cluster = min(-(-cols // (WARPS * per_warp)), MAX_CLUSTER)
    chunks = -(-cols // (cluster * WARPS * per_warp))
    warps = -(-cols // (chunks * cluster * per_warp))
    vectors = -(-cols // (chunks * cluster * warps * LANES * vector))
    return Split(vector, vectors, warps, cluster, chunks)


def make_kernel(config: Config):
    """The TIRx function for one size and type: rmsnorm(X, W, Y)."""
    rows, cols, dtype = config.rows, config.cols, config.dtype
    split = split_row(cols, config.itemsize)
    VECTOR, VECTORS, CLUSTER, CHUNKS = split.vector, split.vectors, split.cluster, split.chunks
    ROW_WARPS = split.warps
    ROWS = min(WARPS // ROW_WARPS, rows)  # of a CTA
    CTA_WARPS = ROWS * ROW_WARPS
    STRIP = ROW_WARPS * LANES * VECTOR  # columns that a row's warps read with one load each
    SLICE = VECTORS * STRIP  # columns of a row that one CTA keeps in registers
    TILES = -(-rows // ROWS)  # ROWS rows each
    ACCESS = f"vec_{8 * VECTOR * config.itemsize}b"

    @T.prim_func
    def rmsnorm(X: T.Buffer((rows, cols), dtype), W: T.Buffer((cols,), dtype), Y: T.Buffer((rows, cols), dtype)):
        T.device_entry()
        cta = T.cta_id([TILES * CLUSTER])
        rank = T.cta_id_in_cluster([CLUSTER])
        warp = T.warp_id([CTA_WARPS])
        lane = T.lane_id([LANES])
        thread = T.thread_id([CTA_WARPS * LANES])

        pool = T.SMEMPool()
        warp_sums = pool.alloc((CTA_WARPS,), "float32")
        cta_sums = pool.alloc((CLUSTER,), "float32")
        pool.commit()

        x = T.alloc_local((VECTORS, VECTOR), dtype)
        w = T.alloc_local((VECTORS, VECTOR), dtype)
        x32 = T.alloc_local((VECTORS, VECTOR), "float32")
        w32 = T.alloc_local((VECTORS, VECTOR), "float32")
        total = T.alloc_local((1,), "float32")

        # Neighbouring lanes take neighbouring vectors: that, and nothing else, is coalescing.
        first: T.int32 = (warp % ROW_WARPS * LANES + lane) * VECTOR
        row: T.int64 = T.cast(cta // CLUSTER, "int64") * ROWS + warp // ROW_WARPS

        @T.inline
        def load(chunk):
            # All loads are issued before the first value is used: one trip to memory, not VECTORS of them.
            for v in T.unroll(VECTORS):
                col: T.let = (chunk * CLUSTER + rank) * SLICE + v * STRIP + first
                # Past the last row or column a lane keeps zeros, which add nothing to the sum. It must not leave: the
                # barriers ahead count every thread of the CTA.
                if (row < rows) & (col < cols):
                    Tx.copy(x[v, :], X[row, col : col + VECTOR], dispatch=ACCESS)
                else:
                    Tx.fill(x[v, :], T.cast(0, dtype))

        @T.inline
        def add_squares():
            for v in T.unroll(VECTORS):
                Tx.cast(x32[v, :], x[v, :])
                for e in T.unroll(VECTOR):
                    total[0] = total[0] + x32[v, e] * x32[v, e]

        @T.inline
        def climb():
            # Lanes -> warp. Butterfly shuffles leave the sum in all 32 lanes.
            total[0] = T.cuda.warp_sum(total[0])

            # Warps -> CTA. One lane speaks for its warp.
            if ROW_WARPS > 1:
                if lane == 0:
                    warp_sums[warp] = total[0]
                # Without this barrier a fast warp adds up sums that slow warps have not written yet.
                T.cuda.cta_sync()
                total[0] = T.cuda.warp_sum(
                    T.if_then_else(
                        lane < ROW_WARPS, warp_sums[warp // ROW_WARPS * ROW_WARPS + lane % ROW_WARPS], T.float32(0)
                    )
                )

            # CTAs -> cluster. Thread k puts this CTA's sum into the SMEM of CTA k.
            if CLUSTER > 1:
                peer: T.uint32
                # SMEM of a CTA that has not started is nobody's: wait until all have arrived at the kernel's top.
                T.ptx.barrier.cluster.wait.acquire.aligned()
                if thread < CLUSTER:
                    T.ptx.mapa.shared__cluster.u32(
                        peer, T.cuda.cvta_generic_to_shared(cta_sums.ptr_to([rank])), T.cast(thread, "uint32")
                    )
                    T.ptx.st.shared__cluster.f32(peer, total[0])
                # Release and acquire: every CTA's store is there when this returns. It is also the last time that
                # anyone touches another CTA's SMEM, so each may exit whenever it is done.
                T.ptx.barrier.cluster.arrive.release.aligned()
                T.ptx.barrier.cluster.wait.acquire.aligned()
                total[0] = T.cuda.warp_sum(T.if_then_else(lane < CLUSTER, cta_sums[lane % CLUSTER], T.float32(0)))

        @T.inline
        def scale_and_store(chunk):
            scale: T.float32 = T.rsqrt(total[0] * T.float32(1 / cols) + T.float32(EPS))
            # Every row reads the same w, so it comes from a cache; it comes late, so as to hold registers only briefly.
            for v in T.unroll(VECTORS):
                col: T.let = (chunk * CLUSTER + rank) * SLICE + v * STRIP + first
                if col < cols:
                    Tx.copy(w[v, :], W[col : col + VECTOR], dispatch=ACCESS)
            for v in T.unroll(VECTORS):
                col: T.let = (chunk * CLUSTER + rank) * SLICE + v * STRIP + first
                if (row < rows) & (col < cols):
                    Tx.cast(x32[v, :], x[v, :])
                    Tx.cast(w32[v, :], w[v, :])
                    for e in T.unroll(VECTOR):
                        x32[v, e] = x32[v, e] * scale * w32[v, e]
                    Tx.cast(x[v, :], x32[v, :])
                    Tx.copy(Y[row, col : col + VECTOR], x[v, :], dispatch=ACCESS)

        if CLUSTER > 1:
            T.ptx.barrier.cluster.arrive.release.aligned()
        total[0] = T.float32(0)
        for chunk in T.serial(CHUNKS, unroll=False):
            load(chunk)
            add_squares()
        climb()
        for chunk in T.serial(CHUNKS, unroll=False):
            if CHUNKS > 1:  # only a row longer than the registers of a whole cluster is read a second time
                load(chunk)
            scale_and_store(chunk)

    return rmsnorm


def check(config: Config) -> None:
    """Refuse what the launch cannot express. Any number of columns works."""
    split = split_row(config.cols, config.itemsize)
    ctas = -(-config.rows // (WARPS // split.warps)) * split.cluster
    if ctas >= 2**31:
        raise BadSize(f"{config.rows} rows of {config.cols} columns are {ctas} CTAs; a grid has at most 2^31 - 1")


def make_inputs(config: Config, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """x with rows of very different size, so that a sum from the wrong row shows; w around 1."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=generator.device)

    x = normal(config.rows, config.cols) * torch.exp2(normal(config.rows, 1))
    return x.to(config.torch_dtype), (1 + 0.1 * normal(config.cols)).to(config.torch_dtype)


def reference(config: Config, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The definition, in float64."""
    x64 = x.double()
    return x64 * torch.rsqrt(x64.square().mean(dim=1, keepdim=True) + EPS) * w.double()


STAGE = Stage(
    number=1,
    title="Execution model",
    arch="sm_90a",
    sizes=[
        Size("rows", default=256, quick=64, gpu=65536, help="rows of x"),
        Size("cols", default=4096, quick=1024, gpu=4096, help="columns of x: the length of one sum"),
    ],
    dtypes=["float16", "bfloat16", "float32"],
    check=check,
    kernel=make_kernel,
    inputs=make_inputs,
    outputs=lambda config: [((config.rows, config.cols), config.torch_dtype)],
    reference=reference,
    # Additions in a row before the sum of one lane starts to climb; the climb adds at most 5 + 5 + 5.
    tolerance=lambda config: Tolerance(
        terms=LANE_BYTES // config.itemsize * split_row(config.cols, config.itemsize).chunks
    ),
    bytes_moved=lambda config: (2 * config.rows + 1) * config.cols * config.itemsize,
    flops=lambda config: 4 * config.rows * config.cols,  # two for the square, two for scale and weight
    baselines={"torch rms_norm": lambda config, x, w: torch.nn.functional.rms_norm(x, (config.cols,), w, EPS)},
)

if __name__ == "__main__":
    run_stage(STAGE)
