"""`fence.proxy.async` between what threads write to shared memory and what asynchronous operations read of it."""

import numpy as np
import pytest

from common.emulator import MissingFence, Run, TensorMap
from common.emulator.machine.generic_writes import GenericWrites
from tests.common.emulator.isa.async_programs import each_schedule, launch

WRITE = "pool[threadIdx.x] = threadIdx.x;"
BULK = "bulk_store(out, smem(pool), 128);"
TILE = "tile_store(map, 0, 0, smem(pool));"
FENCE = "fence();"
BARRIER = "__syncthreads();"


def run(*statements: str, read: str = BULK, schedule: str = "late") -> tuple[Run, np.ndarray]:
    """Statements of 32 threads, then thread 0 stores 128 bytes of shared memory."""
    out = np.zeros(32, np.uint32)
    tensor_map = TensorMap("uint32", out, (32, 1), (128,), (32, 1))
    source = f"""
    KERNEL(u32* out, const u32* in, MAP map) {{
      extern __shared__ __align__(1024) u32 pool[];
      __shared__ u64 bar;
      {" ".join(statements)}
      if (threadIdx.x == 0) {{ {read} drain(); }}
    }}"""
    given = np.arange(100, 132, dtype=np.uint32)
    return launch(source, out, given, tensor_map, shared=2048, schedule=schedule), out


@each_schedule
@pytest.mark.parametrize("read", [BULK, TILE])
def test_a_store_of_what_threads_have_written_needs_a_fence(read: str, schedule: str) -> None:
    with pytest.raises(MissingFence, match="reads shared 0x400 of CTA .* with no fence.proxy.async since"):
        run(WRITE, BARRIER, read=read, schedule=schedule)
    _, out = run(WRITE, FENCE, BARRIER, read=read, schedule=schedule)
    np.testing.assert_array_equal(out, np.arange(32))


def test_the_thread_that_asks_for_the_store_may_fence_after_the_barrier() -> None:
    _, out = run(WRITE, BARRIER, "if (threadIdx.x == 0) fence();")
    np.testing.assert_array_equal(out, np.arange(32))


@pytest.mark.parametrize(
    "other", ["__threadfence();", 'asm volatile("fence.proxy.async.global;");', 'asm volatile("fence.proxy.alias;");']
)
def test_no_other_fence_will_do(other: str) -> None:
    with pytest.raises(MissingFence):
        run(WRITE, other, BARRIER)


def test_what_is_written_after_the_fence_needs_another() -> None:
    with pytest.raises(MissingFence, match="reads shared 0x410"):
        run(WRITE, FENCE, "if (threadIdx.x == 5) pool[5] = 7;", BARRIER)


def test_what_is_written_elsewhere_does_not_matter() -> None:
    _, out = run(WRITE, FENCE, BARRIER, "pool[64 + threadIdx.x] = 1;")
    np.testing.assert_array_equal(out, np.arange(32))


ROW = '"r"(smem(pool) + 16 * (threadIdx.x % 8)), "r"(1)'


@pytest.mark.parametrize(
    "write",
    [
        "atomicAdd(pool + threadIdx.x, 1);",
        f'asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {{%1}};" :: {ROW} : "memory");',
        f'asm volatile("st.shared.v4.b32 [%0], {{%1, %1, %1, %1}};" :: {ROW} : "memory");',
    ],
)
def test_every_way_in_which_threads_write(write: str) -> None:
    with pytest.raises(MissingFence):
        run(WRITE, FENCE, write, BARRIER)
    run(WRITE, FENCE, write, FENCE, BARRIER)


@each_schedule
def test_what_the_copy_engine_has_written_over_needs_none(schedule: str) -> None:
    arm = "init(smem(&bar), 1); expect(smem(&bar), 128);"
    load = f"if (threadIdx.x == 0) {{ {arm} bulk_load(smem(pool), in, 128, smem(&bar)); }}"
    _, out = run(WRITE, BARRIER, load, BARRIER, "wait(smem(&bar), 0);", schedule=schedule)
    np.testing.assert_array_equal(out, np.arange(100, 132))


def test_a_fence_counts_for_all_that_was_written_before() -> None:
    writes = GenericWrites(64)
    writes.add(np.array([0, 20, 60]))
    assert writes.chunks.tolist() == [True, True, False, True]
    writes.overwritten(16, 16)
    assert writes.chunks.tolist() == [True, False, False, True]
    writes.fence()
    assert not writes.any and not writes.chunks.any()
