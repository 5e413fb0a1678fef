"""Kernels in Gluon, Triton's lower level: the kernel places data, barriers and roles by itself."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    allocate_tensor_memory,
    clc,
    fence_async_shared,
    tcgen05_commit,
    tcgen05_mma,
    tcgen05_mma_barrier_count,
    tensor_memory_descriptor,
)
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tests.foreign.triton_kernels import Build

SLOTS = gl.constexpr(2)  # accumulators, and answers of the cluster launch control


@gluon.jit
def cluster_softmax(x, out, columns: gl.constexpr):
    """One row per cluster of four CTAs: maxima and sums meet in distributed shared memory."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0], cga_layout=[[1], [2]])
    place = gl.program_id(0) * columns + gl.arange(0, columns, layout)
    values = gl.load(x + place)
    values = gl.exp(values - gl.max(values, 0))
    gl.store(out + place, values / gl.sum(values, 0))


@gluon.aggregate
class Shared:
    """What the roles of `gemm_roles` share."""

    a: tma.tensor_descriptor
    b: tma.tensor_descriptor
    c: tma.tensor_descriptor
    left: gl.shared_memory_descriptor
    right: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    totals: tensor_memory_descriptor
    total_full: gl.shared_memory_descriptor
    total_empty: gl.shared_memory_descriptor
    answers: gl.shared_memory_descriptor
    answered: gl.shared_memory_descriptor
    answer_read: gl.shared_memory_descriptor

    @gluon.jit
    def next(self, turn):
        """(whether there is another tile, its number), from the launch control's answer of that turn."""
        slot = turn % SLOTS
        mbarrier.wait(self.answered.index(slot), turn // SLOTS & 1)
        answer = clc.load_result(self.answers.index(slot))
        mbarrier.arrive(self.answer_read.index(slot))
        return answer.is_canceled(), answer.program_id(0)


@gluon.jit
def ask_for_tiles(s):
    turn = 0
    more = gl.to_tensor(True)
    while more:
        slot = turn % SLOTS
        mbarrier.wait(s.answer_read.index(slot), (turn // SLOTS & 1) ^ 1, pred=turn >= SLOTS)
        mbarrier.expect(s.answered.index(slot), 16)
        clc.try_cancel(s.answers.index(slot), s.answered.index(slot))
        more, _tile = s.next(turn)
        turn += 1


@gluon.jit
def load_operands(s):
    tile_m: gl.constexpr = s.a.block_shape[0]
    tile_k: gl.constexpr = s.a.block_shape[1]
    tile_n: gl.constexpr = s.b.block_shape[1]
    stages: gl.constexpr = s.full.shape[0]
    across = gl.cdiv(s.c.shape[1], tile_n)
    tile = gl.program_id(0)
    more = gl.to_tensor(True)
    turn = 0
    step = 0
    while more:
        for k in range(0, s.a.shape[1], tile_k):
            stage = step % stages
            mbarrier.wait(s.empty.index(stage), (step // stages & 1) ^ 1, pred=step >= stages)
            full = s.full.index(stage)
            mbarrier.expect(full, s.a.nbytes_per_cta + s.b.nbytes_per_cta)
            tma.async_load(s.a, [tile // across * tile_m, k], full, s.left.index(stage), multicast=True)
            tma.async_load(s.b, [k, tile % across * tile_n], full, s.right.index(stage), multicast=True)
            step += 1
        more, tile = s.next(turn)
        turn += 1


@gluon.jit
def multiply(s):
    tile_k: gl.constexpr = s.a.block_shape[1]
    stages: gl.constexpr = s.full.shape[0]
    more = gl.to_tensor(True)
    turn = 0
    step = 0
    while more:
        slot = turn % SLOTS
        mbarrier.wait(s.total_empty.index(slot), (turn // SLOTS & 1) ^ 1, pred=turn >= SLOTS)
        keep = False
        for _ in range(0, s.a.shape[1], tile_k):
            stage = step % stages
            mbarrier.wait(s.full.index(stage), step // stages & 1)
            tcgen05_mma(
                s.left.index(stage),
                s.right.index(stage),
                s.totals.index(slot),
                use_acc=keep,
                multicast=True,
                mbarriers=[s.empty.index(stage)],
            )
            keep = True
            step += 1
        tcgen05_commit(s.total_full.index(slot), descs=[s.left.index(0), s.right.index(0)])
        more, _tile = s.next(turn)
        turn += 1


@gluon.jit
def store_tiles(s):
    tile_m: gl.constexpr = s.a.block_shape[0]
    tile_n: gl.constexpr = s.b.block_shape[1]
    width: gl.constexpr = s.c.block_shape[1]
    buffers = gl.allocate_shared_memory(s.c.dtype, [2, tile_m, width], s.c.layout)
    across = gl.cdiv(s.c.shape[1], tile_n)
    tile = gl.program_id(0)
    more = gl.to_tensor(True)
    turn = 0
    while more:
        slot = turn % SLOTS
        mbarrier.wait(s.total_full.index(slot), turn // SLOTS & 1)
        for part in gl.static_range(tile_n // width):
            values = s.totals.index(slot).slice(part * width, width).load().to(s.c.dtype)
            tma.store_wait(1)
            buffers.index(part % 2).store(values)
            fence_async_shared()
            place = [tile // across * tile_m, tile % across * tile_n + part * width]
            tma.async_store(s.c, place, buffers.index(part % 2))
        mbarrier.arrive(s.total_empty.index(slot))
        more, tile = s.next(turn)
        turn += 1
    tma.store_wait(0)


@gluon.jit
def gemm_roles(a, b, c, stages: gl.constexpr, total_layout: gl.constexpr):
    """c = a b: a warp each loads, multiplies and asks for tiles, four store; clusters of two pairs share operands."""
    tile_m: gl.constexpr = a.block_shape[0]
    tile_k: gl.constexpr = a.block_shape[1]
    tile_n: gl.constexpr = b.block_shape[1]
    pairs: gl.constexpr = total_layout.two_ctas
    left = gl.allocate_shared_memory(a.dtype, [stages, tile_m, tile_k], a.layout)
    right = gl.allocate_shared_memory(b.dtype, [stages, tile_k, tile_n], b.layout)
    totals = allocate_tensor_memory(gl.float32, [SLOTS, tile_m, tile_n], total_layout)
    signals: gl.constexpr = tcgen05_mma_barrier_count([left.index(0), right.index(0)], multicast=True, two_ctas=pairs)
    full = mbarrier.allocate_mbarrier(batch=stages, two_ctas=pairs)
    empty = mbarrier.allocate_mbarrier(batch=stages)
    total_full = mbarrier.allocate_mbarrier(batch=SLOTS)
    total_empty = mbarrier.allocate_mbarrier(batch=SLOTS, two_ctas=pairs)
    answered = mbarrier.allocate_mbarrier(batch=SLOTS)
    # The first CTA asks for the whole cluster, so an answer is read when all roles of all CTAs have read it.
    everywhere: gl.constexpr = [[0]] * (gl.num_ctas().bit_length() - 1)
    answer_read = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout(everywhere))
    for stage in gl.static_range(stages):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=signals)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(total_full.index(slot), count=signals)
        mbarrier.init(total_empty.index(slot), count=1)
        mbarrier.init(answered.index(slot), count=1)
        mbarrier.init(answer_read.index(slot), count=4)
    answer_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0], cga_layout=everywhere)
    answers = gl.allocate_shared_memory(gl.int64, [SLOTS, 2], answer_layout)
    s = Shared(
        a, b, c, left, right, full, empty, totals, total_full, total_empty, answers, answered, answer_read
    )  # fmt: skip
    gl.warp_specialize(
        [(store_tiles, (s,)), (load_operands, (s,)), (multiply, (s,)), (ask_for_tiles, (s,))], [1, 1, 1], [24, 24, 24]
    )


def _map(rows: int, columns: int, spread: list[tuple[int, int]]) -> str:
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gl.float16, cga_layout=spread)
    return f"tensordesc<fp16[{rows}, {columns}],{layout!r}>"


def _gemm_roles(spread: list[tuple[int, int]], pairs: bool) -> Build:
    """`spread` says how the CTAs of a cluster share a tile: each bit of the rank moves by that many blocks."""
    m = 128 << len(spread)
    rank_0_to_left = [(step_m, 0) for step_m, _ in spread]
    rank_0_to_right = [(0, 1 if pairs and bit == 0 else 0) for bit in range(len(spread))]
    maps = [_map(m, 64, rank_0_to_left), _map(64, 128, rank_0_to_right), _map(m, 32, spread)]
    total_layout = TensorMemoryLayout((128, 128), col_stride=1, cga_layout=spread, two_ctas=pairs)
    constants = {"stages": 3, "total_layout": total_layout}
    return Build(gemm_roles, maps, constants, {"num_ctas": 1 << len(spread)}, gluon=True)


BUILDS = {
    "cluster_softmax": Build(cluster_softmax, ["*fp32", "*fp32"], {"columns": 2048}, {"num_ctas": 4}, gluon=True),
    "gemm_roles": _gemm_roles([], pairs=False),
    "gemm_roles_2_pairs": _gemm_roles([(1, 0), (2, 0)], pairs=True),
}
