"""Four kernels in CuTe DSL, and their PTX as files beside this script: `python tests/foreign/cute_kernels.py`.

Needs nvidia-cutlass-dsl (README.md says which version wrote the files) and no GPU: tensors are described, not
allocated. The shapes are static, so that a kernel's parameters are its tensor maps and plain pointers, in the order of
the launch below; `test_cute.py` builds the arguments and holds the launch shapes.
"""

import os
import re
import sys
import tempfile
from pathlib import Path

os.environ["CUTE_DSL_ARCH"] = "sm_100a"
os.environ["CUTE_DSL_KEEP_PTX"] = "1"
DUMPS = Path(os.environ.setdefault("CUTE_DSL_DUMP_DIR", tempfile.mkdtemp()))

import cutlass  # noqa: E402
import cutlass.cute as cute  # noqa: E402
import cutlass.memory  # noqa: E402
import cutlass.utils.blackwell_helpers as sm100  # noqa: E402
import cutlass.utils.blockscaled_layout as scale_layouts  # noqa: E402
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05  # noqa: E402
from cutlass.cute.nvgpu.tcgen05 import CtaGroup, Field, OperandSource  # noqa: E402
from cutlass.cute.runtime import make_fake_tensor  # noqa: E402
from cutlass.tensor_utils import LayoutEnum  # noqa: E402

HERE = Path(__file__).parent
TMEM_LANE = 65536  # from one lane to the next in a TMEM address
F16, BF16, F32 = cutlass.Float16, cutlass.BFloat16, cutlass.Float32
F4, F8 = cutlass.Float4E2M1FN, cutlass.Float8E4M3FN


def allocate(smem, dtype, layout):
    """A tensor in shared memory; composed layouts carry their swizzle."""
    return smem.allocate_tensor(element_type=dtype, layout=layout.outer, byte_alignment=1024, swizzle=layout.inner)


def first_stage(layout):
    return cute.slice_(layout, (None, None, None, 0))


def split(atom, shared, tiles):
    """Both sides of a TMA load, the tile as one mode: shared (tile, stage), global (tile, ...)."""
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(shared, 0, 3), cute.group_modes(tiles, 0, 3)
    )


def accumulator_parts(accumulator, columns, repetition, thread):
    """A copy of `columns` columns of TMEM to registers by 128 threads, and its sources, one per part."""
    parts = cute.flat_divide(accumulator[(None, None), 0, 0], (128, columns))
    atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(repetition), F32)
    copy = tcgen05.make_tmem_copy(atom, parts[None, None, 0, 0]).get_slice(thread)
    return copy, copy.partition_S(parts), parts


def store_rows(accumulator, tile, columns, parts, thread, factor=None):
    """A float32 accumulator, times `factor`, to global memory by 128 threads, a row each, `columns` at a time."""
    copy, source, _ = accumulator_parts(accumulator, columns, tcgen05.Repetition.x32, thread)
    target = copy.partition_D(cute.flat_divide(tile[(None, None), 0, 0], (128, columns)))
    values = cute.make_rmem_tensor(target[None, None, None, 0, 0].shape, F32)
    for part in range(parts):
        cute.copy(copy, source[None, None, None, 0, part], values)
        if factor is not None:
            values.store(values.load() * factor)
        cute.autovec_copy(values, target[None, None, None, 0, part])


def matrix(dtype, rows, columns):
    """Row-major."""
    return make_fake_tensor(dtype, (rows, columns), (columns, 1), assumed_align=128)


def batch(dtype, rows, columns):
    """One row-major matrix, as a batch."""
    return make_fake_tensor(dtype, (rows, columns, 1), (columns, 1, rows * columns), assumed_align=128)


# -- a dense GEMM: TMA, a ring of stages, one accumulator ------------------------------------------------------------

DENSE = {"m": 256, "n": 192, "k": 320}
DENSE_TILE = (128, 64, 64)
DENSE_STAGES = 3


@cute.struct
class DenseStorage:
    full: cute.struct.MemRange[cutlass.Int64, DENSE_STAGES]
    empty: cute.struct.MemRange[cutlass.Int64, DENSE_STAGES]
    done: cutlass.Int64
    tmem: cutlass.Int32


@cute.kernel
def dense_kernel(load_a: cute.CopyAtom, a: cute.Tensor, load_b: cute.CopyAtom, b: cute.Tensor, d: cute.Tensor):
    """Warp 4 loads, warp 5 multiplies, warps 0-3 store float32 straight from registers."""
    thread = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    tile = (*cute.arch.block_idx()[:2], None)
    mma = dense_mma()
    smem = cutlass.memory.SmemAllocator()
    storage = smem.allocate(DenseStorage)
    shared_a = allocate(smem, BF16, sm100.make_smem_layout_a(mma, DENSE_TILE, BF16, DENSE_STAGES))
    shared_b = allocate(smem, BF16, sm100.make_smem_layout_b(mma, DENSE_TILE, BF16, DENSE_STAGES))
    full, empty, done = storage.full.data_ptr(), storage.empty.data_ptr(), storage.done.ptr

    if warp == 0:
        cute.arch.alloc_tmem(64, storage.tmem.ptr)
    if thread == 0:
        for stage in cutlass.range_constexpr(DENSE_STAGES):
            cute.arch.mbarrier_init(full + stage, 1)
            cute.arch.mbarrier_init(empty + stage, 1)
        cute.arch.mbarrier_init(done, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    tmem = cute.arch.retrieve_tmem_ptr(F32, 16, storage.tmem.ptr)

    one = mma.get_slice(0)
    tiles_a = one.partition_A(cute.local_tile(a, DENSE_TILE, tile, proj=(1, None, 1)))
    tiles_b = one.partition_B(cute.local_tile(b, DENSE_TILE, tile, proj=(None, 1, 1)))
    tile_d = one.partition_C(cute.local_tile(d, DENSE_TILE, tile, proj=(1, 1, None)))
    to_a, from_a = split(load_a, shared_a, tiles_a)
    to_b, from_b = split(load_b, shared_b, tiles_b)
    fragment_a, fragment_b = mma.make_fragment_A(shared_a), mma.make_fragment_B(shared_b)
    accumulator = cute.make_tensor(tmem, mma.make_fragment_C(mma.partition_shape_C(DENSE_TILE[:2])).layout)
    steps = cute.size(tiles_a, mode=[3])

    if warp == 4:
        for step in cutlass.range(steps, unroll=1):
            stage, turn = step % DENSE_STAGES, step // DENSE_STAGES
            if step >= DENSE_STAGES:
                cute.arch.mbarrier_wait(empty + stage, (turn - 1) % 2)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, 2 * 64 * (128 + 64))
            cute.copy(load_a, from_a[None, step], to_a[None, stage], tma_bar_ptr=full + stage)
            cute.copy(load_b, from_b[None, step], to_b[None, stage], tma_bar_ptr=full + stage)
    elif warp == 5:
        for step in cutlass.range(steps, unroll=1):
            stage, turn = step % DENSE_STAGES, step // DENSE_STAGES
            cute.arch.mbarrier_wait(full + stage, turn % 2)
            for block in cutlass.range_constexpr(cute.size(fragment_a, mode=[2])):
                at = (None, None, block, stage)
                cute.gemm(mma, accumulator, fragment_a[at], fragment_b[at], accumulator)
                mma.set(Field.ACCUMULATE, True)
            with cute.arch.elect_one():
                tcgen05.commit(empty + stage)
        with cute.arch.elect_one():
            tcgen05.commit(done)
    else:
        cute.arch.mbarrier_wait(done, 0)
        store_rows(accumulator, tile_d, 32, 2, thread)
    cute.arch.sync_threads()
    if warp == 0:
        cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.dealloc_tmem(tmem, 64)


def dense_mma():
    major = OperandMajorMode.K
    op = tcgen05.MmaF16BF16Op(BF16, F32, (128, 64, 16), CtaGroup.ONE, OperandSource.SMEM, major, major)
    return cute.make_tiled_mma(op)


@cute.jit
def dense_gemm(a: cute.Tensor, b: cute.Tensor, d: cute.Tensor):
    mma, load = dense_mma(), cpasync.CopyBulkTensorTileG2SOp(CtaGroup.ONE)
    layout_a = first_stage(sm100.make_smem_layout_a(mma, DENSE_TILE, BF16, 1))
    layout_b = first_stage(sm100.make_smem_layout_b(mma, DENSE_TILE, BF16, 1))
    load_a, view_a = cute.nvgpu.make_tiled_tma_atom_A(load, a, layout_a, DENSE_TILE, mma)
    load_b, view_b = cute.nvgpu.make_tiled_tma_atom_B(load, b, layout_b, DENSE_TILE, mma)
    grid = (DENSE["m"] // 128, DENSE["n"] // 64, 1)
    dense_kernel(load_a, view_a, load_b, view_b, d).launch(grid=grid, block=(192, 1, 1))


def compile_dense():
    m, n, k = DENSE.values()
    cute.compile(dense_gemm, matrix(BF16, m, k), matrix(BF16, n, k), matrix(F32, m, n))


# -- a persistent GEMM by pairs of CTAs: .cta_group::2, multicast commits, two accumulators, TMA stores ---------------

PAIR = {"m": 500, "n": 376, "k": 200}  # the last tile of every dimension is clipped
PAIR_TILE = (256, 128, 64)
PAIR_STAGES = 2
PAIRS = 2
HALF = (128, 64)  # what one TMA store writes


@cute.struct
class PairStorage:
    full: cute.struct.MemRange[cutlass.Int64, PAIR_STAGES]
    empty: cute.struct.MemRange[cutlass.Int64, PAIR_STAGES]
    done: cute.struct.MemRange[cutlass.Int64, 2]
    free: cute.struct.MemRange[cutlass.Int64, 2]
    tmem: cutlass.Int32


@cute.kernel
def pair_kernel(
    load_a: cute.CopyAtom, a: cute.Tensor, load_b: cute.CopyAtom, b: cute.Tensor, store_d: cute.CopyAtom, d: cute.Tensor
):
    """Warp 4 of both CTAs loads, warp 5 of the first multiplies, warps 0-3 of both store their 128 rows."""
    thread = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    pair = cute.arch.block_idx()[0] // 2
    mma = pair_mma()
    smem = cutlass.memory.SmemAllocator()
    storage = smem.allocate(PairStorage)
    shared_a = allocate(smem, F16, sm100.make_smem_layout_a(mma, PAIR_TILE, F16, PAIR_STAGES))
    shared_b = allocate(smem, F16, sm100.make_smem_layout_b(mma, PAIR_TILE, F16, PAIR_STAGES))
    shared_d = allocate(smem, F16, half_layout())
    full, empty = storage.full.data_ptr(), storage.empty.data_ptr()
    done, free = storage.done.data_ptr(), storage.free.data_ptr()

    if warp == 0:
        cute.arch.alloc_tmem(256, storage.tmem.ptr, is_two_cta=True)
    if thread == 0:
        for stage in cutlass.range_constexpr(PAIR_STAGES):
            cute.arch.mbarrier_init(full + stage, 1)
            cute.arch.mbarrier_init(empty + stage, 1)
        for buffer in cutlass.range_constexpr(2):
            cute.arch.mbarrier_init(done + buffer, 1)
            cute.arch.mbarrier_init(free + buffer, 256)
    cute.arch.mbarrier_init_fence()
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    tmem = cute.arch.retrieve_tmem_ptr(F32, 16, storage.tmem.ptr)

    half = mma.get_slice(rank)
    tiles_a = half.partition_A(cute.local_tile(a, PAIR_TILE, (None, None, None), proj=(1, None, 1)))
    tiles_b = half.partition_B(cute.local_tile(b, PAIR_TILE, (None, None, None), proj=(None, 1, 1)))
    tiles_d = half.partition_C(cute.local_tile(d, PAIR_TILE, (None, None, None), proj=(1, 1, None)))
    to_a, from_a = split(load_a, shared_a, tiles_a)
    to_b, from_b = split(load_b, shared_b, tiles_b)
    fragment_a, fragment_b = mma.make_fragment_A(shared_a), mma.make_fragment_B(shared_b)
    layout = mma.make_fragment_C(mma.partition_shape_C(PAIR_TILE[:2])).layout
    steps = cute.ceil_div(PAIR["k"], PAIR_TILE[2])
    columns = cute.ceil_div(PAIR["n"], PAIR_TILE[1])
    tiles = columns * cute.ceil_div(PAIR["m"], PAIR_TILE[0])

    if warp == 4:
        count = cutlass.Int32(0)
        for tile in cutlass.range(pair, tiles, PAIRS, unroll=1):
            for step in cutlass.range(steps, unroll=1):
                stage, turn = count % PAIR_STAGES, count // PAIR_STAGES
                if count >= PAIR_STAGES:
                    cute.arch.mbarrier_wait(empty + stage, (turn - 1) % 2)
                if rank == 0:
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(full + stage, 2 * 2 * 64 * (128 + 64))
                cute.copy(load_a, from_a[None, tile // columns, step], to_a[None, stage], tma_bar_ptr=full + stage)
                cute.copy(load_b, from_b[None, tile % columns, step], to_b[None, stage], tma_bar_ptr=full + stage)
                count += 1
    elif warp == 5:
        if rank == 0:
            count = cutlass.Int32(0)
            number = cutlass.Int32(0)
            for _tile in cutlass.range(pair, tiles, PAIRS, unroll=1):
                buffer, turn = number % 2, number // 2
                if number >= 2:
                    cute.arch.mbarrier_wait(free + buffer, (turn - 1) % 2)
                accumulator = cute.make_tensor(tmem + 128 * buffer, layout)
                mma.set(Field.ACCUMULATE, False)
                for _step in cutlass.range(steps, unroll=1):
                    stage = count % PAIR_STAGES
                    cute.arch.mbarrier_wait(full + stage, count // PAIR_STAGES % 2)
                    for block in cutlass.range_constexpr(cute.size(fragment_a, mode=[2])):
                        at = (None, None, block, stage)
                        cute.gemm(mma, accumulator, fragment_a[at], fragment_b[at], accumulator)
                        mma.set(Field.ACCUMULATE, True)
                    with cute.arch.elect_one():
                        tcgen05.commit(empty + stage, 3, CtaGroup.TWO)
                    count += 1
                with cute.arch.elect_one():
                    tcgen05.commit(done + buffer, 3, CtaGroup.TWO)
                number += 1
    else:
        number = cutlass.Int32(0)
        for tile in cutlass.range(pair, tiles, PAIRS, unroll=1):
            buffer = number % 2
            cute.arch.mbarrier_wait(done + buffer, number // 2 % 2)
            accumulator = cute.make_tensor(tmem + 128 * buffer, layout)
            copy, source, parts = accumulator_parts(accumulator, HALF[1], tcgen05.Repetition.x64, thread)
            halves = cute.flat_divide(tiles_d[(None, None), 0, 0, tile // columns, tile % columns], HALF)
            for part in cutlass.range_constexpr(2):
                values = cute.make_rmem_tensor(copy.partition_D(parts)[None, None, None, 0, 0].shape, F32)
                cute.copy(copy, source[None, None, None, 0, part], values)
                row = cute.make_tensor(values.iterator, cute.make_layout(HALF[1]))
                rounded = cute.make_rmem_tensor(row.shape, F16)
                rounded.store(row.load().to(F16))
                cute.autovec_copy(rounded, shared_d[thread, None])
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.barrier(barrier_id=1, number_of_threads=128)
                if warp == 0:
                    write, target = cpasync.tma_partition(
                        store_d,
                        0,
                        cute.make_layout(1),
                        cute.group_modes(shared_d, 0, 2),
                        cute.group_modes(halves[None, None, 0, part], 0, 2),
                    )
                    cute.copy(store_d, write, target)
                    cute.arch.cp_async_bulk_commit_group()
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
                cute.arch.barrier(barrier_id=1, number_of_threads=128)
            cute.arch.fence_view_async_tmem_load()
            cute.arch.mbarrier_arrive(free + buffer, 0)
            number += 1
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()
    if warp == 0:
        cute.arch.relinquish_tmem_alloc_permit(is_two_cta=True)
        cute.arch.dealloc_tmem(tmem, 256, is_two_cta=True)


def pair_mma():
    major = OperandMajorMode.K
    op = tcgen05.MmaF16BF16Op(F16, F32, (256, 128, 16), CtaGroup.TWO, OperandSource.SMEM, major, major)
    return cute.make_tiled_mma(op)


def half_layout():
    return cute.slice_(sm100.make_smem_layout_epi(F16, LayoutEnum.ROW_MAJOR, HALF, 1), (None, None, 0))


@cute.jit
def pair_gemm(a: cute.Tensor, b: cute.Tensor, d: cute.Tensor):
    mma, load = pair_mma(), cpasync.CopyBulkTensorTileG2SOp(CtaGroup.TWO)
    layout_a = first_stage(sm100.make_smem_layout_a(mma, PAIR_TILE, F16, 1))
    layout_b = first_stage(sm100.make_smem_layout_b(mma, PAIR_TILE, F16, 1))
    load_a, view_a = cute.nvgpu.make_tiled_tma_atom_A(load, a, layout_a, PAIR_TILE, mma)
    load_b, view_b = cute.nvgpu.make_tiled_tma_atom_B(load, b, layout_b, PAIR_TILE, mma)
    store_d, view_d = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), d, half_layout(), HALF)
    pair_kernel(load_a, view_a, load_b, view_b, store_d, view_d).launch(
        grid=(2 * PAIRS, 1, 1), block=(192, 1, 1), cluster=(2, 1, 1)
    )


def compile_pair():
    m, n, k = PAIR.values()
    cute.compile(pair_gemm, matrix(F16, m, k), matrix(F16, n, k), matrix(F16, m, n))


# -- a block-scaled GEMM: NVFP4, scale factors copied to TMEM by tcgen05.cp ------------------------------------------

SCALED = {"m": 256, "n": 128, "k": 768}
SCALED_TILE = (128, 128, 256)
SCALED_STAGES = 2
VECTOR = 16  # elements with a common scale factor


@cute.struct
class ScaledStorage:
    full: cute.struct.MemRange[cutlass.Int64, SCALED_STAGES]
    empty: cute.struct.MemRange[cutlass.Int64, SCALED_STAGES]
    done: cutlass.Int64
    tmem: cutlass.Int32


@cute.kernel
def scaled_kernel(
    load_a: cute.CopyAtom,
    a: cute.Tensor,
    load_b: cute.CopyAtom,
    b: cute.Tensor,
    load_sa: cute.CopyAtom,
    sa: cute.Tensor,
    load_sb: cute.CopyAtom,
    sb: cute.Tensor,
    d: cute.Tensor,
):
    """Warp 4 loads, warp 5 copies scale factors and multiplies, warps 0-3 store float32."""
    thread = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    row, column = cute.arch.block_idx()[:2]
    mma = scaled_mma()
    smem = cutlass.memory.SmemAllocator()
    storage = smem.allocate(ScaledStorage)
    layout_sa, layout_sb = scale_layouts_of(mma, SCALED_STAGES)
    shared_a = allocate(smem, F4, sm100.make_smem_layout_a(mma, SCALED_TILE, F4, SCALED_STAGES))
    shared_b = allocate(smem, F4, sm100.make_smem_layout_b(mma, SCALED_TILE, F4, SCALED_STAGES))
    shared_sa = smem.allocate_tensor(element_type=F8, layout=layout_sa, byte_alignment=128)
    shared_sb = smem.allocate_tensor(element_type=F8, layout=layout_sb, byte_alignment=128)
    full, empty, done = storage.full.data_ptr(), storage.empty.data_ptr(), storage.done.ptr

    if warp == 0:
        cute.arch.alloc_tmem(256, storage.tmem.ptr)
    if thread == 0:
        for stage in cutlass.range_constexpr(SCALED_STAGES):
            cute.arch.mbarrier_init(full + stage, 1)
            cute.arch.mbarrier_init(empty + stage, 1)
        cute.arch.mbarrier_init(done, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    tmem = cute.arch.retrieve_tmem_ptr(F32, 16, storage.tmem.ptr)

    one = mma.get_slice(0)
    everywhere = (None, None, None)
    tile_a, tile_b, tile_d = (
        cute.slice_(SCALED_TILE, at) for at in ((None, 0, None), (0, None, None), (None, None, 0))
    )
    to_a, from_a = split(load_a, shared_a, one.partition_A(cute.local_tile(a, tile_a, everywhere)))
    to_b, from_b = split(load_b, shared_b, one.partition_B(cute.local_tile(b, tile_b, everywhere)))
    to_sa, from_sa = map(
        cute.filter_zeros, split(load_sa, shared_sa, one.partition_A(cute.local_tile(sa, tile_a, everywhere)))
    )
    to_sb, from_sb = map(
        cute.filter_zeros, split(load_sb, shared_sb, one.partition_B(cute.local_tile(sb, tile_b, everywhere)))
    )
    part_d = one.partition_C(cute.local_tile(d, tile_d, (row, column, 0)))
    fragment_a, fragment_b = mma.make_fragment_A(shared_a), mma.make_fragment_B(shared_b)
    accumulator = cute.make_tensor(tmem, mma.make_fragment_C(mma.partition_shape_C(SCALED_TILE[:2])).layout)
    tmem_sa = cute.make_tensor(
        cute.recast_ptr(tmem + 128, dtype=F8),
        scale_layouts.make_tmem_layout_sfa(mma, SCALED_TILE, VECTOR, first_stage(layout_sa)),
    )
    tmem_sb = cute.make_tensor(
        cute.recast_ptr(tmem + 128 + tcgen05.find_tmem_tensor_col_offset(tmem_sa), dtype=F8),
        scale_layouts.make_tmem_layout_sfb(mma, SCALED_TILE, VECTOR, first_stage(layout_sb)),
    )
    copies = [scale_copy(shared_sa, tmem_sa), scale_copy(shared_sb, tmem_sb)]
    steps = cute.size(from_a, mode=[2])

    if warp == 4:
        for step in cutlass.range(steps, unroll=1):
            stage, turn = step % SCALED_STAGES, step // SCALED_STAGES
            if step >= SCALED_STAGES:
                cute.arch.mbarrier_wait(empty + stage, (turn - 1) % 2)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, 2 * 128 * (256 // 2 + 256 // VECTOR))
            cute.copy(load_a, from_a[None, row, step, 0], to_a[None, stage], tma_bar_ptr=full + stage)
            cute.copy(load_b, from_b[None, column, step, 0], to_b[None, stage], tma_bar_ptr=full + stage)
            cute.copy(load_sa, from_sa[None, row, step, 0], to_sa[None, stage], tma_bar_ptr=full + stage)
            cute.copy(load_sb, from_sb[None, column, step, 0], to_sb[None, stage], tma_bar_ptr=full + stage)
    elif warp == 5:
        for step in cutlass.range(steps, unroll=1):
            stage, turn = step % SCALED_STAGES, step // SCALED_STAGES
            cute.arch.mbarrier_wait(full + stage, turn % 2)
            for copy, source, target in copies:
                cute.copy(copy, source[None, None, None, None, stage], target)
            for block in cutlass.range_constexpr(cute.size(fragment_a, mode=[2])):
                at = (None, None, block, stage)
                mma.set(Field.SFA, tmem_sa[None, None, block].iterator)
                mma.set(Field.SFB, tmem_sb[None, None, block].iterator)
                cute.gemm(mma, accumulator, fragment_a[at], fragment_b[at], accumulator)
                mma.set(Field.ACCUMULATE, True)
            with cute.arch.elect_one():
                tcgen05.commit(empty + stage)
        with cute.arch.elect_one():
            tcgen05.commit(done)
    else:
        cute.arch.mbarrier_wait(done, 0)
        store_rows(accumulator, part_d, 32, 4, thread)
    cute.arch.sync_threads()
    if warp == 0:
        cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.dealloc_tmem(tmem, 256)


def scale_copy(shared, tensor):
    """The tcgen05.cp of one stage of scale factors, with its sources (..., stage) and its target."""
    source, target = cute.filter_zeros(shared), cute.filter_zeros(tensor)
    copy = tcgen05.make_s2t_copy(cute.make_copy_atom(tcgen05.Cp4x32x128bOp(CtaGroup.ONE), F8), target)
    one = copy.get_slice(0)
    return copy, tcgen05.get_s2t_smem_desc_tensor(copy, one.partition_S(source)), one.partition_D(target)


def scaled_mma():
    op = tcgen05.MmaMXF4NVF4Op(F8, (*SCALED_TILE[:2], 64), CtaGroup.ONE, OperandSource.SMEM)
    return cute.make_tiled_mma(op)


def scale_layouts_of(mma, stages):
    return (
        scale_layouts.make_smem_layout_sfa(mma, SCALED_TILE, VECTOR, stages),
        scale_layouts.make_smem_layout_sfb(mma, SCALED_TILE, VECTOR, stages),
    )


@cute.jit
def scaled_gemm(a: cute.Tensor, b: cute.Tensor, sa: cute.Tensor, sb: cute.Tensor, d: cute.Tensor):
    mma, load = scaled_mma(), cpasync.CopyBulkTensorTileG2SOp(CtaGroup.ONE)
    layout_a = first_stage(sm100.make_smem_layout_a(mma, SCALED_TILE, F4, 1))
    layout_b = first_stage(sm100.make_smem_layout_b(mma, SCALED_TILE, F4, 1))
    layout_sa, layout_sb = map(first_stage, scale_layouts_of(mma, 1))
    sa = cute.make_tensor(sa.iterator, scale_layouts.tile_atom_to_shape_SF(a.shape, VECTOR))
    sb = cute.make_tensor(sb.iterator, scale_layouts.tile_atom_to_shape_SF(b.shape, VECTOR))
    load_a, view_a = cute.nvgpu.make_tiled_tma_atom_A(load, a, layout_a, SCALED_TILE, mma)
    load_b, view_b = cute.nvgpu.make_tiled_tma_atom_B(load, b, layout_b, SCALED_TILE, mma)
    pairs = {"internal_type": cutlass.Int16}
    load_sa, view_sa = cute.nvgpu.make_tiled_tma_atom_A(load, sa, layout_sa, SCALED_TILE, mma, **pairs)
    load_sb, view_sb = cute.nvgpu.make_tiled_tma_atom_B(load, sb, layout_sb, SCALED_TILE, mma, **pairs)
    scaled_kernel(load_a, view_a, load_b, view_b, load_sa, view_sa, load_sb, view_sb, d).launch(
        grid=(SCALED["m"] // 128, SCALED["n"] // 128, 1), block=(192, 1, 1)
    )


def compile_scaled():
    m, n, k = SCALED.values()
    scales = [matrix(F8, rows, k // VECTOR) for rows in (m, n)]
    cute.compile(scaled_gemm, batch(F4, m, k), batch(F4, n, k), *scales, batch(F32, m, n))


# -- attention: the probabilities replace the scores in TMEM and are the A of the second product ---------------------

ATTENTION = {"queries": 256, "keys": 384}
WIDTH = 64  # of a head
BLOCK = 128  # queries of a CTA, and keys of a step
SCORE_TILE = (BLOCK, BLOCK, WIDTH)
OUTPUT_TILE = (BLOCK, WIDTH, BLOCK)
BLOCKS = ATTENTION["keys"] // BLOCK
SCALE = 1.4426950408889634 / 8  # log2(e) / sqrt(WIDTH)


@cute.struct
class AttentionStorage:
    loaded: cute.struct.MemRange[cutlass.Int64, BLOCKS]
    scores: cutlass.Int64
    probabilities: cutlass.Int64
    done: cutlass.Int64
    tmem: cutlass.Int32


@cute.kernel
def attention_kernel(
    load_q: cute.CopyAtom,
    q: cute.Tensor,
    load_k: cute.CopyAtom,
    k: cute.Tensor,
    load_v: cute.CopyAtom,
    v: cute.Tensor,
    d: cute.Tensor,
):
    """Warp 4 loads everything, then multiplies; a thread of warps 0-3 has one row. Softmax without its maximum.

    The next scores are written over the probabilities right after the product that reads them, with no wait between.
    """
    thread = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    row = cute.arch.block_idx()[0]
    score, output = score_mma(), output_mma()
    smem = cutlass.memory.SmemAllocator()
    storage = smem.allocate(AttentionStorage)
    shared_q = allocate(smem, BF16, sm100.make_smem_layout_a(score, SCORE_TILE, BF16, 1))
    shared_k = allocate(smem, BF16, sm100.make_smem_layout_b(score, SCORE_TILE, BF16, BLOCKS))
    shared_v = allocate(smem, BF16, sm100.make_smem_layout_b(output, OUTPUT_TILE, BF16, BLOCKS))
    loaded, scores = storage.loaded.data_ptr(), storage.scores.ptr
    probabilities, done = storage.probabilities.ptr, storage.done.ptr

    if warp == 0:
        cute.arch.alloc_tmem(256, storage.tmem.ptr)
    if thread == 0:
        for block in cutlass.range_constexpr(BLOCKS):
            cute.arch.mbarrier_init(loaded + block, 1)
        cute.arch.mbarrier_init(scores, 1)
        cute.arch.mbarrier_init(probabilities, 128)
        cute.arch.mbarrier_init(done, 1)
    cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    tmem = cute.arch.retrieve_tmem_ptr(F32, 16, storage.tmem.ptr)

    first, second = score.get_slice(0), output.get_slice(0)
    tiles_q = first.partition_A(cute.local_tile(q, SCORE_TILE, (row, None, None), proj=(1, None, 1)))
    tiles_k = first.partition_B(cute.local_tile(k, SCORE_TILE, (None, None, 0), proj=(None, 1, 1)))
    tiles_v = second.partition_B(cute.local_tile(v, OUTPUT_TILE, (None, 0, None), proj=(None, 1, 1)))
    tile_d = second.partition_C(cute.local_tile(d, OUTPUT_TILE, (row, 0, None), proj=(1, 1, None)))
    to_q, from_q = split(load_q, shared_q, tiles_q)
    to_k, from_k = split(load_k, shared_k, tiles_k)
    to_v, from_v = split(load_v, shared_v, tiles_v)
    fragment_q, fragment_k = score.make_fragment_A(shared_q), score.make_fragment_B(shared_k)
    fragment_v = output.make_fragment_B(shared_v)
    shape_p = sm100.make_smem_layout_a(output, OUTPUT_TILE, BF16, 1).outer
    layout_p = output.make_fragment_A(cute.make_tensor(tmem, shape_p)).layout
    fragment_p = cute.make_tensor(cute.recast_ptr(tmem, dtype=BF16), layout_p)
    accumulator_s = cute.make_tensor(tmem, score.make_fragment_C(score.partition_shape_C(SCORE_TILE[:2])).layout)
    accumulator_o = cute.make_tensor(
        tmem + BLOCK, output.make_fragment_C(output.partition_shape_C(OUTPUT_TILE[:2])).layout
    )

    if warp == 4:
        for block in cutlass.range_constexpr(BLOCKS):
            size = 2 * WIDTH * BLOCK * (3 if block == 0 else 2)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(loaded + block, size)
            if cutlass.const_expr(block == 0):
                cute.copy(load_q, from_q[None, 0], to_q[None, 0], tma_bar_ptr=loaded)
            cute.copy(load_k, from_k[None, block], to_k[None, block], tma_bar_ptr=loaded + block)
            cute.copy(load_v, from_v[None, block], to_v[None, block], tma_bar_ptr=loaded + block)
        for block in cutlass.range_constexpr(BLOCKS):
            cute.arch.mbarrier_wait(loaded + block, 0)
            if cutlass.const_expr(block > 0):
                cute.arch.mbarrier_wait(probabilities, (block - 1) % 2)
                multiply(output, accumulator_o, fragment_p, fragment_v, 0, block - 1, block > 1)
            multiply(score, accumulator_s, fragment_q, fragment_k, 0, block, False)
            with cute.arch.elect_one():
                tcgen05.commit(scores)
        cute.arch.mbarrier_wait(probabilities, (BLOCKS - 1) % 2)
        multiply(output, accumulator_o, fragment_p, fragment_v, 0, BLOCKS - 1, True)
        with cute.arch.elect_one():
            tcgen05.commit(done)
    elif warp < 4:
        total = F32(0.0)
        copy, source, parts = accumulator_parts(accumulator_s, 32, tcgen05.Repetition.x32, thread)
        pairs = cute.make_tensor(tmem, cute.make_layout((BLOCK, BLOCK // 2), stride=(TMEM_LANE, 1)))
        pair_parts = cute.flat_divide(pairs, (BLOCK, 32))
        store = tcgen05.make_tmem_copy(
            cute.make_copy_atom(tcgen05.St32x32bOp(tcgen05.Repetition.x32), F32), pair_parts[None, None, 0, 0]
        ).get_slice(thread)
        target = store.partition_D(pair_parts)
        shape = copy.partition_D(parts)[None, None, None, 0, 0].shape
        for block in cutlass.range(BLOCKS, unroll=1):
            cute.arch.mbarrier_wait(scores, block % 2)
            rounded = cute.make_rmem_tensor(cute.make_layout(BLOCK), BF16)
            for part in cutlass.range_constexpr(4):
                values = cute.make_rmem_tensor(shape, F32)
                cute.copy(copy, source[None, None, None, 0, part], values)
                for column in cutlass.range_constexpr(32):
                    value = cute.math.exp2(values[column] * SCALE, fastmath=True)
                    total += value
                    rounded[32 * part + column] = value.to(BF16)
            cute.arch.fence_view_async_tmem_load()
            packed = cute.recast_ptr(rounded.iterator, dtype=F32)
            for part in cutlass.range_constexpr(2):
                words = cute.make_tensor(packed + 32 * part, cute.make_layout(shape))
                cute.copy(store, words, target[None, None, None, 0, part])
            cute.arch.fence_view_async_tmem_store()
            cute.arch.mbarrier_arrive(probabilities)
        cute.arch.mbarrier_wait(done, 0)
        store_rows(accumulator_o, tile_d, 32, WIDTH // 32, thread, 1.0 / total)
    cute.arch.sync_threads()
    if warp == 0:
        cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.dealloc_tmem(tmem, 256)


def multiply(mma, accumulator, a, b, stage_a, stage_b, keeps):
    """All K steps of one stage."""
    for block in range(cute.size(a, mode=[2])):
        mma.set(Field.ACCUMULATE, keeps or block > 0)
        cute.gemm(mma, accumulator, a[None, None, block, stage_a], b[None, None, block, stage_b], accumulator)


def score_mma():
    major = OperandMajorMode.K
    op = tcgen05.MmaF16BF16Op(BF16, F32, (BLOCK, BLOCK, 16), CtaGroup.ONE, OperandSource.SMEM, major, major)
    return cute.make_tiled_mma(op)


def output_mma():
    majors = OperandMajorMode.K, OperandMajorMode.MN
    op = tcgen05.MmaF16BF16Op(BF16, F32, (BLOCK, WIDTH, 16), CtaGroup.ONE, OperandSource.TMEM, *majors)
    return cute.make_tiled_mma(op)


@cute.jit
def attention(q: cute.Tensor, k: cute.Tensor, v: cute.Tensor, d: cute.Tensor):
    score, output, load = score_mma(), output_mma(), cpasync.CopyBulkTensorTileG2SOp(CtaGroup.ONE)
    layout_q = first_stage(sm100.make_smem_layout_a(score, SCORE_TILE, BF16, 1))
    layout_k = first_stage(sm100.make_smem_layout_b(score, SCORE_TILE, BF16, 1))
    layout_v = first_stage(sm100.make_smem_layout_b(output, OUTPUT_TILE, BF16, 1))
    columns = cute.make_tensor(v.iterator, cute.make_layout((WIDTH, ATTENTION["keys"]), stride=(1, WIDTH)))
    load_q, view_q = cute.nvgpu.make_tiled_tma_atom_A(load, q, layout_q, SCORE_TILE, score)
    load_k, view_k = cute.nvgpu.make_tiled_tma_atom_B(load, k, layout_k, SCORE_TILE, score)
    load_v, view_v = cute.nvgpu.make_tiled_tma_atom_B(load, columns, layout_v, OUTPUT_TILE, output)
    attention_kernel(load_q, view_q, load_k, view_k, load_v, view_v, d).launch(
        grid=(ATTENTION["queries"] // BLOCK, 1, 1), block=(160, 1, 1)
    )


def compile_attention():
    queries, keys = ATTENTION.values()
    inputs = [matrix(BF16, rows, WIDTH) for rows in (queries, keys, keys)]
    cute.compile(attention, *inputs, matrix(F32, queries, WIDTH))


KERNELS = {"dense": compile_dense, "pair": compile_pair, "scaled": compile_scaled, "attention": compile_attention}


def main() -> None:
    for name in sys.argv[1:] or KERNELS:
        before = set(DUMPS.glob("*.ptx"))
        KERNELS[name]()
        (path,) = set(DUMPS.glob("*.ptx")) - before
        text = re.sub(r"\n\t*\.section\s.*", "", path.read_text().rstrip("\0"), flags=re.DOTALL)
        target = HERE / f"cute_{name}.ptx"
        target.write_text(text.rstrip() + "\n")
        print(target)


if __name__ == "__main__":
    main()
