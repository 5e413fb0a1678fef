"""TIRx kernels around one `Tx.gemm_async`, for the sweep over what its tcgen05 dispatch supports.

Every CTA loads its operands through threads, one thread issues the product, and all of tensor memory is stored raw, so
that the data path layout is checked too. TVM reads a kernel's source, so the kernels live in a file.
"""

from __future__ import annotations

from tvm.backend.cuda.lang.pipeline import TCGen05Bar
from tvm.backend.cuda.tile_primitive.gemm_async.tcgen05 import sf_smem_layout
from tvm.backend.cuda.tile_primitive.tma_utils import SwizzleMode, mma_shared_layout
from tvm.script import tirx as T
from tvm.script.tirx import tile as Tx
from tvm.tirx.layout import tmem_datapath_layout

SWIZZLES = {
    "none": SwizzleMode.SWIZZLE_NONE,
    "32B": SwizzleMode.SWIZZLE_32B_ATOM,
    "64B": SwizzleMode.SWIZZLE_64B_ATOM,
    "128B": SwizzleMode.SWIZZLE_128B_ATOM,
}
COLUMNS = 512


@T.inline
def store_tensor_memory(raw, out, rank, thread):
    """All columns of tensor memory, float32, to out[rank], a lane from each thread."""
    for i in range(COLUMNS // 64):
        fr = T.alloc_tcgen05_ldst_frag("32x32b", (128, 64), "float32")
        Tx.wg.copy_async(fr[:, :], raw[:, i * 64 : i * 64 + 64])
        T.ptx.tcgen05.wait__ld.sync.aligned()
        for j in T.serial(64):
            out[rank, thread, i * 64 + j] = fr.local()[j]


def gemm(
    dtype: str, m: int, n: int, k: int, *, group: int = 1, swizzle_a: str = "128B", swizzle_b: str = "128B",
    trans_a: bool = False, trans_b: bool = False, tf32: bool = False,
):  # fmt: skip
    """D = A B^T of a CTA, or of a pair: `m` rows and `n / group` columns of operands lie in each CTA.

    A is (group * m, k), or (group, k, m) with `trans_a`; B (n, k), or (group, k, n / group) with `trans_b`; the output
    is the raw tensor memory (group, 128, 512).
    """
    part = n // group
    shape_a, shape_b = ((k, m) if trans_a else (m, k)), ((k, part) if trans_b else (part, k))
    layout = tmem_datapath_layout("D" if m == 128 else "F" if group == 1 else "B", m, n)
    mode_a, mode_b = SWIZZLES[swizzle_a], SWIZZLES[swizzle_b]

    @T.prim_func
    def gemm(
        A: T.Buffer((group, *shape_a), dtype),
        B: T.Buffer((group, *shape_b), dtype),
        out: T.Buffer((group, 128, COLUMNS), "float32"),
    ):
        T.device_entry()
        T.cluster_id([1])
        rank = T.cta_id_in_cluster([group])
        T.warpgroup_id([1])
        T.warp_id_in_wg([4])
        T.lane_id([32])
        thread = T.thread_id([128])
        T.thread_id_in_wg([128])
        pool = T.SMEMPool()
        bar = TCGen05Bar(pool, 1)
        As = pool.alloc_tcgen05_mma_AB(shape_a, dtype, swizzle_mode=mode_a)
        Bs = pool.alloc_tcgen05_mma_AB(shape_b, dtype, swizzle_mode=mode_b)
        tp = T.TMEMPool(pool, total_cols=COLUMNS, cta_group=group, alloc_warp=0)
        raw = tp.alloc((128, COLUMNS), "float32")
        tp.move_base_to(0)
        D = tp.alloc((m, n), "float32", layout=layout)
        pool.commit()
        tp.commit()
        bar.init(1)
        Tx.cta.copy(As[:, :], A[rank, :, :])
        Tx.cta.copy(Bs[:, :], B[rank, :, :])
        T.ptx.fence.proxy.async_.shared__cta()
        T.cuda.cta_sync()
        if group == 2:
            T.cuda.cluster_sync()
        if (thread == 0) & (rank == 0):
            Tx.gemm_async(
                D[:, :],
                As[:, :],
                Bs[:, :],
                accum=False,
                cta_group=group,
                transA=trans_a,
                transB=trans_b,
                is_AB_tf32=tf32,
            )
            bar.arrive(0, cta_group=group, cta_mask=2**group - 1)
        bar.wait(0, 0)
        T.ptx.tcgen05.fence__after_thread_sync()
        store_tensor_memory(raw, out, rank, thread)
        T.cuda.cta_sync()
        if group == 2:
            T.cuda.cluster_sync()
        tp.dealloc()

    return gemm


def gemm_from_tensor_memory(dtype: str, m: int, n: int, k: int, *, group: int = 1, trans_b: bool = False):
    """The same with A in tensor memory, written there by `tcgen05.st` (m = 128: data path layout D, or A of a pair)."""
    part = n // group
    shape_b = (k, part) if trans_b else (part, k)

    @T.prim_func
    def gemm(
        A: T.Buffer((group, m, k), dtype),
        B: T.Buffer((group, *shape_b), dtype),
        out: T.Buffer((group, 128, COLUMNS), "float32"),
    ):
        T.device_entry()
        T.cluster_id([1])
        rank = T.cta_id_in_cluster([group])
        T.warpgroup_id([1])
        T.warp_id_in_wg([4])
        T.lane_id([32])
        thread = T.thread_id([128])
        T.thread_id_in_wg([128])
        pool = T.SMEMPool()
        bar = TCGen05Bar(pool, 1)
        Bs = pool.alloc_tcgen05_mma_AB(shape_b, dtype)
        tp = T.TMEMPool(pool, total_cols=COLUMNS, cta_group=group, alloc_warp=0)
        raw = tp.alloc((128, COLUMNS), "float32")
        tp.move_base_to(0)
        D = tp.alloc((m, n), "float32")
        At = tp.alloc_tcgen05_mma_A((m, k), dtype, M=m * group, cta_group=group)
        pool.commit()
        tp.commit()
        bar.init(1)
        Tx.cta.copy(Bs[:, :], B[rank, :, :])
        T.ptx.fence.proxy.async_.shared__cta()
        T.cuda.cta_sync()
        half = T.alloc_tcgen05_ldst_frag("32x32b", (128, k), dtype)
        for j in T.serial(k):
            half.local()[j] = A[rank, thread, j]
        Tx.wg.copy_async(At[:, :], half[:, :])
        T.ptx.tcgen05.wait__st.sync.aligned()
        T.ptx.tcgen05.fence__before_thread_sync()
        T.cuda.cta_sync()
        if group == 2:
            T.cuda.cluster_sync()
        T.ptx.tcgen05.fence__after_thread_sync()
        if (thread == 0) & (rank == 0):
            Tx.gemm_async(D[:, :], At[:, :], Bs[:, :], accum=False, cta_group=group, transB=trans_b)
            bar.arrive(0, cta_group=group, cta_mask=2**group - 1)
        bar.wait(0, 0)
        T.ptx.tcgen05.fence__after_thread_sync()
        store_tensor_memory(raw, out, rank, thread)
        T.cuda.cta_sync()
        if group == 2:
            T.cuda.cluster_sync()
        tp.dealloc()

    return gemm


def scaled_gemm(dtype: str, scale: str, n: int, k: int, *, group: int = 1, vector: int = 32, per_mma: int = 1):
    """128 rows per CTA of D = (A * SFA) (B * SFB)^T; `per_mma` scale factors of a row belong to one instruction.

    A (group, 128, bytes) and B (group, n / group, bytes) come as uint8: fp8 values, or two fp4 in each. SFA is
    (group, 128, k / vector), SFB (128 or 256 rows, k / vector), both as uint8.
    """
    part, factors = n // group, k // vector
    four_bit = dtype == "float4_e2m1fn"
    width = k // 2 if four_bit else k
    rows_b = -(-n // 128) * 128
    sfa_layout, sfb_layout = (sf_smem_layout(rows, factors, per_mma) for rows in (128, rows_b))
    layout_a, layout_b = (mma_shared_layout(dtype, 3, (rows, k)) for rows in (128, part))

    @T.prim_func
    def gemm(
        A: T.Buffer((group, 128, width), "uint8"),
        B: T.Buffer((group, part, width), "uint8"),
        SA: T.Buffer((group, 128, factors), "uint8"),
        SB: T.Buffer((rows_b, factors), "uint8"),
        out: T.Buffer((group, 128, COLUMNS), "float32"),
    ):
        T.device_entry()
        T.cluster_id([1])
        rank = T.cta_id_in_cluster([group])
        T.warpgroup_id([1])
        T.warp_id_in_wg([4])
        T.lane_id([32])
        thread = T.thread_id([128])
        T.thread_id_in_wg([128])
        pool = T.SMEMPool()
        a8 = pool.alloc_tcgen05_mma_AB((128, width), "uint8")
        b8 = pool.alloc_tcgen05_mma_AB((part, width), "uint8")
        sa8 = pool.alloc((128, factors), "uint8", layout=sfa_layout, align=1024)
        sb8 = pool.alloc((rows_b, factors), "uint8", layout=sfb_layout, align=1024)
        bar = TCGen05Bar(pool, 1)
        tp = T.TMEMPool(pool, total_cols=COLUMNS, cta_group=group, alloc_warp=0)
        raw = tp.alloc((128, COLUMNS), "float32")
        tp.move_base_to(0)
        D = tp.alloc((128, n), "float32")
        SAt = tp.alloc_sf((128, factors), scale, sf_per_mma=per_mma)
        SBt = tp.alloc_sf((rows_b, factors), scale, sf_per_mma=per_mma)
        pool.commit()
        tp.commit()
        As = T.decl_buffer((128, k), dtype, data=pool.ptr, byte_offset=0, scope="shared.dyn", layout=layout_a)
        Bs = T.decl_buffer(
            (part, k), dtype, data=pool.ptr, byte_offset=128 * width, scope="shared.dyn", layout=layout_b
        )
        offset_a = (128 + part) * width
        SAs = T.decl_buffer(
            (128, factors), scale, data=pool.ptr, byte_offset=offset_a, scope="shared.dyn", layout=sfa_layout
        )
        SBs = T.decl_buffer(
            (rows_b, factors), scale, data=pool.ptr, byte_offset=offset_a + 1024 * ((128 * factors + 1023) // 1024),
            scope="shared.dyn", layout=sfb_layout,
        )  # fmt: skip
        bar.init(1)
        Tx.cta.copy(a8[:, :], A[rank, :, :])
        Tx.cta.copy(b8[:, :], B[rank, :, :])
        for j in T.serial(factors):
            sa8[thread, j] = SA[rank, thread, j]
            for i in T.serial(rows_b // 128):
                sb8[i * 128 + thread, j] = SB[i * 128 + thread, j]
        T.ptx.fence.proxy.async_.shared__cta()
        T.cuda.cta_sync()
        if group == 2:
            T.cuda.cluster_sync()
        if (thread == 0) & (rank == 0):
            Tx.copy_async(SAt[:, :], SAs[:, :], cta_group=group)
            Tx.copy_async(SBt[:, :], SBs[:, :], cta_group=group)
            Tx.gemm_async(D[:, :], As[:, :], Bs[:, :], SFA=SAt[:, :], SFB=SBt[:, :], accum=False, cta_group=group)
            bar.arrive(0, cta_group=group, cta_mask=2**group - 1)
        bar.wait(0, 0)
        T.ptx.tcgen05.fence__after_thread_sync()
        store_tensor_memory(raw, out, rank, thread)
        T.cuda.cta_sync()
        if group == 2:
            T.cuda.cluster_sync()
        tp.dealloc()

    return gemm
