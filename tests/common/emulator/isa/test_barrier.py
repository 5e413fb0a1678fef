"""Named barriers and the cluster barrier: programs that use them well, and what is said about those that do not."""

from __future__ import annotations

import numpy as np
import pytest

from common.emulator import BarrierFault, Deadlock, Emulator, UnsupportedInstruction
from common.emulator.machine.events import SCHEDULES
from tests.common.emulator.cuda import compile_ptx
from tests.common.emulator.ptx_kernels import run_lanes

each_schedule = pytest.mark.parametrize("schedule", SCHEDULES)


def launch(source: str, *args, block=64, grid=1, cluster=None, schedule="late", seed=1) -> None:
    Emulator(schedule, seed).launch(compile_ptx(source), "k", grid=grid, block=block, cluster=cluster, args=args)


def failure(kind: type, source: str, *args, **shape) -> str:
    with pytest.raises(kind) as caught:
        launch(source, *args, **shape)
    return str(caught.value)


# -- barriers of a CTA ---------------------------------------------------------------------------------------------


@each_schedule
@pytest.mark.parametrize("block", [32, 64, 100, 256])
def test_syncthreads_separates_stores_from_loads(block: int, schedule: str) -> None:
    source = """
    extern "C" __global__ void k(int* out) {
      __shared__ int box[256];
      int n = blockDim.x, me = threadIdx.x, sum = 0;
      for (int round = 0; round < 5; round++) {
        box[me] = me * (round + 1);
        __syncthreads();
        sum += box[n - 1 - me] - box[(me + 1) % n];
        __syncthreads();
      }
      out[me] = sum;
    }"""
    out = np.zeros(block, np.int32)
    launch(source, out, block=block, schedule=schedule)
    me = np.arange(block)
    np.testing.assert_array_equal(out, 15 * ((block - 1 - me) - (me + 1) % block))


@each_schedule
def test_barrier_reductions(schedule: str) -> None:
    source = """
    extern "C" __global__ void k(int* out, const unsigned char* in, int n) {
      for (int row = 0; row < 4; row++) {
        int vote = in[row * n + threadIdx.x];
        int* to = out + (row * n + threadIdx.x) * 3;
        to[0] = __syncthreads_count(vote);
        to[1] = __syncthreads_and(vote);
        to[2] = __syncthreads_or(vote);
      }
    }"""
    n = 96
    votes = np.random.default_rng(0).random((4, n)) < np.array([[0.0], [0.02], [0.97], [1.0]])
    out = np.full((4, n, 3), -1, np.int32)
    launch(source, out, votes.astype(np.uint8), n, block=n, schedule=schedule)
    for row in range(4):
        assert (out[row, :, 0] == votes[row].sum()).all()
        assert (out[row, :, 1] != 0).tolist() == [bool(votes[row].all())] * n
        assert (out[row, :, 2] != 0).tolist() == [bool(votes[row].any())] * n


@each_schedule
def test_barrier_reduction_of_a_negated_predicate_over_part_of_the_cta(schedule: str) -> None:
    """Warps 0 and 1 use barrier 3, warps 2 and 3 barrier 4, named by a register."""
    votes = np.random.default_rng(1).random(128) < 0.3
    out = run_lanes(
        """
        .reg .b32 %id;
        shr.u32 %id, %lane_, 6;
        add.u32 %id, %id, 3;
        barrier.cta.red.popc.aligned.u32 %count, %id, 64, !%vote;
        barrier.cta.red.or.pred %any, %id, 64, %vote;
        """,
        {"vote": ("pred", votes)},
        {"count": "u32", "any": "pred"},
        schedule=schedule,
    )
    for half in (slice(0, 64), slice(64, 128)):
        assert (out["count"][half] == np.count_nonzero(~votes[half])).all()
        assert (out["any"][half] == votes[half].any()).all()


@each_schedule
def test_producer_and_consumers_with_named_barriers(schedule: str) -> None:
    """One producer warp, two consumer warps, two slots: arrive on one side, sync on the other."""
    source = """
    extern "C" __global__ void k(int* out, int rounds) {
      __shared__ int slots[2][32];
      int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
      if (warp == 0) {
        for (int i = 0; i < rounds; i++) {
          if (i >= 2) asm volatile("barrier.cta.sync %0, 96;" :: "r"(3 + i % 2) : "memory");
          slots[i % 2][lane] = i * 100 + lane;
          asm volatile("bar.arrive %0, 96;" :: "r"(1 + i % 2) : "memory");
        }
      } else {
        int sum = 0;
        for (int i = 0; i < rounds; i++) {
          asm volatile("bar.sync %0, 96;" :: "r"(1 + i % 2) : "memory");
          sum += slots[i % 2][31 - lane] * (i + 1);
          if (i + 2 < rounds) asm volatile("barrier.arrive %0, 96;" :: "r"(3 + i % 2) : "memory");
        }
        out[threadIdx.x - 32] = sum;
      }
    }"""
    out, rounds = np.zeros(64, np.int32), 9
    launch(source, out, rounds, block=96, schedule=schedule)
    expected = [sum((i * 100 + 31 - lane) * (i + 1) for i in range(rounds)) for lane in range(32)]
    assert out.tolist() == expected * 2


@each_schedule
def test_exited_warps_and_lanes_are_not_waited_for(schedule: str) -> None:
    source = """
    extern "C" __global__ void k(int* out) {
      __shared__ int total;
      int me = threadIdx.x;
      if (me >= 96 || me % 32 == 7) return;
      if (me == 0) total = 0;
      __syncthreads();
      if (me == 40) total = 5;
      __syncthreads();
      out[me] = total + __syncthreads_count(1);
    }"""
    out = np.zeros(128, np.int32)
    launch(source, out, block=128, schedule=schedule)
    me = np.arange(128)
    np.testing.assert_array_equal(out, np.where((me >= 96) | (me % 32 == 7), 0, 5 + 93))


@each_schedule
def test_a_barrier_completes_when_the_last_missing_warp_exits(schedule: str) -> None:
    source = """
    extern "C" __global__ void k(int* out) {
      if (threadIdx.x / 32 == 1) {
        int sum = 0;
        for (int i = 0; i < 300; i++) sum += i ^ sum;
        out[64] = sum;
        return;
      }
      __syncthreads();
      out[threadIdx.x] = 1;
    }"""
    out = np.zeros(65, np.int32)
    launch(source, out, schedule=schedule)
    assert out[:32].all() and not out[32:64].any() and out[64]


@each_schedule
def test_lanes_of_a_warp_may_come_to_an_unaligned_barrier_from_different_places(schedule: str) -> None:
    source = """
    extern "C" __global__ void k(int* out) {
      __shared__ int box[64];
      int me = threadIdx.x;
      box[me] = me;
      if (me % 32 < 9) {
        asm volatile("barrier.sync 2;" ::: "memory");
        out[me] = box[63 - me];
      } else {
        asm volatile("barrier.sync 2;" ::: "memory");
        out[me] = -box[63 - me];
      }
    }"""
    out = np.zeros(64, np.int32)
    launch(source, out, schedule=schedule)
    me = np.arange(64)
    np.testing.assert_array_equal(out, np.where(me % 32 < 9, 63 - me, me - 63))


@each_schedule
def test_lanes_of_a_warp_may_announce_themselves_from_different_places(schedule: str) -> None:
    """The first lanes of warp 0 to come wait for the rest of their warp, and go on before the barrier completes."""
    source = """
    extern "C" __global__ void k(int* out) {
      __shared__ volatile int flag;
      if (threadIdx.x == 0) flag = 0;
      __syncthreads();
      if (threadIdx.x < 9) {
        asm volatile("barrier.arrive 2, 64;" ::: "memory");
        flag = 1;
      } else if (threadIdx.x < 32) {
        asm volatile("barrier.arrive 2, 64;" ::: "memory");
      } else {
        while (flag == 0) { }
        asm volatile("barrier.sync 2, 64;" ::: "memory");
      }
      out[threadIdx.x] = 1;
    }"""
    out = np.zeros(64, np.int32)
    launch(source, out, schedule=schedule)
    assert out.all()


@each_schedule
def test_a_path_that_spins_with_a_counter_lets_woken_warps_run(schedule: str) -> None:
    """Warp 1 counts while it waits for a flag that warp 0 sets only after a barrier has let it go."""
    source = """
    extern "C" __global__ void k(int* out) {
      __shared__ volatile int flag;
      if (threadIdx.x == 0) flag = 0;
      __syncthreads();
      if (threadIdx.x < 32) {
        asm volatile("bar.sync 1, 96;" ::: "memory");
        flag = 1;
      } else if (threadIdx.x < 64) {
        asm volatile("bar.arrive 1, 96;" ::: "memory");
        long spins = 0;
        while (flag == 0) spins++;
        out[threadIdx.x] = 1 + (spins < 0);
      } else {
        asm volatile("bar.sync 1, 96;" ::: "memory");
      }
    }"""
    out = np.zeros(64, np.int32)
    launch(source, out, block=96, schedule=schedule)
    assert out[32:].tolist() == [1] * 32


# -- cluster barrier -----------------------------------------------------------------------------------------------


@each_schedule
def test_cluster_barrier_orders_distributed_shared_memory(schedule: str) -> None:
    source = """
    #include <cooperative_groups.h>
    namespace cg = cooperative_groups;
    extern "C" __global__ void __cluster_dims__(4, 1, 1) k(int* out) {
      __shared__ int box[64];
      cg::cluster_group cluster = cg::this_cluster();
      unsigned rank = cluster.block_rank();
      int sum = 0;
      for (int round = 0; round < 3; round++) {
        box[threadIdx.x] = 1000 * rank + threadIdx.x + round;
        cluster.sync();
        for (unsigned other = 0; other < 4; other++) sum += cluster.map_shared_rank(box, other)[threadIdx.x];
        cluster.sync();
      }
      out[blockIdx.x * 64 + threadIdx.x] = sum;
    }"""
    out = np.zeros((8, 64), np.int32)
    launch(source, out, grid=8, schedule=schedule)
    np.testing.assert_array_equal(out, np.broadcast_to(3 * 6000 + 12 * np.arange(64) + 12, (8, 64)))


@each_schedule
def test_exited_threads_count_as_arrived_at_the_cluster_barrier(schedule: str) -> None:
    source = """
    extern "C" __global__ void __cluster_dims__(2, 1, 1) k(int* out) {
      if (blockIdx.x == 1 && threadIdx.x >= 20) return;
      asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
      asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
      asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
      asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
      out[blockIdx.x * 64 + threadIdx.x] = 1;
    }"""
    out = np.zeros(128, np.int32)
    launch(source, out, grid=2, schedule=schedule)
    assert out[:84].all() and not out[84:].any()


@each_schedule
def test_a_thread_may_arrive_again_once_the_cluster_barrier_has_completed(schedule: str) -> None:
    """Warp 1 learns from a CTA barrier that the cluster barrier completed, and does not wait itself."""
    source = """
    extern "C" __global__ void __cluster_dims__(2, 1, 1) k(int* out) {
      for (int round = 0; round < 3; round++) {
        asm volatile("barrier.cluster.arrive.aligned;" ::: "memory");
        if (threadIdx.x < 32) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
        __syncthreads();
      }
      out[blockIdx.x * 64 + threadIdx.x] = 1;
    }"""
    out = np.zeros(128, np.int32)
    launch(source, out, grid=2, schedule=schedule)
    assert out.all()


# -- misuse --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("bar.sync %x, 64;", r"barrier 16 does not exist: they are 0 to 15"),
        ("bar.sync 1, %y;", r"a barrier cannot be for 48 threads: the count must be a multiple of 32"),
        ("bar.sync 1, 0;", r"a barrier cannot be for 0 threads"),
        ("bar.sync 1, 128;", r"from 32 to the 96 of the CTA"),
        ("and.b32 %x, %lane_, 1; bar.sync %x;", r"the lanes of warps? [012](-2)? name different barriers"),
        ("@%low bar.arrive 1, 96; @%low bar.arrive 1, 96;", r"second arrival of warps? [01].* before it has completed"),
    ],
)
@each_schedule
def test_wrong_operands_and_arrivals(line: str, message: str, schedule: str) -> None:
    body = f"""
    .reg .pred %low; .reg .b32 %x, %y;
    mov.b32 %x, 16; mov.b32 %y, 48; setp.lt.u32 %low, %lane_, 64;
    {line}
    mov.b32 %d, 1;
    """
    with pytest.raises(BarrierFault, match=message):
        run_lanes(body, {}, {"d": "u32"}, lanes=96, schedule=schedule)


def test_more_arrivals_together_than_the_barrier_is_for() -> None:
    with pytest.raises(BarrierFault, match="barrier 1 is for 32 threads, 64 arrive at it together"):
        run_lanes("bar.sync 1, 32; mov.b32 %d, 1;", {}, {"d": "u32"}, lanes=64, schedule="early")


@each_schedule
@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("bar.sync 1, 64;", "bar.sync 1, 96;", "barrier 1 has been started for (64|96) .* an arrival says (64|96)"),
        ("bar.sync 1;", "bar.sync 1, 64;", "barrier 1 has been started for (64|96) threads, an arrival says (64|96)"),
        ("bar.red.popc.u32 %d, 1, 96, 1;", "bar.sync 1, 96;", r"barrier 1 is in use by a .*: a .* cannot join it"),
        ("bar.red.popc.u32 %d, 1, 1;", "bar.red.or.pred %p, 1, 1;", r"in use by a red\.(popc|or): a red\.(popc|or)"),
    ],
)
def test_arrivals_that_do_not_fit_together(first: str, second: str, message: str, schedule: str) -> None:
    body = f"""
    .reg .pred %low, %p; mov.b32 %d, 1;
    setp.lt.u32 %low, %lane_, 32;
    @%low bra other;
    {first}
    bra.uni after;
    other: {second}
    after:
    """
    with pytest.raises(BarrierFault, match=message):
        run_lanes(body, {}, {"d": "u32"}, lanes=96, schedule=schedule)


@each_schedule
def test_second_arrival_at_the_cluster_barrier(schedule: str) -> None:
    source = """
    extern "C" __global__ void __cluster_dims__(2, 1, 1) k() {
      if (blockIdx.x == 0) asm volatile("barrier.cluster.arrive;");
      asm volatile("barrier.cluster.arrive; barrier.cluster.wait;");
    }"""
    text = failure(BarrierFault, source, grid=2, block=32, schedule=schedule)
    assert "barrier.cluster.arrive for a second time before the barrier has completed" in text
    assert "warp 0 of CTA rank 1" in text


@each_schedule
def test_wait_without_arrive_at_the_cluster_barrier(schedule: str) -> None:
    source = 'extern "C" __global__ void k() { asm volatile("barrier.cluster.wait;"); }'
    text = failure(BarrierFault, source, schedule=schedule)
    assert "barrier.cluster.wait without a barrier.cluster.arrive" in text


@pytest.mark.parametrize(
    "line", ["bar.arrive 1;", "barrier.cluster.arrive.acquire;", "bar.sync.gpu 0;", "bar.red.xor.pred %p, 0, 1;",
             "barrier.cluster.wait 0;"]
)  # fmt: skip
def test_unknown_forms_are_refused(line: str) -> None:
    with pytest.raises(UnsupportedInstruction):
        run_lanes(f".reg .pred %p; {line} mov.b32 %d, 1;", {}, {"d": "u32"}, lanes=32)


# -- hangs ---------------------------------------------------------------------------------------------------------


@each_schedule
def test_syncthreads_in_divergent_code(schedule: str) -> None:
    """Stage 01's lesson: half a warp cannot pass a barrier alone."""
    source = """
    extern "C" __global__ void k(int* out) {
      if (threadIdx.x < 16) {
        __syncthreads();
        out[threadIdx.x] = 1;
      } else {
        asm volatile("bar.sync 0;");
        out[threadIdx.x] = 2;
      }
    }"""
    text = failure(Deadlock, source, np.zeros(64, np.int32), schedule=schedule)
    assert "CTA (0, 0, 0) warp 0, threads 0-15 wait for other lanes of its warp to reach the same instruction" in text
    assert "CTA (0, 0, 0) warp 0, threads 16-31 wait for other lanes" in text
    assert "threads 16-31 wait at bar.sync 0" in text
    assert "CTA (0, 0, 0) warp 1 waits for barrier 0: 1 of 2 warps have arrived, warp 0 missing" in text
    assert "test.cu:4)" in text and "test.cu:7)" in text


def test_ctas_that_hang_in_the_same_way_are_reported_once() -> None:
    source = """
    extern "C" __global__ void k() {
      if (threadIdx.x % 32 < 20) __syncthreads();
      asm volatile("bar.sync 0;");
    }"""
    text = failure(Deadlock, source, grid=20)
    assert text.count("threads 0-19, 32-51 wait for other lanes") == 1
    assert "CTA (0, 0, 0) warps 0-1, threads 0-19, 32-51 wait" in text
    assert "and 19 more CTAs in the same way: (1, 0, 0), (2, 0, 0)" in text


@each_schedule
def test_a_guarded_barrier_is_divergent_code_too(schedule: str) -> None:
    body = """
    .reg .pred %low;
    setp.lt.u32 %low, %lane_, 8;
    @%low bar.sync 1;
    bar.sync 2;
    mov.b32 %d, 1;
    """
    with pytest.raises(Deadlock) as caught:
        run_lanes(body, {}, {"d": "u32"}, lanes=32, schedule=schedule)
    assert "warp 0, threads 0-7 wait for other lanes of its warp" in str(caught.value)
    assert "at @%low bar.sync 1" in str(caught.value)
    assert "threads 8-31 wait at bar.sync 2" in str(caught.value)


@each_schedule
def test_a_guarded_barrier_that_is_uniform_in_each_warp(schedule: str) -> None:
    body = """
    .reg .pred %low;
    setp.lt.u32 %low, %lane_, 64;
    @%low bar.sync 1, 64;
    @!%low bar.sync 2, 32;
    mov.b32 %d, 1;
    """
    assert run_lanes(body, {}, {"d": "u32"}, lanes=96, schedule=schedule)["d"].tolist() == [1] * 96


@each_schedule
def test_a_loop_over_several_flags_that_nobody_sets(schedule: str) -> None:
    source = """
    extern "C" __global__ void k() {
      __shared__ volatile int flags[3];
      if (threadIdx.x < 3) flags[threadIdx.x] = 0;
      __syncthreads();
      if (threadIdx.x == 40) while (!(flags[0] || flags[1] || flags[2])) { }
      __syncthreads();
    }"""
    text = failure(Deadlock, source, schedule=schedule)
    assert "warp 1, thread 40 waits in a loop that polls memory nobody changes" in text
    assert "warp 0 waits for barrier 0: 1 of 2 warps have arrived, warp 1 missing" in text
    assert "warp 1, threads 32-39, 41-63 wait for other lanes" in text


@each_schedule
def test_a_barrier_with_too_large_a_count(schedule: str) -> None:
    source = """
    extern "C" __global__ void k(int* out) {
      if (threadIdx.x < 64) asm volatile("bar.sync 5, 96;");
      out[threadIdx.x] = 1;
    }"""
    text = failure(Deadlock, source, np.zeros(96, np.int32), block=96, schedule=schedule)
    assert "wait for barrier 5: 64 of 96 threads have arrived, warps 0-1, warp 2 exited" in text


@each_schedule
def test_an_unaligned_barrier_names_the_missing_threads(schedule: str) -> None:
    source = """
    extern "C" __global__ void k(int* out) {
      if (threadIdx.x % 32 < 30) asm volatile("barrier.sync 1;");
      else asm volatile("barrier.sync 2;");
      out[threadIdx.x] = 1;
    }"""
    text = failure(Deadlock, source, np.zeros(32, np.int32), block=32, schedule=schedule)
    assert "wait for barrier 1: 0 of 1 warps have arrived, of warp 0 threads 30-31 missing" in text
    assert "wait for barrier 2: 0 of 1 warps have arrived, of warp 0 threads 0-29 missing" in text


@each_schedule
def test_a_cta_that_skips_the_cluster_barrier(schedule: str) -> None:
    source = """
    extern "C" __global__ void __cluster_dims__(2, 1, 1) k() {
      asm volatile("barrier.cluster.arrive; barrier.cluster.wait;");
      if (blockIdx.x == 0) asm volatile("barrier.cluster.arrive; barrier.cluster.wait;");
      else if (threadIdx.x < 32) asm volatile("bar.sync 1, 64;");
      else asm volatile("bar.sync 2, 64;");
    }"""
    text = failure(Deadlock, source, grid=2, schedule=schedule)
    assert "CTA (0, 0, 0) warps 0-1 wait for the cluster barrier: missing warps 0-1 of CTA rank 1" in text
    assert "CTA (1, 0, 0) warp 0 waits for barrier 1: 32 of 64 threads have arrived, warp 0" in text
