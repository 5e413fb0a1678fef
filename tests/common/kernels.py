"""Small TIRx kernels that the tests of the harness build. TVM reads a kernel's source, so they live in a file."""

import torch
from tvm.backend.cuda.lang.pipeline import TMABar
from tvm.script import tirx as T
from tvm.script.tirx import tile as Tx

from common.stage import BadSize, Option, Size, Stage
from common.verify import Tolerance

COLS = 256


def scale(dtype: str = "float32"):
    """y = x * w * s + n for x (m, 256) with symbolic m; two rows per CTA, arguments in an order unlike the kernel's."""

    @T.prim_func
    def scale(x: T.handle, w: T.Buffer((COLS,), dtype), s: T.float32, n: T.int32, y: T.handle):
        m = T.int32()
        X = T.match_buffer(x, (m, COLS), dtype)
        Y = T.match_buffer(y, (m, COLS), dtype)
        T.device_entry()
        b = T.cta_id([T.ceildiv(m, 2)])
        t = T.thread_id([COLS])
        for i in range(2):
            r: T.let = b * 2 + i
            if r < m:
                value: T.let = T.cast(X[r, t], "float32") * T.cast(w[t], "float32") * s + T.cast(n, "float32")
                Y[r, t] = T.cast(value, dtype)

    return scale


def tma_copy(cols: int = 64):
    """b = a through SMEM, a (m, cols) float16 read with TMA in boxes of 32 rows; m symbolic, a multiple of 32."""

    @T.prim_func
    def copy(a: T.handle, b: T.handle):
        m = T.int32()
        A = T.match_buffer(a, (m, cols), "float16")
        B = T.match_buffer(b, (m, cols), "float16")
        T.device_entry()
        bx = T.cta_id([(m + 31) // 32])
        T.warpgroup_id([1])
        T.warp_id_in_wg([4])
        T.lane_id([32])
        tid = T.thread_id([128])
        T.thread_id_in_wg([128])
        pool = T.SMEMPool()
        bar = TMABar(pool, 1)
        As = pool.alloc((32, cols), "float16", align=128)
        pool.commit()
        bar.init(1)
        T.ptx.fence.proxy.async_.shared__cta()
        T.cuda.cta_sync()
        if tid == 0:
            Tx.copy_async(As[:, :], A[bx * 32 : bx * 32 + 32, :], dispatch="tma_auto", mbar=bar.ptr_to([0]))
            bar.arrive(0, 32 * cols * 2)
        bar.wait(0, 0)
        for i in range(cols // 4):
            B[bx * 32 + tid // 4, (tid % 4) * (cols // 4) + i] = As[tid // 4, (tid % 4) * (cols // 4) + i]

    return copy


def own_tensor_map():
    """b = the second of the eight-row boxes of a (m, 64) float32, through a tensor map that the script encodes."""

    @T.prim_func
    def copy(a: T.handle, b: T.handle):
        m = T.int32()
        A = T.match_buffer(a, (m, 64), "float32")
        B = T.match_buffer(b, (8, 64), "float32")
        boxes: T.let[T.handle("tensormap")] = T.tvm_stack_alloca("tensormap", 1)
        T.call_packed(
            "runtime.cuTensorMapEncodeTiled", boxes, "float32", 2, A.data, 64, m, 256, 64, 8, 1, 1, 0, 0, 2, 0
        )
        T.device_entry()
        T.cta_id([1])
        lane = T.thread_id([32])
        tile = T.alloc_buffer((8, 64), "float32", scope="shared", align=128)
        full = T.shared_scalar("uint64")
        if lane == 0:
            T.ptx.mbarrier.init.shared.b64(T.address_of(full), T.uint32(1))
            T.ptx.fence.proxy.async_.shared__cta()
            T.ptx["cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"](
                tile.data, T.address_of(boxes), 0, 8, T.address_of(full)
            )
            T.ptx.mbarrier.arrive.expect_tx.shared.b64(T.address_of(full), T.uint32(8 * 64 * 4))
        T.cuda.cta_sync()
        T.cuda.mbarrier_wait(T.address_of(full), 0)
        for row in range(8):
            for half in range(2):
                B[row, half * 32 + lane] = tile[row, half * 32 + lane]

    return copy


def clustered():
    """Fixed shapes: 4 clusters of 2 CTAs, each CTA writes its rank in the cluster."""

    @T.prim_func
    def clustered(y: T.Buffer((8, 32), "int32")):
        T.device_entry()
        cluster = T.cluster_id([4])
        rank = T.cta_id_in_cluster([2])
        t = T.thread_id([32])
        y[cluster * 2 + rank, t] = rank

    return clustered


def _check(config) -> None:
    if config.rows % 2:
        raise BadSize(f"rows is {config.rows}: it must be even, two rows go to a CTA")


def toy_stage(**changes) -> Stage:
    """A whole stage around `scale`, sm_90a, with some fields replaced."""
    fields = dict(
        number=2,
        title="Toy",
        arch="sm_90a",
        sizes=[Size("rows", default=6, quick=2, gpu=1024, help="rows of x")],
        dtypes=["float32", "float16"],
        options=[Option("flavour", ("plain", "other"), "plain")],
        check=_check,
        kernel=lambda config: scale(config.dtype),
        inputs=lambda config, generator: (
            torch.randn(config.rows, COLS, generator=generator, device=generator.device).to(config.torch_dtype),
            torch.randn(COLS, generator=generator, device=generator.device).to(config.torch_dtype),
            1.5,
            3,
        ),
        outputs=lambda config: [((config.rows, COLS), config.torch_dtype)],
        reference=lambda config, x, w, s, n: x.double() * w.double() * s + n,
        tolerance=Tolerance(terms=2),
        bytes_moved=lambda config: 2 * config.rows * COLS * config.itemsize,
    )
    return Stage(**{**fields, **changes})


def misspelt():
    """A kernel that TVM's parser refuses."""

    @T.prim_func
    def misspelt(y: T.Buffer((COLS,), "float32")):
        T.device_entry()
        t = T.thread_id([COLS])
        T.cuda.cta_snyc()
        y[t] = T.float32(0)

    return misspelt
