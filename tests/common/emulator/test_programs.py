"""Whole programs in CUDA C++, compiled by NVRTC, against NumPy: what a reader might write in an afternoon."""

import importlib
from functools import partial

import numpy as np
import pytest

from common.emulator import (
    Deadlock,
    Emulator,
    InvalidAddress,
    LaunchError,
    Misaligned,
    OutOfBounds,
    Pointers,
    ProgramTrap,
    PtxSyntaxError,
    UnsupportedInstruction,
)
from common.emulator.machine.events import SCHEDULES
from common.emulator.machine.scheduler import Limits
from tests.common.emulator.cuda import compile_ptx

each_schedule = pytest.mark.parametrize("schedule", SCHEDULES)


def launch(source: str, *args, grid=1, block=32, cluster=None, shared=0, schedule="late", seed=1, name="k"):
    return Emulator(schedule, seed).launch(
        compile_ptx(source), name, grid=grid, block=block, cluster=cluster, shared_bytes=shared, args=args
    )


@each_schedule
def test_divergent_loops_give_each_lane_its_own_trip_count(schedule: str) -> None:
    source = """
    extern "C" __global__ void k(int* out, const int* n, int count) {
      int i = threadIdx.x + blockIdx.x * blockDim.x;
      if (i >= count) return;
      int sum = 0;
      for (int a = 0; a < n[i]; a++) {
        if (a % 3 == 1) continue;
        for (int b = a; b < n[i]; b += 2) { sum = sum * 3 + b; if (sum > 100000) break; }
      }
      out[i] = sum;
    }"""
    n = np.random.default_rng(0).integers(0, 12, 300).astype(np.int32)
    out = np.full(300, -1, np.int32)
    launch(source, out, n, 300, grid=3, block=128, schedule=schedule)

    def expected(limit: int) -> int:
        total = 0
        for a in range(limit):
            if a % 3 == 1:
                continue
            for b in range(a, limit, 2):
                total = total * 3 + b
                if total > 100000:
                    break
        return total

    assert out.tolist() == [expected(int(v)) for v in n]


@each_schedule
@pytest.mark.parametrize("block", [32, 96, 256, 1000])
def test_block_reduction(schedule: str, block: int) -> None:
    source = """
    extern "C" __global__ void k(float* out, const float* x, int n) {
      __shared__ float partial[32];
      float sum = 0;
      for (int i = threadIdx.x; i < n; i += blockDim.x) sum += x[blockIdx.x * n + i];
      for (int d = 16; d; d /= 2) sum += __shfl_down_sync(__activemask(), sum, d);
      if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
      __syncthreads();
      if (threadIdx.x == 0) {
        float total = 0;
        for (int w = 0; w < (blockDim.x + 31) / 32; w++) total += partial[w];
        out[blockIdx.x] = total;
      }
    }"""
    x = np.random.default_rng(1).integers(-8, 8, (5, 777)).astype(np.float32)
    out = np.zeros(5, np.float32)
    block = block // 32 * 32
    launch(source, out, x, 777, grid=5, block=block, schedule=schedule)
    np.testing.assert_array_equal(out, x.sum(axis=1))


@each_schedule
def test_histogram_with_shared_and_global_atomics(schedule: str) -> None:
    source = """
    extern "C" __global__ void k(unsigned* bins, const unsigned char* x, int n) {
      __shared__ unsigned local[256];
      for (int i = threadIdx.x; i < 256; i += blockDim.x) local[i] = 0;
      __syncthreads();
      for (int i = threadIdx.x + blockIdx.x * blockDim.x; i < n; i += gridDim.x * blockDim.x)
        atomicAdd(&local[x[i]], 1u);
      __syncthreads();
      for (int i = threadIdx.x; i < 256; i += blockDim.x) if (local[i]) atomicAdd(&bins[i], local[i]);
    }"""
    x = np.random.default_rng(2).integers(0, 40, 5000).astype(np.uint8)
    bins = np.zeros(256, np.uint32)
    launch(source, bins, x, x.size, grid=4, block=128, schedule=schedule)
    np.testing.assert_array_equal(bins, np.bincount(x, minlength=256))


@each_schedule
def test_lanes_of_one_warp_hand_a_lock_around(schedule: str) -> None:
    source = """
    __device__ int lock = 0;
    extern "C" __global__ void k(int* order, volatile int* count) {
      bool done = false;
      while (!done) {
        if (atomicCAS(&lock, 0, 1) == 0) {
          order[*count] = threadIdx.x; *count = *count + 1;
          __threadfence(); atomicExch(&lock, 0); done = true;
        }
      }
    }"""
    order, count = np.full(64, -1, np.int32), np.zeros(1, np.int32)
    launch(source, order, count, block=64, schedule=schedule)
    assert sorted(order.tolist()) == list(range(64)) and count[0] == 64


@each_schedule
def test_a_lane_spins_on_a_store_of_its_neighbour(schedule: str) -> None:
    source = """
    extern "C" __global__ void k(volatile int* flag, int* out) {
      if (threadIdx.x == 1) { while (flag[0] == 0) {} out[0] = 7; }
      else if (threadIdx.x == 0) { flag[0] = 1; }
    }"""
    flag, out = np.zeros(1, np.int32), np.zeros(1, np.int32)
    launch(source, flag, out, schedule=schedule)
    assert out[0] == 7


@each_schedule
def test_ctas_of_a_grid_wait_for_one_another(schedule: str) -> None:
    source = """
    extern "C" __global__ void k(volatile int* flags, int* out) {
      if (threadIdx.x == 0) {
        if (blockIdx.x) while (flags[blockIdx.x - 1] == 0) {}
        out[blockIdx.x] = blockIdx.x ? out[blockIdx.x - 1] + 1 : 1;
        __threadfence(); flags[blockIdx.x] = 1;
      }
    }"""
    flags, out = np.zeros(20, np.int32), np.zeros(20, np.int32)
    launch(source, flags, out, grid=20, schedule=schedule)
    assert out.tolist() == list(range(1, 21))


def test_printf_formats() -> None:
    source = r"""
    extern "C" __device__ int printf(const char*, ...);
    extern "C" __global__ void k() {
      printf("%*d|%-*d|%.f|%.1e|%hhd|%5s|%%|%u|%zu\n", 6, 42, 4, 7, 2.6, 1234.5, (char)-3, "ab", 4000000000u, 9ul);
    }"""
    assert launch(source, block=1).printed == "    42|7   |3|1.2e+03|-3|   ab|%|4000000000|9\n"


def test_functions_local_arrays_constants_and_printf(capsys) -> None:
    source = """
    extern "C" __device__ int printf(const char*, ...);
    __constant__ int table[4] = {10, 20, 30, 40};
    __device__ int counter = 5;
    __device__ __noinline__ int power(int base, int n) { int r = 1; for (int i = 0; i < n; i++) r *= base; return r; }
    struct Pair { int a; long long b; };
    __device__ __noinline__ Pair both(int x) { return {x + 1, (long long)x << 33}; }
    extern "C" __global__ void k(long long* out, Pair p) {
      int local[8];
      for (int i = 0; i < 8; i++) local[(i * 3) % 8] = power(i, 2);
      Pair q = both(threadIdx.x);
      out[threadIdx.x] = local[threadIdx.x % 8] + table[threadIdx.x & 3] + q.a + (q.b >> 30) + p.b;
      if (threadIdx.x == 3) printf("lane %d says %s %.2f %lld\\n", threadIdx.x, "hi", 1.5, q.b);
      atomicAdd(&counter, 1);
    }"""
    out = np.zeros(32, np.int64)
    pair = np.array([(1, -7)], dtype=np.dtype([("a", "i4"), ("b", "i8")], align=True)).tobytes()
    run = launch(source, out, pair)
    local = {(i * 3) % 8: i * i for i in range(8)}
    expected = [local[t % 8] + (t % 4 + 1) * 10 + t + 1 + t * 8 - 7 for t in range(32)]
    assert out.tolist() == expected
    assert run.printed == f"lane 3 says hi 1.50 {3 << 33}\n" == capsys.readouterr().out


@each_schedule
def test_indirect_calls_go_where_each_lane_points(schedule: str) -> None:
    source = """
    typedef int (*Op)(int);
    __device__ __noinline__ int twice(int x) { return 2 * x; }
    __device__ __noinline__ int square(int x) { return x * x; }
    __device__ Op ops[2] = {twice, square};
    extern "C" __global__ void k(int* out, int n) {
      Op f = threadIdx.x % 3 == n ? twice : square;
      out[threadIdx.x] = f(threadIdx.x);
    }"""
    out = np.zeros(32, np.int32)
    launch(source, out, 1, schedule=schedule)
    assert out.tolist() == [2 * t if t % 3 == 1 else t * t for t in range(32)]


@each_schedule
def test_lanes_that_skip_a_call_keep_their_earlier_result(schedule: str) -> None:
    """`@p call`: f(1) for odd lanes, and what the first call left for even ones, although g has been called since."""
    function = """
    .func (.param .b32 r) {name}(.param .b32 a) {{
      .reg .b32 x; ld.param.u32 x, [a]; add.u32 x, x, {addend}; st.param.b32 [r], x; ret;
    }}"""
    ptx = (
        ".version 8.7\n.target sm_90\n.address_size 64\n"
        + function.format(name="f", addend=10)
        + function.format(name="g", addend=500)
        + """
    .visible .entry k(.param .u64 out) {
      .reg .b32 %r<5>; .reg .b64 %d<3>; .reg .pred %odd; .param .b32 a, v, w;
      mov.u32 %r1, %tid.x; and.b32 %r2, %r1, 1; setp.eq.u32 %odd, %r2, 1;
      st.param.b32 [a], %r1;
      call (v), f, (a);
      call (w), g, (a);
      st.param.b32 [a], 1;
      @%odd call (v), f, (a);
      ld.param.b32 %r3, [v];
      ld.param.u64 %d1, [out]; mul.wide.u32 %d2, %r1, 4; add.u64 %d1, %d1, %d2; st.global.u32 [%d1], %r3;
      ret;
    }"""
    )
    out = np.zeros(64, np.int32)
    Emulator(schedule, 1).launch(ptx, "k", grid=1, block=64, args=[out])
    assert out.tolist() == [11 if t % 2 else t + 10 for t in range(64)]


@each_schedule
def test_every_cta_of_a_cluster_reads_the_size_of_the_cluster(schedule: str) -> None:
    source = """
    extern "C" __global__ void k(int* out) {
      int size;
      asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
      out[blockIdx.x] = size;
    }"""
    for cluster in (1, 2, 4):
        out = np.zeros(8, np.int32)
        launch(source, out, grid=8, cluster=cluster, schedule=schedule)
        assert (out == cluster).all()


@each_schedule
def test_a_cta_that_polls_against_the_clock_meets_ctas_that_start_later(schedule: str) -> None:
    """Its registers change at every poll, so it never counts as stuck."""
    source = """
    extern "C" __global__ void k(volatile int* flag, int* out) {
      long long start = clock64();
      if (blockIdx.x + 1 < gridDim.x)
        while (flag[blockIdx.x + 1] == 0)
          if (clock64() - start > 1000000000) __trap();
      if (threadIdx.x == 0) { out[blockIdx.x] = blockIdx.x; __threadfence(); flag[blockIdx.x] = 1; }
    }"""
    out = np.zeros(8, np.int32)
    launch(source, np.zeros(8, np.int32), out, grid=8, block=64, schedule=schedule)
    assert out.tolist() == list(range(8))


@each_schedule
def test_switch_statements(schedule: str) -> None:
    source = """
    extern "C" __global__ void k(int* out) {
      int r;
      switch (threadIdx.x % 7) {
        case 0: r = 3; break; case 1: r = 1 << threadIdx.x % 5; break; case 2: r = -threadIdx.x; break;
        case 3: r = 9; break; case 4: r = threadIdx.x * 7; break; case 5: r = 1; default: r = 77;
      }
      out[threadIdx.x] = r;
    }"""
    out = np.zeros(64, np.int32)
    launch(source, out, block=64, schedule=schedule)
    values = [lambda t: 3, lambda t: 1 << t % 5, lambda t: -t, lambda t: 9, lambda t: t * 7, lambda t: 77, lambda t: 77]
    assert out.tolist() == [values[t % 7](t) for t in range(64)]


def test_recursion_is_refused() -> None:
    source = """
    __device__ __noinline__ int f(int n) { return n < 2 ? n : f(n - 1) + f(n - 2); }
    extern "C" __global__ void k(int* out) { out[0] = f(out[1]); }"""
    with pytest.raises(UnsupportedInstruction, match="recursi"):
        launch(source, np.zeros(2, np.int32))


def test_recursion_through_a_pointer_is_refused() -> None:
    source = """
    typedef int (*Function)(int, void*);
    __device__ __noinline__ int factorial(int n, void* self) {
      Function again = *(Function*)self;
      return n <= 1 ? 1 : n * again(n - 1, self);
    }
    extern "C" __global__ void k(Function* self, int* out) { self[0] = factorial; out[0] = factorial(out[1], self); }"""
    out = np.array([0, 1], np.int32)
    launch(source, np.zeros(1, np.int64), out, block=1)
    assert out[0] == 1
    with pytest.raises(UnsupportedInstruction, match="recursi"):
        launch(source, np.zeros(1, np.int64), np.array([0, 5], np.int32), block=1)


# -- programs that are wrong ------------------------------------------------------------------------------------------

STORE = """
extern "C" __global__ void k(int* out, int i) {
  out[i + (int)threadIdx.x] = 1;
}"""


@pytest.mark.parametrize("module", ["numpy", "torch"])
def test_a_view_is_the_memory_that_it_spans(module: str) -> None:
    """A transposed matrix keeps its memory; of a column all is there from its first element to its last."""
    full = importlib.import_module(module).zeros((32, 2), dtype=importlib.import_module(module).int32)
    launch(STORE, full.T, 32)
    assert full.ravel().tolist() == [0] * 32 + [1] * 32
    with pytest.raises(OutOfBounds):
        launch(STORE, full[:, 0], 32)


def test_out_of_bounds_names_lane_line_and_distance() -> None:
    with pytest.raises(OutOfBounds) as caught:
        launch(STORE, np.zeros(32, np.int32), 4)
    assert caught.value.lanes == (28, 29, 30, 31)
    assert "0 bytes past the end" in str(caught.value)
    assert caught.value.place.source.endswith("test.cu:3")
    with pytest.raises(OutOfBounds, match="4 bytes before"):
        launch(STORE, np.zeros(64, np.int32), -1)


def test_misaligned_access() -> None:
    source = 'extern "C" __global__ void k(char* p) { *(int*)(p + 1) = 1; }'
    with pytest.raises(Misaligned, match="4 bytes"):
        launch(source, np.zeros(8, np.uint8), block=1)


def test_constants_are_read_only() -> None:
    source = """
    __constant__ int c[4];
    extern "C" __global__ void k() { asm volatile("st.global.b32 [%0], 3;" :: "l"(&c[1]) : "memory"); }"""
    with pytest.raises(InvalidAddress, match="read-only"):
        launch(source, block=1)


def test_arrays_that_the_caller_may_not_write_are_read_only() -> None:
    out = np.zeros(64, np.int32)
    out.flags.writeable = False
    with pytest.raises(InvalidAddress, match="read-only memory: argument 0"):
        launch(STORE, out, 0)


def test_shared_memory_past_the_end() -> None:
    source = 'extern "C" __global__ void k(int n) { extern __shared__ int s[]; s[n] = 1; }'
    launch(source, 3, block=1, shared=16)
    with pytest.raises(OutOfBounds, match="16 bytes"):
        launch(source, 4, block=1, shared=16)


def test_static_shared_memory_lies_in_the_order_of_its_declarations() -> None:
    """Addresses as ptxas 13.0 gives them, whatever the order of use: kernels rely on a tile that comes first."""
    source = """
    extern "C" __global__ void k(unsigned* out) {
      __shared__ alignas(64) unsigned char tile[16384];
      __shared__ alignas(64) unsigned slot;
      __shared__ unsigned long long barrier;
      __shared__ alignas(128) unsigned char last[3000];
      barrier = 1; last[threadIdx.x] = 2; slot = 3; tile[threadIdx.x] = 4;
      __syncthreads();
      out[0] = __cvta_generic_to_shared(tile);
      out[1] = __cvta_generic_to_shared(&slot);
      out[2] = __cvta_generic_to_shared(&barrier);
      out[3] = __cvta_generic_to_shared(last);
      out[4] = barrier + last[0] + slot + tile[0];
    }"""
    out = np.zeros(5, np.uint32)
    launch(source, out, block=1)
    assert out.tolist() == [0x400, 0x4400, 0x4408, 0x4480, 10]


def test_trap() -> None:
    with pytest.raises(ProgramTrap):
        launch('extern "C" __global__ void k(int n) { if (threadIdx.x == n) __trap(); }', 7)


def test_fresh_shared_memory_is_no_zero() -> None:
    source = """
    extern "C" __global__ void k(float* out) {
      __shared__ float s[32];
      out[threadIdx.x] = ((volatile float*)s)[threadIdx.x];
    }"""
    out = np.zeros(32, np.float32)
    launch(source, out)
    assert np.isnan(out).all()


def test_polling_memory_that_nobody_writes_is_a_deadlock() -> None:
    source = """
    extern "C" __global__ void k(volatile int* flag) {
      while (*flag == 0) {}
    }"""
    with pytest.raises(Deadlock, match="polls memory") as caught:
        launch(source, np.zeros(1, np.int32), block=64)
    assert "test.cu:3" in str(caught.value)


def test_a_missing_barrier_between_warps_is_seen() -> None:
    source = """
    extern "C" __global__ void k(int* out, int n) {
      __shared__ int s[128];
      ((volatile int*)s)[threadIdx.x] = threadIdx.x;
      out[threadIdx.x] = ((volatile int*)s)[threadIdx.x ^ 32];
    }"""
    out = np.zeros(128, np.int32)
    launch(source, out, 0, block=128, schedule="late")
    assert (out != np.arange(128) ^ 32).any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block": 2048}, "at most 1024 threads"),
        ({"grid": 3, "cluster": 2}, "multiple of cluster"),
        ({"shared": 300_000}, "shared memory"),
        ({"grid": 0}, "positive"),
        ({"grid": (1, 65536)}, "grid"),
        ({"block": (1, 1, 65)}, "block"),
        ({"grid": 1.5}, "whole number"),
        ({"grid": (2.5, 1)}, "whole number"),
        ({"block": "32"}, "whole number"),
        ({"shared": -16}, "dynamic shared memory"),
        ({"shared": 16.0}, "whole number"),
    ],
)
def test_impossible_launches_are_refused(change: dict, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        launch(STORE, np.zeros(64, np.int32), 0, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block": (4, 8)}, "reqntid"),
        ({"block": 32}, "reqntid"),
        ({"cluster": 1}, "reqnctapercluster"),
        ({"cluster": (1, 2)}, "reqnctapercluster"),
    ],
)
def test_launches_that_the_kernel_forbids_are_refused(change: dict, message: str) -> None:
    ptx = ".version 8.7\n.target sm_90\n.address_size 64\n.entry k() .reqntid 8, 4 .reqnctapercluster 2 { ret; }"
    shape = {"grid": (2, 2), "block": (8, 4)}
    Emulator().launch(ptx, "k", **shape)
    with pytest.raises(LaunchError, match=message):
        Emulator().launch(ptx, "k", **{**shape, **change})


@pytest.mark.parametrize(
    ("parameter", "value"),
    [(".u64 x", 3.0), (".s32 x", 3.0), (".b16 x", 1.5), (".align 2 .b8 x[2]", 1.5), (".align 4 .b8 x[8]", 1.5)],
)
def test_a_float_is_not_taken_for_what_is_no_float(parameter: str, value: float) -> None:
    """A 16-bit parameter may be f16 or bf16, and a struct holds anything: the caller passes the bits."""
    ptx = f".version 8.7\n.target sm_90\n.address_size 64\n.entry k(.param {parameter}) {{ ret; }}"
    with pytest.raises(LaunchError, match="cannot take the float"):
        Emulator().launch(ptx, "k", grid=1, block=1, args=[value])


def test_ptx_is_text() -> None:
    with pytest.raises(LaunchError, match="must be text"):
        Emulator().launch(b".version 8.7", "k", grid=1, block=1)


@pytest.mark.parametrize(
    "text", ["add.u32 %r1, %r1", "mov.u32 %r1", "bra", "bar.sync", "brx.idx %r1, nowhere", "mad.lo.u32 %r1, 1, 2, 3, 4"]
)
def test_instructions_with_wrong_operands_are_refused(text: str) -> None:
    ptx = f".version 8.7\n.target sm_90\n.address_size 64\n.entry k() {{ .reg .b32 %r<2>;\n{text}; ret; }}"
    with pytest.raises(PtxSyntaxError, match="cannot take these") as caught:
        Emulator().launch(ptx, "k", grid=1, block=1)
    assert caught.value.place.ptx_line == 5


@pytest.mark.parametrize("argument", ["%r1", "7"])
def test_calls_with_registers_or_constants_are_refused(argument: str) -> None:
    ptx = ".version 8.7\n.target sm_90\n.address_size 64\n.func f(.reg .b32 x) { ret; }\n"
    ptx += f".entry k() {{ .reg .b32 %r<2>; call f, ({argument}); ret; }}"
    with pytest.raises(UnsupportedInstruction, match="must be .param variables"):
        Emulator().launch(ptx, "k", grid=1, block=1)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(LaunchError, match="takes 2 arguments"):
        launch(STORE, np.zeros(64, np.int32))
    with pytest.raises(LaunchError, match="does not fit"):
        launch(STORE, np.zeros(64, np.int32), 1 << 40)
    with pytest.raises(LaunchError, match="negative stride"):
        launch(STORE, np.zeros(64, np.int32)[::-1], 0)
    with pytest.raises(LaunchError, match="no kernel 'nope'"):
        launch(STORE, np.zeros(64, np.int32), 0, name="nope")


def test_memory_does_not_grow_with_the_number_of_ctas() -> None:
    import tracemalloc

    peaks = []
    for grid in (200, 2000):
        out = np.zeros(grid * 32, np.int32)
        source = 'extern "C" __global__ void k(int* out) { out[blockIdx.x * 32 + threadIdx.x] = blockIdx.x; }'
        tracemalloc.start()
        launch(source, out, grid=grid, schedule="early")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert (out.reshape(grid, 32) == np.arange(grid)[:, None]).all()
    assert peaks[1] < peaks[0] * 1.5 + 200_000


@each_schedule
def test_a_sleeping_loop_ends_by_the_clock(schedule: str) -> None:
    source = """
    extern "C" __global__ void k(int* out) {
      long long start = clock64();
      while (clock64() - start < 1000000) __nanosleep(100);
      out[threadIdx.x] = 1;
    }"""
    out = np.zeros(32, np.int32)
    launch(source, out, schedule=schedule)
    assert out.all()


def test_registers_that_the_kernel_fixes_limit_how_many_ctas_share_an_sm() -> None:
    source = """
    extern "C" __global__ void __launch_bounds__(512, {ctas}) k(volatile int* arrived) {
      if (threadIdx.x == 0) { atomicAdd((int*)arrived, 1); while (*arrived < 2) {} }
    }"""
    one_sm = Limits(sm_count=1)
    for ctas in (2, 1):
        ptx = compile_ptx(source.replace("{ctas}", str(ctas)))
        run = partial(Emulator(limits=one_sm).launch, ptx, "k", grid=2, block=512, args=[np.zeros(1, np.int32)])
        if ctas == 2:
            run()
        else:
            with pytest.raises(Deadlock, match="polls memory"):
                run()


ROWS = """
    extern "C" __global__ void k(float* const* rows, const int* lengths) {
      if (threadIdx.x < lengths[blockIdx.x]) rows[blockIdx.x][threadIdx.x] += blockIdx.x;
    }"""


@each_schedule
def test_an_array_of_pointers_reaches_its_arrays(schedule: str) -> None:
    lengths = np.array([5, 32, 17], np.int32)
    rows = [np.arange(length, dtype=np.float32) for length in lengths]
    launch(ROWS, Pointers(rows), lengths, grid=3, schedule=schedule)
    for block, row in enumerate(rows):
        np.testing.assert_array_equal(row, np.arange(lengths[block]) + block)


def test_beyond_an_array_behind_a_pointer_is_out_of_bounds() -> None:
    rows = [np.zeros(4, np.float32), np.zeros(4, np.float32)]
    with pytest.raises(OutOfBounds, match="array 1 of argument 0"):
        launch(ROWS, Pointers(rows), np.array([4, 5], np.int32), grid=2)
