"""What the tests of asynchronous data movement share: a CUDA C++ prelude of one-line PTX wrappers, and a launcher."""

from __future__ import annotations

from typing import Any

import pytest

from common.emulator import Emulator, Run
from common.emulator.machine.events import SCHEDULES
from tests.common.emulator.cuda import compile_ptx

each_schedule = pytest.mark.parametrize("schedule", SCHEDULES)

PRELUDE = r"""
typedef unsigned char u8; typedef unsigned short u16; typedef unsigned int u32; typedef unsigned long long u64;
#define DEVICE static __device__ __forceinline__
DEVICE u32 smem(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE u32 rank() { u32 r; asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r)); return r; }
DEVICE u32 mapa(u32 address, u32 rank) {
  u32 r; asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(address), "r"(rank)); return r;
}
DEVICE void cluster_sync() { asm volatile("barrier.cluster.arrive;\n barrier.cluster.wait;" ::: "memory"); }
DEVICE void init(u32 bar, u32 count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(bar), "r"(count) : "memory");
}
DEVICE void expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" :: "r"(bar), "r"(bytes) : "memory");
}
DEVICE void arrive(u32 bar) { asm volatile("mbarrier.arrive.shared.b64 _, [%0];" :: "r"(bar) : "memory"); }
DEVICE void wait(u32 bar, u32 parity) {
  u32 done;
  do {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(bar), "r"(parity) : "memory");
  } while (!done);
}
DEVICE void fence() { asm volatile("fence.proxy.async;" ::: "memory"); }
DEVICE void commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
DEVICE void drain() { commit(); asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
DEVICE void drain_reads() { commit(); asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
DEVICE void bulk_load(u32 to, const void* from, u32 bytes, u32 bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(to), "l"(from), "r"(bytes), "r"(bar) : "memory");
}
DEVICE void bulk_store(void* to, u32 from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
               :: "l"(to), "r"(from), "r"(bytes) : "memory");
}
struct alignas(64) Map { u64 words[16]; };
DEVICE void tile_load(u32 to, const Map& map, int x, int y, u32 bar) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.cta_group::1"
               " [%0], [%1, {%2, %3}], [%4];" :: "r"(to), "l"(&map), "r"(x), "r"(y), "r"(bar) : "memory");
}
DEVICE void tile_store(const Map& map, int x, int y, u32 from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];"
               :: "l"(&map), "r"(x), "r"(y), "r"(from) : "memory");
}
#define KERNEL extern "C" __global__ void k
#define MAP const __grid_constant__ Map
"""


def launch(
    source: str,
    *args: Any,
    grid: int = 1,
    block: int = 32,
    cluster: int | None = None,
    shared: int = 0,
    schedule: str = "late",
    seed: int = 3,
) -> Run:
    """Compiles `PRELUDE` and `source` for sm_100a and runs its kernel `k`."""
    ptx = compile_ptx(PRELUDE + source)
    return Emulator(schedule, seed).launch(
        ptx, "k", grid=grid, block=block, cluster=cluster, shared_bytes=shared, args=args
    )
