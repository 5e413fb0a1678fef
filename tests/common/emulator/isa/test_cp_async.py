import numpy as np
import pytest

from common.emulator import Deadlock, Fault, InvalidAddress, Misaligned, OutOfBounds, UnsupportedInstruction
from tests.common.emulator.isa.async_programs import each_schedule, launch
from tests.common.emulator.ptx_kernels import run_lanes

COPY = r"""
DEVICE void copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(from) : "memory");
}
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
"""


def numbers(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def ring(wait: str) -> str:
    """Three stages; each thread copies 16 bytes per stage and reads a neighbour's."""
    return (
        COPY
        + r"""
    KERNEL(float* out, const float* in, int steps) {
      __shared__ alignas(16) float stage[3][512];
      int t = threadIdx.x;
      for (int s = 0; s < 2; s++) { copy16(smem(&stage[s][4 * t]), in + 512 * s + 4 * t); commit_copies(); }
      for (int s = 0; s < steps; s++) {
        WAIT
        __syncthreads();
        float sum = 0;
        for (int i = 0; i < 4; i++) sum += stage[s % 3][4 * ((t + 33) % 128) + i];
        out[128 * s + t] = sum;
        if (s + 2 < steps) copy16(smem(&stage[(s + 2) % 3][4 * t]), in + 512 * (s + 2) + 4 * t);
        commit_copies();
      }
      asm volatile("cp.async.wait_all;" ::: "memory");
    }""".replace("WAIT", f'asm volatile("{wait}" ::: "memory");' if wait else "")
    )


def ring_result(data: np.ndarray, steps: int) -> np.ndarray:
    rows = data.reshape(steps, 128, 4)
    sums = ((rows[..., 0] + rows[..., 1]) + rows[..., 2]) + rows[..., 3]
    return np.roll(sums, -33, axis=1).reshape(-1)


@each_schedule
def test_a_ring_of_three_stages(schedule: str) -> None:
    data, out = numbers(512 * 9), np.zeros(128 * 9, np.float32)
    run = launch(ring("cp.async.wait_group 1;"), out, data, 9, block=128, schedule=schedule)
    np.testing.assert_array_equal(out, ring_result(data, 9))
    assert run.counters.bytes["cp.async"] == data.nbytes


@pytest.mark.parametrize("wait", ["", "cp.async.wait_group 2;"])
def test_a_missing_or_loose_wait_gives_poison_under_late(wait: str) -> None:
    data, out = numbers(512 * 9), np.zeros(128 * 9, np.float32)
    launch(ring(wait), out, data, 9, block=128, schedule="late")
    assert np.isnan(out).any()


def test_a_missing_wait_does_not_show_under_early() -> None:
    data, out = numbers(512 * 9), np.zeros(128 * 9, np.float32)
    launch(ring(""), out, data, 9, block=128, schedule="early")
    np.testing.assert_array_equal(out, ring_result(data, 9))


def test_only_the_warps_with_copies_wait_for_them() -> None:
    source = (
        COPY
        + r"""
    KERNEL(float* out, const float* in) {
      __shared__ alignas(16) float x[128];
      if (threadIdx.x < 32) copy16(smem(x + 4 * threadIdx.x), in + 4 * threadIdx.x);
      asm volatile("cp.async.wait_all;" ::: "memory");
      out[threadIdx.x] = x[2 * threadIdx.x];
    }"""
    )
    data, out = numbers(128), np.zeros(64, np.float32)
    launch(source, out, data, block=64, schedule="late")
    np.testing.assert_array_equal(out[:32], data[:64:2])
    assert np.isnan(out[32:]).all(), "the second warp waits for nothing: it may see unwritten memory"


def partial_copy(size: int, operand: str) -> str:
    """Thread t copies `size` bytes, with `operand` after the size; `length` (%2) is its third argument."""
    return r"""
    KERNEL(u32* out, const u8* in, const int* lengths) {
      __shared__ alignas(16) u32 x[32 * SIZE / 4];
      int t = threadIdx.x;
      asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0;"
                   "cp.async.ca.shared::cta.global.L2::cache_hint.L2::128B [%0], [%1], SIZE, OPERAND, %3; }"
                   :: "r"(smem(x) + SIZE * t), "l"(in + SIZE * t), "r"(lengths[t]), "l"(0x1234ull) : "memory");
      asm volatile("cp.async.wait_all;" ::: "memory");
      for (int i = 0; i < SIZE / 4; i++) out[SIZE / 4 * t + i] = x[SIZE / 4 * t + i];
    }""".replace("SIZE", str(size)).replace("OPERAND", operand)


@each_schedule
@pytest.mark.parametrize("size", [4, 8, 16])
def test_a_source_size_fills_with_zeros_and_touches_nothing_beyond(schedule: str, size: int) -> None:
    lengths = (np.arange(32, dtype=np.int32) % (size + 1)).astype(np.int32)
    data = np.random.default_rng(1).integers(0, 256, 31 * size + int(lengths[31]), dtype=np.uint8)
    out = np.full((32, size), 7, np.uint8)
    launch(partial_copy(size, "%2"), out, data, lengths, schedule=schedule)
    expected = np.zeros((32, size), np.uint8)
    for lane, length in enumerate(lengths):
        expected[lane, :length] = data[lane * size : lane * size + length]
    np.testing.assert_array_equal(out, expected)


@each_schedule
def test_an_ignored_source_may_lie_anywhere(schedule: str) -> None:
    ignored = (np.arange(32) >= 20).astype(np.int32)
    data, out = numbers(4 * 20), np.full((32, 4), 7, np.float32)
    launch(partial_copy(16, "p"), out, data, ignored, schedule=schedule)
    np.testing.assert_array_equal(out[:20], data.reshape(20, 4))
    assert not out[20:].any()


def test_a_source_size_above_the_copy_size_faults() -> None:
    with pytest.raises(Fault, match="src-size above"):
        launch(partial_copy(8, "%2"), np.zeros(64, np.uint32), np.zeros(256, np.uint8), np.full(32, 9, np.int32))


@pytest.mark.parametrize(
    ("into", "source", "fault"),
    [("4 * t", "16 * t", Misaligned), ("16 * t", "8 * t", Misaligned), ("16 * t", "16 * t + 64", OutOfBounds)],
)
def test_addresses_are_checked(into: str, source: str, fault: type) -> None:
    text = (
        COPY
        + r"""
    KERNEL(float* out, const u8* in) {
      __shared__ alignas(16) u8 x[1024];
      int t = threadIdx.x;
      copy16(smem(x) + INTO, in + SOURCE);
      asm volatile("cp.async.wait_all;" ::: "memory");
    }""".replace("INTO", into).replace("SOURCE", source)
    )
    with pytest.raises(fault) as caught:
        launch(text, np.zeros(4, np.float32), np.zeros(512, np.uint8))
    assert "cp.async.cg" in str(caught.value)


TRACKED = (
    COPY
    + r"""
KERNEL(float* out, const float* in) {
  __shared__ alignas(16) float x[512];
  __shared__ u64 bar;
  int t = threadIdx.x;
  if (t == 0) init(smem(&bar), COUNT);
  __syncthreads();
  for (int round = 0; round < 3; round++) {
    copy16(smem(x + 4 * t), in + 512 * round + 4 * t);
    asm volatile("cp.async.mbarrier.arrive.MODE.b64 [%0];" :: "r"(smem(&bar)) : "memory");
    ARRIVE
    wait(smem(&bar), round & 1);
    out[128 * round + t] = x[4 * ((t + 33) % 128)];
    __syncthreads();
  }
}"""
)


def tracked(mode: str, arrives: bool) -> str:
    count = 128 * (arrives + mode.startswith("noinc"))
    text = TRACKED.replace("MODE", mode).replace("COUNT", str(count))
    return text.replace("ARRIVE", "arrive(smem(&bar));" if arrives else "")


@each_schedule
@pytest.mark.parametrize(("mode", "arrives"), [("noinc.shared", False), ("noinc.shared::cta", True), ("shared", True)])
def test_an_mbarrier_tracks_copies(schedule: str, mode: str, arrives: bool) -> None:
    data, out = numbers(512 * 3), np.zeros(384, np.float32)
    launch(tracked(mode, arrives), out, data, block=128, schedule=schedule)
    np.testing.assert_array_equal(out, np.roll(data.reshape(3, 128, 4)[..., 0], -33, axis=1).reshape(-1))


def test_counting_the_copies_of_an_incrementing_arrive_hangs() -> None:
    text = TRACKED.replace("MODE", "shared").replace("COUNT", "128").replace("ARRIVE", "")
    with pytest.raises(Deadlock, match="128 of 128 arrivals missing"):
        launch(text, np.zeros(384, np.float32), numbers(512 * 3), block=128)


def test_an_mbarrier_of_another_cta_is_refused() -> None:
    text = (
        COPY
        + r"""
    KERNEL() {
      __shared__ u64 bar;
      u64 remote;
      asm("mapa.u64 %0, %1, 1;" : "=l"(remote) : "l"(&bar));
      init(smem(&bar), 32);
      cluster_sync();
      if (rank() == 0) asm volatile("cp.async.mbarrier.arrive.noinc.b64 [%0];" :: "l"(remote) : "memory");
      cluster_sync();
    }"""
    )
    with pytest.raises(InvalidAddress, match="its own CTA"):
        launch(text, grid=2, cluster=2, block=1)


@pytest.mark.parametrize(
    "instruction",
    [
        "cp.async.cg.shared.global [%r], [%rd], 8;",
        "cp.async.ca.shared.global [%r], [%rd], 12;",
        "cp.async.ca.shared.global.L2::32B [%r], [%rd], 4;",
        "cp.async.ca.shared::cluster.global [%r], [%rd], 4;",
        "cp.async.ca.shared.global.L2::cache_hint [%r], [%rd], 4;",
        "cp.async.mbarrier.arrive.shared::cluster.b64 [%r];",
        "cp.async.wait_group %r;",
        "cp.async.bulk.wait_all;",
    ],
)
def test_what_does_not_exist_is_refused(instruction: str) -> None:
    with pytest.raises(UnsupportedInstruction):
        run_lanes(f".reg .b32 %r; .reg .b64 %rd; {instruction}", {}, {"y": "u32"})
