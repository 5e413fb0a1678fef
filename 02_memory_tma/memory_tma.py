"""Stage 02, memory and TMA: the same kernel, fed by the copy engine through a ring of SMEM stages.

RMSNorm: y = x * rsqrt(mean(x^2) + eps) * w, the mean over a row. x and y are (rows, cols), w is (cols,), all of one
type: float16, bfloat16 or float32. Sums and products are float32; y is rounded once.

In stage 01 every thread fetched its own x, waited, summed, waited again and stored. Here one thread asks for whole
boxes of x, several tiles ahead, another sends boxes of y away, and the rest only compute. CTAs stay on their SM and
take tile after tile, so that the loads of the next tiles run under the sums of this one. What used to be ordered by
program order or one barrier is now ordered by three mbarriers for each stage of the ring:

    loader --full--> compute warps --ready--> storer --empty--> loader
           bytes     arrivals                 reads done

Run `python memory_tma.py --help`, or `make stage-02`. `make diff-02` shows what changed since stage 01.
"""

import sys
from dataclasses import dataclass
from math import gcd
from pathlib import Path

import torch
from tvm.backend.cuda.lang.pipeline import MBarrier, PipelineState, TMABar
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

CTAS_PER_SM = 2  # CTAs that share an SM, because their rings share its SMEM
SHIFTS = 32  # CTAs that follow one another in one place; a cluster stays, since it starts only where all of it fits
SM_SMEM_BYTES = 228 * 1024
CTA_SMEM_BYTES = 2 * 1024  # not the ring: 1 KB that the system keeps for each CTA, and barriers and sums
MAX_STAGES = 8


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

    STAGE_BYTES = ROWS * SLICE * config.itemsize
    STAGES = min(MAX_STAGES, (SM_SMEM_BYTES // CTAS_PER_SM - CTA_SMEM_BYTES) // STAGE_BYTES)
    BOX = LANES * VECTOR  # columns of a box: what a warp reads in one instruction
    BOXES = VECTORS * ROW_WARPS  # of a stage
    CTAS = config.sms * CTAS_PER_SM * (SHIFTS if CLUSTER == 1 else 1)
    CLUSTERS = min(TILES, max(1, min(config.ctas, CTAS) // CLUSTER))  # each takes every CLUSTERS-th tile
    LOADER, STORER = CTA_WARPS, CTA_WARPS + 1
    PASSES = 1 if CHUNKS == 1 else 2

    @T.prim_func
    def rmsnorm(X: T.Buffer((rows, cols), dtype), W: T.Buffer((cols,), dtype), Y: T.Buffer((rows, cols), dtype)):
        T.device_entry()
        cta = T.cta_id([CLUSTERS * CLUSTER])
        # No cluster where none is needed: launched as clusters of one CTA, it takes up to a third longer on an H200.
        rank = T.cta_id_in_cluster([CLUSTER]) if CLUSTER > 1 else 0
        warp = T.warp_id([CTA_WARPS + 2])
        lane = T.lane_id([LANES])
        thread = T.thread_id([(CTA_WARPS + 2) * LANES])

        pool = T.SMEMPool()
        full = TMABar(pool, STAGES)  # loader -> compute warps: the bytes of x have landed
        ready = MBarrier(pool, STAGES)  # compute warps -> storer: y has replaced x
        empty = MBarrier(pool, STAGES)  # storer -> loader: y has left, the stage may be overwritten
        exchanged = MBarrier(pool, 2)  # CTA -> CTA: my sum is in your SMEM
        warp_sums = pool.alloc((2, CTA_WARPS), "float32")
        cta_sums = pool.alloc((2, CLUSTER), "float32")
        ring = pool.alloc((STAGES, BOXES, ROWS, BOX), dtype, align=128)
        pool.commit()

        full.init(1)
        ready.init(CTA_WARPS)
        empty.init(1)
        exchanged.init(CLUSTER)
        # The copy engine and the other CTAs must see initialised barriers before they signal one.
        T.ptx.fence.mbarrier_init.release.cluster()
        T.ptx.fence.proxy.async_.shared__cta()
        T.cuda.cluster_sync()

        x = T.alloc_local((VECTORS, VECTOR), dtype)
        w = T.alloc_local((VECTORS, VECTOR), dtype)
        x32 = T.alloc_local((VECTORS, VECTOR), "float32")
        w32 = T.alloc_local((VECTORS, VECTOR), "float32")
        total = T.alloc_local((1,), "float32")

        # Neighbouring lanes take neighbouring vectors: no two of a quarter-warp meet in a bank of SMEM.
        first: T.int32 = (warp % ROW_WARPS * LANES + lane) * VECTOR
        at: T.int32 = lane * VECTOR  # in a row of a box
        tile: T.int32 = cta // CLUSTER
        parity: T.int32 = 0  # of the tile: picks one of two sets of sums
        exchange_phase: T.int32 = 0
        slot = PipelineState(STAGES)

        @T.inline
        def request(step):
            # The barrier owes STAGE_BYTES before the copies that pay it are issued. Boxes past an edge of the tensor
            # are filled with zeros, and count in full: a ragged tile owes as much as any other.
            empty.wait(slot.stage, slot.phase)
            full.arrive(slot.stage, STAGE_BYTES)
            for box in T.serial(BOXES, unroll=False):
                col: T.let = (step % CHUNKS * CLUSTER + rank) * SLICE + box * BOX
                Tx.copy_async(
                    ring[slot.stage, box, :, :],
                    X[tile * ROWS : tile * ROWS + ROWS, col : col + BOX],
                    dispatch="tma_auto",
                    mbar=full.ptr_to([slot.stage]),
                )
            slot.advance()

        @T.inline
        def send(step):
            ready.wait(slot.stage, slot.phase)
            if step >= (PASSES - 1) * CHUNKS:
                for box in T.serial(BOXES, unroll=False):
                    col: T.let = (step % CHUNKS * CLUSTER + rank) * SLICE + box * BOX
                    Tx.copy_async(
                        Y[tile * ROWS : tile * ROWS + ROWS, col : col + BOX],
                        ring[slot.stage, box, :, :],
                        dispatch="tma_auto",
                    )
                T.ptx.cp.async_.bulk.commit_group()
                # .read: the copy engine has read the stage. That is all its next user needs; the writes may still fly.
                T.ptx.cp.async_.bulk.wait_group.read(0)
            empty.arrive(slot.stage)
            slot.advance()

        @T.inline
        def load(chunk):
            full.wait(slot.stage, slot.phase)
            for v in T.unroll(VECTORS):
                box: T.let = v * ROW_WARPS + warp % ROW_WARPS
                Tx.copy(x[v, :], ring[slot.stage, box, warp // ROW_WARPS, at : at + VECTOR], dispatch=ACCESS)

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
                    warp_sums[parity, warp] = total[0]
                # Without this barrier a fast warp adds up sums that slow warps have not written yet. A named one: the
                # loader and the storer have business of their own. Two sets of sums make it enough: who writes a set
                # again has passed the barrier of the tile between, where every reader of the old values had arrived.
                T.ptx.bar.sync(T.uint32(1), T.uint32(CTA_WARPS * LANES))
                total[0] = T.cuda.warp_sum(
                    T.if_then_else(
                        lane < ROW_WARPS,
                        warp_sums[parity, warp // ROW_WARPS * ROW_WARPS + lane % ROW_WARPS],
                        T.float32(0),
                    )
                )

            # CTAs -> cluster. Thread k puts this CTA's sum into the SMEM of CTA k.
            if CLUSTER > 1:
                peer: T.uint32
                if thread < CLUSTER:
                    T.ptx.mapa.shared__cluster.u32(
                        peer, T.cuda.cvta_generic_to_shared(cta_sums.ptr_to([parity, rank])), T.cast(thread, "uint32")
                    )
                    T.ptx.st.shared__cluster.f32(peer, total[0])
                    # The cluster's barrier wants every thread, the loader too. An mbarrier wants the CLUSTER threads
                    # that have something to say. Release: the sum is there before the arrival is.
                    T.ptx.mapa.shared__cluster.u32(
                        peer, T.cuda.cvta_generic_to_shared(exchanged.ptr_to([parity])), T.cast(thread, "uint32")
                    )
                    T.ptx.mbarrier.arrive.release.cluster.shared__cluster.b64(peer)
                T.cuda.mbarrier_wait_acquire_cluster(exchanged.ptr_to([parity]), exchange_phase)
                total[0] = T.cuda.warp_sum(
                    T.if_then_else(lane < CLUSTER, cta_sums[parity, lane % CLUSTER], T.float32(0))
                )
                exchange_phase = exchange_phase ^ parity
            parity = parity ^ 1

        @T.inline
        def scale_and_store(chunk):
            scale: T.float32 = T.rsqrt(total[0] * T.float32(1 / cols) + T.float32(EPS))
            # Every row reads the same w, so it comes from a cache; it comes late, so as to hold registers only briefly.
            for v in T.unroll(VECTORS):
                col: T.let = (chunk * CLUSTER + rank) * SLICE + v * STRIP + first
                if col < cols:
                    Tx.copy(w[v, :], W[col : col + VECTOR], dispatch=ACCESS)
            for v in T.unroll(VECTORS):
                box: T.let = v * ROW_WARPS + warp % ROW_WARPS
                Tx.cast(x32[v, :], x[v, :])
                Tx.cast(w32[v, :], w[v, :])
                for e in T.unroll(VECTOR):
                    x32[v, e] = x32[v, e] * scale * w32[v, e]
                Tx.cast(x[v, :], x32[v, :])
                Tx.copy(ring[slot.stage, box, warp // ROW_WARPS, at : at + VECTOR], x[v, :], dispatch=ACCESS)

        @T.inline
        def hand_over():
            # Ordinary stores and the copy engine reach SMEM by different ways (proxies): each thread that wrote fences
            # its own stores, then one lane speaks for the warp.
            T.ptx.fence.proxy.async_.shared__cta()
            T.cuda.warp_sync()
            if lane == 0:
                ready.arrive(slot.stage)
            slot.advance()

        if warp == LOADER:
            if T.cuda.elect_sync():
                slot.init(1)  # a fresh ring is empty: the first wait for the phase before the first passes at once
                while tile < TILES:
                    for step in T.serial(PASSES * CHUNKS, unroll=False):
                        request(step)
                    tile = tile + CLUSTERS
        elif warp == STORER:
            if T.cuda.elect_sync():
                slot.init(0)
                while tile < TILES:
                    for step in T.serial(PASSES * CHUNKS, unroll=False):
                        send(step)
                    tile = tile + CLUSTERS
        else:
            slot.init(0)
            while tile < TILES:
                total[0] = T.float32(0)
                for chunk in T.serial(CHUNKS, unroll=False):
                    load(chunk)
                    add_squares()
                    if CHUNKS > 1:
                        hand_over()
                climb()
                for chunk in T.serial(CHUNKS, unroll=False):
                    load(chunk)
                    scale_and_store(chunk)
                    hand_over()
                tile = tile + CLUSTERS

    return rmsnorm


def check(config: Config) -> None:
    """Refuse what a tensor map cannot express. Any row that is a multiple of 16 bytes works."""
    row_bytes = config.cols * config.itemsize
    if row_bytes % VECTOR_BYTES:
        raise BadSize(
            f"{config.cols} columns of {config.dtype} are {row_bytes} bytes: the stride between the rows of a TMA "
            f"tensor must be a multiple of {VECTOR_BYTES} bytes, so cols a multiple of "
            f"{VECTOR_BYTES // config.itemsize} (stage 01 takes any)"
        )


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
    number=2,
    title="Memory and TMA",
    arch="sm_90a",
    sizes=[
        Size("rows", default=256, quick=64, gpu=65536, help="rows of x"),
        Size("cols", default=4096, quick=1024, gpu=4096, help="columns of x: the length of one sum"),
        Size("ctas", default=8, gpu=1 << 16, help="CTAs at most, never more than the SMs run at once"),
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
