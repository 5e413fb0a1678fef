"""Programmatic dependent launches: a grid that starts before the one before it is complete."""

from __future__ import annotations

import numpy as np
import pytest

from common.emulator import Deadlock, Emulator, Fault, Grid
from common.emulator.machine.scheduler import Limits
from tests.common.emulator.cuda import compile_ptx
from tests.common.emulator.isa.async_programs import PRELUDE, each_schedule

RELEASE = 'asm volatile("griddepcontrol.launch_dependents;" ::: "memory");'
WAIT = 'asm volatile("griddepcontrol.wait;" ::: "memory");'
PRODUCE = r"""
extern "C" __global__ void produce(u32* data) {
  BEFORE
  data[blockIdx.x * blockDim.x + threadIdx.x] = 10 * blockIdx.x + threadIdx.x;
  AFTER
}"""
CONSUME = r"""
extern "C" __global__ void consume(u32* data, u32* out) {
  WAIT
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = data[i ^ 33] + 1;
}"""


def compiled(source: str) -> str:
    return compile_ptx(PRELUDE + source.replace("RELEASE", RELEASE).replace("WAIT", WAIT))


def ptx(*, before: str = "RELEASE", after: str = "", wait: str = "WAIT") -> str:
    return compiled((PRODUCE + CONSUME.replace("WAIT", wait)).replace("BEFORE", before).replace("AFTER", after))


def chain(text: str, schedule: str, **options) -> tuple[np.ndarray, np.ndarray]:
    """What the second of two grids of 8 x 64 threads makes, and what it should."""
    data, out = np.full(512, 7000, np.uint32), np.zeros(512, np.uint32)
    emulator = Emulator(schedule, **options)
    runs = emulator.launch_chain(
        Grid(text, "produce", 8, 64, args=[data]), Grid(text, "consume", 8, 64, args=[data, out])
    )
    assert len(runs) == 2
    threads = np.arange(512, dtype=np.uint32)
    return out, (10 * (threads // 64) + threads % 64)[threads ^ 33] + 1


@each_schedule
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("sms", [148, 2])
def test_a_wait_makes_the_results_of_the_grid_before_visible(schedule: str, seed: int, sms: int) -> None:
    out, expected = chain(ptx(), schedule, seed=seed, limits=Limits(sm_count=sms, ctas_per_sm=1))
    np.testing.assert_array_equal(out, expected)


def test_without_a_wait_the_second_grid_reads_what_was_there_before() -> None:
    out, expected = chain(ptx(wait=""), "late")
    assert (out == 7001).any()
    assert not np.array_equal(out, expected)


def test_without_a_wait_early_hides_the_mistake() -> None:
    out, expected = chain(ptx(wait=""), "early")
    np.testing.assert_array_equal(out, expected)


@each_schedule
def test_a_grid_that_releases_nothing_is_complete_before_the_next_one_starts(schedule: str) -> None:
    out, expected = chain(ptx(before="", wait=""), schedule)
    np.testing.assert_array_equal(out, expected)


def test_what_a_cta_writes_after_its_release_is_missed_by_a_grid_that_does_not_wait() -> None:
    text = ptx(before="", after="__syncthreads(); RELEASE data[threadIdx.x] = 5000;", wait="")
    out, expected = chain(text, "late")
    np.testing.assert_array_equal(out, expected)
    out, _ = chain(text, "early")
    assert (out[:64] == 5001).all()


@each_schedule
def test_a_release_waits_for_no_cta_that_cannot_come(schedule: str) -> None:
    """More CTAs than fit at once, and one that meets the other only after the release."""
    text = compiled(r"""
    extern "C" __global__ void produce(volatile u32* data) {
      if (blockIdx.x == 1) while (!data[0]);
      RELEASE
      data[blockIdx.x] = 1;
    }
    extern "C" __global__ void consume(u32* data, u32* out) { WAIT out[threadIdx.x] = data[threadIdx.x]; }""")
    data, out = np.zeros(32, np.uint32), np.zeros(32, np.uint32)
    Emulator(schedule, limits=Limits(sm_count=2, ctas_per_sm=1)).launch_chain(
        Grid(text, "produce", 32, 1, args=[data]), Grid(text, "consume", 1, 32, args=[data, out])
    )
    assert out.all()


@each_schedule
def test_three_grids_and_a_variable_of_the_module(schedule: str) -> None:
    text = compiled(r"""
    __device__ u32 total;
    extern "C" __global__ void add(u32 amount) { RELEASE WAIT if (threadIdx.x == 0) total += amount; }
    extern "C" __global__ void show(u32* out) { WAIT out[0] = total; }""")
    out = np.zeros(1, np.uint32)
    grids = [Grid(text, "add", 1, 32, args=[amount]) for amount in (1, 20, 300)]
    Emulator(schedule).launch_chain(*grids, Grid(text, "show", 1, 1, args=[out]))
    assert out[0] == 321


@each_schedule
def test_bulk_stores_in_flight_are_part_of_the_grid(schedule: str) -> None:
    """A wait for the grid includes its asynchronous operations, which end after its threads have exited."""
    text = compiled(r"""
    extern "C" __global__ void produce(u32* data) {
      __shared__ __align__(128) u32 tile[32];
      RELEASE
      tile[threadIdx.x] = 100 + threadIdx.x;
      fence();
      __syncwarp();
      if (threadIdx.x == 0) { bulk_store(data, smem(tile), 128); drain_reads(); }
    }
    extern "C" __global__ void consume(u32* data, u32* out) { WAIT out[threadIdx.x] = data[threadIdx.x]; }
    """)
    data, out = np.zeros(32, np.uint32), np.zeros(32, np.uint32)
    Emulator(schedule).launch_chain(
        Grid(text, "produce", 1, 32, args=[data]), Grid(text, "consume", 1, 32, args=[data, out])
    )
    np.testing.assert_array_equal(out, np.arange(100, 132))


@each_schedule
def test_a_grid_may_spin_on_a_flag_of_the_one_before(schedule: str) -> None:
    text = compiled(r"""
    extern "C" __global__ void produce(volatile u32* flag) { RELEASE flag[1] = 9; flag[0] = 1; }
    extern "C" __global__ void consume(volatile u32* flag, u32* out) { while (!flag[0]); out[0] = flag[1]; }
    """)
    flag, out = np.zeros(2, np.uint32), np.zeros(1, np.uint32)
    Emulator(schedule).launch_chain(
        Grid(text, "produce", 1, 1, args=[flag]), Grid(text, "consume", 1, 1, args=[flag, out])
    )
    assert out[0] == 9


@each_schedule
@pytest.mark.parametrize("wait", ["WAIT", ""])
def test_faults_of_the_first_grid_are_raised(schedule: str, wait: str) -> None:
    data, out = np.zeros(256, np.uint32), np.zeros(512, np.uint32)
    text = ptx(wait=wait)
    with pytest.raises(Fault, match="produce|st.global"):
        Emulator(schedule).launch_chain(
            Grid(text, "produce", 8, 64, args=[data]), Grid(text, "consume", 4, 64, args=[out, out])
        )


def test_a_deadlock_of_the_first_grid_is_reported() -> None:
    text = compiled(r"""
    extern "C" __global__ void produce() {
      __shared__ u64 bar;
      RELEASE
      init(smem(&bar), 2);
      arrive(smem(&bar));
      wait(smem(&bar), 0);
    }
    extern "C" __global__ void consume() { WAIT }""")
    with pytest.raises(Deadlock, match="mbarrier"):
        Emulator().launch_chain(Grid(text, "produce", 1, 1), Grid(text, "consume", 1, 1))


def test_the_wait_of_a_single_launch_is_over_at_once() -> None:
    data, out = np.arange(512, dtype=np.uint32), np.zeros(512, np.uint32)
    Emulator().launch(ptx(), "consume", grid=8, block=64, args=[data, out])
    np.testing.assert_array_equal(out, (np.arange(512) ^ 33) + 1)


def test_an_empty_chain_runs_nothing() -> None:
    assert Emulator().launch_chain() == []
