"""Warp-wide exchanges against per-lane definitions written straight from the ISA's text."""

from __future__ import annotations

import functools
import operator
import struct

import numpy as np
import pytest

from common.emulator import Deadlock, DivergenceFault, Emulator, UnsupportedInstruction
from common.emulator.machine.events import SCHEDULES
from tests.common.emulator.cuda import compile_ptx
from tests.common.emulator.ptx_kernels import run_lanes

each_schedule = pytest.mark.parametrize("schedule", SCHEDULES)
FULL = 0xFFFFFFFF
LANES = 96


def words(rng: np.random.Generator, count: int = LANES) -> np.ndarray:
    return rng.integers(0, 1 << 32, count, np.uint32)


def grouped_masks(rng: np.random.Generator, groups: int) -> np.ndarray:
    """A membermask for each lane: the lanes of a warp are dealt into disjoint groups."""
    masks = np.zeros(LANES, np.uint32)
    for warp in range(LANES // 32):
        group = rng.integers(0, groups, 32)
        for lane in range(32):
            masks[warp * 32 + lane] = sum(1 << other for other in range(32) if group[other] == group[lane])
    return masks


def members_of(masks: np.ndarray, i: int) -> list[int]:
    """Thread numbers that the membermask of thread `i` names."""
    return [i // 32 * 32 + lane for lane in range(32) if int(masks[i]) >> lane & 1]


# -- shfl ----------------------------------------------------------------------------------------------------------


def shuffled(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """Source lane and predicate, as the pseudocode of PTX ISA 9.7.9.6 has it."""
    bval, cval, segmask = b & 31, c & 31, (c >> 8) & 31
    max_lane = (lane & segmask) | (cval & ~segmask & 31)
    min_lane = lane & segmask
    if mode == "up":
        j = lane - bval
        pval = j >= max_lane
    elif mode == "down":
        j = lane + bval
        pval = j <= max_lane
    elif mode == "bfly":
        j = lane ^ bval
        pval = j <= max_lane
    else:
        j = min_lane | (bval & ~segmask & 31)
        pval = j <= max_lane
    return (j, True) if pval else (lane, False)


@each_schedule
@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
def test_shuffle_takes_any_lane_operand_clamp_and_segment_mask(mode: str, schedule: str) -> None:
    rng = np.random.default_rng(1)
    for _ in range(4):
        a, b, c = words(rng), words(rng), words(rng)
        out = run_lanes(
            f"shfl.sync.{mode}.b32 %d|%p, %a, %b, %c, 0xffffffff;",
            {"a": ("u32", a), "b": ("u32", b), "c": ("u32", c)},
            {"d": "u32", "p": "pred"},
            schedule=schedule,
        )
        for i in range(LANES):
            source, inside = shuffled(mode, i % 32, int(b[i]), int(c[i]))
            assert out["d"][i] == a[i // 32 * 32 + source]
            assert out["p"][i] == inside


@pytest.mark.parametrize(("mode", "clamp"), [("up", 0), ("down", 31), ("bfly", 31), ("idx", 31)])
@pytest.mark.parametrize("width", [32, 16, 8, 4, 2])
def test_shuffle_with_literals_as_the_compiler_writes_them(mode: str, clamp: int, width: int) -> None:
    """__shfl_*_sync(mask, value, 1, width): c is ((32 - width) << 8) | clamp."""
    a = np.arange(LANES, dtype=np.float32) + 0.5
    c = (32 - width) << 8 | clamp
    out = run_lanes(f"shfl.sync.{mode}.b32 %d, %a, 1, {c}, -1;", {"a": ("f32", a)}, {"d": "f32"})
    lane = np.arange(LANES)
    start = lane // width * width
    expected = {
        "up": np.maximum(lane - 1, np.where(lane > start, lane - 1, lane)),
        "down": np.where(lane + 1 < start + width, lane + 1, lane),
        "bfly": lane ^ 1,
        "idx": start + 1,
    }[mode]
    np.testing.assert_array_equal(out["d"], expected + np.float32(0.5))


def test_shuffle_may_overwrite_its_source() -> None:
    a = words(np.random.default_rng(2))
    out = run_lanes(
        "mov.b32 %d, %a; shfl.sync.bfly.b32 %d, %d, 16, 0x1f, -1;", {"a": ("u32", a)}, {"d": "u32"}, lanes=LANES
    )
    np.testing.assert_array_equal(out["d"], a.reshape(-1, 2, 16)[:, ::-1].reshape(-1))


@each_schedule
def test_shuffle_from_a_lane_outside_the_membermask_is_poison(schedule: str) -> None:
    a = np.arange(64, dtype=np.uint32)
    out = run_lanes(
        """
        .reg .pred %low; .reg .b32 %lane;
        mov.u32 %lane, %laneid;
        setp.lt.u32 %low, %lane, 16;
        mov.b32 %d, 7;
        @!%low bra after;
        shfl.sync.down.b32 %d|%p, %a, 4, 0x1f, 0xffff;
        after:
        """,
        {"a": ("u32", a)},
        {"d": "u32", "p": "pred"},
        schedule=schedule,
    )
    for warp in (0, 32):
        low = out["d"][warp : warp + 16].tolist()
        assert low == [*range(warp + 4, warp + 16), FULL, FULL, FULL, FULL]
        assert out["p"][warp : warp + 16].all()
        assert (out["d"][warp + 16 : warp + 32] == 7).all()


@each_schedule
def test_shuffle_in_groups_with_masks_of_their_own(schedule: str) -> None:
    rng = np.random.default_rng(3)
    masks, a, b = grouped_masks(rng, 3), words(rng), rng.integers(0, 32, LANES).astype(np.uint32)
    out = run_lanes(
        "shfl.sync.idx.b32 %d, %a, %b, 0x1f, %m;",
        {"a": ("u32", a), "b": ("u32", b), "m": ("u32", masks)},
        {"d": "u32"},
        schedule=schedule,
    )
    for i in range(LANES):
        source = i // 32 * 32 + int(b[i])
        assert out["d"][i] == (a[source] if source in members_of(masks, i) else FULL)


# -- vote, match, elect --------------------------------------------------------------------------------------------


@each_schedule
@pytest.mark.parametrize("groups", [0, 1, 2, 5])
def test_votes(groups: int, schedule: str) -> None:
    rng = np.random.default_rng(4 + groups)
    masks = grouped_masks(rng, groups) if groups else np.full(LANES, FULL, np.uint32)
    operand = "%m" if groups else "0xffffffff"
    for density in (0.0, 0.05, 0.5, 0.95, 1.0):
        votes = rng.random(LANES) < density
        out = run_lanes(
            f"""
            vote.sync.all.pred %all, %a, {operand};
            vote.sync.any.pred %any, %a, {operand};
            vote.sync.uni.pred %uni, %a, {operand};
            vote.sync.any.pred %none, !%a, {operand};
            vote.sync.ballot.b32 %ballot, %a, {operand};
            """,
            {"a": ("pred", votes), "m": ("u32", masks)},
            {"all": "pred", "any": "pred", "uni": "pred", "none": "pred", "ballot": "u32"},
            schedule=schedule,
        )
        for i in range(LANES):
            mine = [bool(votes[j]) for j in members_of(masks, i)]
            assert out["all"][i] == all(mine)
            assert out["any"][i] == any(mine)
            assert out["uni"][i] == (len(set(mine)) == 1)
            assert out["none"][i] == any(not vote for vote in mine)
            assert out["ballot"][i] == sum(1 << j % 32 for j in members_of(masks, i) if votes[j])


@each_schedule
@pytest.mark.parametrize("kind", ["b32", "b64"])
def test_match(kind: str, schedule: str) -> None:
    rng = np.random.default_rng(5)
    choices = words(rng, 3).astype(np.uint64) * (1 if kind == "b32" else 0x1_0000_0001)
    for groups, few in ((1, 3), (3, 3), (2, 1), (8, 2)):
        masks = grouped_masks(rng, groups)
        values = choices[rng.integers(0, few, LANES)]
        if kind == "b64":  # some differ in the high half only
            values = values ^ (rng.integers(0, 2, LANES).astype(np.uint64) << np.uint64(40)) * np.uint64(few > 1)
        out = run_lanes(
            f"match.any.sync.{kind} %any, %a, %m; match.all.sync.{kind} %all|%p, %a, %m;"
            f"match.all.sync.{kind} _|%q, %a, %m;",
            {"a": (kind.replace("b", "u"), values), "m": ("u32", masks)},
            {"any": "u32", "all": "u32", "p": "pred", "q": "pred"},
            schedule=schedule,
        )
        for i in range(LANES):
            members = members_of(masks, i)
            same = sum(1 << j % 32 for j in members if values[j] == values[i])
            agreed = all(values[j] == values[i] for j in members)
            assert out["any"][i] == same
            assert out["all"][i] == (masks[i] if agreed else 0)
            assert out["p"][i] == out["q"][i] == agreed


@each_schedule
def test_elect_names_the_lowest_member(schedule: str) -> None:
    masks = grouped_masks(np.random.default_rng(6), 4)
    out = run_lanes(
        "elect.sync %d|%p, %m; elect.sync _|%q, -1;",
        {"m": ("u32", masks)},
        {"d": "u32", "p": "pred", "q": "pred"},
        schedule=schedule,
    )
    for i in range(LANES):
        leader = min(members_of(masks, i))
        assert out["d"][i] == leader % 32
        assert out["p"][i] == (i == leader)
        assert out["q"][i] == (i % 32 == 0)


@each_schedule
def test_exited_lanes_take_no_part(schedule: str) -> None:
    """Lanes 0 to 4 of each warp leave first: a full membermask then means those that are left."""
    source = """
    extern "C" __global__ void k(unsigned* out) {
      unsigned lane = threadIdx.x % 32, leader, ballot;
      if (lane < 5) return;
      asm volatile("{ .reg .pred p; elect.sync %0|p, 0xffffffff; }" : "=r"(leader));
      ballot = __ballot_sync(0xffffffff, lane & 1);
      out[threadIdx.x * 3] = leader;
      out[threadIdx.x * 3 + 1] = ballot;
      out[threadIdx.x * 3 + 2] = __reduce_add_sync(0xffffffff, 1);
    }"""
    out = np.zeros((64, 3), np.uint32)
    Emulator(schedule).launch(compile_ptx(source), "k", grid=1, block=64, args=[out])
    for thread in range(64):
        expected = [0, 0, 0] if thread % 32 < 5 else [5, 0xAAAAAAA0, 27]
        assert out[thread].tolist() == expected


# -- redux ---------------------------------------------------------------------------------------------------------

INTEGER = {
    "add": lambda values: sum(values),
    "min": min,
    "max": max,
    "and": lambda values: functools.reduce(operator.and_, values),
    "or": lambda values: functools.reduce(operator.or_, values),
    "xor": lambda values: functools.reduce(operator.xor, values),
}


@pytest.mark.parametrize(
    ("operation", "kind"),
    [(o, k) for o in ("add", "min", "max") for k in ("u32", "s32")] + [(o, "b32") for o in ("and", "or", "xor")],
)
def test_integer_reductions(operation: str, kind: str) -> None:
    rng = np.random.default_rng(7)
    for groups in (0, 1, 2, 6):
        masks = grouped_masks(rng, groups) if groups else np.full(LANES, FULL, np.uint32)
        a = words(rng)
        a[rng.integers(0, LANES, 6)] = [0, 1, 0x7FFFFFFF, 0x80000000, FULL, FULL]
        out = run_lanes(
            f"redux.sync.{operation}.{kind} %d, %a, {'%m' if groups else '0xffffffff'};",
            {"a": ("u32", a), "m": ("u32", masks)},
            {"d": "u32"},
            schedule=SCHEDULES[groups % 3],
        )
        values = a.view(np.int32) if kind == "s32" else a
        for i in range(LANES):
            assert out["d"][i] == INTEGER[operation]([int(values[j]) for j in members_of(masks, i)]) & FULL


def float_bits(value: float) -> int:
    return struct.unpack("<I", struct.pack("<f", value))[0]


SPECIAL = [0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x7F800000, 0xFF800000, float_bits(1.5), float_bits(-2.5)]
NANS = [0x7FC00000, 0xFFC00001, 0x7F800001]


def float_reduction(operation: str, absolute: bool, keep_nan: bool, bits: list[int]) -> int:
    """redux.sync f32 from its text: NaN wins with .NaN, is skipped without, and +0 is greater than -0."""
    if absolute:
        bits = [b & 0x7FFFFFFF for b in bits]
    nans = [b for b in bits if b & 0x7FFFFFFF > 0x7F800000]
    numbers = [b for b in bits if b & 0x7FFFFFFF <= 0x7F800000]
    if not numbers or (nans and keep_nan):
        return 0x7FFFFFFF

    def order(b: int) -> tuple[float, int]:
        return struct.unpack("<f", struct.pack("<I", b))[0], -(b >> 31)

    return (min if operation == "min" else max)(numbers, key=order)


@pytest.mark.parametrize("operation", ["min", "max"])
@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("keep_nan", [False, True])
def test_float_reductions(operation: str, absolute: bool, keep_nan: bool) -> None:
    rng = np.random.default_rng(8)
    name = f"redux.sync.{operation}{'.abs' * absolute}{'.NaN' * keep_nan}.f32"
    for pool in (SPECIAL, SPECIAL[:2], SPECIAL + NANS, NANS, words(rng, 50).tolist()):
        masks = grouped_masks(rng, 4)
        a = np.array(pool, np.uint32)[rng.integers(0, len(pool), LANES)]
        out = run_lanes(f"{name} %d, %a, %m;", {"a": ("u32", a), "m": ("u32", masks)}, {"d": "u32"})
        for i in range(LANES):
            members = [int(a[j]) for j in members_of(masks, i)]
            assert out["d"][i] == float_reduction(operation, absolute, keep_nan, members)


# -- meeting -------------------------------------------------------------------------------------------------------


@each_schedule
def test_groups_of_one_warp_do_not_wait_for_each_other(schedule: str) -> None:
    """The upper half meets at once; the lower half gets there only after it has seen what the upper half did next."""
    source = """
    extern "C" __global__ void k(int* out) {
      __shared__ volatile int flag;
      int lane = threadIdx.x;
      if (lane == 0) flag = 0;
      __syncwarp();
      unsigned mask = lane < 16 ? 0xffff : 0xffff0000;
      if (lane == 3) while (flag == 0) { }
      int sum = __reduce_add_sync(mask, lane);
      if (lane == 20) flag = 1;
      out[lane] = sum;
    }"""
    out = np.zeros(32, np.int32)
    Emulator(schedule).launch(compile_ptx(source), "k", grid=1, block=32, args=[out])
    assert out.tolist() == [120] * 16 + [376] * 16


@each_schedule
def test_warp_barrier_joins_lanes_from_different_instructions(schedule: str) -> None:
    source = """
    extern "C" __global__ void k(int* out) {
      __shared__ int box[64];
      int lane = threadIdx.x % 32, mine = threadIdx.x;
      if (lane < 10) {
        for (int i = 0; i < lane; i++) box[mine] = i;
        box[mine] = lane + 1;
        asm volatile("bar.warp.sync 0xffffffff;" ::: "memory");
        out[mine] = box[mine ^ 31];
      } else {
        box[mine] = 100 * lane;
        asm volatile("bar.warp.sync 0xffffffff;" ::: "memory");
        out[mine] = box[mine ^ 31] + 1;
      }
    }"""
    out = np.zeros(64, np.int32)
    Emulator(schedule).launch(compile_ptx(source), "k", grid=1, block=64, args=[out])
    for thread in range(64):
        lane, other = thread % 32, 31 - thread % 32
        assert out[thread] == (other + 1 if other < 10 else 100 * other) + (lane >= 10)


@each_schedule
def test_warp_barrier_of_part_of_a_warp(schedule: str) -> None:
    """Lanes 8 to 15 exchange through shared memory at a barrier of their own while others loop; one of them exits."""
    source = """
    extern "C" __global__ void k(int* out) {
      __shared__ int box[32];
      int lane = threadIdx.x;
      if (lane >= 8 && lane < 16) {
        if (lane == 15) return;
        for (int round = 0; round < 3; round++) {
          box[lane] = lane * 10 + round;
          __syncwarp(0xff00);
          out[lane] += box[8 + (lane - 8 + 1) % 7];
          __syncwarp(0xff00);
        }
      } else if (lane == 0) {
        for (int i = 0; i < 50; i++) out[0] += i;
      }
    }"""
    out = np.zeros(32, np.int32)
    Emulator(schedule).launch(compile_ptx(source), "k", grid=1, block=32, args=[out])
    assert out[0] == 1225
    for lane in range(8, 15):
        assert out[lane] == 3 * 10 * (8 + (lane - 7) % 7) + 3
    assert out[15] == 0


@each_schedule
@pytest.mark.parametrize("block", [32, 70, 256])
def test_block_reduction(block: int, schedule: str) -> None:
    source = """
    extern "C" __global__ void k(float* out, const float* in) {
      __shared__ float part[32];
      int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = (blockDim.x + 31) / 32;
      unsigned mask = __ballot_sync(__activemask(), 1);
      float value = in[blockIdx.x * blockDim.x + threadIdx.x];
      for (int step = 16; step; step /= 2) {
        float other = __shfl_down_sync(mask, value, step);
        if (lane + step < 32 && (mask >> (lane + step) & 1)) value += other;
      }
      if (lane == 0) part[warp] = value;
      __syncthreads();
      if (warp == 0) {
        value = lane < warps ? part[lane] : 0.0f;
        for (int step = 16; step; step /= 2) value += __shfl_xor_sync(mask, value, step);
        if (lane == 0) out[blockIdx.x] = value;
      }
    }"""
    values = np.random.default_rng(9).integers(-50, 50, (3, block)).astype(np.float32)
    out = np.zeros(3, np.float32)
    Emulator(schedule, 3).launch(compile_ptx(source), "k", grid=3, block=block, args=[out, values])
    np.testing.assert_array_equal(out, values.sum(axis=1))


@each_schedule
def test_a_lock_goes_round_the_lanes_of_a_warp(schedule: str) -> None:
    """The spin lock that hangs under a plain reconvergence stack: the owner must run while its warp spins."""
    source = """
    extern "C" __global__ void k(int* out) {
      __shared__ int lock, count;
      if (threadIdx.x == 0) { lock = 0; count = 0; }
      __syncthreads();
      while (atomicCAS(&lock, 0, 1) != 0) { }
      int mine = *(volatile int*)&count;
      for (int i = 0; i <= threadIdx.x % 3; i++) mine = mine * 1 + (i == 0);
      *(volatile int*)&count = mine;
      out[threadIdx.x] = mine;
      __threadfence_block();
      atomicExch(&lock, 0);
    }"""
    out = np.zeros(64, np.int32)
    Emulator(schedule, 2).launch(compile_ptx(source), "k", grid=1, block=64, args=[out])
    assert sorted(out.tolist()) == list(range(1, 65))


# -- what must be refused ------------------------------------------------------------------------------------------


def test_a_lane_outside_its_membermask_is_a_fault() -> None:
    with pytest.raises(DivergenceFault, match=r"0x0000ffff, which does not name it(.|\n)*threads +16-31"):
        run_lanes("mov.b32 %m, 0xffff; vote.sync.ballot.b32 %d, 1, %m;", {"m": ("u32", 0)}, {"d": "u32"}, lanes=32)


@pytest.mark.parametrize("line", ["shfl.sync.idx.b32 %d, %d, 0, 0x1f, %m;", "redux.sync.add.u32 %d, %d, %m;"])
def test_membermasks_that_overlap_are_a_fault(line: str) -> None:
    masks = np.full(32, FULL, np.uint32)
    masks[5] = 0x20
    with pytest.raises(DivergenceFault, match="overlap but differ"):
        run_lanes(f"mov.b32 %d, 1; {line}", {"m": ("u32", masks)}, {"d": "u32"})


@each_schedule
def test_a_shuffle_that_part_of_the_warp_skips_is_a_deadlock(schedule: str) -> None:
    source = """
    extern "C" __global__ void k(int* out) {
      int lane = threadIdx.x % 32, value = lane;
      if (lane < 8) value = __shfl_sync(0xffffffff, value, 3);
      asm volatile("bar.sync 0;");
      out[threadIdx.x] = value;
    }"""
    with pytest.raises(Deadlock) as caught:
        Emulator(schedule).launch(compile_ptx(source), "k", grid=1, block=32, args=[np.zeros(32, np.int32)])
    text = str(caught.value)
    assert "warp 0, threads 0-7 wait for other lanes of its warp to reach the same instruction" in text
    assert "at shfl.sync.idx.b32" in text
    assert "threads 8-31 wait at bar.sync" in text
    assert "test.cu:5)" in text


@pytest.mark.parametrize("line", ["shfl.idx.b32 %d, %d, 0, 0x1f;", "vote.ballot.b32 %d, 1;"])
def test_the_forms_without_sync_are_refused(line: str) -> None:
    with pytest.raises(UnsupportedInstruction, match=r"without \.sync"):
        run_lanes(f"mov.b32 %d, 1; {line}", {}, {"d": "u32"})


@pytest.mark.parametrize(
    "line",
    ["shfl.sync.idx.b64 %d, %d, 0, 31, -1;", "redux.sync.and.s32 %d, %d, -1;", "redux.sync.add.f32 %d, %d, -1;",
     "match.any.sync.b16 %d, %d, -1;", "redux.sync.min.NaN.u32 %d, %d, -1;"],
)  # fmt: skip
def test_unknown_forms_are_refused(line: str) -> None:
    with pytest.raises(UnsupportedInstruction):
        run_lanes(f"mov.b32 %d, 1; {line}", {}, {"d": "u32"})
