"""mbarriers: a model of the object against random histories, pipelines in CUDA C++, and every misuse."""

from __future__ import annotations

import random

import numpy as np
import pytest

from common.emulator import (
    BarrierFault,
    Deadlock,
    Emulator,
    InvalidAddress,
    Misaligned,
    ProgramTrap,
    UnsupportedInstruction,
)
from common.emulator.machine.events import SCHEDULES
from tests.common.emulator.cuda import compile_ptx
from tests.common.emulator.ptx_kernels import run_lanes

each_schedule = pytest.mark.parametrize("schedule", SCHEDULES)
LIMIT = (1 << 20) - 1
VARIABLES = ".shared .align 8 .b64 bar; .shared .align 8 .b64 spare;"


def lines(
    body: str, *, lanes: int = 1, schedule: str = "late", outputs: dict[str, str] | None = None
) -> dict[str, np.ndarray]:
    """Runs PTX with two mbarrier-sized variables, `bar` and `spare`, and some registers."""
    registers = ".reg .pred %p<8>; .reg .b32 %n<8>; .reg .b64 %s<8>;"
    outputs = outputs or {"done": "u32"}
    finish = "mov.b32 %done, 1;" if "done" in outputs else ""
    return run_lanes(registers + body + finish, {}, outputs, lanes=lanes, schedule=schedule, variables=VARIABLES)


def launch(source: str, *args, block=64, grid=1, schedule="late", seed=1, shared=0) -> None:
    ptx = compile_ptx(HELPERS + source)
    Emulator(schedule, seed).launch(ptx, "k", grid=grid, block=block, shared_bytes=shared, args=args)


HELPERS = """
using uint32_t = unsigned;
using uint64_t = unsigned long long;
namespace ptx {
__device__ inline uint32_t at(uint64_t* bar) { return (uint32_t)__cvta_generic_to_shared(bar); }
__device__ inline void init(uint64_t* bar, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(at(bar)), "r"(count) : "memory");
}
__device__ inline uint64_t arrive(uint64_t* bar) {
  uint64_t state;
  asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1];" : "=l"(state) : "r"(at(bar)) : "memory");
  return state;
}
__device__ inline void arrive_expect_tx(uint64_t* bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(at(bar)), "r"(bytes) : "memory");
}
__device__ inline bool test_wait(uint64_t* bar, uint64_t state) {
  uint32_t done;
  asm volatile("{ .reg .pred p; mbarrier.test_wait.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done) : "r"(at(bar)), "l"(state) : "memory");
  return done;
}
__device__ inline bool test_wait_parity(uint64_t* bar, uint32_t parity) {
  uint32_t done;
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done) : "r"(at(bar)), "r"(parity) : "memory");
  return done;
}
__device__ inline bool try_wait_parity(uint64_t* bar, uint32_t parity) {
  uint32_t done;
  asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;"
               " selp.u32 %0, 1, 0, p; }" : "=r"(done) : "r"(at(bar)), "r"(parity) : "memory");
  return done;
}
}
__device__ inline void wait(uint64_t* bar, unsigned parity) { while (!ptx::try_wait_parity(bar, parity)) { } }
"""

# -- the object against a model --------------------------------------------------------------------------------------


class History:
    """Random operations of one lane on `bar`: the PTX, and what PTX ISA 9.7.13.15.2 to .7 says that it observes.

    The PTX hashes what it observes into %hash, to be compared with `hash`.
    """

    def __init__(self, seed: int, length: int) -> None:
        self.random = random.Random(seed)
        self.expected = self.pending = self.random.choice([1, 2, 3, 7, LIMIT])
        self.tx = self.phase = 0
        self.state_phase: int | None = None
        self.code = [f"mbarrier.init.shared::cta.b64 [bar], {self.expected};"]
        self.hash, self.observations = 17, 0
        for _ in range(length):
            self.random.choice(self.choices())()

    def choices(self) -> list:
        if self.tx > LIMIT // 2:
            return [self.complete_tx]
        choices = [self.expect_tx, self.wait_parity]
        choices += [self.complete_tx] * (self.tx > 0)
        choices += [self.arrive, self.arrive, self.arrive_expect_tx] * (self.pending > 0)
        choices += [self.arrive_drop] * (self.pending > 0 and self.expected > 1)
        choices += [self.pending_count] * (self.pending > 1)
        choices += [self.wait_state] * (self.state_phase is not None and self.phase - self.state_phase <= 1)
        return choices

    def do(self, instruction: str, arrivals: int = 0, size: int = 0) -> None:
        self.code.append(instruction)
        if arrivals:
            self.state_phase = self.phase
        self.tx += size
        self.pending -= arrivals
        if self.pending == 0 and self.tx == 0:
            self.phase, self.pending = self.phase + 1, self.expected

    def observe(self, instruction: str, value: int) -> None:
        """The instruction leaves `value` in %n1."""
        self.code += [instruction, "mad.lo.u32 %hash, %hash, 1000003, %n1;"]
        self.hash = (self.hash * 1000003 + value) & 0xFFFFFFFF
        self.observations += 1

    def expect_tx(self) -> None:
        size = self.random.choice([1, 16, 4096, 100000])
        self.do(f"mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [bar], {size};", size=size)

    def complete_tx(self) -> None:
        size = self.random.choice([self.tx, 1, max(self.tx // 2, 1)])
        self.do(f"mbarrier.complete_tx.b64 [%generic], {size};", size=-size)

    def arrive(self) -> None:
        count = self.random.choice([1, self.pending, self.random.randint(1, self.pending)])
        self.do(f"mbarrier.arrive.release.cluster.shared.b64 %s1, [bar], {count};", count)

    def arrive_expect_tx(self) -> None:
        size = self.random.choice([0, 16, 2048])
        self.do(f"mbarrier.arrive.expect_tx.relaxed.cta.b64 %s1, [%generic], {size};", 1, size)

    def arrive_drop(self) -> None:
        self.expected -= 1
        self.do("mbarrier.arrive_drop.shared::cta.b64 %s1, [bar];", 1)

    def pending_count(self) -> None:
        before = self.pending
        self.do("mbarrier.arrive.noComplete.release.cta.shared::cta.b64 %s1, [bar], 1;", 1)
        self.observe("mbarrier.pending_count.b64 %n1, %s1;", before)

    def wait_state(self) -> None:
        test = "mbarrier.test_wait.shared::cta.b64 %p1, [bar], %s1; selp.b32 %n1, 1, 0, %p1;"
        self.observe(test, self.phase - self.state_phase)

    def wait_parity(self) -> None:
        parity, kind = self.random.randint(0, 1), self.random.choice(["", ".acquire.cta", ".relaxed.cluster"])
        test = f"mbarrier.test_wait.parity{kind}.b64 %p1, [%generic], {parity}; selp.b32 %n1, 1, 0, %p1;"
        self.observe(test, self.phase % 2 != parity)


@pytest.mark.parametrize("seed", range(25))
def test_random_histories(seed: int) -> None:
    history = History(seed, 60)
    body = f"""
    .reg .b64 %generic;
    mov.u64 %generic, bar;
    cvta.shared.u64 %generic, %generic;
    mov.b32 %hash, 17;
    {" ".join(history.code)}
    """
    out = lines(body, outputs={"hash": "u32"}, schedule=SCHEDULES[seed % 3])
    assert history.observations > 5
    assert out["hash"][0] == history.hash


@each_schedule
def test_each_lane_of_one_instruction_arrives_in_turn(schedule: str) -> None:
    """40 lanes on a barrier for 16: two phases complete in the midst, and each lane's state tells which was its own."""
    out = run_lanes(
        """
        .reg .pred %first, %done; .reg .b64 %state;
        setp.eq.u32 %first, %lane_, 0;
        @%first mbarrier.init.shared::cta.b64 [bar], 16;
        bar.sync 0;
        mbarrier.arrive.shared::cta.b64 %state, [bar];
        bar.sync 0;
        mbarrier.pending_count.b64 %pending, %state;
        @%first mbarrier.test_wait.parity.shared::cta.b64 %done, [bar], 1;
        selp.b32 %even, 1, 0, %done;
        """,
        {},
        {"pending": "u32", "even": "u32"},
        lanes=40,
        schedule=schedule,
        variables=VARIABLES,
    )
    assert sorted(out["pending"].tolist()) == sorted([*range(1, 17)] * 2 + [*range(9, 17)])
    assert out["even"][0] == 1  # phase 2 is current


def test_a_fresh_mbarrier_has_completed_parity_one() -> None:
    out = lines(
        """
        mbarrier.init.shared::cta.b64 [bar], 1;
        mbarrier.try_wait.parity.shared::cta.b64 %p1, [bar], 1;
        mbarrier.test_wait.parity.shared::cta.b64 %p2, [bar], 0;
        mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p3, [bar], 1, 1000;
        selp.b32 %n1, 1, 0, %p1; selp.b32 %n2, 2, 0, %p2; selp.b32 %n3, 4, 0, %p3;
        add.u32 %d, %n1, %n2; add.u32 %d, %d, %n3;
        """,
        outputs={"d": "u32"},
    )
    assert out["d"][0] == 5


def test_invalidated_memory_can_be_used_again() -> None:
    out = lines(
        """
        mbarrier.init.shared::cta.b64 [bar], 3;
        mbarrier.inval.shared::cta.b64 [bar];
        mov.b64 %s1, 42; st.shared.b64 [bar], %s1; ld.shared.b64 %s2, [bar];
        mov.u64 %s4, bar; cvta.shared.u64 %s4, %s4; mbarrier.init.b64 [%s4], 1;
        mbarrier.arrive.shared::cta.b64 %s3, [bar];
        mbarrier.test_wait.shared::cta.b64 %p1, [bar], %s3;
        cvt.u32.u64 %d, %s2; selp.b32 %n1, 100, 0, %p1; add.u32 %d, %d, %n1;
        """,
        outputs={"d": "u32"},
    )
    assert out["d"][0] == 142


@each_schedule
def test_a_try_wait_that_nobody_can_satisfy_returns_false_at_last(schedule: str) -> None:
    """One lane asks three mbarriers in turn; only the third can answer."""
    out = lines(
        """
        mbarrier.init.shared::cta.b64 [bar], 1;
        mbarrier.init.shared::cta.b64 [spare], 1;
        mbarrier.arrive.shared::cta.b64 _, [spare];
        mov.b32 %d, 0;
        again:
        add.u32 %d, %d, 1;
        mbarrier.try_wait.parity.shared::cta.b64 %p1, [bar], 0;
        @%p1 bra out;
        mbarrier.try_wait.parity.shared::cta.b64 %p1, [bar], 0, 20;
        @%p1 bra out;
        mbarrier.try_wait.parity.shared::cta.b64 %p1, [spare], 0;
        @!%p1 bra again;
        out:
        """,
        outputs={"d": "u32"},
        schedule=schedule,
    )
    assert out["d"][0] == 1


@each_schedule
def test_lanes_whose_phase_is_complete_go_on(schedule: str) -> None:
    """Even lanes wait for a phase that odd lanes complete only after the same instruction has let them go."""
    source = """
    extern "C" __global__ void k(int* out) {
      __shared__ uint64_t bars[2];
      int lane = threadIdx.x;
      if (lane == 0) { ptx::init(&bars[0], 16); ptx::init(&bars[1], 1); }
      __syncwarp();
      if (lane == 5) ptx::arrive(&bars[1]);
      __syncwarp();
      wait(&bars[lane & 1], 0);
      out[lane] = 1;
      if (lane & 1) ptx::arrive(&bars[0]);
    }"""
    out = np.zeros(32, np.int32)
    launch(source, out, block=32, schedule=schedule)
    assert out.all()


# -- programs --------------------------------------------------------------------------------------------------------

PIPELINE = """
extern "C" __global__ void k(int* out, int rounds) {
  constexpr int stages = 3;
  __shared__ int slots[stages][64];
  __shared__ uint64_t full[stages], empty[stages];
  int me = threadIdx.x, lane = me % 64;
  if (me == 0) for (int s = 0; s < stages; s++) { ptx::init(&full[s], 64); ptx::init(&empty[s], 2); }
  __syncthreads();
  if (me < 64) {
    for (int i = 0; i < rounds; i++) {
      int s = i % stages;
      wait(&empty[s], (i / stages & 1) ^ 1);
      slots[s][lane] = i * 1000 + lane;
      ptx::arrive(&full[s]);
    }
  } else {
    int sum = 0;
    for (int i = 0; i < rounds; i++) {
      int s = i % stages;
      WAIT
      sum += slots[s][63 - lane] ^ i;
      __syncwarp();
      if (me % 32 == 0) ptx::arrive(&empty[s]);
    }
    out[lane] = sum;
  }
}"""


@each_schedule
@pytest.mark.parametrize(
    "waiting",
    ["wait(&full[s], i / stages & 1);", "while (!ptx::test_wait_parity(&full[s], i / stages & 1)) { }"],
)
def test_ring_of_full_and_empty_mbarriers(waiting: str, schedule: str) -> None:
    out, rounds = np.zeros(64, np.int32), 11
    launch(PIPELINE.replace("WAIT", waiting), out, rounds, block=128, schedule=schedule, seed=5)
    lane = np.arange(64)
    np.testing.assert_array_equal(out, sum((i * 1000 + 63 - lane) ^ i for i in range(rounds)))


@each_schedule
def test_cuda_ptx(schedule: str) -> None:
    """The wrappers of libcu++ as a tutorial uses them."""
    source = """
    #include <cuda/ptx>
    using namespace cuda;
    extern "C" __global__ void k(int* out) {
      __shared__ uint64_t bar;
      __shared__ int box[64];
      if (threadIdx.x == 0) ptx::mbarrier_init(&bar, 64);
      __syncthreads();
      box[threadIdx.x] = threadIdx.x;
      auto state = ptx::mbarrier_arrive(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &bar);
      while (!ptx::mbarrier_try_wait(ptx::sem_acquire, ptx::scope_cta, &bar, state)) { }
      out[threadIdx.x] = box[63 - threadIdx.x];
    }"""
    out = np.zeros(64, np.int32)
    Emulator(schedule).launch(
        compile_ptx(source.replace("uint64_t", "cuda::std::uint64_t")), "k", grid=1, block=64, args=[out]
    )
    assert out.tolist() == [*range(63, -1, -1)]


@each_schedule
def test_cuda_barrier(schedule: str) -> None:
    """cuda::barrier of libcu++: arrival tokens, waiting by state, and a thread that drops out."""
    source = """
    #include <cuda/barrier>
    extern "C" __global__ void k(int* out) {
      __shared__ cuda::barrier<cuda::thread_scope_block> bar;
      __shared__ int box[64];
      int me = threadIdx.x, sum = 0;
      if (me == 0) init(&bar, blockDim.x);
      __syncthreads();
      for (int round = 0; round < 4; round++) {
        box[me] = me + round;
        auto token = bar.arrive();
        bar.wait(static_cast<decltype(token)&&>(token));
        sum += box[63 - me];
        if (round == 3) break;
        if (me >= 40 && round == 2) { bar.arrive_and_drop(); break; }
        bar.arrive_and_wait();
      }
      out[me] = sum;
    }"""
    out = np.zeros(64, np.int32)
    launch(source, out, schedule=schedule)
    me = np.arange(64)
    # threads from 40 on leave after round 2, so what the others read from them in round 3 is of round 2
    three = 3 * (63 - me) + 3
    fourth = (63 - me) + np.where(63 - me >= 40, 2, 3)
    np.testing.assert_array_equal(out, np.where(me >= 40, three, three + fourth))


@each_schedule
def test_remote_arrivals_and_bytes(schedule: str) -> None:
    """Every CTA writes to CTA 0 through DSMEM and arrives there; one of them also owes and delivers bytes."""
    source = """
    #include <cooperative_groups.h>
    namespace cg = cooperative_groups;
    extern "C" __global__ void __cluster_dims__(4, 1, 1) k(int* out) {
      __shared__ int box[4][32];
      __shared__ uint64_t bar;
      auto cluster = cg::this_cluster();
      unsigned rank = cluster.block_rank(), lane = threadIdx.x;
      if (lane == 0) ptx::init(&bar, 4 * 32);
      cluster.sync();
      int (*far)[32] = (int (*)[32])cluster.map_shared_rank(&box[0][0], 0);
      uint64_t* far_bar = cluster.map_shared_rank(&bar, 0);
      uint32_t address = __cvta_generic_to_shared(&bar), remote;
      asm("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(remote) : "r"(address));
      for (int round = 0; round < 3; round++) {
        far[rank][lane] = 100 * rank + lane + round;
        if (rank == 2 && lane == 9) {
          asm volatile("mbarrier.expect_tx.relaxed.cluster.shared::cluster.b64 [%0], 48;" :: "r"(remote) : "memory");
          asm volatile("mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64 _, [%0], 16;"
                       :: "r"(remote) : "memory");
          asm volatile("mbarrier.complete_tx.relaxed.cluster.shared::cluster.b64 [%0], 64;" :: "r"(remote) : "memory");
        } else if (rank == 1) {
          asm volatile("mbarrier.arrive.release.cluster.b64 _, [%0], 1;" :: "l"(far_bar) : "memory");
        } else {
          asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(remote) : "memory");
        }
        if (rank == 0) {
          while (!ptx::try_wait_parity(&bar, round & 1)) { }
          out[round * 32 + lane] = box[0][lane] + box[1][lane] + box[2][lane] + box[3][lane];
        }
        cluster.sync();
      }
    }"""
    out = np.zeros((3, 32), np.int32)
    launch(source, out, grid=4, block=32, schedule=schedule)
    lane, round_ = np.arange(32), np.arange(3)[:, None]
    np.testing.assert_array_equal(out, 600 + 4 * lane + 4 * round_)


@each_schedule
def test_many_lanes_arrive_at_many_mbarriers(schedule: str) -> None:
    """Random arrival counts from 96 threads on 5 mbarriers; a phase flips exactly when its counts are used up."""
    rng = np.random.default_rng(2)
    which = rng.integers(0, 5, 96).astype(np.uint32)
    counts = rng.integers(1, 50, 96).astype(np.uint32)
    total = [int(counts[which == bar].sum()) + bar % 2 for bar in range(5)]
    inits = [f"@%first mbarrier.init.shared::cta.b64 [bars + {8 * bar}], {n};" for bar, n in enumerate(total)]
    out = run_lanes(
        f"""
        .reg .pred %first, %done; .reg .b32 %at, %parity; .reg .b64 %state;
        mov.b32 %at, bars;
        setp.eq.u32 %first, %lane_, 0;
        {"".join(inits)}
        bar.sync 0;
        mad.lo.u32 %at, %which, 8, %at;
        mbarrier.arrive.shared::cta.b64 %state, [%at], %count;
        bar.sync 0;
        mbarrier.test_wait.shared::cta.b64 %done, [%at], %state;
        selp.b32 %d, 1, 0, %done;
        """,
        {"which": ("u32", which), "count": ("u32", counts)},
        {"d": "u32"},
        schedule=schedule,
        variables=".shared .align 8 .b64 bars[5];",
    )
    np.testing.assert_array_equal(out["d"], 1 - which % 2)


# -- misuse ----------------------------------------------------------------------------------------------------------

INIT = "mbarrier.init.shared::cta.b64 [bar], {};"
ARRIVE = "mbarrier.arrive.shared::cta.b64 %s1, [bar];"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (INIT.format(0), r"count 0 of the mbarrier at shared 0x400: it must be 1 to 1048575"),
        (INIT.format(1 << 20), r"count 1048576 of the mbarrier"),
        (INIT.format(2) + INIT.format(1), r"mbarrier.init of a live mbarrier \(mbarrier 0x400 phase 0: 2 of 2"),
        (INIT.format(2) + ARRIVE + INIT.format(2), r"init of a live mbarrier \(mbarrier 0x400 phase 0: 1 of 2"),
        (INIT.format(1) + ARRIVE + INIT.format(1), r"init of a live mbarrier \(mbarrier 0x400 phase 1: 1 of 1"),
        (ARRIVE, r"no mbarrier at shared 0x400 of CTA rank 0: the memory is uninitialised"),
        ("st.shared.b64 [bar], 5;" + ARRIVE, r"mbarrier.init has not run, the word is 0x0000000000000005"),
        ("mbarrier.inval.shared::cta.b64 [bar];", "the memory is uninitialised"),
        (INIT.format(1) + "mbarrier.inval.shared::cta.b64 [bar];" + ARRIVE, r"has been invalidated"),
        (INIT.format(1) + "st.shared.b32 [bar + 4], 7;" + ARRIVE, r"has been overwritten: the word is 0x000000070"),
        (INIT.format(3) + "mbarrier.arrive.shared.b64 _, [bar], 4;", r"more arrivals than the .*3 of 3"),
        (INIT.format(3) + "mbarrier.arrive.shared.b64 _, [bar], 0;", r"arrival count 0 of the mbarrier"),
        (
            INIT.format(1) + "mbarrier.arrive.expect_tx.shared.b64 _, [bar], 16;" + ARRIVE,
            r"more arrivals than the mbarrier expects: mbarrier 0x400 phase 0: 0 of 1 arrivals missing, 16 bytes owed",
        ),
        (INIT.format(1) + "mbarrier.expect_tx.b64 [%s7], 1048576;", r"tx-count overflow: .*\+1048576 bytes"),
        (INIT.format(1) + "mbarrier.expect_tx.b64 [%s7], 1048575; mbarrier.expect_tx.b64 [%s7], 1;", r"tx-count"),
        (INIT.format(1) + "mbarrier.complete_tx.b64 [%s7], 1048576;", r"tx-count overflow: .*-1048576 bytes"),
        (INIT.format(1) + "mbarrier.arrive.noComplete.shared.b64 %s1, [bar], 1;", r"arrival completed phase 0"),
        (INIT.format(3) + "mbarrier.arrive_drop.shared.b64 _, [bar], 2; mbarrier.arrive_drop.shared.b64 _, [bar];"
         "mbarrier.arrive.shared.b64 _, [bar];", r"more arrivals than .* phase 1: 0 of 0"),
        (INIT.format(1) + "mbarrier.test_wait.parity.shared.b64 %p1, [bar], 2;", r"phase parity 2: it must be 0 or 1"),
        (INIT.format(1) + ARRIVE * 2 + "mov.b64 %s2, %s1;" + ARRIVE * 2
         + "mbarrier.test_wait.shared.b64 %p1, [bar], %s2;",
         r"a state that is neither of the current phase 4 nor of the one before"),
        (INIT.format(1) + "mbarrier.try_wait.shared.b64 %p1, [bar], -1;", "neither of the current phase"),
    ],
)  # fmt: skip
def test_faults(body: str, message: str) -> None:
    with pytest.raises(BarrierFault, match=message) as caught:
        lines("mov.u64 %s7, bar; cvta.shared.u64 %s7, %s7;" + body)
    assert caught.value.address == 0x400
    assert caught.value.place.lanes == (0,)


def test_the_same_initialisation_twice_before_any_use() -> None:
    """As by one thread of every warp: it changes nothing."""
    pending = "mbarrier.pending_count.b64 %left, %s1;"
    assert lines(INIT.format(3) * 2 + ARRIVE + pending, outputs={"left": "u32"})["left"] == 3


def test_misaligned_and_outside_shared_memory() -> None:
    with pytest.raises(Misaligned, match="aligned to 8 bytes"):
        lines("mbarrier.init.shared::cta.b64 [bar + 4], 1;")
    with pytest.raises(InvalidAddress, match="an mbarrier must lie in shared memory, not in argument 0"):
        lines("mov.b64 %d, 1; mbarrier.init.b64 [%at_d], 1;", outputs={"d": "u64"})


REMOTE = """
extern "C" __global__ void __cluster_dims__(2, 1, 1) k() {
  __shared__ uint64_t bar;
  uint32_t address = __cvta_generic_to_shared(&bar), remote;
  uint64_t generic = (uint64_t)&bar, far;
  asm("mapa.shared::cluster.u32 %0, %1, 1;" : "=r"(remote) : "r"(address));
  asm("mapa.u64 %0, %1, 1;" : "=l"(far) : "l"(generic));
  INIT
  asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");
  if (blockIdx.x == 0 && threadIdx.x == 0) { USE }
  AFTER
}"""
SYNC = 'asm volatile("barrier.cluster.arrive; barrier.cluster.wait;" ::: "memory");'


def remote(use: str, after: str = SYNC, init: str = "if (threadIdx.x == 0) ptx::init(&bar, 1);", **shape) -> None:
    launch(REMOTE.replace("INIT", init).replace("USE", use).replace("AFTER", after), grid=2, block=32, **shape)


@each_schedule
def test_an_mbarrier_of_another_cta_cannot_be_waited_for(schedule: str) -> None:
    for use in (
        'asm volatile("{.reg .pred p; mbarrier.try_wait.parity.b64 p, [%0], 0;}" :: "l"(far));',
        'asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%0], 0;}" :: "r"(remote));',
        'asm volatile("mbarrier.inval.b64 [%0];" :: "l"(far));',
    ):
        with pytest.raises(BarrierFault, match=r"names an mbarrier of another CTA \(this is rank 0\)"):
            remote(use, schedule=schedule)
    with pytest.raises(BarrierFault, match="returns no state"):
        remote('asm volatile("{.reg .b64 s; mbarrier.arrive.b64 s, [%0];}" :: "l"(far));', schedule=schedule)


@each_schedule
def test_a_remote_arrival_reports_faults_with_the_place_that_issued_it(schedule: str) -> None:
    twice = 'asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0], 2;" :: "r"(remote));'
    with pytest.raises(BarrierFault, match=r"more arrivals than(.|\n)*_, \[%\w+\], 2(.|\n)*CTA +\(0, 0, 0\)"):
        remote(twice, schedule=schedule)
    once = twice.replace("], 2", "]")
    with pytest.raises(BarrierFault, match="0x400 of CTA rank 1: the memory is uninitialised"):
        remote(once, init="", schedule=schedule)


@each_schedule
def test_a_cluster_barrier_with_release_performs_the_arrivals_before_it(schedule: str) -> None:
    once = 'asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(remote));'
    check = SYNC + 'if (blockIdx.x == 1 && !ptx::test_wait_parity(&bar, 0)) asm("trap;");'
    remote(once, after=check, schedule=schedule)
    with pytest.raises(ProgramTrap):
        remote(once, after=check.replace("cluster.arrive", "cluster.arrive.relaxed"), schedule="late")


def test_a_remote_arrival_at_a_cta_that_has_exited() -> None:
    once = 'asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" :: "r"(remote));'
    with pytest.raises(InvalidAddress, match="CTA rank 1 is accessed after that CTA has exited"):
        remote(once, after="", schedule="late")


@pytest.mark.parametrize(
    "line",
    [
        "mbarrier.arrive.shared::cluster.b64 %s1, [bar];",
        "mbarrier.init.shared::cluster.b64 [bar], 1;",
        "mbarrier.test_wait.parity.shared::cluster.b64 %p1, [bar], 0;",
        "mbarrier.test_wait.parity.shared.b64 %p1, [bar], 0, 100;",
        "mbarrier.arrive.release.shared.b64 _, [bar];",
        "mbarrier.arrive.noComplete.shared.b64 _, [bar];",
        "mbarrier.arrive.acquire.cta.shared.b64 _, [bar];",
        "mbarrier.arrive.release.gpu.shared.b64 _, [bar];",
        "mbarrier.init.shared.b32 [bar], 1;",
        "mbarrier.flip.shared.b64 [bar];",
    ],
)
def test_unknown_forms_are_refused(line: str) -> None:
    with pytest.raises(UnsupportedInstruction):
        lines(line)


# -- hangs -----------------------------------------------------------------------------------------------------------


@each_schedule
def test_a_deadlock_shows_the_mbarrier(schedule: str) -> None:
    source = """
    extern "C" __global__ void k() {
      __shared__ uint64_t bars[6];
      if (threadIdx.x == 0) {
        for (int i = 0; i < 6; i++) ptx::init(&bars[i], 2);
        ptx::arrive(&bars[5]);
        ptx::arrive(&bars[5]);
        ptx::arrive_expect_tx(&bars[5], 16384);
        ptx::arrive(&bars[3]);
      }
      __syncthreads();
      wait(&bars[5], 1);
    }"""
    with pytest.raises(Deadlock) as caught:
        launch(source, schedule=schedule)
    text = str(caught.value)
    assert "CTA (0, 0, 0) warps 0-1 wait for mbarrier 0x428 phase 1: 1 of 2 arrivals missing, 16384 bytes owed" in text
    assert "asks for parity 1, the current phase is 1" in text
    assert "at mbarrier.try_wait.parity.acquire.cluster.shared::cta" in text
    assert "CTA (0, 0, 0) mbarrier 0x418 phase 0: 1 of 2 arrivals missing, 0 bytes owed" in text


def test_a_deadlock_lists_the_mbarriers_of_ctas_in_the_same_state_once() -> None:
    source = """
    extern "C" __global__ void k() {
      __shared__ uint64_t bars[2];
      if (threadIdx.x == 0) {
        ptx::init(&bars[0], 3);
        ptx::init(&bars[1], 3);
        if (blockIdx.x == 2) ptx::arrive(&bars[1]);
      }
      __syncthreads();
      wait(&bars[0], 0);
    }"""
    with pytest.raises(Deadlock) as caught:
        launch(source, grid=5)
    listed = [line.strip() for line in str(caught.value).splitlines() if ") mbarrier " in line or "the same of" in line]
    assert listed == [
        "CTA (0, 0, 0) mbarrier 0x400 phase 0: 3 of 3 arrivals missing, 0 bytes owed",
        "CTA (0, 0, 0) mbarrier 0x408 phase 0: 3 of 3 arrivals missing, 0 bytes owed",
        "and the same of 3 more CTAs",
        "CTA (2, 0, 0) mbarrier 0x400 phase 0: 3 of 3 arrivals missing, 0 bytes owed",
        "CTA (2, 0, 0) mbarrier 0x408 phase 0: 2 of 3 arrivals missing, 0 bytes owed",
    ]


@each_schedule
@pytest.mark.parametrize("nap", ["", "__nanosleep(20);"])
def test_a_polling_loop_is_a_deadlock_too(nap: str, schedule: str) -> None:
    source = f"""
    extern "C" __global__ void k() {{
      __shared__ uint64_t bar;
      if (threadIdx.x == 0) ptx::init(&bar, 40);
      __syncthreads();
      uint64_t state = ptx::arrive(&bar);
      while (!ptx::test_wait(&bar, state)) {{ {nap} }}
    }}"""
    with pytest.raises(Deadlock) as caught:
        launch(source, block=32, schedule=schedule)
    text = str(caught.value)
    assert "mbarrier 0x400 phase 0: 8 of 40 arrivals missing, 0 bytes owed" in text
    if not nap:
        assert "at mbarrier.test_wait" in text
        assert "asks for the state of phase 0" in text


@each_schedule
def test_bytes_that_never_come_and_bytes_too_many(schedule: str) -> None:
    for change, owed in (("expect", "512 bytes owed"), ("complete", "512 bytes more than expected")):
        source = f"""
        extern "C" __global__ void k() {{
          __shared__ uint64_t bar;
          uint32_t at = __cvta_generic_to_shared(&bar);
          if (threadIdx.x == 0) {{
            ptx::init(&bar, 1);
            asm volatile("mbarrier.{change}_tx.relaxed.cta.shared::cta.b64 [%0], 512;" :: "r"(at) : "memory");
            ptx::arrive(&bar);
          }}
          __syncthreads();
          wait(&bar, 0);
        }}"""
        with pytest.raises(Deadlock, match=f"phase 0: 0 of 1 arrivals missing, {owed}"):
            launch(source, block=32, schedule=schedule)


@each_schedule
def test_wrong_parity_goes_through_or_hangs(schedule: str) -> None:
    """The first producer wait on an empty mbarrier must use parity 1; with parity 0 it hangs."""
    text = PIPELINE.replace("WAIT", "wait(&full[s], i / stages & 1);").replace("(i / stages & 1) ^ 1", "i / stages & 1")
    with pytest.raises(Deadlock) as caught:
        launch(text, np.zeros(64, np.int32), 4, block=128, schedule=schedule)
    assert "2 of 2 arrivals missing" in str(caught.value) and "asks for parity 0" in str(caught.value)
    assert "64 of 64 arrivals missing" in str(caught.value)
