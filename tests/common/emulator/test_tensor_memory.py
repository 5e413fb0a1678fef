"""Tensor memory in whole programs: TIRx's own dispatch of loads, stores and copies, and CUDA C++ with inline PTX."""

import numpy as np
import pytest
import torch

from common.build import build
from common.emulator import Emulator, TensorMemoryFault
from common.emulator.machine.events import SCHEDULES
from tests.common.emulator.cuda import compile_ptx
from tests.common.emulator.tensor_memory_kernels import CP_LANES, shared_to_tensor_memory, through_tensor_memory

# Every shape stores once and loads once. A build takes seconds: the sweep over all pairs is left to the PTX tests.
TRANSFERS = [
    ("32x32b", "16x256b", 128, "D", "float32"),
    ("16x64b", "32x32b", 128, "D", "float32"),
    ("16x128b", "16x64b", 64, "F", "float32"),
    ("16x256b", "16x128b", 64, "F", "float32"),
    ("32x32b", "16x128b", 128, "D", "float16"),
    ("16x256b", "16x64b", 64, "F", "bfloat16"),
]
COPIES = [(*form, 3, 64) for form in CP_LANES] + [
    ("128x256b", None, 0, 8),
    ("64x128b", "warpx2::01_23", 1, 8),
    ("32x128b", "warpx4", 2, 16),
]


@pytest.mark.parametrize("form", TRANSFERS, ids=lambda form: "-".join(map(str, form)))
def test_tirx_loads_and_stores(form):
    """What TIRx stores through one shape it loads through another, as its fragment layouts say."""
    store, load, rows, datapath, dtype = form
    kernel = build(through_tensor_memory(store, load, rows, 64, dtype, datapath))
    a = torch.randn(rows, 64).to(getattr(torch, dtype))
    for schedule in SCHEDULES:
        b = torch.full_like(a, torch.nan)
        kernel(a, b, schedule=schedule)
        assert torch.equal(a, b), schedule


@pytest.mark.parametrize(("shape", "multicast", "mode", "columns"), COPIES)
def test_tirx_copies(shape, multicast, mode, columns):
    """SMEM -> TMEM through every shape of tcgen05.cp and every swizzle, in as many instructions as TIRx wants."""
    kernel = build(shared_to_tensor_memory(shape, multicast, mode, columns))
    rows = int(shape.split("x")[0])
    a = torch.randn(rows, columns)
    expected = {
        "warpx4": a.repeat(4, 1),
        "warpx2::02_13": a.repeat(2, 1),
        "warpx2::01_23": torch.cat([a[:32], a[:32], a[32:], a[32:]]),
        None: a,
    }[multicast]
    for schedule in SCHEDULES:
        b = torch.zeros(128, columns)
        kernel(a, b, schedule=schedule)
        assert torch.equal(b[::32] if rows == 4 else b, expected), schedule


RING = r"""
typedef unsigned uint32_t;
typedef unsigned long long uint64_t;
__device__ uint32_t address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
__device__ void wait(uint32_t bar, uint32_t parity) {
  asm volatile("{.reg .pred p; L_%=: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra L_%=;}"
               :: "r"(bar), "r"(parity) : "memory");
}
// One thread copies tile after tile into one place of tensor memory; four warps add up what they find there.
extern "C" __global__ void __launch_bounds__(160) ring(const uint4* tiles, uint32_t* sums, int count) {
  extern __shared__ __align__(1024) uint4 tile[];
  __shared__ uint64_t full, empty;
  __shared__ uint32_t slot;
  int warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(address(&full)) : "memory");
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 128;" :: "r"(address(&empty)) : "memory");
  }
  if (warp == 0)
    asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.b32 [%0], %1;" :: "l"(&slot), "r"(32) : "memory");
  for (int i = threadIdx.x; i < 128 * count; i += 160) tile[i] = tiles[i];
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  uint32_t taddr = slot;
  if (warp == 4) {
    if (threadIdx.x == 128)
      for (int k = 0; k < count; ++k) {
        wait(address(&empty), (k & 1) ^ 1);
        uint64_t desc = (uint64_t)((address(tile) + 2048 * k) >> 4) | (uint64_t)8 << 32 | 1ull << 46;
        asm volatile("tcgen05.cp.cta_group::1.128x128b [%0], %1;" :: "r"(taddr), "l"(desc) : "memory");
        asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.b64 [%0];" :: "l"(&full) : "memory");
      }
    __syncwarp();
  } else {
    uint32_t sum = 0;
    for (int k = 0; k < count; ++k) {
      wait(address(&full), k & 1);
      asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
      uint32_t r0, r1, r2, r3;
      asm volatile("tcgen05.ld.sync.aligned.32x32b.x4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(r0), "=r"(r1), "=r"(r2), "=r"(r3) : "r"(taddr + (warp << 21)) : "memory");
#if USE_FIRST
      sum += r0 + r1 + r2 + r3;
      asm volatile("" : "+r"(sum) :: "memory");
#elif !NO_WAIT
      asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
#endif
      asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
      asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(address(&empty)) : "memory");
#if !USE_FIRST
      sum += r0 + r1 + r2 + r3;
#endif
    }
    sums[threadIdx.x] = sum;
  }
  __syncthreads();
#if !NO_FREE
  if (warp == 0) {
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;");
    asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" :: "r"(taddr), "r"(32));
  }
#endif
}
"""


def ring(schedule: str, *options: str) -> tuple[np.ndarray, np.ndarray]:
    """(sums, expected sums) of the program above."""
    count = 5
    tiles = np.random.default_rng(0).integers(0, 1 << 16, (count, 128, 4), np.uint32)
    sums = np.zeros(128, np.uint32)
    Emulator(schedule).launch(
        compile_ptx(RING, options=tuple(f"-D{option}=1" for option in options)),
        "ring", grid=1, block=160, shared_bytes=2048 * count, args=[tiles, sums, count],
    )  # fmt: skip
    return sums, tiles.sum(axis=(0, 2), dtype=np.uint32)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("option", [(), ("USE_FIRST",)], ids=["wait", "register dependency"])
def test_ring(option, schedule):
    """A single buffer handed to and fro; with `wait::ld`, or with all registers used before it is given back."""
    sums, expected = ring(schedule, *option)
    np.testing.assert_array_equal(sums, expected)


def test_ring_that_gives_its_buffer_back_too_early():
    """Without `wait::ld` the next copy overwrites what a load in flight has not read yet: seen under `late`."""
    sums, expected = ring("early", "NO_WAIT")
    np.testing.assert_array_equal(sums, expected)
    sums, expected = ring("late", "NO_WAIT")
    assert (sums != expected).any()


def test_ring_that_leaks():
    with pytest.raises(TensorMemoryFault, match=r"exits without tcgen05.dealloc.*columns 0-31"):
        ring("late", "NO_FREE")
