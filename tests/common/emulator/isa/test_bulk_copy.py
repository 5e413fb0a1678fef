import numpy as np
import pytest

from common.emulator import (
    BarrierFault,
    Deadlock,
    Fault,
    InvalidAddress,
    Misaligned,
    OutOfBounds,
    UnsupportedInstruction,
)
from tests.common.emulator.isa.async_programs import each_schedule, launch
from tests.common.emulator.ptx_kernels import run_lanes


def numbers(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint32)


# -- global to shared, shared to global ----------------------------------------------------------------------------

RING = r"""
KERNEL(u32* out, const u32* in, int steps) {
  __shared__ alignas(16) u32 stage[4][256], result[2][256];
  __shared__ u64 full[4], empty[4];
  int t = threadIdx.x;
  if (t == 0) for (int i = 0; i < 4; i++) { init(smem(full + i), 1); init(smem(empty + i), 64); }
  fence();
  __syncthreads();
  if (t == 64) {  // producer
    for (int s = 0; s < steps; s++) {
      wait(smem(empty + s % 4), (s / 4 & 1) ^ 1);
      expect(smem(full + s % 4), EXPECTED);
      bulk_load(smem(stage[s % 4]), in + 256 * s, 1024, smem(full + s % 4));
    }
  } else if (t < 64) {
    for (int s = 0; s < steps; s++) {
      wait(smem(full + s % 4), s / 4 & 1);
      if (t == 0) asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
      asm volatile("bar.sync 1, 64;" ::: "memory");
      for (int i = t; i < 256; i += 64) result[s % 2][i] = stage[s % 4][255 - i] + 1;
      arrive(smem(empty + s % 4));
      fence();
      asm volatile("bar.sync 1, 64;" ::: "memory");
      if (t == 0) { bulk_store(out + 256 * s, smem(result[s % 2]), 1024); commit(); }
    }
    if (t == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
}"""


@each_schedule
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_ring_with_full_and_empty_mbarriers(schedule: str, seed: int) -> None:
    data, out = numbers(256 * 11), np.zeros(256 * 11, np.uint32)
    run = launch(RING.replace("EXPECTED", "1024"), out, data, 11, block=96, schedule=schedule, seed=seed)
    np.testing.assert_array_equal(out, (data.reshape(11, 256)[:, ::-1] + 1).reshape(-1))
    assert run.counters.bytes["bulk load"] == run.counters.bytes["bulk store"] == data.nbytes


@pytest.mark.parametrize(("expected", "owed"), [("1040", "16 bytes owed"), ("1008", "16 bytes more than expected")])
@each_schedule
def test_a_wrong_byte_count_deadlocks_and_says_what_is_owed(schedule: str, expected: str, owed: str) -> None:
    with pytest.raises(Deadlock, match=owed):
        launch(
            RING.replace("EXPECTED", expected),
            *(np.zeros(256 * 11, np.uint32), numbers(256 * 11), 11),
            block=96,
            schedule=schedule,
        )


def test_without_a_wait_for_the_mbarrier_the_data_is_poison() -> None:
    source = r"""
    KERNEL(u32* out, const u32* in) {
      __shared__ alignas(16) u32 x[64];
      __shared__ u64 bar;
      init(smem(&bar), 1);
      expect(smem(&bar), 256);
      bulk_load(smem(x), in, 256, smem(&bar));
      out[0] = x[5];
      wait(smem(&bar), 0);
      out[1] = x[5];
    }"""
    data, out = numbers(64), np.zeros(2, np.uint32)
    launch(source, out, data, block=1)
    assert out.tolist() == [0xFFFF_FFFF, data[5]]


REUSE = r"""
KERNEL(u32* out) {
  __shared__ alignas(16) u32 x[64];
  for (int round = 0; round < 4; round++) {
    x[threadIdx.x] = 100 * round + threadIdx.x;
    x[threadIdx.x + 32] = round;
    fence();
    __syncwarp();
    if (threadIdx.x == 0) { bulk_store(out + 64 * round, smem(x), 256); commit(); WAIT }
    __syncwarp();
  }
  if (threadIdx.x == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}"""


def reused() -> np.ndarray:
    rounds = np.arange(4)[:, None]
    return np.hstack([100 * rounds + np.arange(32), np.broadcast_to(rounds, (4, 32))]).reshape(-1)


@each_schedule
def test_a_buffer_is_reused_after_its_reads(schedule: str) -> None:
    out = np.zeros(256, np.uint32)
    wait = 'asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");'
    launch(REUSE.replace("WAIT", wait), out, schedule=schedule)
    np.testing.assert_array_equal(out, reused())


@pytest.mark.parametrize("wait", ["", 'asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");'])
def test_without_wait_group_read_a_store_sees_later_data(wait: str) -> None:
    out = np.zeros(256, np.uint32)
    launch(REUSE.replace("WAIT", wait), out, schedule="late")
    assert not np.array_equal(out, reused())


@pytest.mark.parametrize(("wait", "visible"), [("", True), (".read", False)])
def test_wait_group_read_does_not_wait_for_the_writes(wait: str, visible: bool) -> None:
    source = r"""
    KERNEL(u32* out, u32* seen) {
      __shared__ alignas(16) u32 x[4];
      for (int i = 0; i < 4; i++) x[i] = i + 1;
      fence();
      bulk_store(out, smem(x), 16);
      commit();
      asm volatile("cp.async.bulk.wait_groupWAIT 0;" ::: "memory");
      *seen = *(volatile u32*)(out + 2);
    }""".replace("WAIT", wait)
    out, seen = np.zeros(4, np.uint32), np.zeros(1, np.uint32)
    launch(source, out, seen, block=1)
    assert seen[0] == (3 if visible else 0xFFFF_FFFF)
    assert out.tolist() == [1, 2, 3, 4]


@each_schedule
@pytest.mark.parametrize("operation", ["bulk_store(out, smem(x), 16)", "bulk_add(out, smem(x), 16)"])
def test_shared_memory_outlives_its_cta_until_the_stores_have_read_it(operation: str, schedule: str) -> None:
    """Kernels in production leave without `wait_group.read`; the next CTA on the SM must not overwrite the source."""
    source = r"""
    __device__ void bulk_add(void* dst, u32 src, u32 n) {
      asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%0], [%1], %2;"
                   :: "l"(dst), "r"(src), "r"(n) : "memory");
    }
    KERNEL(u32* all) {
      __shared__ alignas(16) u32 x[4];
      u32* out = all + 4 * blockIdx.x;
      for (int i = 0; i < 4; i++) x[i] = 10 * blockIdx.x + i;
      fence();
      OPERATION;
      commit();
    }"""
    out = np.zeros((9, 4), np.uint32)
    launch(source.replace("OPERATION", operation), out, grid=9, block=1, schedule=schedule)
    np.testing.assert_array_equal(out, 10 * np.arange(9)[:, None] + np.arange(4))


def test_leaving_before_a_load_has_come_faults() -> None:
    source = r"""
    KERNEL(const u32* in) {
      __shared__ alignas(16) u32 x[4];
      __shared__ u64 bar;
      init(smem(&bar), 1);
      bulk_load(smem(x), in, 16, smem(&bar));
    }"""
    with pytest.raises(InvalidAddress, match="wait for its mbarrier"):
        launch(source, numbers(4), block=1)


@each_schedule
def test_each_lane_makes_an_operation_and_groups_of_its_own(schedule: str) -> None:
    source = r"""
    KERNEL(u32* out) {
      __shared__ alignas(16) u32 x[64][4];
      int t = threadIdx.x;
      for (int i = 0; i < 4; i++) x[t][i] = 10 * t + i;
      fence();
      if (t % 3) bulk_store(out + 4 * t, smem(x[t]), 16);
      drain();
      if (t % 3) out[4 * t + 1] += out[4 * t + 3];
    }"""
    out = np.zeros((64, 4), np.uint32)
    launch(source, out, block=64, schedule=schedule)
    expected = 10 * np.arange(64)[:, None] + np.arange(4)
    expected[:, 1] += expected[:, 3]
    expected[::3] = 0
    np.testing.assert_array_equal(out, expected)


@each_schedule
def test_a_byte_mask_copies_the_chosen_bytes_of_each_chunk(schedule: str) -> None:
    source = r"""
    KERNEL(u8* out, const u8* in, u16 mask) {
      __shared__ alignas(16) u8 x[64];
      for (int i = threadIdx.x; i < 64; i += 32) x[i] = in[i];
      fence();
      __syncwarp();
      if (threadIdx.x == 0) {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.cp_mask [%0], [%1], 64, %2, %3;"
                     :: "l"(out), "r"(smem(x)), "l"(0ull), "h"(mask) : "memory");
        drain();
      }
    }"""
    data, out = np.arange(64, dtype=np.uint8) + 100, np.arange(64, dtype=np.uint8)
    launch(source, out, data, 0b1010_0000_0000_0110, schedule=schedule)
    chosen = np.isin(np.arange(64) % 16, (1, 2, 13, 15))
    np.testing.assert_array_equal(out, np.where(chosen, np.arange(64) + 100, np.arange(64)))


@each_schedule
def test_prefetch_and_the_shared_cta_form(schedule: str) -> None:
    source = r"""
    KERNEL(u32* out, const u32* in) {
      __shared__ alignas(16) u32 x[16];
      __shared__ u64 bar;
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], 64;" :: "l"(in));
      asm volatile("cp.async.bulk.prefetch.L2.global.L2::cache_hint [%0], 64, %1;" :: "l"(in), "l"(0ull));
      init(smem(&bar), 1);
      expect(smem(&bar), 64);
      asm volatile("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes.L2::cache_hint"
                   " [%0], [%1], %2, [%3], %4;"
                   :: "r"(smem(x)), "l"(in), "r"(64), "r"(smem(&bar)), "l"(0ull) : "memory");
      wait(smem(&bar), 0);
      for (int i = 0; i < 16; i++) out[i] = x[i];
    }"""
    data, out = numbers(16), np.zeros(16, np.uint32)
    run = launch(source, out, data, block=1, schedule=schedule)
    np.testing.assert_array_equal(out, data)
    assert run.counters.bytes["L2 prefetch"] == 128


# -- clusters ------------------------------------------------------------------------------------------------------

MULTICAST = r"""
KERNEL(u32* out, const u32* in, u16 mask) {
  __shared__ alignas(16) u32 x[64];
  __shared__ u64 bar;
  int t = threadIdx.x;
  for (int i = t; i < 64; i += 32) x[i] = 7;
  if (t == 0) { init(smem(&bar), 1); if (mask >> rank() & 1) expect(smem(&bar), 256); }
  fence();
  cluster_sync();
  if (t == 0 && rank() == 1)
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
                 " [%0], [%1], %2, [%3], %4, %5;"
                 :: "r"(smem(x)), "l"(in), "r"(256), "r"(smem(&bar)), "h"(mask), "l"(0ull) : "memory");
  if (mask >> rank() & 1) wait(smem(&bar), 0);
  for (int i = t; i < 64; i += 32) out[64 * blockIdx.x + i] = x[i];
  cluster_sync();
}"""


@each_schedule
@pytest.mark.parametrize(("cluster", "mask"), [(2, 0b11), (2, 0b01), (4, 0b1111), (4, 0b1010)])
def test_multicast_reaches_the_ctas_of_the_mask(schedule: str, cluster: int, mask: int) -> None:
    data, out = numbers(64), np.zeros((2 * cluster, 64), np.uint32)
    launch(MULTICAST, out, data, mask, grid=2 * cluster, cluster=cluster, schedule=schedule)
    for block in range(2 * cluster):
        expected = data if mask >> block % cluster & 1 else 7
        assert (out[block] == expected).all(), block


@pytest.mark.parametrize("mask", [0, 0b100])
def test_a_multicast_to_nobody_faults(mask: int) -> None:
    with pytest.raises(InvalidAddress):
        launch(MULTICAST, np.zeros((2, 64), np.uint32), numbers(64), mask, grid=2, cluster=2)


EXCHANGE = r"""
KERNEL(u32* out, const u32* in) {
  __shared__ alignas(16) u32 mine[256], theirs[256];
  __shared__ u64 bar;
  int t = threadIdx.x;
  u32 next = (rank() + 1) % CLUSTER;
  for (int i = t; i < 256; i += 32) { mine[i] = in[256 * blockIdx.x + i]; theirs[i] = 1000 + i; }
  if (t == 0) { init(smem(&bar), 1); expect(smem(&bar), 1024); }
  fence();
  cluster_sync();
  if (t == 0)
    asm volatile("INSTRUCTION [%0], [%1], %2, [%3];"
                 :: "r"(mapa(smem(theirs), next)), "r"(smem(mine)), "r"(1024), "r"(mapa(smem(&bar), next)) : "memory");
  WAIT
  for (int i = t; i < 256; i += 32) out[256 * blockIdx.x + i] = theirs[i];
  cluster_sync();
}"""
COPY = "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"


def exchange(instruction: str, data: np.ndarray, cluster: int, schedule: str, wait: bool = True) -> np.ndarray:
    out = np.zeros_like(data)
    text = EXCHANGE.replace("CLUSTER", str(cluster)).replace("INSTRUCTION", instruction)
    text = text.replace("WAIT", "wait(smem(&bar), 0);" if wait else "")
    launch(text, out, data, grid=cluster, cluster=cluster, schedule=schedule)
    return out


@each_schedule
@pytest.mark.parametrize("cluster", [2, 4])
def test_a_copy_to_the_next_cta(schedule: str, cluster: int) -> None:
    data = numbers(256 * cluster).reshape(cluster, 256)
    np.testing.assert_array_equal(exchange(COPY, data, cluster, schedule), np.roll(data, 1, axis=0))


def test_leaving_before_a_copy_to_the_next_cta_is_complete_faults() -> None:
    with pytest.raises(Fault, match="a wait for its mbarrier is missing"):
        exchange(COPY, numbers(512).reshape(2, 256), 2, "late", wait=False)


@pytest.mark.parametrize("instruction", [COPY, COPY.replace("cp.async", "cp.reduce.async") + ".add.u32"])
def test_the_own_shared_memory_as_target_faults(instruction: str) -> None:
    with pytest.raises(InvalidAddress, match="another CTA"):
        exchange(instruction, numbers(256).reshape(1, 256), 1, "late")


SHARED_REDUCTIONS = {
    "add.u32": np.add, "add.s32": np.add, "add.u64": np.add, "min.u32": np.minimum, "max.u32": np.maximum,
    "min.s32": np.minimum, "max.s32": np.maximum, "and.b32": np.bitwise_and, "or.b32": np.bitwise_or,
    "xor.b32": np.bitwise_xor,
    "inc.u32": lambda x, y: np.where(x >= y, 0, x + 1), "dec.u32": lambda x, y: np.where((x == 0) | (x > y), y, x - 1),
}  # fmt: skip
TYPES = {
    "u32": np.uint32, "s32": np.int32, "b32": np.uint32, "u64": np.uint64, "s64": np.int64, "b64": np.uint64,
    "f16": np.float16, "f32": np.float32, "f64": np.float64,
}  # fmt: skip


@each_schedule
@pytest.mark.parametrize("form", SHARED_REDUCTIONS)
def test_a_reduction_into_another_cta(schedule: str, form: str) -> None:
    kind = TYPES[form.split(".")[1]]
    data = np.random.default_rng(5).integers(0, 2500, (2, 256), dtype=np.uint32)
    data[:, ::7] -= np.uint32(5000)
    actual = exchange(COPY.replace("cp.async", "cp.reduce.async") + "." + form, data, 2, schedule)
    initial = (1000 + np.arange(256, dtype=np.uint32)).view(kind)
    expected = SHARED_REDUCTIONS[form](initial, np.roll(data, 1, axis=0).view(kind)).astype(kind)
    np.testing.assert_array_equal(actual.view(kind), expected)


# -- reductions into global memory ---------------------------------------------------------------------------------

REDUCE = r"""
KERNEL(u8* out, const u8* in) {
  __shared__ alignas(16) u8 x[2048];
  for (int i = threadIdx.x; i < 2048; i += 32) x[i] = in[i];
  fence();
  __syncwarp();
  if (threadIdx.x == 0) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_groupFORM [%0], [%1], 2048POLICY;"
                 :: "l"(out), "r"(smem(x)), "l"(0ull) : "memory");
    drain();
  }
}"""


def reduce(form: str, old: np.ndarray, new: np.ndarray, schedule: str = "late", policy: bool = False) -> np.ndarray:
    result = old.copy()
    text = REDUCE.replace("FORM", (".L2::cache_hint." if policy else ".") + form)
    launch(text.replace("POLICY", ", %2" if policy else ""), result, new, schedule=schedule)
    return result


GLOBAL_INTEGERS = {
    **SHARED_REDUCTIONS,
    "min.u64": np.minimum, "max.u64": np.maximum, "min.s64": np.minimum, "max.s64": np.maximum,
    "and.b64": np.bitwise_and, "or.b64": np.bitwise_or, "xor.b64": np.bitwise_xor,
}  # fmt: skip


@pytest.mark.parametrize("form", GLOBAL_INTEGERS)
def test_integer_reductions_into_global_memory(form: str) -> None:
    kind = TYPES[form.split(".")[1]]
    generator = np.random.default_rng(6)
    old, new = (generator.integers(0, 256, 2048, dtype=np.uint8) for _ in range(2))
    old[::16] = 0
    expected = GLOBAL_INTEGERS[form](old.view(kind), new.view(kind)).astype(kind)
    for schedule in ("late", "early", "random"):
        np.testing.assert_array_equal(reduce(form, old, new, schedule, policy=schedule == "early").view(kind), expected)


@each_schedule
@pytest.mark.parametrize("form", ["add.noftz.f16", "min.f16", "max.f16", "add.f32", "add.f64"])
def test_float_reductions_into_global_memory(schedule: str, form: str) -> None:
    kind = TYPES[form.split(".")[-1]]
    generator = np.random.default_rng(7)
    old, new = (generator.standard_normal(2048 // np.dtype(kind).itemsize).astype(kind) for _ in range(2))
    old[:4], new[:4] = [np.inf, 0, -0.0, 1], [1, -0.0, -0.0, -1]
    operation = {"add": np.add, "min": np.minimum, "max": np.maximum}[form[:3]]
    actual = reduce(form, old, new, schedule)
    np.testing.assert_array_equal(actual, operation(old, new))


def bfloat(values: np.ndarray) -> np.ndarray:
    """float32 to bfloat16 bits, nearest even; no NaN."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def widened(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize(("form", "operation"), [("add.noftz", np.add), ("min", np.minimum), ("max", np.maximum)])
def test_bfloat_reductions_into_global_memory(form: str, operation: np.ufunc) -> None:
    generator = np.random.default_rng(8)
    old, new = (bfloat(generator.standard_normal(1024)) for _ in range(2))
    np.testing.assert_array_equal(reduce(f"{form}.bf16", old, new), bfloat(operation(widened(old), widened(new))))


# Bits of (old, new, result) that an H200 gave.
MEASURED = {
    "add.f32": [
        (0x00000003, 0x00000003, 0x00000006),
        (0x80000003, 0x00000003, 0x00000000),
        (0x00C00000, 0x80800000, 0x00400000),
        (0x7FC01234, 0x00000000, 0x7FFFFFFF),
        (0x3F800000, 0xFF800001, 0x7FFFFFFF),
    ],
    "add.noftz.f16": [
        (0x0001, 0x0001, 0x0002), (0xFC01, 0x0000, 0x7FFF), (0x7E12, 0x7C00, 0x7FFF), (0x0000, 0x8000, 0x0000),
    ],
    "add.noftz.bf16": [(0x0001, 0x0001, 0x0002), (0xFF81, 0x0000, 0x7FFF), (0x7FC1, 0x0000, 0x7FFF)],
    "min.f16": [
        (0x0000, 0x8000, 0x8000), (0x7E01, 0x7E02, 0x7FFF), (0x8000, 0x0000, 0x8000), (0x7C00, 0x7E01, 0x7C00),
    ],
}  # fmt: skip


@pytest.mark.parametrize("form", MEASURED)
def test_subnormals_and_nans_are_as_on_an_h200(form: str) -> None:
    kind = np.uint32 if form.endswith("f32") else np.uint16
    table = np.array(MEASURED[form], kind)
    old, new = (np.resize(table[:, place], 2048 // np.dtype(kind).itemsize) for place in (0, 1))
    result = reduce(form, old, new)
    np.testing.assert_array_equal(result, np.resize(table[:, 2], result.size))


@pytest.mark.parametrize(
    "form",
    ["add.f16", "add.bf16", "min.noftz.f16", "add.s64", "min.f32", "and.u32", "inc.s32", "xor.b16"],
)
def test_combinations_outside_the_table_are_refused(form: str) -> None:
    with pytest.raises(UnsupportedInstruction):
        reduce(form, np.zeros(2048, np.uint8), np.zeros(2048, np.uint8))


@each_schedule
def test_reductions_of_many_ctas_add_up(schedule: str) -> None:
    source = r"""
    KERNEL(u32* out) {
      __shared__ alignas(16) u32 x[64];
      for (int i = threadIdx.x; i < 64; i += 32) x[i] = i * (blockIdx.x + 1);
      fence();
      __syncwarp();
      if (threadIdx.x == 0) {
        asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%0], [%1], 256;"
                     :: "l"(out), "r"(smem(x)) : "memory");
        drain_reads();
      }
    }"""
    out = np.ones(64, np.uint32)
    launch(source, out, grid=9, schedule=schedule)
    np.testing.assert_array_equal(out, 1 + 45 * np.arange(64))


# -- faults --------------------------------------------------------------------------------------------------------

CHECKED = r"""
KERNEL(u8* memory) {
  __shared__ alignas(128) u8 x[256];
  __shared__ u64 bar;
  if (INITIAL) init(smem(&bar), 1);
  bulk_load(smem(x) + TO, memory + FROM, SIZE, smem(&bar));
  wait(smem(&bar), 0);
}"""


@pytest.mark.parametrize(
    ("to", "source", "size", "fault", "text"),
    [
        (8, 0, 16, Misaligned, "shared"),
        (0, 8, 16, Misaligned, "global"),
        (0, 0, 24, Misaligned, "multiple of 16"),
        (0, 112, 32, OutOfBounds, "past|across"),
        (0, -16, 32, OutOfBounds, "before"),
        (1 << 18, 0, 32, OutOfBounds, "shared"),
        (1 << 24, 0, 32, InvalidAddress, "CTA rank 1"),
    ],
)
def test_loads_check_sizes_and_addresses(to: int, source: int, size: int, fault: type, text: str) -> None:
    program = CHECKED.replace("TO", str(to)).replace("FROM", str(source)).replace("SIZE", str(size))
    with pytest.raises(fault, match=text) as caught:
        launch(program.replace("INITIAL", "true"), np.zeros(128, np.uint8), block=1)
    assert "PTX line" in str(caught.value)


@each_schedule
def test_signalling_what_is_no_mbarrier_faults_at_completion(schedule: str) -> None:
    program = CHECKED.replace("TO", "0").replace("FROM", "0").replace("SIZE", "16").replace("INITIAL", "false")
    with pytest.raises(BarrierFault):
        launch(program, np.zeros(128, np.uint8), block=1, schedule=schedule)


def test_stores_to_constants_fault() -> None:
    source = r"""
    __constant__ u32 table[4];
    KERNEL() {
      __shared__ alignas(16) u32 x[4];
      u64 to;
      asm("mov.u64 %0, table;" : "=l"(to));
      bulk_store((void*)to, smem(x), 16);
    }"""
    with pytest.raises(InvalidAddress, match="read-only"):
        launch(source, block=1)


@pytest.mark.parametrize(
    "instruction",
    [
        "cp.async.bulk.shared::cta.shared::cta.mbarrier::complete_tx::bytes [%r], [%r], %r, [%r];",
        "cp.async.bulk.global.global.bulk_group [%rd], [%rd], %r;",
        "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes.multicast::cluster [%r], [%rd], %r, [%r], %h;",
        "cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%rd], [%r], %r;",
        "cp.async.bulk.global.shared::cta.mbarrier::complete_tx::bytes [%rd], [%r], %r, [%r];",
        "cp.async.bulk.shared::cluster.global.bulk_group [%r], [%rd], %r;",
        "cp.async.bulk.prefetch.L2.shared::cta [%r], %r;",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.add.u32 [%rd], [%r], %r;",
        "cp.async.bulk.wait_group %r;",
    ],
)
def test_what_does_not_exist_is_refused(instruction: str) -> None:
    with pytest.raises(UnsupportedInstruction):
        run_lanes(f".reg .b16 %h; .reg .b32 %r; .reg .b64 %rd; {instruction}", {}, {"y": "u32"})
