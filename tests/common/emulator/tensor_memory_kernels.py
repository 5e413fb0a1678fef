"""TIRx kernels that move tiles between tensor memory, registers and shared memory with TIRx's own dispatch."""

from tvm.backend.cuda.lang.pipeline import TCGen05Bar
from tvm.backend.cuda.tile_primitive.tma_utils import mma_shared_layout
from tvm.script import tirx as T
from tvm.script.tirx import tile as Tx
from tvm.tirx.layout import R, S, TCol, TileLayout, TLane, tmem_datapath_layout


def through_tensor_memory(store: str, load: str, rows: int, columns: int, dtype: str = "float32", datapath: str = "D"):
    """b = a (rows, columns): global -> fragment `store` -> tensor memory -> fragment `load` -> global."""
    cells = columns * (2 if dtype != "float32" else 4) // 4

    @T.prim_func
    def through(a: T.Buffer((rows, columns), dtype), b: T.Buffer((rows, columns), dtype)):
        T.device_entry()
        T.cta_id([1])
        T.warpgroup_id([1])
        T.warp_id_in_wg([4])
        T.lane_id([32])
        T.thread_id([128])
        T.thread_id_in_wg([128])
        pool = T.SMEMPool()
        tp = T.TMEMPool(pool, total_cols=512, cta_group=1, alloc_warp=0)
        D = tp.alloc((rows, columns), dtype, layout=tmem_datapath_layout(datapath, rows, columns))
        tp.commit()
        pool.commit()
        T.cuda.cta_sync()
        source = T.alloc_tcgen05_ldst_frag(store, (rows, columns), dtype)
        target = T.alloc_tcgen05_ldst_frag(load, (rows, columns), dtype)
        Tx.wg.copy(source[:, :], a[:, :])
        Tx.wg.copy_async(D[:, :], source[:, :])
        T.ptx.tcgen05.wait__st.sync.aligned()
        Tx.wg.copy_async(target[:, :], D[:, :])
        T.ptx.tcgen05.wait__ld.sync.aligned()
        Tx.wg.copy(b[:, :], target[:, :])
        T.cuda.cta_sync()
        tp.dealloc()

    assert cells <= 512
    return through


# Rows of a tcgen05.cp shape -> (shape of its lanes, their strides), (copies, distance between copies)
CP_LANES = {
    ("128x256b", None): ((128,), (1,), None),
    ("128x128b", None): ((128,), (1,), None),
    ("64x128b", "warpx2::02_13"): ((64,), (1,), (2, 64)),
    ("64x128b", "warpx2::01_23"): ((2, 32), (64, 1), (2, 32)),
    ("32x128b", "warpx4"): ((32,), (1,), (4, 32)),
    ("4x256b", None): ((4,), (32,), None),
}


def copy_layout(shape: str, multicast: str | None, columns: int) -> TileLayout:
    """The tensor memory layout of a matrix whose rows one copy of that shape covers."""
    extents, strides, replica = CP_LANES[shape, multicast]
    lanes = tuple(stride @ TLane for stride in strides)
    layout = S[(*extents, columns) : (*lanes, 1 @ TCol)]
    return TileLayout(layout if replica is None else layout + R[replica[0] : replica[1] @ TLane])


def shared_to_tensor_memory(shape: str, multicast: str | None, mode: int, columns: int):
    """b (128, columns) = the first `columns` 32-bit columns of tensor memory after a copy of a (rows, columns), which
    lies in shared memory with swizzle `mode` (0 to 3)."""
    rows = int(shape.split("x")[0])
    layout = mma_shared_layout("float32", mode, (max(rows, 8), columns))

    @T.prim_func
    def copied(a: T.Buffer((rows, columns), "float32"), b: T.Buffer((128, columns), "float32")):
        T.device_entry()
        T.cta_id([1])
        T.warpgroup_id([1])
        T.warp_id_in_wg([4])
        T.lane_id([32])
        t = T.thread_id([128])
        T.thread_id_in_wg([128])
        pool = T.SMEMPool()
        bar = TCGen05Bar(pool, 1)
        As = pool.alloc((max(rows, 8), columns), "float32", align=1024, layout=layout)
        tp = T.TMEMPool(pool, total_cols=512, cta_group=1, alloc_warp=0)
        D = tp.alloc((128, columns), "float32")
        tp.move_base_to(0)
        C = tp.alloc((rows, columns), "float32", layout=copy_layout(shape, multicast, columns))
        tp.commit()
        pool.commit()
        bar.init(1)
        for i in T.serial(columns, unroll=False):
            if t < rows:
                As[t, i] = a[t, i]
        T.ptx.fence.proxy.async_.shared__cta()
        T.cuda.cta_sync()
        if t == 0:
            Tx.copy_async(C[:, :], As[0:rows, :], cta_group=1, shape=shape, multicast=multicast)
            bar.arrive(0)
        bar.wait(0, 0)
        T.ptx.tcgen05.fence__after_thread_sync()
        target = T.alloc_tcgen05_ldst_frag("32x32b", (128, columns), "float32")
        Tx.wg.copy_async(target[:, :], D[:, :])
        T.ptx.tcgen05.wait__ld.sync.aligned()
        Tx.wg.copy(b[:, :], target[:, :])
        T.cuda.cta_sync()
        tp.dealloc()

    return copied
