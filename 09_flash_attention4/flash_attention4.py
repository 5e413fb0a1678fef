"""Stage 09, FlashAttention-4: softmax(scale Q K^T) V, the tensor core never waiting for the exponentials.

Q is (batch, sq, hq, d), K and V are (batch, skv, hkv, d), float16 or bfloat16, d 64 or 128; hq a multiple of hkv. O is
as Q; LSE, the logarithm of each row's sum of exponentials, is (batch, hq, sq) in float32.

Run `python flash_attention4.py --help`, or `make stage-09`.
"""

import sys
from math import sqrt
from pathlib import Path

import torch
from tvm.backend.cuda.lang.pipeline import MBarrier, PipelineState, TCGen05Bar, TMABar
from tvm.script import tirx as T
from tvm.script.tirx import tile as Tx
from tvm.tirx.layout import tcgen05_atom_layout

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.harness import BadSize, Config, Option, Size, Stage, Tolerance, run_stage

LANES = 32  # of a warp
TILE = 128  # queries of a tile and keys of a block: the tensor core's M, and one query for each thread of a warpgroup
TILES = 2  # of queries in flight
CHUNK = 32  # columns that a thread moves between TMEM and registers with one instruction
TMEM_COLUMNS = 512
SMEM_BYTES = 227 * 1024  # the most that one CTA can have
L2_BYTES = 126 * 1024 * 1024

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
LOWEST = -1e38  # below every score; -inf would make NaNs of the differences between two of them
MAX_RISE = 8.0  # log2 of how far weights may outgrow 1 before O is rescaled

# 2^f for f in [0, 1), relative error at most 8.6e-5, a sixth of float16's rounding. Exactly 1 at 0.
POLYNOMIAL = (1.0, 0.6951168179512024, 0.22764497995376587, 0.0770670473575592)
FLOOR = 1.5 * 2**23  # x + FLOOR has no bits below 1: the sum rounded down is floor(x) + FLOOR
SMALLEST = -127.0  # 2^x is a float32 of exponent field 0, which is 0


@T.meta_class
class SoftmaxRow:
    """What one thread does with one row of scores, block after block: weights out, maximum and sum kept."""

    def __init__(self, dtype, scale_log2, polynomial_pairs):
        self.x = T.alloc_local((TILE,), "float32")
        self.scores = self.x.view(TILE, TILE, layout=tcgen05_atom_layout("32x32b", (TILE, TILE), "float32"))
        self.p = T.alloc_local((CHUNK,), dtype)
        self.weights = self.p.view(TILE, CHUNK, layout=tcgen05_atom_layout("32x32b", (TILE, CHUNK), dtype))
        self.scale_log2 = scale_log2
        self.mufu_pairs = 4 - polynomial_pairs  # of four
        self.base = T.local_scalar("float32")  # a weight is 2^(score - base)
        self.factor = T.local_scalar("float32")  # from weights of the last base to those of this one
        self.top = T.alloc_local((1,), "float32")
        self.sums = T.alloc_local((2,), "uint64")  # each two float32
        self.pair = T.alloc_local((4,), "uint64")

    @T.inline
    def start(self):
        self.base = T.float32(LOWEST)
        self.sums[0] = T.uint64(0)
        self.sums[1] = T.uint64(0)

    @T.inline
    def load(self, S, column):
        for chunk in T.unroll(TILE // CHUNK):
            Tx.wg.copy_async(
                self.scores[:, chunk * CHUNK : chunk * CHUNK + CHUNK],
                S[:, column + chunk * CHUNK : column + chunk * CHUNK + CHUNK],
            )
        T.ptx.tcgen05.wait__ld.sync.aligned()

    @T.inline
    def mask(self, allowed):
        for j in T.unroll(TILE):
            self.x[j] = T.Select(j < allowed, self.x[j], T.float32(float("-inf")))

    @T.inline
    def raise_base(self):
        """Take the block's maximum as the new base, if it is so far above the old one."""
        self.top[0] = T.float32(LOWEST)
        Tx.max(self.top[0:1], self.x[0:TILE], accum=True)
        self.top[0] = self.top[0] * self.scale_log2
        self.factor = T.float32(1)
        if self.top[0] - self.base > T.float32(MAX_RISE):
            T.ptx.ex2.approx.ftz.f32(self.factor, self.base - self.top[0])
            self.base = self.top[0]
        T.ptx.mov.b64(self.pair[0], self.factor, self.factor)
        for i in T.unroll(2):
            T.ptx.mul.rn.ftz.f32x2(self.sums[i], self.sums[i], self.pair[0])

    @T.inline
    def exponentiate(self, chunk):
        T.ptx.mov.b64(self.pair[1], self.scale_log2, self.scale_log2)
        T.ptx.mov.b64(self.pair[2], -self.base, -self.base)
        for i in T.unroll(CHUNK // 2):
            j: T.let = chunk * CHUNK + 2 * i
            T.ptx.mov.b64(self.pair[0], self.x[j], self.x[j + 1])
            T.ptx.fma.rn.ftz.f32x2(self.pair[0], self.pair[0], self.pair[1], self.pair[2])
            T.ptx.mov.b64(self.x[j], self.x[j + 1], self.pair[0])
            if i % 4 < self.mufu_pairs:
                T.ptx.ex2.approx.ftz.f32(self.x[j], self.x[j])
                T.ptx.ex2.approx.ftz.f32(self.x[j + 1], self.x[j + 1])
            else:
                self.exponentiate_by_polynomial(j)
            T.ptx.mov.b64(self.pair[0], self.x[j], self.x[j + 1])
            T.ptx.add.rn.ftz.f32x2(self.sums[i % 2], self.sums[i % 2], self.pair[0])

    @T.inline
    def exponentiate_by_polynomial(self, j):
        for k in T.unroll(2):
            self.x[j + k] = T.max(self.x[j + k], T.float32(SMALLEST))
        whole: T.uint64
        back: T.uint64
        fraction: T.uint64
        value: T.uint64
        T.ptx.mov.b64(self.pair[0], self.x[j], self.x[j + 1])
        T.ptx.mov.b64(self.pair[3], T.float32(FLOOR), T.float32(FLOOR))
        T.ptx.add.rm.ftz.f32x2(whole, self.pair[0], self.pair[3])
        T.ptx.sub.rn.ftz.f32x2(back, whole, self.pair[3])
        T.ptx.sub.rn.ftz.f32x2(fraction, self.pair[0], back)
        T.ptx.mov.b64(value, T.float32(POLYNOMIAL[3]), T.float32(POLYNOMIAL[3]))
        for k in T.unroll(3):
            coefficient: T.let = T.Select(
                k == 0, T.float32(POLYNOMIAL[2]), T.Select(k == 1, T.float32(POLYNOMIAL[1]), T.float32(POLYNOMIAL[0]))
            )
            T.ptx.mov.b64(self.pair[3], coefficient, coefficient)
            T.ptx.fma.rn.ftz.f32x2(value, value, fraction, self.pair[3])
        lo: T.uint32
        hi: T.uint32
        exponent_lo: T.uint32
        exponent_hi: T.uint32
        T.ptx.mov.b64(lo, hi, value)
        T.ptx.mov.b64(exponent_lo, exponent_hi, whole)
        self.x[j] = T.reinterpret("float32", lo + (exponent_lo << T.uint32(23)))
        self.x[j + 1] = T.reinterpret("float32", hi + (exponent_hi << T.uint32(23)))

    @T.inline
    def store(self, P, column, chunk):
        Tx.wg.cast(self.weights[:, :], self.scores[:, chunk * CHUNK : chunk * CHUNK + CHUNK])
        Tx.wg.copy_async(P[:, column + chunk * CHUNK : column + chunk * CHUNK + CHUNK], self.weights[:, :])

    @T.inline
    def total(self, result):
        lo: T.float32
        hi: T.float32
        T.ptx.add.rn.ftz.f32x2(self.sums[0], self.sums[0], self.sums[1])
        T.ptx.mov.b64(lo, hi, self.sums[0])
        result = lo + hi


def make_kernel(config: Config):
    """The TIRx function for one size and type: attention(Q, K, V, scale, O, LSE)."""
    batch, sq, skv, hq, hkv, d, dtype = (
        config.batch, config.sq, config.skv, config.hq, config.hkv, config.d, config.dtype,
    )  # fmt: skip
    CAUSAL = config.mask == "causal"
    GROUP = hq // hkv  # query heads that share a head of K and V; they lie side by side in a tile
    POSITIONS = TILE // GROUP  # of the sequence, in a tile
    SHIFT = skv - sq  # query i sees keys up to i + SHIFT: the last query sees all
    BLOCKS = -(-skv // TILE)

    PAIRS = -(-sq // (TILES * POSITIONS))  # of tiles, for each head of K and V
    HEADS = batch * hkv
    WORK = PAIRS * HEADS
    CTAS = min(WORK, config.sms, config.ctas)
    KV_BYTES = 2 * skv * d * config.itemsize
    SECTION = min(HEADS, max(1, L2_BYTES // 2 // KV_BYTES))  # heads whose K and V stay in L2 together

    TILE_BYTES = TILE * d * config.itemsize
    STAGES = min(6, (SMEM_BYTES - 3072) // TILE_BYTES - 2 * TILES)

    P_COLUMN = 0 if d == 128 else 2 * TILES * (TILE + d)  # in elements of P, two to a column
    P_STRIDE = 2 * TILE if d == 128 else TILE
    FIRST_KEYS = 96  # the product with V starts when so many weights are there
    PIECES = 2

    SOFTMAX_WARPS = 4 * TILES
    LOADER, MMA, STORER = SOFTMAX_WARPS + 4, SOFTMAX_WARPS + 5, SOFTMAX_WARPS + 6
    WARPS = SOFTMAX_WARPS + 8

    @T.prim_func
    def attention(q: T.handle, k: T.handle, v: T.handle, scale: T.float32, o: T.handle, lse: T.handle):
        # Lengths are left open: TIRx drops dimensions of one element, and with them strides that a tensor map needs.
        queries = T.int32()
        keys = T.int32()
        Q = T.match_buffer(q, (batch, queries, hq, d), dtype)
        K = T.match_buffer(k, (batch, keys, hkv, d), dtype)
        V = T.match_buffer(v, (batch, keys, hkv, d), dtype)
        O = T.match_buffer(o, (batch, queries, hq, d), dtype)  # noqa: E741
        LSE = T.match_buffer(lse, (batch, hq, queries), "float32")

        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
        cta = T.cta_id([CTAS])
        warpgroup = T.warpgroup_id([WARPS // 4])
        T.warp_id_in_wg([4])
        warp = T.warp_id([WARPS])
        lane = T.lane_id([LANES])
        T.thread_id([WARPS * LANES])
        row = T.thread_id_in_wg([TILE])

        pool = T.SMEMPool()
        q_full = TMABar(pool, TILES)
        q_empty = TCGen05Bar(pool, TILES)
        kv_full = TMABar(pool, STAGES)
        kv_empty = TCGen05Bar(pool, STAGES)
        s_full = TCGen05Bar(pool, TILES)
        p_full = MBarrier(pool, TILES * PIECES)
        o_full = TCGen05Bar(pool, TILES)
        o_empty = MBarrier(pool, TILES)
        factor_full = MBarrier(pool, TILES)
        factor_empty = MBarrier(pool, TILES)
        out_full = MBarrier(pool, TILES)
        out_empty = MBarrier(pool, TILES)
        factors = pool.alloc((TILES, TILE), "float32")
        Qs = pool.alloc_tcgen05_mma_AB((TILES, TILE, d), dtype)
        KVs = pool.alloc_tcgen05_mma_AB((STAGES, TILE, d), dtype)
        Os = pool.alloc_tcgen05_mma_AB((TILES, TILE, d), dtype)
        tmem = T.TMEMPool(pool, total_cols=TMEM_COLUMNS, cta_group=1, alloc_warp=SOFTMAX_WARPS)
        S = tmem.alloc((TILE, TILES * TILE), "float32")
        Ot = tmem.alloc((TILE, TILES * d), "float32")
        tmem.move_base_to(0)
        P = tmem.alloc_tcgen05_mma_A((TILE, 2 * TMEM_COLUMNS), dtype, M=TILE, cta_group=1)
        tmem.commit()
        pool.commit()

        q_full.init(1)
        q_empty.init(1)
        kv_full.init(1)
        kv_empty.init(1)
        s_full.init(1)
        p_full.init(4)
        o_full.init(1)
        o_empty.init(4)
        factor_full.init(4)
        factor_empty.init(4)
        out_full.init(4)
        out_empty.init(1)
        T.ptx.fence.mbarrier_init.release.cluster()
        T.ptx.fence.proxy.async_.shared__cta()
        T.ptx.tcgen05.fence__before_thread_sync()
        T.cuda.cta_sync()
        T.ptx.tcgen05.fence__after_thread_sync()

        work: T.int32 = cta
        batch_index: T.int32
        head: T.int32
        position: T.int32
        blocks = T.alloc_local((TILES,), "int32")
        turn: T.int32 = 0
        kv = PipelineState(STAGES)

        @T.inline
        def locate():
            section: T.let = work // (SECTION * PAIRS)
            width: T.let = T.min(SECTION, HEADS - section * SECTION)
            place: T.let = work % (SECTION * PAIRS)
            item: T.let = section * SECTION + place % width
            batch_index = item // hkv
            head = item % hkv
            position = (PAIRS - 1 - place // width) * TILES * POSITIONS
            for t in T.unroll(TILES):
                if CAUSAL:
                    last: T.let = position + (t + 1) * POSITIONS + SHIFT
                    blocks[t] = T.max(1, T.min(BLOCKS, (last + TILE - 1) // TILE))
                else:
                    blocks[t] = BLOCKS

        @T.inline
        def proceed():
            turn = turn + 1
            work = turn * CTAS + T.if_then_else(turn % 2 == 1, CTAS - 1 - cta, cta)

        # -- loader --

        @T.inline
        def request_queries(t):
            q_empty.wait(t, (turn & 1) ^ 1)
            q_full.arrive(t, TILE_BYTES)
            at: T.let = position + t * POSITIONS
            Tx.copy_async(
                Qs[t, :, :],
                Q[batch_index, at : at + POSITIONS, head * GROUP : head * GROUP + GROUP, :],
                dispatch="tma_auto",
                mbar=q_full.ptr_to([t]),
            )

        @T.inline
        def request(X, i):
            kv_empty.wait(kv.stage, kv.phase)
            kv_full.arrive(kv.stage, TILE_BYTES)
            Tx.copy_async(
                KVs[kv.stage, :, :],
                X[batch_index, i * TILE : i * TILE + TILE, head, :],
                dispatch="tma_auto",
                mbar=kv_full.ptr_to([kv.stage]),
            )
            kv.advance()

        # -- tensor core --

        weighed = T.alloc_local((TILES,), "int32")

        @T.inline
        def score(t, i):
            Tx.gemm_async(S[:, t * TILE : t * TILE + TILE], Qs[t, :, :], KVs[kv.stage, :, :], accum=False)
            s_full.arrive(t)
            if i + 1 == blocks[t]:
                q_empty.arrive(t)

        @T.inline
        def weigh(t, i, stage):
            phase: T.let = weighed[t] & 1
            o_empty.wait(t, phase ^ 1)
            p_full.wait(t * PIECES, phase)
            T.ptx.tcgen05.fence__after_thread_sync()
            p: T.let = P_COLUMN + t * P_STRIDE
            Tx.gemm_async(
                Ot[:, t * d : t * d + d],
                P[:, p : p + FIRST_KEYS],
                KVs[stage, 0:FIRST_KEYS, :],
                transB=True,
                accum=i != 0,
            )
            p_full.wait(t * PIECES + 1, phase)
            T.ptx.tcgen05.fence__after_thread_sync()
            Tx.gemm_async(
                Ot[:, t * d : t * d + d],
                P[:, p + FIRST_KEYS : p + TILE],
                KVs[stage, FIRST_KEYS:TILE, :],
                transB=True,
                accum=True,
            )
            weighed[t] = weighed[t] + 1
            if i + 1 == blocks[t]:
                o_full.arrive(t)

        # -- softmax --

        scale_log2: T.let = scale * T.float32(LOG2_E)
        softmax = SoftmaxRow(dtype, scale_log2, 1)
        scored: T.int32 = 0
        told: T.int32 = 0

        @T.inline
        def arrive(barrier, index):
            T.cuda.warp_sync()
            if lane == 0:
                barrier.arrive(index)

        @T.inline
        def tell(factor):
            factor_empty.wait(warpgroup, (told & 1) ^ 1)
            factors[warpgroup, row] = factor
            arrive(factor_full, warpgroup)
            told = told + 1

        @T.inline
        def attend(i, limit, masked):
            s_full.wait(warpgroup, scored & 1)
            T.ptx.tcgen05.fence__after_thread_sync()
            softmax.load(S, warpgroup * TILE)
            if masked:
                softmax.mask(limit - i * TILE)
            softmax.raise_base()
            if i > 0:
                tell(softmax.factor)
            for chunk in T.unroll(TILE // CHUNK):
                softmax.exponentiate(chunk)
                softmax.store(P, P_COLUMN + warpgroup * P_STRIDE, chunk)
                if chunk * CHUNK + CHUNK == FIRST_KEYS:
                    T.ptx.tcgen05.wait__st.sync.aligned()
                    T.ptx.tcgen05.fence__before_thread_sync()
                    arrive(p_full, warpgroup * PIECES)
            T.ptx.tcgen05.wait__st.sync.aligned()
            T.ptx.tcgen05.fence__before_thread_sync()
            arrive(p_full, warpgroup * PIECES + 1)
            scored = scored + 1

        # -- correction --

        values = T.alloc_tcgen05_ldst_frag("32x32b", (TILE, CHUNK), "float32")
        halves = T.alloc_cast_frag(values, dtype)
        heard = T.alloc_local((TILES,), "int32")

        @T.inline
        def hear(t):
            factor_full.wait(t, heard[t] & 1)
            heard[t] = heard[t] + 1

        @T.inline
        def rescale(t):
            hear(t)
            factor: T.float32 = factors[t, row]
            arrive(factor_empty, t)
            changed: T.uint32
            T.ptx.vote_sync.ballot.b32(changed, factor != T.float32(1), T.uint32(0xFFFFFFFF))
            if changed != T.uint32(0):
                T.ptx.tcgen05.fence__after_thread_sync()
                for chunk in T.unroll(d // CHUNK):
                    at: T.let = t * d + chunk * CHUNK
                    Tx.wg.copy_async(values[:, :], Ot[:, at : at + CHUNK])
                    T.ptx.tcgen05.wait__ld.sync.aligned()
                    for j in T.unroll(CHUNK):
                        values.local()[j] = values.local()[j] * factor
                    Tx.wg.copy_async(Ot[:, at : at + CHUNK], values[:, :])
                T.ptx.tcgen05.wait__st.sync.aligned()
                T.ptx.tcgen05.fence__before_thread_sync()
            arrive(o_empty, t)

        @T.inline
        def carry_out(t):
            hear(t)
            factor: T.float32 = factors[t, row]
            arrive(factor_empty, t)
            o_full.wait(t, turn & 1)
            out_empty.wait(t, (turn & 1) ^ 1)
            T.ptx.tcgen05.fence__after_thread_sync()
            for chunk in T.unroll(d // CHUNK):
                at: T.let = t * d + chunk * CHUNK
                Tx.wg.copy_async(values[:, :], Ot[:, at : at + CHUNK])
                T.ptx.tcgen05.wait__ld.sync.aligned()
                for j in T.unroll(CHUNK):
                    values.local()[j] = values.local()[j] * factor
                Tx.wg.cast(halves[:, :], values[:, :])
                Tx.copy(Os[t, row, chunk * CHUNK : chunk * CHUNK + CHUNK], halves.local()[:])
            T.ptx.tcgen05.fence__before_thread_sync()
            arrive(o_empty, t)
            T.ptx.fence.proxy.async_.shared__cta()
            arrive(out_full, t)

        @T.inline
        def send(t):
            out_full.wait(t, turn & 1)
            at: T.let = position + t * POSITIONS
            Tx.copy_async(
                O[batch_index, at : at + POSITIONS, head * GROUP : head * GROUP + GROUP, :],
                Os[t, :, :],
                dispatch="tma_auto",
            )
            T.ptx.cp.async_.bulk.commit_group()
            T.ptx.cp.async_.bulk.wait_group.read(0)
            out_empty.arrive(t)

        if warpgroup < TILES:
            T.ptx.setmaxnreg.inc.sync.aligned.u32(192)
            while work < WORK:
                locate()
                softmax.start()
                at: T.let = position + warpgroup * POSITIONS + row // GROUP
                limit: T.int32 = skv
                clear: T.int32 = skv // TILE
                mine: T.int32 = BLOCKS
                if CAUSAL:
                    first: T.let = position + warpgroup * POSITIONS + SHIFT + 1
                    limit = T.min(skv, at + SHIFT + 1)
                    clear = T.max(0, T.min(skv, first)) // TILE
                    mine = T.if_then_else(warpgroup == 0, blocks[0], blocks[1])
                for i in T.serial(clear, unroll=False):
                    attend(i, limit, False)
                for i in T.serial(mine - clear, unroll=False):
                    attend(clear + i, limit, True)
                total: T.float32
                softmax.total(total)
                inverse: T.float32
                T.ptx.rcp.approx.ftz.f32(inverse, total)
                tell(T.if_then_else(total == T.float32(0), T.float32(0), inverse))
                if at < sq:
                    log: T.float32
                    T.ptx.lg2.approx.ftz.f32(log, total)
                    LSE[batch_index, head * GROUP + row % GROUP, at] = (softmax.base + log) * T.float32(LN_2)
                proceed()
        elif warpgroup == TILES:
            T.ptx.setmaxnreg.dec.sync.aligned.u32(80)
            for t in T.unroll(TILES):
                heard[t] = 0
            while work < WORK:
                locate()
                for i in T.serial(blocks[TILES - 1] - 1, unroll=False):
                    for t in T.unroll(TILES):
                        if i + 1 < blocks[t]:
                            rescale(t)
                for t in T.unroll(TILES):
                    carry_out(t)
                proceed()
            # All products are complete and read.
            T.cuda.warpgroup_sync(1)
            tmem.dealloc()
        else:
            T.ptx.setmaxnreg.dec.sync.aligned.u32(48)
            if warp == LOADER:
                if T.cuda.elect_sync():
                    kv.init(1)
                    while work < WORK:
                        locate()
                        for i in T.serial(blocks[TILES - 1], unroll=False):
                            if i == 0:
                                request_queries(0)
                            request(K, i)
                            if i == 0:
                                request_queries(1)
                            request(V, i)
                        proceed()
            elif warp == MMA:
                if T.cuda.elect_sync():
                    kv.init(0)
                    for t in T.unroll(TILES):
                        weighed[t] = 0
                    while work < WORK:
                        locate()
                        kv_full.wait(kv.stage, kv.phase)
                        for t in T.unroll(TILES):
                            q_full.wait(t, turn & 1)
                            score(t, 0)
                        kv_empty.arrive(kv.stage)
                        kv.advance()
                        for i in T.serial(blocks[TILES - 1], unroll=False):
                            stage: T.int32 = kv.stage
                            kv_full.wait(kv.stage, kv.phase)
                            kv.advance()
                            for t in T.unroll(TILES):
                                if i < blocks[t]:
                                    weigh(t, i, stage)
                                if t == TILES - 1:
                                    kv_empty.arrive(stage)
                                if i + 1 < blocks[t]:
                                    kv_full.wait(kv.stage, kv.phase)
                                    score(t, i + 1)
                            if i + 1 < blocks[TILES - 1]:
                                kv_empty.arrive(kv.stage)
                                kv.advance()
                        proceed()
            elif warp == STORER:
                if T.cuda.elect_sync():
                    while work < WORK:
                        locate()
                        for t in T.unroll(TILES):
                            send(t)
                        proceed()

    return attention


def check(config: Config) -> None:
    """Refuse head dimensions and groups that do not fit the tile."""
    if config.d not in (64, 128):
        raise BadSize(f"d is {config.d}: a head has 64 or 128 elements here")
    if config.hq % config.hkv or TILE % (config.hq // config.hkv):
        raise BadSize(
            f"{config.hq} query heads and {config.hkv} heads of K and V: their ratio must be whole and divide {TILE}, "
            "because the query heads of a group share a tile"
        )


def make_inputs(config: Config, generator: torch.Generator) -> tuple:
    """q, k, v, and the scale 1 / sqrt(d)."""

    def normal(length: int, heads: int) -> torch.Tensor:
        x = torch.randn(config.batch, length, heads, config.d, generator=generator, device=generator.device)
        return x.to(config.torch_dtype)

    q, k, v = normal(config.sq, config.hq), normal(config.skv, config.hkv), normal(config.skv, config.hkv)
    return q, k, v, 1 / sqrt(config.d)


def reference(config: Config, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple:
    """The definition, in float64: O and LSE."""
    group = config.hq // config.hkv
    q64, k64, v64 = (x.double().transpose(1, 2) for x in (q, k, v))
    k64, v64 = k64.repeat_interleave(group, 1), v64.repeat_interleave(group, 1)
    scores = scale * q64 @ k64.transpose(-1, -2)
    if config.mask == "causal":
        seen = torch.ones(config.sq, config.skv, dtype=torch.bool, device=q.device)
        scores = scores.masked_fill(~seen.tril(config.skv - config.sq), float("-inf"))
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.unsqueeze(-1)).nan_to_num(0.0)
    return (weights @ v64).transpose(1, 2), lse


def tolerance(config: Config) -> Tolerance:
    """Weights are rounded to 16 bits, each by up to half a unit: next to that, additions in float32 are nothing.

    The rounding errors of a row are independent, so their sum compares with the output as one of them with a weight.
    """
    half_unit = torch.finfo(config.torch_dtype).eps / 2
    return Tolerance(terms=config.skv + int(4 * half_unit * 2**24), by_row=True)


STAGE = Stage(
    number=9,
    title="FlashAttention-4",
    arch="sm_100a",
    sizes=[
        Size("batch", default=1, gpu=4, help="sequences"),
        Size("sq", default=512, quick=128, gpu=8192, help="queries of a sequence"),
        Size("skv", default=512, quick=256, gpu=8192, help="keys and values of a sequence"),
        Size("hq", default=4, quick=2, gpu=32, help="heads of Q"),
        Size("hkv", default=2, quick=1, gpu=32, help="heads of K and V"),
        Size("d", default=128, help="elements of a head: 64 or 128"),
        Size("ctas", default=1 << 16, help="CTAs at most, never more than there are SMs"),
    ],
    options=[Option("mask", ("full", "causal"), "full", help="which keys a query sees")],
    dtypes=["float16", "bfloat16"],
    check=check,
    kernel=make_kernel,
    inputs=make_inputs,
    outputs=lambda config: [
        ((config.batch, config.sq, config.hq, config.d), config.torch_dtype),
        ((config.batch, config.hq, config.sq), torch.float32),
    ],
    reference=reference,
    tolerance=tolerance,
)

if __name__ == "__main__":
    run_stage(STAGE)
