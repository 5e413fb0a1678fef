"""Stage 09, FlashAttention-4: O = softmax(scale Q K^T) V, and the tensor core does not wait for the exponentials.

Q is (batch, sq, hq, d), K and V are (batch, skv, hkv, d), float16 or bfloat16, with d 64 or 128 and hq a multiple of
hkv. O is as Q. LSE, the logarithm of the sum of each row's exponentials, is (batch, hq, sq) in float32. A row that sees
no key gives zeros and -inf. `scale`, positive, is an argument of the kernel.

With `--lengths varying` the sequences of a batch have lengths of their own and lie one after the other: Q and O are
(rows, hq, d), K and V (rows, hkv, d), LSE is (hq, rows), and cu_seqlens_q and cu_seqlens_k, int32, say where each
sequence starts and the last one ends.

A CTA has two tiles of 128 queries in flight. While one is in the softmax the other has the tensor core, which
multiplies twice for each block of 128 keys: S = Q K^T, and O += P V with the weights P = 2^(S - base). All three stay
in TMEM, a row to each of its lanes, and a row of S becomes one of P in the registers of one thread:

    loader --q,kv--> MMA --s--> softmax 0, 1 --p--> MMA --o--> correction --out--> storer
                                            --factor--> correction --o_empty--> MMA

`--step` shows how it comes about: `qk`, `softmax`, `two-tiles`, `correction`, `causal`, `full`. `make stage-09` runs
it. Run this script with `--help` for its flags. From elsewhere: `build(...)` returns the kernel.

After FlashAttention-4 (arXiv 2603.05451).
"""

import sys
from dataclasses import dataclass
from math import inf, sqrt
from pathlib import Path

import torch
from tvm.backend.cuda.lang.pipeline import MBarrier, PipelineState, TCGen05Bar, TMABar
from tvm.script import tirx as T
from tvm.script.tirx import tile as Tx
from tvm.tirx.layout import S, TileLayout, tcgen05_atom_layout

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common.build import Kernel
from common.harness import BadSize, Config, Option, Size, Stage, Tolerance, run_stage

LANES = 32  # of a warp
WARPGROUP = 4  # warps, each of which reaches a quarter of TMEM's 128 lanes
TILE = 128  # queries of a tile, and keys of a block: a row of the tensor core's result for each thread of a warpgroup
TILES = 2  # of queries in flight: one is multiplied while the other is in the softmax
ATOM = 64  # elements of a row that a 128-byte swizzle keeps together: the widest box
CHUNK = 32  # columns of TMEM that one instruction moves to or from a thread's registers
TMEM_COLUMNS = 512  # all there are
CTA_SMEM_BYTES = 227 * 1024  # the most that one CTA can have
BARRIER_BYTES = 3 * 1024  # barriers and factors, and what is lost to the alignment of swizzled tiles
MAX_STAGES = 6  # of the ring: more than six blocks ahead hide nothing more
L2_BYTES = 126 * 1024 * 1024

LOADER, MMA, STORER = 0, 1, 2  # warps of the last warpgroup; the fourth has nothing to do
# Registers of a thread. Two warpgroups of the first and one of each of the others have the 64 K that 512 threads begin
# with. Without a correction warpgroup 384 threads begin with 168 each, and softmax, which does its work, may have more.
SOFTMAX_REGISTERS, CORRECTION_REGISTERS, OTHER_REGISTERS = 192, 80, 48
LONE_SOFTMAX_REGISTERS = 224

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
LOWEST = -1e38  # a base below every score. With -inf, the difference of two would be no number
PAIRS = 4  # of elements, out of which a fixed number takes the polynomial
# 2^f for f in [0, 1), highest power first: the least maximum of the relative error, 8.6e-5, among those that are 1 at
# 0. That is a sixth of what rounding P to float16 may lose, and a forty-fifth of what bfloat16 may.
POLYNOMIAL = (0.0770670473575592, 0.22764497995376587, 0.6951168179512024, 1.0)
FLOOR = 1.5 * 2.0**23  # x + FLOOR has no bits below 1, so rounding down leaves FLOOR + floor(x)
SMALLEST = -127.0  # here the exponent field of 2^x is 0, and so is 2^x for a polynomial that is 1


@dataclass(frozen=True)
class Step:
    """What the kernel of a step has. Each adds to the one before it."""

    correction: bool = False  # a warpgroup of its own rescales O, so that softmax need not
    max_rise: float = 0.0  # log2 of how far weights may outgrow 1 before O is rescaled
    masks: bool = False  # causal, and keys that do not fill their block
    polynomial: bool = False  # for a part of the exponentials
    first_keys: int = TILE  # weights of a block that are there when their product with V starts


STEPS = {
    "qk": Step(),
    "softmax": Step(),
    "two-tiles": Step(),
    "correction": Step(correction=True, max_rise=8.0),
    "causal": Step(correction=True, max_rise=8.0, masks=True),
    "full": Step(correction=True, max_rise=8.0, masks=True, polynomial=True, first_keys=96),
}
ONE_TILE = ("qk", "softmax")  # steps in which one warpgroup does everything, one thing after the other

# Of PAIRS. MUFU gives 16 exponentials per clock and SM. With d = 128 the tensor core takes as long for a block as MUFU
# for all its exponentials: a quarter less leaves it some slack. With d = 64 it takes half as long, and then the
# exponentials go to both pipes in equal parts.
POLYNOMIAL_PAIRS = {128: 1, 64: 2}


# -- what one thread does with its row ---------------------------------------------------------------------------------


@T.meta_class
class SoftmaxRow:
    """A row of scores in the registers of one thread: what becomes of it, block after block.

    Scores are taken in units of log2, so a weight is 2^(score - base). With the largest score so far as the base,
    weights are at most 1. Any other base would do: it cancels when O is divided by the sum of the weights.
    """

    def __init__(self, dtype, scale, max_rise, polynomial_pairs):
        self.x = T.alloc_local((TILE,), "float32")
        self.scores = self.x.view(TILE, TILE, layout=tcgen05_atom_layout("32x32b", (TILE, TILE), "float32"))
        self.p = T.alloc_local((CHUNK,), dtype)
        self.weights = self.p.view(TILE, CHUNK, layout=tcgen05_atom_layout("32x32b", (TILE, CHUNK), dtype))
        self.scale = scale * T.float32(LOG2_E)
        self.max_rise = max_rise
        self.mufu_pairs = PAIRS - polynomial_pairs
        self.top = T.alloc_local((1,), "float32")
        self.base = T.local_scalar("float32")
        self.factor = T.local_scalar("float32")  # from weights of the base before to those of this one
        self.sums = T.alloc_local((2,), "uint64")  # of weights; each is a pair, so that an instruction adds two
        self.total = T.local_scalar("float32")
        self.lse = T.local_scalar("float32")
        self.pair = T.alloc_local((1,), "uint64")
        self.operand = T.alloc_local((2,), "uint64")
        self.fraction = T.alloc_local((1,), "uint64")
        self.value = T.alloc_local((1,), "uint64")

    @T.inline
    def start(self):
        self.base = T.float32(LOWEST)
        for i in T.unroll(2):
            self.sums[i] = T.uint64(0)

    @T.inline
    def load(self, S, column):
        for chunk in T.unroll(TILE // CHUNK):
            Tx.wg.copy_async(
                self.scores[:, chunk * CHUNK : chunk * CHUNK + CHUNK],
                S[:, column + chunk * CHUNK : column + chunk * CHUNK + CHUNK],
            )
        T.ptx.tcgen05.wait__ld.sync.aligned()

    @T.inline
    def mask(self, visible):
        """Keep the first `visible` scores."""
        for j in T.unroll(TILE):
            self.x[j] = T.Select(j < visible, self.x[j], T.float32(-inf))

    @T.inline
    def find_top(self):
        self.top[0] = T.float32(LOWEST)
        Tx.max(self.top[0:1], self.x[0:TILE], accum=True)
        self.top[0] = self.top[0] * self.scale

    @T.inline
    def raise_base(self):
        """Raise the base to the block's largest score, unless it is little higher. A row without scores keeps it."""
        self.find_top()
        self.factor = T.float32(1)
        if self.top[0] - self.base > T.float32(self.max_rise):
            T.ptx.ex2.approx.ftz.f32(self.factor, self.base - self.top[0])
            self.base = self.top[0]
        T.ptx.mov.b64(self.operand[0], self.factor, self.factor)
        for i in T.unroll(2):
            T.ptx.mul.rn.ftz.f32x2(self.sums[i], self.sums[i], self.operand[0])

    @T.inline
    def exponentiate(self, chunk):
        """Scores to weights, and add them up."""
        for i in T.unroll(CHUNK // 2):
            j: T.let = chunk * CHUNK + 2 * i
            T.ptx.mov.b64(self.pair[0], self.x[j], self.x[j + 1])
            T.ptx.mov.b64(self.operand[0], self.scale, self.scale)
            T.ptx.mov.b64(self.operand[1], -self.base, -self.base)
            T.ptx.fma.rn.ftz.f32x2(self.pair[0], self.pair[0], self.operand[0], self.operand[1])
            T.ptx.mov.b64(self.x[j], self.x[j + 1], self.pair[0])
            if i % PAIRS < self.mufu_pairs:
                T.ptx.ex2.approx.ftz.f32(self.x[j], self.x[j])
                T.ptx.ex2.approx.ftz.f32(self.x[j + 1], self.x[j + 1])
            else:
                self.exponentiate_by_polynomial(j)
            T.ptx.mov.b64(self.pair[0], self.x[j], self.x[j + 1])
            T.ptx.add.rn.ftz.f32x2(self.sums[i % 2], self.sums[i % 2], self.pair[0])

    @T.inline
    def exponentiate_by_polynomial(self, j):
        """2^x = 2^floor(x) 2^fraction: the fraction through a polynomial, the floor by adding to the exponent field."""
        whole: T.uint64
        bits = T.alloc_local((4,), "uint32")
        for k in T.unroll(2):
            self.x[j + k] = T.max(self.x[j + k], T.float32(SMALLEST))
        T.ptx.mov.b64(self.pair[0], self.x[j], self.x[j + 1])
        T.ptx.mov.b64(self.operand[0], T.float32(FLOOR), T.float32(FLOOR))
        T.ptx.add.rm.ftz.f32x2(whole, self.pair[0], self.operand[0])
        T.ptx.sub.rn.ftz.f32x2(self.fraction[0], whole, self.operand[0])
        T.ptx.sub.rn.ftz.f32x2(self.fraction[0], self.pair[0], self.fraction[0])
        T.ptx.mov.b64(self.value[0], T.float32(POLYNOMIAL[0]), T.float32(POLYNOMIAL[0]))
        self.multiply_and_add(POLYNOMIAL[1])
        self.multiply_and_add(POLYNOMIAL[2])
        self.multiply_and_add(POLYNOMIAL[3])
        T.ptx.mov.b64(bits[0], bits[1], self.value[0])
        T.ptx.mov.b64(bits[2], bits[3], whole)
        for k in T.unroll(2):
            self.x[j + k] = T.reinterpret("float32", bits[k] + (bits[2 + k] << T.uint32(23)))

    @T.inline
    def multiply_and_add(self, coefficient):
        T.ptx.mov.b64(self.operand[0], T.float32(coefficient), T.float32(coefficient))
        T.ptx.fma.rn.ftz.f32x2(self.value[0], self.value[0], self.fraction[0], self.operand[0])

    @T.inline
    def store(self, P, column, chunk):
        Tx.wg.cast(self.weights[:, :], self.scores[:, chunk * CHUNK : chunk * CHUNK + CHUNK])
        Tx.wg.copy_async(P[:, column + chunk * CHUNK : column + chunk * CHUNK + CHUNK], self.weights[:, :])

    @T.inline
    def finish(self):
        """The sum of all weights, and in `factor` what O must be multiplied with: 0 if there were none."""
        pair_sums = T.alloc_local((2,), "float32")
        T.ptx.add.rn.ftz.f32x2(self.sums[0], self.sums[0], self.sums[1])
        T.ptx.mov.b64(pair_sums[0], pair_sums[1], self.sums[0])
        self.total = pair_sums[0] + pair_sums[1]
        T.ptx.rcp.approx.ftz.f32(self.factor, self.total)
        self.factor = T.Select(self.total == T.float32(0), T.float32(0), self.factor)

    @T.inline
    def find_lse(self):
        T.ptx.lg2.approx.ftz.f32(self.lse, self.total)
        self.lse = (self.base + self.lse) * T.float32(LN_2)


@T.meta_class
class OutputRow:
    """A row of O in TMEM, and the registers of one thread through which it passes a chunk at a time."""

    def __init__(self, dtype, d):
        self.d = d
        self.x = T.alloc_local((CHUNK,), "float32")
        self.sums = self.x.view(TILE, CHUNK, layout=tcgen05_atom_layout("32x32b", (TILE, CHUNK), "float32"))
        self.y = T.alloc_local((CHUNK,), dtype)
        self.rounded = self.y.view(TILE, CHUNK, layout=tcgen05_atom_layout("32x32b", (TILE, CHUNK), dtype))

    @T.inline
    def load_scaled(self, O, column, factor):  # noqa: E741
        Tx.wg.copy_async(self.sums[:, :], O[:, column : column + CHUNK])
        T.ptx.tcgen05.wait__ld.sync.aligned()
        for j in T.unroll(CHUNK):
            self.x[j] = self.x[j] * factor

    @T.inline
    def rescale(self, O, column, factor):  # noqa: E741
        """Multiply the row, unless no row of this warp changes."""
        changed: T.uint32
        T.ptx.vote_sync.ballot.b32(changed, factor != T.float32(1), T.uint32(0xFFFFFFFF))
        if changed != T.uint32(0):
            for chunk in T.unroll(self.d // CHUNK):
                self.load_scaled(O, column + chunk * CHUNK, factor)
                Tx.wg.copy_async(O[:, column + chunk * CHUNK : column + chunk * CHUNK + CHUNK], self.sums[:, :])
            T.ptx.tcgen05.wait__st.sync.aligned()

    @T.inline
    def take(self, O, column, factor, Os, tile, row):  # noqa: E741
        """Multiply the row, round it and write it to SMEM. Rows are swizzled: neighbours do not share banks."""
        for chunk in T.unroll(self.d // CHUNK):
            self.load_scaled(O, column + chunk * CHUNK, factor)
            Tx.wg.cast(self.rounded[:, :], self.sums[:, :])
            Tx.copy(Os[tile, row, chunk * CHUNK : chunk * CHUNK + CHUNK], self.y[:])


# -- how queries become tiles, and keys blocks -------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """Rows of a tile are `positions` of the sequence times a `group` of heads, all those that share K and V.

    The tile needs K and V once for all of them, and few queries with many heads fill a tile as well as many queries.
    """

    group: int  # query heads that share a head of K and V; they lie side by side in memory
    positions: int  # of the sequence, in a tile
    blocks: int  # of keys


def split(config: Config) -> Split:
    group = config.hq // config.hkv
    return Split(group, TILE // group, -(-config.skv // TILE))


def rows_before_end(X, rows, box: int, heads: int, d: int):
    """X, `rows` of (heads, d), as a tensor in which (i, end) is row end - box + i: those before `end`, for i < box.

    A box that begins at (box - n, end) has n rows in this tensor. The copy engine fills the others with zeros, or
    drops them, even if there are rows of X in their place: those of the next sequence. The tensor begins `box` rows
    before X, and nobody touches what is there.
    """
    row = heads * d
    layout = TileLayout(S[(box, rows + box, heads, d) : (row, row, d, 1)] + -box * row)
    return X.view(box, rows + box, heads, d, layout=layout)


def tmem_columns(d: int) -> dict[str, list[range]]:
    """Columns of S, P and O of each tile. The scores and outputs of two tiles of d = 128 are all of TMEM.

    So P, two elements to a column, takes over half of the columns of its S; with d = 64 it has its own.
    """
    scores = [range(tile * TILE, tile * TILE + TILE) for tile in range(TILES)]
    outputs = [range(TILES * TILE + tile * d, TILES * TILE + tile * d + d) for tile in range(TILES)]
    free = outputs[-1].stop
    starts = [columns.start for columns in scores] if free == TMEM_COLUMNS else [free, free + TILE // 2]
    return {"S": scores, "P": [range(start, start + TILE // 2) for start in starts], "O": outputs}


# -- steps qk and softmax ----------------------------------------------------------------------------------------------


def make_one_tile(config: Config):
    """One warpgroup, one tile: S = Q K^T, the softmax, O += P V, one after the other; step `qk` ends at S."""
    batches, sq, skv, hq, hkv, d = config.batch, config.sq, config.skv, config.hq, config.hkv, config.d
    dtype, step, shape = config.dtype, STEPS[config.step], split(config)
    GROUP, POSITIONS, BLOCKS = shape.group, shape.positions, shape.blocks
    ONLY_SCORES = config.step == "qk"
    TILE_BYTES = TILE * d * config.itemsize

    @T.prim_func
    def attention(q: T.handle, k: T.handle, v: T.handle, scale: T.float32, o: T.handle, lse: T.handle):
        # Lengths stay open. TIRx would drop a dimension of one element, and with it a stride that a tensor map needs.
        queries = T.int32()
        keys = T.int32()
        Q = T.match_buffer(q, (batches, queries, hq, d), dtype)
        K = T.match_buffer(k, (batches, keys, hkv, d), dtype)
        V = T.match_buffer(v, (batches, keys, hkv, d), dtype)
        if ONLY_SCORES:
            O = T.match_buffer(o, (batches, hq, queries, keys), "float32")  # noqa: E741
        else:
            O = T.match_buffer(o, (batches, queries, hq, d), dtype)  # noqa: E741
        LSE = T.match_buffer(lse, (batches, hq, queries), "float32")
        assert queries == sq, "Q, O and LSE have another number of queries than the kernel was built for"
        assert keys == skv, "K and V have another number of keys than the kernel was built for"

        T.device_entry()
        tile, head, batch = T.cta_id([-(-sq // POSITIONS), hkv, batches])
        T.warpgroup_id([1])
        T.warp_id_in_wg([WARPGROUP])
        T.warp_id([WARPGROUP])
        T.lane_id([LANES])
        row = T.thread_id([TILE])
        T.thread_id_in_wg([TILE])

        pool = T.SMEMPool()
        loaded = TMABar(pool, 1)
        multiplied = TCGen05Bar(pool, 1)
        Qs = pool.alloc_tcgen05_mma_AB((TILE, d), dtype)
        Ks = pool.alloc_tcgen05_mma_AB((TILE, d), dtype)
        Vs = pool.alloc_tcgen05_mma_AB((TILE, d), dtype)
        Os = pool.alloc_tcgen05_mma_AB((1, TILE, d), dtype)
        tmem = T.TMEMPool(pool, total_cols=TMEM_COLUMNS)
        St = tmem.alloc((TILE, TILE), "float32")
        Ot = tmem.alloc((TILE, d), "float32")
        tmem.move_base_to(0)
        Pt = tmem.alloc_tcgen05_mma_A((TILE, TILE), dtype, M=TILE, cta_group=1)  # over the scores, in half the columns
        tmem.commit()
        pool.commit()

        loaded.init(1)
        multiplied.init(1)
        T.ptx.fence.mbarrier_init.release.cluster()
        T.ptx.fence.proxy.async_.shared__cta()
        T.ptx.tcgen05.fence__before_thread_sync()
        T.cuda.cta_sync()
        T.ptx.tcgen05.fence__after_thread_sync()

        softmax = SoftmaxRow(dtype, scale, step.max_rise, 0)
        output = OutputRow(dtype, d)
        products: T.int32 = 0
        first: T.let = tile * POSITIONS
        position: T.let = first + row // GROUP
        query_head: T.let = head * GROUP + row % GROUP

        @T.inline
        def load(tile, X, position, positions, head, heads):
            for atom in T.unroll(d // ATOM):
                Tx.copy_async(
                    tile[:, atom * ATOM : atom * ATOM + ATOM],
                    X[batch, position : position + positions, head : head + heads, atom * ATOM : atom * ATOM + ATOM],
                    dispatch="tma_explicit",
                    mbar=loaded.ptr_to([0]),
                )

        @T.inline
        def wait_for_product():
            multiplied.wait(0, products & 1)
            products = products + 1
            T.ptx.tcgen05.fence__after_thread_sync()

        softmax.start()
        highest: T.float32 = T.float32(LOWEST)
        for i in T.serial(BLOCKS, unroll=False):
            if row == 0:
                loaded.arrive(0, T.if_then_else(i == 0, 3, 2) * TILE_BYTES)
                if i == 0:
                    load(Qs, Q, first, POSITIONS, head * GROUP, GROUP)
                load(Ks, K, i * TILE, TILE, head, 1)
                load(Vs, V, i * TILE, TILE, head, 1)
                loaded.wait(0, i & 1)
                Tx.gemm_async(St[:, :], Qs[:, :], Ks[:, :], accum=False)
                multiplied.arrive(0)
            wait_for_product()
            softmax.load(St, 0)
            if ONLY_SCORES:
                softmax.find_top()
                highest = T.max(highest, softmax.top[0])
                if position < sq:
                    for j in T.unroll(TILE):
                        O[batch, query_head, position, i * TILE + j] = softmax.x[j] * scale
                # The next product overwrites the scores: all threads must have read theirs.
                T.ptx.tcgen05.fence__before_thread_sync()
                T.cuda.cta_sync()
            else:
                softmax.raise_base()
                if i > 0:
                    output.rescale(Ot, 0, softmax.factor)
                for chunk in T.unroll(TILE // CHUNK):
                    softmax.exponentiate(chunk)
                    softmax.store(Pt, 0, chunk)
                # The tensor core reads the weights, and adds to the rescaled O, of all threads.
                T.ptx.tcgen05.wait__st.sync.aligned()
                T.ptx.tcgen05.fence__before_thread_sync()
                T.cuda.cta_sync()
                if row == 0:
                    T.ptx.tcgen05.fence__after_thread_sync()
                    Tx.gemm_async(Ot[:, :], Pt[:, :], Vs[:, :], transB=True, accum=(i != 0))
                    multiplied.arrive(0)
                wait_for_product()

        if ONLY_SCORES:
            if position < sq:
                LSE[batch, query_head, position] = highest * T.float32(LN_2)
        else:
            softmax.finish()
            if position < sq:
                softmax.find_lse()
                LSE[batch, query_head, position] = softmax.lse
            output.take(Ot, 0, softmax.factor, Os, 0, row)
            T.ptx.fence.proxy.async_.shared__cta()
            T.ptx.tcgen05.fence__before_thread_sync()
            T.cuda.cta_sync()
            if row == 0:
                for atom in T.unroll(d // ATOM):
                    Tx.copy_async(
                        O[
                            batch,
                            first : first + POSITIONS,
                            head * GROUP : head * GROUP + GROUP,
                            atom * ATOM : atom * ATOM + ATOM,
                        ],
                        Os[0, :, atom * ATOM : atom * ATOM + ATOM],
                        dispatch="tma_explicit",
                    )
                T.ptx.cp.async_.bulk.commit_group()
                T.ptx.cp.async_.bulk.wait_group.read(0)
        T.cuda.cta_sync()
        tmem.dealloc()

    return attention


# -- the other steps ---------------------------------------------------------------------------------------------------


def make_two_tiles(config: Config):
    """The kernel of the other steps, the last of which is FlashAttention-4."""
    batches, sq, skv, hq, hkv, d = config.batch, config.sq, config.skv, config.hq, config.hkv, config.d
    dtype, step, shape = config.dtype, STEPS[config.step], split(config)
    GROUP, POSITIONS = shape.group, shape.positions
    CAUSAL = config.mask == "causal"
    VARYING = config.lengths == "varying"
    CORRECTION = step.correction
    FIRST_KEYS = step.first_keys
    PIECES = 1 if FIRST_KEYS == TILE else 2  # of P

    WORK_POSITIONS = TILES * POSITIONS  # of a piece of work: two tiles of a head
    ROWS_OF_WORK = -(-sq // WORK_POSITIONS)  # pieces of work of a head
    HEADS = batches * hkv
    CTAS = min(ROWS_OF_WORK * HEADS, config.ctas, config.sms)
    WORK = 1 << 30 if VARYING else ROWS_OF_WORK * HEADS  # or more than there can be: the end is found on the way
    HEAD_BYTES = 2 * skv * d * config.itemsize
    SECTION = min(HEADS, max(1, L2_BYTES // 2 // HEAD_BYTES))  # heads whose K and V share L2, with room to spare

    TILE_BYTES = TILE * d * config.itemsize
    STAGES = min(MAX_STAGES, (CTA_SMEM_BYTES - BARRIER_BYTES) // TILE_BYTES - 2 * TILES)  # beside Q and O

    COLUMNS = tmem_columns(d)
    P_COLUMN = 2 * COLUMNS["P"][0].start  # in elements of P, two to a column
    P_STRIDE = 2 * COLUMNS["P"][1].start - P_COLUMN

    SOFTMAX_WARPS = TILES * WARPGROUP
    OTHER_WARPGROUP = TILES + 1 if CORRECTION else TILES
    WARPS = (OTHER_WARPGROUP + 1) * WARPGROUP
    ROW_REGISTERS = SOFTMAX_REGISTERS if CORRECTION else LONE_SOFTMAX_REGISTERS
    # Who reads O last gives TMEM back.
    FIRST_READER, READERS = (SOFTMAX_WARPS, WARPGROUP) if CORRECTION else (0, SOFTMAX_WARPS)

    @T.inline
    def kernel(Q, K, V, cu_seqlens_q, cu_seqlens_k, scale, O, LSE, q_rows, k_rows, sequences):  # noqa: E741
        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})  # or ptxas ignores setmaxnreg
        cta = T.cta_id([CTAS])
        warpgroup = T.warpgroup_id([WARPS // WARPGROUP])
        warp = T.warp_id_in_wg([WARPGROUP])
        T.warp_id([WARPS])
        lane = T.lane_id([LANES])
        T.thread_id([WARPS * LANES])
        row = T.thread_id_in_wg([TILE])

        Q_rows = T.meta_var(rows_before_end(Q, q_rows, POSITIONS, hq, d))
        K_rows = T.meta_var(rows_before_end(K, k_rows, TILE, hkv, d))
        V_rows = T.meta_var(rows_before_end(V, k_rows, TILE, hkv, d))
        O_rows = T.meta_var(rows_before_end(O, q_rows, POSITIONS, hq, d))
        LSE_flat = LSE.view(hq * q_rows)

        # One of each barrier for each tile, except for the ring.
        pool = T.SMEMPool()
        q_full = TMABar(pool, TILES)  # loader -> MMA: the queries have landed
        q_empty = TCGen05Bar(pool, TILES)  # MMA -> loader: the last block's scores are complete
        kv_full = TMABar(pool, STAGES)  # loader -> MMA: a block of K or V has landed
        kv_empty = TCGen05Bar(pool, STAGES)  # MMA -> loader: both tiles have multiplied with it
        s_full = TCGen05Bar(pool, TILES)  # MMA -> softmax: the block's scores are complete
        p_full = MBarrier(pool, TILES * PIECES)  # softmax -> MMA: weights are in TMEM
        factor_full = MBarrier(pool, TILES)  # softmax -> correction: multiply O with this
        factor_empty = MBarrier(pool, TILES)  # correction -> softmax: the factor is in registers
        o_full = TCGen05Bar(pool, TILES)  # MMA -> correction: O is complete
        o_empty = MBarrier(pool, TILES)  # correction -> MMA: O is rescaled, or in registers; add to it, or overwrite it
        out_full = MBarrier(pool, TILES)  # correction -> storer: O is in SMEM
        out_empty = MBarrier(pool, TILES)  # storer -> correction: it has left
        factors = pool.alloc((TILES, TILE), "float32")
        Qs = pool.alloc_tcgen05_mma_AB((TILES, TILE, d), dtype)
        ring = pool.alloc_tcgen05_mma_AB((STAGES, TILE, d), dtype)  # K and V in turn
        Os = pool.alloc_tcgen05_mma_AB((TILES, TILE, d), dtype)
        tmem = T.TMEMPool(pool, total_cols=TMEM_COLUMNS, alloc_warp=FIRST_READER)
        St = tmem.alloc((TILE, TILES * TILE), "float32")
        Ot = tmem.alloc((TILE, TILES * d), "float32")
        tmem.move_base_to(0)
        Pt = tmem.alloc_tcgen05_mma_A((TILE, 2 * TMEM_COLUMNS), dtype, M=TILE, cta_group=1)
        tmem.commit()
        pool.commit()

        q_full.init(1)
        q_empty.init(1)
        kv_full.init(1)
        kv_empty.init(1)
        s_full.init(1)
        p_full.init(WARPGROUP)
        factor_full.init(WARPGROUP)
        factor_empty.init(WARPGROUP)
        o_full.init(1)
        o_empty.init(WARPGROUP)
        out_full.init(WARPGROUP)
        out_empty.init(1)
        # The copy engine and the tensor core must see initialised barriers before they signal one.
        T.ptx.fence.mbarrier_init.release.cluster()
        T.ptx.fence.proxy.async_.shared__cta()
        T.ptx.tcgen05.fence__before_thread_sync()
        T.cuda.cta_sync()
        T.ptx.tcgen05.fence__after_thread_sync()

        # Every role keeps its own place in the list of work, and its own count of what it has waited for.
        work: T.int32 = cta
        turn: T.int32 = 0
        sequence: T.int32 = -1
        earlier: T.int32 = 0  # pieces of work of the sequences before it
        own: T.int32 = 0  # pieces of work of this one
        q_start: T.int32  # its first row in Q and O
        k_start: T.int32
        queries: T.int32 = sq
        keys: T.int32 = skv
        head: T.int32
        first: T.int32  # position of the first tile
        blocks = T.alloc_local((TILES,), "int32")  # of keys that a tile needs

        @T.inline
        def locate_in_sequences():
            # One sequence after the other, and in each the longest work first.
            while work >= earlier + own and work < WORK:
                earlier = earlier + own
                sequence = sequence + 1
                if sequence < sequences:
                    q_start = cu_seqlens_q[sequence]
                    k_start = cu_seqlens_k[sequence]
                    queries = cu_seqlens_q[sequence + 1] - q_start
                    keys = cu_seqlens_k[sequence + 1] - k_start
                    own = (queries + WORK_POSITIONS - 1) // WORK_POSITIONS * hkv
                else:
                    work = WORK
            place: T.let = work - earlier
            head = place % hkv
            first = (own // hkv - 1 - place // hkv) * WORK_POSITIONS

        @T.inline
        def locate_in_batch():
            # Heads of a section side by side, so that K and V come from L2; in it the longest work first, since with
            # a causal mask the last rows see the most keys: short work fills the gaps at the end.
            section: T.let = work // (SECTION * ROWS_OF_WORK)
            place: T.let = work % (SECTION * ROWS_OF_WORK)
            heads: T.let = T.min(SECTION, HEADS - section * SECTION)
            item: T.let = section * SECTION + place % heads
            sequence = item // hkv
            head = item % hkv
            q_start = sequence * sq
            k_start = sequence * skv
            first = (ROWS_OF_WORK - 1 - place // heads) * WORK_POSITIONS

        @T.inline
        def locate():
            if VARYING:
                locate_in_sequences()
            else:
                locate_in_batch()
            for tile in T.unroll(TILES):
                # One block at least, all of it masked if need be, so that every row has an O.
                blocks[tile] = T.max(1, (keys + TILE - 1) // TILE)
                if CAUSAL:
                    # Query i sees keys up to i + keys - queries: the last one sees all.
                    visible: T.let = first + (tile + 1) * POSITIONS + keys - queries  # to the last row
                    blocks[tile] = T.max(1, T.min(blocks[tile], (visible + TILE - 1) // TILE))

        @T.inline
        def take_next():
            # Back and forth: who had the longest work of this turn gets the shortest of the next.
            turn = turn + 1
            work = turn * CTAS + T.if_then_else(turn % 2 == 0, cta, CTAS - 1 - cta)

        @T.inline
        def arrive(barrier, index):
            # One arrival for a warp, when all its lanes are here.
            T.cuda.warp_sync()
            if lane == 0:
                barrier.arrive(index)

        # -- loader: Q once, K and V block by block --

        slot = PipelineState(STAGES)

        @T.inline
        def request_queries(tile):
            # Without this wait the queries would overwrite those that the tensor core still reads.
            q_empty.wait(tile, (turn & 1) ^ 1)
            q_full.arrive(tile, TILE_BYTES)
            position: T.let = first + tile * POSITIONS
            end: T.let = T.min(position + POSITIONS, queries)
            missing: T.let = position + POSITIONS - end
            # A box of positions x heads lands as rows, one head after the other. Missing positions arrive as zeros.
            for atom in T.unroll(d // ATOM):
                Tx.copy_async(
                    Qs[tile, :, atom * ATOM : atom * ATOM + ATOM],
                    Q_rows[
                        missing : missing + POSITIONS,
                        q_start + end,
                        head * GROUP : head * GROUP + GROUP,
                        atom * ATOM : atom * ATOM + ATOM,
                    ],
                    dispatch="tma_explicit",
                    mbar=q_full.ptr_to([tile]),
                )

        @T.inline
        def request(X_rows, block):
            kv_empty.wait(slot.stage, slot.phase)
            kv_full.arrive(slot.stage, TILE_BYTES)
            end: T.let = T.min(block * TILE + TILE, keys)
            missing: T.let = block * TILE + TILE - end
            # Missing keys arrive as zeros. Their scores are masked; and 0 times a zero of V is 0, which NaN is not.
            for atom in T.unroll(d // ATOM):
                Tx.copy_async(
                    ring[slot.stage, :, atom * ATOM : atom * ATOM + ATOM],
                    X_rows[missing : missing + TILE, k_start + end, head, atom * ATOM : atom * ATOM + ATOM],
                    dispatch="tma_explicit",
                    mbar=kv_full.ptr_to([slot.stage]),
                )
            slot.advance()

        @T.inline
        def request_all():
            # In the order in which they are needed.
            for block in T.serial(blocks[TILES - 1], unroll=False):
                if block == 0:
                    request_queries(0)
                request(K_rows, block)
                if block == 0:
                    request_queries(1)
                request(V_rows, block)

        @T.inline
        def drain():
            # The tensor core's last releases have nobody else to wait for them, and must not come to the SMEM of a CTA
            # that has ended.
            for tile in T.unroll(TILES):
                q_empty.wait(tile, (turn & 1) ^ 1)
            for _ in T.serial(STAGES, unroll=False):
                kv_empty.wait(slot.stage, slot.phase)
                slot.advance()

        # -- MMA: one thread keeps the tensor core busy --

        weighed = T.alloc_local((TILES,), "int32")  # blocks, so far

        @T.inline
        def score(tile, block):
            # S is free: p_full has said that all its scores were read, and products of one shape take place in the
            # order of their issue, so that the tensor core has read P, where P lies in the same columns.
            Tx.gemm_async(St[:, tile * TILE : tile * TILE + TILE], Qs[tile, :, :], ring[slot.stage, :, :], accum=False)
            s_full.arrive(tile)
            if block + 1 == blocks[tile]:
                q_empty.arrive(tile)

        @T.inline
        def weigh_piece(tile, piece, start, stop, stage, accumulate):
            p_full.wait(tile * PIECES + piece, weighed[tile] & 1)
            T.ptx.tcgen05.fence__after_thread_sync()
            p: T.let = P_COLUMN + tile * P_STRIDE
            Tx.gemm_async(
                Ot[:, tile * d : tile * d + d],
                Pt[:, p + start : p + stop],
                ring[stage, start:stop, :],
                transB=True,
                accum=accumulate,
            )

        @T.inline
        def weigh(tile, block, stage):
            # Without this wait the product would add to an O that is not rescaled yet, or that nobody has taken away.
            if CORRECTION:
                o_empty.wait(tile, (weighed[tile] & 1) ^ 1)
            # Nobody clears TMEM: the first block overwrites O.
            weigh_piece(tile, 0, 0, FIRST_KEYS, stage, block != 0)
            if PIECES > 1:
                weigh_piece(tile, 1, FIRST_KEYS, TILE, stage, True)
            weighed[tile] = weighed[tile] + 1
            if block + 1 == blocks[tile]:
                o_full.arrive(tile)

        @T.inline
        def multiply():
            # Scores run a block ahead of weights: Q0 K0, Q1 K0, then for each block P0 V, Q0 K', P1 V, Q1 K'. While
            # one tile is in the softmax, the tensor core has two products of the other.
            kv_full.wait(slot.stage, slot.phase)
            for tile in T.unroll(TILES):
                q_full.wait(tile, turn & 1)
                score(tile, 0)
            kv_empty.arrive(slot.stage)
            slot.advance()
            for block in T.serial(blocks[TILES - 1], unroll=False):
                values: T.int32 = slot.stage
                kv_full.wait(slot.stage, slot.phase)
                slot.advance()
                for tile in T.unroll(TILES):
                    if block < blocks[tile]:
                        weigh(tile, block, values)
                    if tile == TILES - 1:
                        kv_empty.arrive(values)
                    if block + 1 < blocks[tile]:
                        kv_full.wait(slot.stage, slot.phase)
                        score(tile, block + 1)
                if block + 1 < blocks[TILES - 1]:
                    kv_empty.arrive(slot.stage)
                    slot.advance()

        # -- output: by the correction warpgroup, or in the step without it by each tile's softmax warpgroup --

        output = OutputRow(dtype, d)

        @T.inline
        def rescale(tile, factor):
            # The product before this block's is complete: the commit for S, which softmax has waited for, tracks it.
            T.ptx.tcgen05.fence__after_thread_sync()
            output.rescale(Ot, tile * d, factor)
            T.ptx.tcgen05.fence__before_thread_sync()

        @T.inline
        def take_output(tile, factor):
            o_full.wait(tile, turn & 1)
            # Without this wait the rows would overwrite those of the last work, which the copy engine still reads.
            out_empty.wait(tile, (turn & 1) ^ 1)
            T.ptx.tcgen05.fence__after_thread_sync()
            output.take(Ot, tile * d, factor, Os, tile, row)
            T.ptx.tcgen05.fence__before_thread_sync()
            if CORRECTION:
                arrive(o_empty, tile)
            # Each thread fences its own stores towards the copy engine.
            T.ptx.fence.proxy.async_.shared__cta()
            arrive(out_full, tile)

        @T.inline
        def give_tmem_back():
            T.ptx.bar.sync(T.uint32(1), T.uint32(READERS * LANES))
            tmem.dealloc()

        # -- softmax: a warpgroup for each tile, a row for each thread --

        softmax = SoftmaxRow(dtype, scale, step.max_rise, POLYNOMIAL_PAIRS[d] if step.polynomial else 0)
        scored: T.int32 = 0  # blocks, so far
        told: T.int32 = 0  # factors

        @T.inline
        def tell():
            # Without this wait the factor would overwrite one that has not been read.
            factor_empty.wait(warpgroup, (told & 1) ^ 1)
            factors[warpgroup, row] = softmax.factor
            arrive(factor_full, warpgroup)
            told = told + 1

        @T.inline
        def hand_over(piece):
            T.ptx.tcgen05.wait__st.sync.aligned()
            T.ptx.tcgen05.fence__before_thread_sync()
            arrive(p_full, warpgroup * PIECES + piece)

        @T.inline
        def attend(block, limit, masked):
            s_full.wait(warpgroup, scored & 1)
            scored = scored + 1
            T.ptx.tcgen05.fence__after_thread_sync()
            softmax.load(St, warpgroup * TILE)
            if masked:
                softmax.mask(limit - block * TILE)
            softmax.raise_base()
            if block > 0:
                if CORRECTION:
                    tell()
                else:
                    rescale(warpgroup, softmax.factor)
            for chunk in T.unroll(TILE // CHUNK):
                softmax.exponentiate(chunk)
                softmax.store(Pt, P_COLUMN + warpgroup * P_STRIDE, chunk)
                if (chunk + 1) * CHUNK == FIRST_KEYS:
                    hand_over(0)
            if PIECES > 1:
                hand_over(1)

        @T.inline
        def attend_to_all():
            position: T.let = first + warpgroup * POSITIONS + row // GROUP
            limit: T.int32 = keys  # that this row sees, from the first
            clear: T.int32 = keys // TILE  # blocks of which every row of the tile sees all
            needed: T.int32 = T.if_then_else(warpgroup == 0, blocks[0], blocks[TILES - 1])
            if CAUSAL:
                limit = T.min(keys, position + keys - queries + 1)
                clear = T.max(0, T.min(keys, first + warpgroup * POSITIONS + keys - queries + 1)) // TILE
            # Where the LSE goes, or -1. Found now, so that one register waits for it, and not four.
            lse_place: T.int32 = -1
            if position < queries:
                if VARYING:
                    lse_place = (head * GROUP + row % GROUP) * q_rows + q_start + position
                else:
                    lse_place = ((sequence * hkv + head) * GROUP + row % GROUP) * sq + position
            softmax.start()
            for block in T.serial(clear, unroll=False):
                attend(block, limit, False)
            for block in T.serial(needed - clear, unroll=False):
                attend(clear + block, limit, True)
            softmax.finish()
            if CORRECTION:
                tell()
            else:
                take_output(warpgroup, softmax.factor)
            if lse_place >= 0:
                softmax.find_lse()
                LSE_flat[lse_place] = softmax.lse

        # -- correction: the factors of a block's softmax on O, off its critical path --

        heard = T.alloc_local((TILES,), "int32")  # factors, so far
        factor: T.float32

        @T.inline
        def hear(tile):
            factor_full.wait(tile, heard[tile] & 1)
            heard[tile] = heard[tile] + 1
            factor = factors[tile, row]
            arrive(factor_empty, tile)

        @T.inline
        def correct():
            for block in T.serial(blocks[TILES - 1] - 1, unroll=False):
                for tile in T.unroll(TILES):
                    if block + 1 < blocks[tile]:
                        hear(tile)
                        rescale(tile, factor)
                        arrive(o_empty, tile)
            for tile in T.unroll(TILES):
                hear(tile)
                take_output(tile, factor)

        # -- storer --

        @T.inline
        def send(tile):
            out_full.wait(tile, turn & 1)
            position: T.let = first + tile * POSITIONS
            end: T.let = T.min(position + POSITIONS, queries)
            missing: T.let = position + POSITIONS - end
            # Missing positions are dropped.
            for atom in T.unroll(d // ATOM):
                Tx.copy_async(
                    O_rows[
                        missing : missing + POSITIONS,
                        q_start + end,
                        head * GROUP : head * GROUP + GROUP,
                        atom * ATOM : atom * ATOM + ATOM,
                    ],
                    Os[tile, :, atom * ATOM : atom * ATOM + ATOM],
                    dispatch="tma_explicit",
                )
            T.ptx.cp.async_.bulk.commit_group()
            # .read: the copy engine has read the tile. That is all its next user needs; the writes may still fly.
            T.ptx.cp.async_.bulk.wait_group.read(0)
            out_empty.arrive(tile)

        # All threads start with as many registers. Softmax keeps a row of scores in them, the others need few.
        if warpgroup < TILES:
            T.ptx.setmaxnreg.inc.sync.aligned.u32(ROW_REGISTERS)
            while work < WORK:
                locate()
                if work < WORK:
                    attend_to_all()
                    take_next()
            if not CORRECTION:
                give_tmem_back()
        elif warpgroup < OTHER_WARPGROUP:
            T.ptx.setmaxnreg.dec.sync.aligned.u32(CORRECTION_REGISTERS)
            for tile in T.unroll(TILES):
                heard[tile] = 0
            while work < WORK:
                locate()
                if work < WORK:
                    correct()
                    take_next()
            if CORRECTION:
                give_tmem_back()
        else:
            T.ptx.setmaxnreg.dec.sync.aligned.u32(OTHER_REGISTERS)
            if warp == LOADER:
                if T.cuda.elect_sync():
                    slot.init(1)  # a fresh ring is empty: the first wait for the phase before the first passes at once
                    while work < WORK:
                        locate()
                        if work < WORK:
                            request_all()
                            take_next()
                    drain()
            elif warp == MMA:
                if T.cuda.elect_sync():
                    slot.init(0)
                    for tile in T.unroll(TILES):
                        weighed[tile] = 0
                    while work < WORK:
                        locate()
                        if work < WORK:
                            multiply()
                            take_next()
            elif warp == STORER:
                if T.cuda.elect_sync():
                    while work < WORK:
                        locate()
                        if work < WORK:
                            for tile in T.unroll(TILES):
                                send(tile)
                            take_next()

    if VARYING:

        @T.prim_func
        def attention(
            q: T.handle,
            k: T.handle,
            v: T.handle,
            q_bounds: T.handle,
            k_bounds: T.handle,
            scale: T.float32,
            o: T.handle,
            lse: T.handle,
        ):
            queries = T.int32()
            keys = T.int32()
            bounds = T.int32()
            Q = T.match_buffer(q, (queries, hq, d), dtype)
            K = T.match_buffer(k, (keys, hkv, d), dtype)
            V = T.match_buffer(v, (keys, hkv, d), dtype)
            CU_SEQLENS_Q = T.match_buffer(q_bounds, (bounds,), "int32")
            CU_SEQLENS_K = T.match_buffer(k_bounds, (bounds,), "int32")
            O = T.match_buffer(o, (queries, hq, d), dtype)  # noqa: E741
            LSE = T.match_buffer(lse, (hq, queries), "float32")
            kernel(Q, K, V, CU_SEQLENS_Q, CU_SEQLENS_K, scale, O, LSE, queries, keys, bounds - 1)

    else:

        @T.prim_func
        def attention(q: T.handle, k: T.handle, v: T.handle, scale: T.float32, o: T.handle, lse: T.handle):
            # Lengths stay open: see `make_one_tile`.
            queries = T.int32()
            keys = T.int32()
            Q = T.match_buffer(q, (batches, queries, hq, d), dtype)
            K = T.match_buffer(k, (batches, keys, hkv, d), dtype)
            V = T.match_buffer(v, (batches, keys, hkv, d), dtype)
            O = T.match_buffer(o, (batches, queries, hq, d), dtype)  # noqa: E741
            LSE = T.match_buffer(lse, (batches, hq, queries), "float32")
            assert queries == sq, "Q, O and LSE have another number of queries than the kernel was built for"
            assert keys == skv, "K and V have another number of keys than the kernel was built for"
            kernel(Q, K, V, None, None, scale, O, LSE, batches * queries, batches * keys, batches)

    return attention


def make_kernel(config: Config):
    """The TIRx function for one problem and step: attention(Q, K, V, scale, O, LSE).

    With lengths that vary: attention(Q, K, V, cu_seqlens_q, cu_seqlens_k, scale, O, LSE).
    """
    return make_one_tile(config) if config.step in ONE_TILE else make_two_tiles(config)


def make_bounds(config: Config) -> list[torch.Tensor]:
    """cu_seqlens_q and cu_seqlens_k, int32: cuts at random places, the same for the same sizes. Lengths may be 0."""
    generator = torch.Generator().manual_seed(config.batch)

    def cut(rows: int) -> torch.Tensor:
        cuts = torch.randint(0, rows + 1, (config.batch - 1,), generator=generator)
        return torch.cat([torch.tensor([0]), cuts.sort().values, torch.tensor([rows])]).int()

    return [cut(config.batch * length) for length in (config.sq, config.skv)]


def check(config: Config) -> None:
    """Refuse heads that do not fit the tile, and masks before the step that adds them."""
    if config.d not in POLYNOMIAL_PAIRS:
        raise BadSize(f"d is {config.d}: a head has 64 or 128 elements here (pad Q, K and V with zeros)")
    if config.hq % config.hkv or TILE % (config.hq // config.hkv):
        raise BadSize(
            f"{config.hq} heads of Q and {config.hkv} of K and V: the query heads that share a head of K and V share a "
            f"tile, so hq must be a multiple of hkv, and hq / hkv must divide {TILE}"
        )
    varying = config.lengths == "varying"
    if not STEPS[config.step].masks and (config.mask == "causal" or config.skv % TILE or varying):
        raise BadSize(
            f"--step {config.step} cannot hide a key: take --mask full, --lengths equal and skv a multiple of {TILE}, "
            "or a later step"
        )


def make_inputs(config: Config, generator: torch.Generator) -> tuple:
    """Q, K and V normally distributed, and the usual scale, so that scores are too."""

    def normal(length: int, heads: int) -> torch.Tensor:
        x = torch.randn(config.batch, length, heads, config.d, generator=generator, device=generator.device)
        return x.to(config.torch_dtype)

    q, k, v = normal(config.sq, config.hq), normal(config.skv, config.hkv), normal(config.skv, config.hkv)
    scale = 1 / sqrt(config.d)
    if config.lengths == "equal":
        return q, k, v, scale
    return *(x.flatten(0, 1) for x in (q, k, v)), *(bounds.to(q.device) for bounds in make_bounds(config)), scale


def attend(config: Config, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple:
    """The definition, in float64, for one sequence: O (sq, hq, d) and LSE (hq, sq).

    For step `qk` the scores (hq, sq, skv), and the largest of each row.
    """
    group = config.hq // config.hkv
    q64, k64, v64 = (x.double().transpose(0, 1) for x in (q, k, v))
    k64, v64 = k64.repeat_interleave(group, 0), v64.repeat_interleave(group, 0)
    scores = scale * q64 @ k64.transpose(1, 2)
    if config.step == "qk":
        return scores, scores.amax(-1)
    if config.mask == "causal":
        seen = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).tril(len(k) - len(q))
        scores = scores.masked_fill(~seen, -inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.unsqueeze(-1)).nan_to_num(0.0)  # a row of -inf has no weights
    return (weights @ v64).transpose(0, 1), lse


def reference(config: Config, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *bounds_and_scale) -> tuple:
    """`attend` for each sequence: O and LSE as the kernel has them."""
    *bounds, scale = bounds_and_scale
    if not bounds:
        results = [attend(config, *sequence, scale) for sequence in zip(q, k, v)]
        return tuple(torch.stack(part) for part in zip(*results))
    q_lengths, k_lengths = (ends.diff().tolist() for ends in bounds)
    sequences = zip(q.split(q_lengths), k.split(k_lengths), v.split(k_lengths))
    outs, lses = zip(*(attend(config, *sequence, scale) for sequence in sequences))
    return torch.cat(outs), torch.cat(lses, 1)


def outputs(config: Config) -> list:
    rows, tensor = (config.batch, config.hq, config.sq), (config.batch, config.sq, config.hq, config.d)
    if config.step == "qk":
        return [((*rows, config.skv), torch.float32), (rows, torch.float32)]
    if config.lengths == "varying":
        rows, tensor = (config.hq, config.batch * config.sq), (config.batch * config.sq, config.hq, config.d)
    return [(tensor, config.torch_dtype), (rows, torch.float32)]


def tolerance(config: Config) -> Tolerance:
    """Weights are rounded to 16 bits, each by up to half a unit: next to that, additions in float32 are nothing.

    The errors of a row's weights are independent, so that their sum compares with an element of the row as one error
    with one weight. Rows that see few keys are larger than those that see many.
    """
    if config.step == "qk":
        return Tolerance(terms=config.d)
    half_unit = torch.finfo(config.torch_dtype).eps / 2
    return Tolerance(terms=config.skv + int(4 * half_unit * 2**24), by_row=True)


def pairs_seen(config: Config) -> int:
    """Pairs of a query and a key that it sees, over all heads."""
    lengths = [(config.sq, config.skv)] * config.batch
    if config.lengths == "varying":
        lengths = zip(*(bounds.diff().tolist() for bounds in make_bounds(config)))
    pairs = 0
    for queries, keys in lengths:
        if config.mask == "causal":
            pairs += sum(min(keys, max(0, i + 1 + keys - queries)) for i in range(queries))
        else:
            pairs += queries * keys
    return config.hq * pairs


def torch_attention(
    config: Config, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *bounds_and_scale
) -> torch.Tensor:
    """What torch offers for the same problem."""
    *bounds, scale = bounds_and_scale
    grouped = config.hq != config.hkv
    if bounds:
        from torch.nn.attention.varlen import varlen_attn

        longest = [int(ends.diff().max()) for ends in make_bounds(config)]
        window = (-1, 0 if config.mask == "causal" else -1)
        return varlen_attn(q, k, v, *bounds, *longest, scale=scale, window_size=window, enable_gqa=grouped)

    from torch.nn.attention.bias import causal_lower_right

    bias = causal_lower_right(config.sq, config.skv) if config.mask == "causal" else None
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    attention = torch.nn.functional.scaled_dot_product_attention
    return attention(q, k, v, attn_mask=bias, scale=scale, enable_gqa=grouped)


def build(
    batch: int,
    sq: int,
    skv: int,
    hq: int,
    hkv: int,
    d: int = 128,
    *,
    causal: bool = False,
    lengths: str = "equal",
    dtype: str = "float16",
) -> Kernel:
    """The kernel for one problem: `kernel(Q, K, V, scale, O, LSE)`, contiguous tensors as in the script's docstring.

    With lengths="varying" it is `kernel(Q, K, V, cu_seqlens_q, cu_seqlens_k, scale, O, LSE)` and takes any lengths and
    any number of sequences: `batch`, `sq` and `skv`, their averages, only say how many CTAs are worth starting.

    CUDA tensors run on the GPU, CPU tensors on the emulator. Raises BadSize for heads that the tile cannot take.
    """
    mask = "causal" if causal else "full"
    sizes = {"batch": batch, "sq": sq, "skv": skv, "hq": hq, "hkv": hkv, "d": d}
    return STAGE.build(dtype=dtype, mask=mask, lengths=lengths, scale="gpu", **sizes)


STAGE = Stage(
    number=9,
    title="FlashAttention-4",
    arch="sm_100a",
    sizes=[
        Size("batch", default=1, gpu=4, help="sequences"),
        Size("sq", default=512, quick=128, gpu=8192, help="queries of a sequence, on average"),
        Size("skv", default=512, quick=256, gpu=8192, help="keys and values of a sequence, on average"),
        Size("hq", default=4, quick=2, gpu=32, help="heads of Q"),
        Size("hkv", default=2, quick=1, gpu=32, help="heads of K and V"),
        Size("d", default=128, help="elements of a head: 64 or 128"),
        Size("ctas", default=1 << 16, help="CTAs at most, never more than there are SMs"),
    ],
    options=[
        Option("mask", ["full", "causal"], "full", help="which keys a query sees", each=True),
        Option("lengths", ["equal", "varying"], "equal", help="of the sequences in a batch"),
        Option("step", list(STEPS), "full", help="how much of the kernel there is"),
    ],
    dtypes=["float16", "bfloat16"],
    check=check,
    kernel=make_kernel,
    inputs=make_inputs,
    outputs=outputs,
    reference=reference,
    tolerance=tolerance,
    bytes_moved=lambda config: (
        2 * config.batch * (config.sq * config.hq + config.skv * config.hkv) * config.d * config.itemsize
        + 4 * config.batch * config.hq * config.sq
    ),
    flops=lambda config: 4 * pairs_seen(config) * config.d,
    baselines={"torch attention": torch_attention},
)

if __name__ == "__main__":
    run_stage(STAGE)
