"""How fast the emulator is on this machine: `make bench-emulator`. Figures are reported, never asserted.

The cases are small programs in PTX; the matrix products are CUDA C++, compiled before the clock starts.
"""

from __future__ import annotations

import argparse
import time
import tracemalloc
from collections.abc import Callable

import numpy as np
from tabulate import tabulate

from common.compiler import compile_cuda
from common.emulator import Emulator, TensorMap
from common.emulator.hardware.tile_copy import TileCopy
from common.emulator.machine.events import SCHEDULES
from common.emulator.machine.memory import GLOBAL_BASE

HEADER = ".version 8.6\n.target sm_100a\n.address_size 64\n"

# D = A B^T, one 64 x 64 tile per warp. Fragments come straight from global memory: what counts here is mma.sync.
MATRIX_PRODUCT = """
#define LOAD(X, row, col) (*(const unsigned*)(X + (size_t)(row) * K + (col)))
extern "C" __global__ void product(const unsigned short* A, const unsigned short* B, float* D, int N, int K) {
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, at = lane / 4, pair = lane % 4 * 2;
  int m0 = blockIdx.y * 128 + warp / 2 * 64, n0 = blockIdx.x * 128 + warp % 2 * 64;
  float d[4][8][4] = {};
  #pragma unroll 1
  for (int k = 0; k < K; k += 16) {
    unsigned a[4][4], b[8][2];
    for (int i = 0; i < 4; i++)
      for (int r = 0; r < 4; r++) a[i][r] = LOAD(A, m0 + 16 * i + at + r % 2 * 8, k + pair + r / 2 * 8);
    for (int j = 0; j < 8; j++)
      for (int r = 0; r < 2; r++) b[j][r] = LOAD(B, n0 + 8 * j + at, k + pair + r * 8);
    for (int i = 0; i < 4; i++)
      for (int j = 0; j < 8; j++)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
          "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
          : "+f"(d[i][j][0]), "+f"(d[i][j][1]), "+f"(d[i][j][2]), "+f"(d[i][j][3])
          : "r"(a[i][0]), "r"(a[i][1]), "r"(a[i][2]), "r"(a[i][3]), "r"(b[j][0]), "r"(b[j][1]));
  }
  for (int i = 0; i < 4; i++) for (int j = 0; j < 8; j++) for (int r = 0; r < 4; r++)
    D[(size_t)(m0 + 16 * i + at + r / 2 * 8) * N + n0 + 8 * j + pair + r % 2] = d[i][j][r];
}
"""

# D = A B^T by TMA and tcgen05, a 128 x 128 tile per CTA: one thread loads, one multiplies, all four warps store.
TENSOR_CORE_PRODUCT = """
struct alignas(64) Map { char bytes[128]; };
constexpr int STAGES = 4, TILE = 128 * 64 * 2;
__device__ unsigned at(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ void wait(const void* bar, unsigned parity) {
  asm volatile("{ .reg .pred p; L: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra L; }"
    :: "r"(at(bar)), "r"(parity) : "memory");
}
__device__ void load(void* to, const Map& map, int k, int row, void* bar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes "
    "[%0], [%1, {%2, %3}], [%4];" :: "r"(at(to)), "l"(&map), "r"(k), "r"(row), "r"(at(bar)) : "memory");
}
__device__ void commit(const void* bar) {
  asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];"
    :: "r"(at(bar)) : "memory");
}
__device__ unsigned long long matrix(const void* p) {  // K-major, 128-byte swizzle
  return at(p) >> 4 | 64ull << 32 | 1ull << 46 | 2ull << 61;
}
extern "C" __global__ void __launch_bounds__(128) product(
    const __grid_constant__ Map A, const __grid_constant__ Map B, float* D, int N, int K) {
  extern __shared__ __align__(1024) char pool[];
  __shared__ unsigned long long full[STAGES], empty[STAGES], done;
  __shared__ unsigned base;
  int thread = threadIdx.x, m0 = blockIdx.y * 128, n0 = blockIdx.x * 128;
  if (thread < 32)
    asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], 128;" :: "r"(at(&base)));
  if (thread == 0) {
    for (int s = 0; s < STAGES; s++)
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1; mbarrier.init.shared::cta.b64 [%1], 1;"
        :: "r"(at(full + s)), "r"(at(empty + s)));
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1; fence.mbarrier_init.release.cluster;" :: "r"(at(&done)));
  }
  __syncthreads();
  if (thread == 0) {
    #pragma unroll 1
    for (int i = 0; i < K / 64; i++) {
      int s = i % STAGES;
      char* stage = pool + s * 2 * TILE;
      if (i >= STAGES) wait(empty + s, i / STAGES - 1 & 1);
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(at(full + s)), "r"(2 * TILE));
      load(stage, A, i * 64, m0, full + s);
      load(stage + TILE, B, i * 64, n0, full + s);
    }
  } else if (thread == 32) {
    #pragma unroll 1
    for (int i = 0; i < K / 64; i++) {
      int s = i % STAGES;
      wait(full + s, i / STAGES & 1);
      unsigned long long a = matrix(pool + s * 2 * TILE), b = matrix(pool + s * 2 * TILE + TILE);
      for (int k = 0; k < 4; k++)
        asm volatile("{ .reg .pred p; setp.ne.u32 p, %4, 0;"
          "tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p; }"
          :: "r"(base), "l"(a + 2 * k), "l"(b + 2 * k), "r"(1 << 4 | 128 / 8 << 17 | 128 / 16 << 24), "r"(i + k));
      commit(empty + s);
    }
    commit(&done);
  }
  __syncwarp();
  wait(&done, 0);
  asm volatile("tcgen05.fence::after_thread_sync;");
  for (int c = 0; c < 128; c += 8) {
    float d[8];
    asm volatile("tcgen05.ld.sync.aligned.32x32b.x8.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
      "tcgen05.wait::ld.sync.aligned;"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]), "=f"(d[7]) : "r"(base + c));
    float4* row = (float4*)(D + (size_t)(m0 + thread) * N + n0 + c);
    row[0] = make_float4(d[0], d[1], d[2], d[3]);
    row[1] = make_float4(d[4], d[5], d[6], d[7]);
  }
  __syncthreads();
  if (thread < 32) asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, 128;" :: "r"(base));
}
"""


def _seconds(launch: Callable[[], object]) -> float:
    """Time of the second launch: the first one also parses and decodes the program."""
    launch()
    start = time.perf_counter()
    launch()
    return time.perf_counter() - start


def arithmetic(schedule: str) -> tuple[str, str]:
    """Straight-line integer and float arithmetic of two warpgroups (256 threads)."""
    repeat = 200
    lines = []
    for place in range(100):
        a, b = place % 8, (place + 3) % 8
        lines.append(f"mad.lo.s32 %r{a}, %r{b}, %r{a}, %r{b};" if place % 2 else f"add.f32 %f{a}, %f{b}, %f{a};")
    body = "\n".join(lines)
    ptx = f"""{HEADER}
    .visible .entry k() {{
      .reg .b32 %r<8>; .reg .f32 %f<8>; .reg .b32 %n; .reg .pred %p;
      {" ".join(f"mov.u32 %r{i}, %tid.x; mov.f32 %f{i}, 0f3F800000;" for i in range(8))}
      mov.u32 %n, {repeat};
      LOOP: {body}
      sub.u32 %n, %n, 1; setp.ne.u32 %p, %n, 0; @%p bra LOOP;
      ret;
    }}"""
    run = Emulator(schedule).launch(ptx, "k", grid=1, block=256)
    count = run.counters.warp_instructions
    seconds = _seconds(lambda: Emulator(schedule).launch(ptx, "k", grid=1, block=256))
    return f"{count:,} warp-instructions of 8 warps", f"{count / seconds / 1e6:.2f} M warp-instructions/s"


def tensor_copies(schedule: str, slabs: int) -> tuple[str, str]:
    """TMA loads and stores, 128 KB in flight, in boxes of `slabs` x 256 rows of 128 bytes (32 KB a slab)."""
    count, in_flight = 512, 4
    size = 256 * 128
    load = "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
    store = "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group"
    places = [f"add.u32 %at, %slab, {n}; add.u32 %s, %pool, {size * n};" for n in range(0, in_flight, slabs)]
    loads = "\n".join(f"{at} {load} [%s], [%from, {{%zero, %zero, %at}}], [%bar];" for at in places)
    stores = "\n".join(f"{at} {store} [%to, {{%zero, %zero, %at}}], [%s];" for at in places)
    ptx = f"""{HEADER}
    .extern .shared .align 1024 .b8 pool[];
    .visible .entry k(.param .align 64 .b8 source[128], .param .align 64 .b8 target[128]) {{
      .reg .b32 %pool; .reg .b32 %s; .reg .b32 %at; .reg .b32 %bar; .reg .b32 %slab; .reg .b32 %zero; .reg .b32 %parity;
      .reg .pred %p; .reg .b64 %from; .reg .b64 %to;
      mov.b64 %from, source; mov.b64 %to, target; mov.u32 %pool, pool; add.u32 %bar, %pool, {size * in_flight};
      mov.u32 %zero, 0; mov.u32 %slab, 0; mov.u32 %parity, 0;
      mbarrier.init.shared::cta.b64 [%bar], 1;
      LOOP: mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {size * in_flight};
      {loads}
      WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p, [%bar], %parity; @!%p bra WAIT;
      xor.b32 %parity, %parity, 1;
      {stores}
      cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0;
      add.u32 %slab, %slab, {in_flight}; setp.lt.u32 %p, %slab, {count}; @%p bra LOOP;
      cp.async.bulk.wait_group 0;
      ret;
    }}"""
    source = np.random.default_rng(0).integers(0, 1 << 16, (count, 256, 64), dtype=np.uint16)
    target = np.zeros_like(source)

    def tensor_map(array: np.ndarray) -> TensorMap:
        return TensorMap("uint16", array, [64, 256, count], [128, size], [64, 256, slabs], swizzle="128B")

    def launch() -> None:
        args = [tensor_map(source), tensor_map(target)]
        Emulator(schedule).launch(ptx, "k", grid=1, block=1, shared_bytes=size * in_flight + 8, args=args)

    seconds = _seconds(launch)
    if not np.array_equal(source, target):
        raise AssertionError("the copy is wrong")
    moved = 2 * source.nbytes
    return f"{moved / 2**20:.0f} MiB in boxes of {32 * slabs} KB", f"{moved / seconds / 1e9:.2f} GB/s"


def tiles_alone(schedule: str) -> tuple[str, str]:
    """What the copy engine moves when no instruction has to be executed for it: 32 KB boxes, 128B swizzle."""
    count, size = 512, 256 * 128
    source = np.random.default_rng(0).integers(0, 1 << 16, (count, 256, 64), dtype=np.uint16)
    tensor_map = TensorMap("uint16", source, [64, 256, count], [128, size], [64, 256, 1], swizzle="128B")
    tile = tensor_map.descriptor(GLOBAL_BASE).plan(TileCopy)
    flat, shared = source.reshape(-1).view(np.uint8), np.zeros(2 * size, np.uint8)

    def launch() -> None:
        for slab in range(count):
            tile.load([0, 0, slab], flat, GLOBAL_BASE, shared, size)
            tile.store([0, 0, slab], flat, GLOBAL_BASE, shared, size)

    return "32 MiB, the copies alone", f"{2 * source.nbytes / _seconds(launch) / 1e9:.2f} GB/s"


def small_tensor_copies(schedule: str) -> tuple[str, str]:
    return tensor_copies(schedule, slabs=1)


def large_tensor_copies(schedule: str) -> tuple[str, str]:
    return tensor_copies(schedule, slabs=4)


def matrix_product(schedule: str) -> tuple[str, str]:
    """A float16 matrix product by mma.sync.m16n8k16."""
    size = 1024
    ptx = compile_cuda(MATRIX_PRODUCT, "sm_100a").ptx
    a, b = (np.random.default_rng(seed).integers(-4, 5, (size, size)).astype(np.float16) for seed in (0, 1))
    d = np.zeros((size, size), np.float32)
    start = time.perf_counter()
    grid = (size // 128, size // 128)
    Emulator(schedule).launch(ptx, "product", grid=grid, block=128, args=[a, b, d, size, size])
    seconds = time.perf_counter() - start
    if not np.array_equal(d, a.astype(np.float32) @ b.astype(np.float32).T):
        raise AssertionError("the product is wrong")
    return f"{size} x {size} x {size}, mma.sync", f"{seconds:.1f} s"


def tensor_core_step(schedule: str) -> tuple[str, str]:
    """128 x 128 x 64 in float16: four `tcgen05.mma` on operands in swizzled SMEM, a commit, and the wait for it."""
    steps, tile = 1024, 128 * 64 * 2
    shape = 1 << 4 | 128 // 8 << 17 | 128 // 16 << 24  # float32 results, N, M
    multiply = "\n".join(
        f"@%one tcgen05.mma.cta_group::1.kind::f16 [%d], %a{k}, %b{k}, {shape}, {'%always' if k else '%yes'};"
        for k in range(4)
    )
    descriptors = "\n".join(
        f"add.u64 %a{k}, %first, {2 * k}; add.u64 %b{k}, %first, {2 * k + tile // 16};" for k in range(4)
    )
    ptx = f"""{HEADER}
    .extern .shared .align 1024 .b8 pool[];
    .visible .entry k(.param .u64 out) {{
      .reg .b32 %pool; .reg .b32 %bar; .reg .b32 %at; .reg .b32 %end; .reg .b32 %d; .reg .b32 %n; .reg .b32 %parity;
      .reg .b32 %value; .reg .b64 %a<4>; .reg .b64 %b<4>; .reg .b64 %first; .reg .b64 %out; .reg .b64 %place;
      .reg .pred %p; .reg .pred %one; .reg .pred %yes; .reg .pred %always;
      mov.u32 %pool, pool; add.u32 %end, %pool, {2 * tile}; add.u32 %bar, %end, 8;
      setp.eq.u32 %one, %tid.x, 0; setp.eq.u32 %always, 0, 0;
      @%one mbarrier.init.shared::cta.b64 [%bar], 1;
      tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%end], 128; ld.shared.u32 %d, [%end];
      mad.lo.u32 %at, %tid.x, 16, %pool; mov.u32 %value, 0x3C003C00;
      FILL: st.shared.v4.b32 [%at], {{%value, %value, %value, %value}};
      add.u32 %at, %at, 512; setp.lt.u32 %p, %at, %end; @%p bra FILL;
      fence.proxy.async.shared::cta;
      shr.u32 %at, %pool, 4; cvt.u64.u32 %first, %at; or.b64 %first, %first, {64 << 32 | 1 << 46 | 2 << 61};
      {descriptors}
      setp.ne.u32 %yes, 0, 0; mov.u32 %n, 0; mov.u32 %parity, 0;
      LOOP:
      {multiply}
      @%one tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%bar];
      WAIT: mbarrier.try_wait.parity.shared::cta.b64 %p, [%bar], %parity; @!%p bra WAIT;
      xor.b32 %parity, %parity, 1; setp.eq.u32 %yes, 0, 0;
      add.u32 %n, %n, 1; setp.lt.u32 %p, %n, {steps}; @%p bra LOOP;
      tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%value}}, [%d]; tcgen05.wait::ld.sync.aligned;
      ld.param.u64 %out, [out]; mad.wide.u32 %place, %tid.x, 4, %out; st.global.b32 [%place], %value;
      tcgen05.dealloc.cta_group::1.sync.aligned.b32 %d, 128;
      ret;
    }}"""
    out = np.zeros(32, np.float32)

    def launch() -> None:
        Emulator(schedule).launch(ptx, "k", grid=1, block=32, shared_bytes=2 * tile + 16, args=[out])

    seconds = _seconds(launch)
    if not (out == 64 * steps).all():
        raise AssertionError("the product is wrong")
    return f"{steps} times 128 x 128 x 64, tcgen05.mma", f"{seconds / steps * 1e6:.0f} us each"


def tensor_core_product(schedule: str) -> tuple[str, str]:
    """A float16 matrix product by TMA and tcgen05.mma."""
    size = 1024
    ptx = compile_cuda(TENSOR_CORE_PRODUCT, "sm_100a").ptx
    a, b = (np.random.default_rng(seed).integers(-4, 5, (size, size)).astype(np.float16) for seed in (0, 1))
    d = np.zeros((size, size), np.float32)
    maps = [TensorMap("float16", x, [size, size], [2 * size], [64, 128], swizzle="128B") for x in (a, b)]

    def launch() -> None:
        grid = (size // 128, size // 128)
        Emulator(schedule).launch(
            ptx, "product", grid=grid, block=128, shared_bytes=4 * 32768, args=[*maps, d, size, size]
        )

    seconds = _seconds(launch)
    if not np.array_equal(d, a.astype(np.float32) @ b.astype(np.float32).T):
        raise AssertionError("the product is wrong")
    return f"{size} x {size} x {size}, TMA and tcgen05.mma", f"{seconds:.2f} s"


def softmax(schedule: str) -> tuple[str, str]:
    """The arithmetic of attention: 128 numbers per thread of two warpgroups scaled, exponentiated and packed."""
    repeat, width = 50, 128
    pairs = range(0, width, 2)
    scale = "\n".join(
        f"mov.b64 %d{i}, {{%x{i}, %x{i + 1}}}; fma.rn.ftz.f32x2 %d{i}, %d{i}, %scale, %bias;"
        f"mov.b64 {{%y{i}, %y{i + 1}}}, %d{i};"
        for i in pairs
    )
    exponentials = "\n".join(f"ex2.approx.ftz.f32 %y{i}, %y{i};" for i in range(width))
    pack = "\n".join(f"cvt.rn.f16x2.f32 %h{i}, %y{i + 1}, %y{i};" for i in pairs)
    ptx = f"""{HEADER}
    .visible .entry k() {{
      .reg .f32 %x<{width}>; .reg .f32 %y<{width}>; .reg .b32 %h<{width}>; .reg .b64 %d<{width}>;
      .reg .b64 %scale; .reg .b64 %bias; .reg .b32 %n; .reg .pred %p;
      {" ".join(f"cvt.rn.f32.u32 %x{i}, %tid.x;" for i in range(width))}
      mov.b64 %scale, 0x3C0000003C000000; mov.b64 %bias, 0xBF800000BF800000; mov.u32 %n, {repeat};
      LOOP: {scale}
      {exponentials}
      {pack}
      sub.u32 %n, %n, 1; setp.ne.u32 %p, %n, 0; @%p bra LOOP;
      ret;
    }}"""
    count = Emulator(schedule).launch(ptx, "k", grid=1, block=256).counters.warp_instructions
    seconds = _seconds(lambda: Emulator(schedule).launch(ptx, "k", grid=1, block=256))
    return f"{count:,} warp-instructions of 8 warps", f"{count / seconds / 1e6:.2f} M warp-instructions/s"


def launches(schedule: str) -> tuple[str, str]:
    """Memory of a launch of many CTAs over that of a tenth as many."""
    ptx = f"""{HEADER}
    .visible .entry k() {{ .reg .b32 %r<2>; mov.u32 %r0, %ctaid.x; add.u32 %r1, %r0, 1; ret; }}"""
    peaks = []
    start = time.perf_counter()
    for grid in (1000, 10000):
        tracemalloc.start()
        Emulator(schedule).launch(ptx, "k", grid=grid, block=256)
        peaks.append(tracemalloc.get_traced_memory()[1] / 2**20)
        tracemalloc.stop()
    seconds = time.perf_counter() - start
    return "10,000 CTAs of 256 threads", f"{peaks[1]:.1f} MiB peak (1,000 CTAs: {peaks[0]:.1f}), {seconds:.1f} s both"


CASES = (
    arithmetic,
    softmax,
    tiles_alone,
    small_tensor_copies,
    large_tensor_copies,
    matrix_product,
    tensor_core_step,
    tensor_core_product,
    launches,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedule", choices=SCHEDULES, help="only this schedule (default: late and early)")
    chosen = parser.parse_args().schedule
    rows = []
    for case in CASES:
        for schedule in (chosen,) if chosen else SCHEDULES[:2]:
            what, figure = case(schedule)
            rows.append((case.__name__.replace("_", " "), schedule, what, figure))
    print(tabulate(rows, headers=("case", "schedule", "what", "measured on this CPU")))


if __name__ == "__main__":
    main()
