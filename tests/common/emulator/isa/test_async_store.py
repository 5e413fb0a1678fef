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

TYPES = {
    "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "f32": np.float32,
    "b64": np.uint64, "u64": np.uint64, "s64": np.int64, "f64": np.float64,
}  # fmt: skip
CONSTRAINTS = {"b32": "r", "u32": "r", "s32": "r", "f32": "f", "b64": "l", "u64": "l", "s64": "l", "f64": "d"}
CTYPES = {"b32": "u32", "u32": "u32", "s32": "int", "f32": "float", "b64": "u64", "u64": "u64", "s64": "long long",
          "f64": "double"}  # fmt: skip

SEND = r"""
KERNEL(TYPE* out, const TYPE* in) {
  __shared__ alignas(32) TYPE x[64 * COUNT];
  __shared__ u64 bar;
  int t = threadIdx.x;
  if (t == 0) { init(smem(&bar), 1); expect(smem(&bar), EXPECTED); }
  for (int i = 0; i < COUNT; i++) x[COUNT * t + i] = (TYPE)(3 * t);
  cluster_sync();
  const TYPE* v = in + COUNT * (64 * blockIdx.x + t);
  ADDRESS to = REMOTE(smem(x + COUNT * t), &x[COUNT * t]), signal = REMOTE(smem(&bar), &bar);
  asm volatile("INSTRUCTION [%0], VALUE, [%1];" :: "A"(to), "A"(signal), INPUTS : "memory");
  WAIT
  for (int i = 0; i < COUNT; i++) out[COUNT * (64 * blockIdx.x + t) + i] = x[COUNT * t + i];
  cluster_sync();
}"""
REMOTE = """
#define SHARED(address, pointer) mapa(address, rank() ^ 1)
#define GENERIC(address, pointer) mapped(pointer, rank() ^ 1)
DEVICE u64 mapped(const void* p, u32 rank) {
  u64 r; asm volatile("mapa.u64 %0, %1, %2;" : "=l"(r) : "l"(p), "r"(rank)); return r;
}
"""


def send(
    instruction: str, kind: str, data: np.ndarray, schedule: str, *, count: int = 1, generic: bool = False,
    expected: int | None = None, wait: str = "wait(smem(&bar), 0);",
) -> np.ndarray:  # fmt: skip
    """Every thread sends `count` values to its place in the other CTA of a pair; returns what both have then."""
    letter = CONSTRAINTS[kind]
    size = 64 * count * data.itemsize if expected is None else expected
    names = ", ".join(f"%{2 + i}" for i in range(count))
    text = SEND.replace("INSTRUCTION", instruction).replace("WAIT", wait)
    for name, value in {
        "TYPE": CTYPES[kind],
        "COUNT": str(count),
        "EXPECTED": str(size),
        "ADDRESS": "u64" if generic else "u32",
        "REMOTE": "GENERIC" if generic else "SHARED",
        "VALUE": names if count == 1 else f"{{{names}}}",
        "INPUTS": ", ".join(f'"{letter}"(v[{i}])' for i in range(count)),
        '"A"': '"l"' if generic else '"r"',
    }.items():
        text = text.replace(name, value)
    out = np.zeros_like(data)
    launch(REMOTE + text, out, data, grid=2, cluster=2, block=64, schedule=schedule)
    return out


def values(kind: str, count: int = 1) -> np.ndarray:
    generator = np.random.default_rng(2)
    dtype = np.dtype(TYPES[kind])
    if dtype.kind == "f":
        return generator.standard_normal((2, 64 * count)).astype(dtype)
    return generator.integers(0, 256, (2, 64 * count * dtype.itemsize), dtype=np.uint8).view(dtype)


STORE = "st.async.shared::cluster.mbarrier::complete_tx::bytes"


@each_schedule
@pytest.mark.parametrize("kind", TYPES)
def test_a_store_to_the_other_cta(schedule: str, kind: str) -> None:
    data = values(kind)
    np.testing.assert_array_equal(send(f"{STORE}.{kind}", kind, data, schedule), data[::-1])


@each_schedule
@pytest.mark.parametrize("kind", ["b32", "f32", "u64"])
@pytest.mark.parametrize("count", [2, 4])
def test_vectors(schedule: str, kind: str, count: int) -> None:
    data = values(kind, count)
    np.testing.assert_array_equal(send(f"{STORE}.v{count}.{kind}", kind, data, schedule, count=count), data[::-1])


@each_schedule
def test_generic_addresses_and_the_weak_qualifier(schedule: str) -> None:
    data = values("u32")
    instruction = "st.async.weak.mbarrier::complete_tx::bytes.u32"
    np.testing.assert_array_equal(send(instruction, "u32", data, schedule, generic=True), data[::-1])


def test_what_was_sent_is_poison_before_the_wait() -> None:
    wait = "__syncthreads(); u32 early = x[t]; wait(smem(&bar), 0); x[t] = early;"
    seen = send(f"{STORE}.u32", "u32", values("u32"), "late", wait=wait)
    assert (seen == 0xFFFF_FFFF).any()


@each_schedule
def test_a_wrong_byte_count_deadlocks(schedule: str) -> None:
    with pytest.raises(Deadlock, match="4 bytes owed"):
        send(f"{STORE}.u32", "u32", values("u32"), schedule, expected=260)


REDUCTIONS = {
    "add.u32": np.add, "add.s32": np.add, "add.u64": np.add, "min.u32": np.minimum, "max.u32": np.maximum,
    "min.s32": np.minimum, "max.s32": np.maximum, "and.b32": np.bitwise_and, "or.b32": np.bitwise_or,
    "xor.b32": np.bitwise_xor,
    "inc.u32": lambda x, y: np.where(x >= y, 0, x + 1), "dec.u32": lambda x, y: np.where((x == 0) | (x > y), y, x - 1),
}  # fmt: skip


@each_schedule
@pytest.mark.parametrize("form", REDUCTIONS)
def test_a_reduction_into_the_other_cta(schedule: str, form: str) -> None:
    kind = form.split(".")[1]
    data = np.random.default_rng(9).integers(-150, 150, (2, 64)).astype(TYPES[kind])
    instruction = f"red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.{form}"
    actual = send(instruction, kind, data, schedule)
    initial = np.broadcast_to(3 * np.arange(64), (2, 64)).astype(TYPES[kind])
    np.testing.assert_array_equal(actual, REDUCTIONS[form](initial, data[::-1]).astype(TYPES[kind]))


@each_schedule
def test_reductions_of_many_lanes_into_one_word(schedule: str) -> None:
    source = r"""
    KERNEL(u32* out) {
      __shared__ u32 x; __shared__ u64 bar;
      if (threadIdx.x == 0) { x = 5; init(smem(&bar), 1); expect(smem(&bar), 3 * 64 * 4); }
      cluster_sync();
      if (rank() != 0)
        asm volatile("red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%0], %1, [%2];"
                     :: "r"(mapa(smem(&x), 0)), "r"(threadIdx.x), "r"(mapa(smem(&bar), 0)) : "memory");
      if (rank() == 0) { wait(smem(&bar), 0); out[threadIdx.x] = x; }
      cluster_sync();
    }"""
    out = np.zeros(64, np.uint32)
    launch(source, out, grid=4, cluster=4, block=64, schedule=schedule)
    assert (out == 5 + 3 * 63 * 32).all()


@each_schedule
def test_release_forms_go_to_global_memory(schedule: str) -> None:
    source = r"""
    KERNEL(u32* words, u16* shorts, u64* sum) {
      int t = threadIdx.x;
      asm volatile("st.async.release.gpu.global.u32 [%0], %1;" :: "l"(words + t), "r"(7 * t) : "memory");
      asm volatile("st.async.mmio.release.sys.b16 [%0], %1;" :: "l"(shorts + t), "h"((u16)(t + 1)) : "memory");
      asm volatile("red.async.release.gpu.global.add.u64 [%0], %1;" :: "l"(sum), "l"((u64)t) : "memory");
      asm volatile("red.async.release.sys.add.s64 [%0], %1;" :: "l"(sum + 1), "l"(-(long long)t) : "memory");
    }"""
    words, shorts, sums = np.zeros(64, np.uint32), np.zeros(64, np.uint16), np.zeros(2, np.int64)
    launch(source, words, shorts, sums, block=64, schedule=schedule)
    np.testing.assert_array_equal(words, 7 * np.arange(64))
    np.testing.assert_array_equal(shorts, 1 + np.arange(64))
    assert sums.tolist() == [2016, -2016]


@each_schedule
def test_bulk_stores_zero_the_shared_memory(schedule: str) -> None:
    source = r"""
    KERNEL(u32* out, u32 small, u64 large) {
      __shared__ alignas(16) u32 x[512];
      int t = threadIdx.x;
      for (int i = t; i < 512; i += 32) x[i] = 9;
      __syncwarp();
      if (t == 0) asm volatile("st.bulk.weak.shared::cta [%0], %1, 0;" :: "r"(smem(x)), "r"(small) : "memory");
      if (t == 1) asm volatile("st.bulk [%0], %1, 0;" :: "l"(x + 100), "l"(large) : "memory");
      if (t == 2) asm volatile("st.bulk.shared::cta [%0], 64, 0;" :: "r"(smem(x + 400)) : "memory");
      __syncwarp();
      for (int i = t; i < 512; i += 32) out[i] = x[i];
    }"""
    out = np.zeros(512, np.uint32)
    launch(source, out, 40, 400, schedule=schedule)
    expected = np.full(512, 9)
    expected[:10] = expected[100:200] = expected[400:416] = 0
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(
    ("address", "size", "fault"),
    [("smem(x)", 12, Misaligned), ("smem(x) + 4", 8, Misaligned), ("smem(x)", 1 << 25, Fault),
     ("smem(x)", 1 << 20, OutOfBounds), ("mapa(smem(x), 1)", 8, InvalidAddress)],
)  # fmt: skip
def test_bulk_stores_are_checked(address: str, size: int, fault: type) -> None:
    source = r"""
    KERNEL(u32 size) {
      __shared__ alignas(16) u32 x[16];
      asm volatile("st.bulk.shared::cta [%0], %1, 0;" :: "r"(ADDRESS), "r"(size) : "memory");
    }""".replace("ADDRESS", address)
    with pytest.raises(fault):
        launch(source, size, block=1)


FAULTY = r"""
KERNEL(u32* out) {
  __shared__ alignas(16) u32 x[16]; __shared__ u64 bar;
  if (threadIdx.x == 0 && rank() == 1) init(smem(&bar), 1);
  cluster_sync();
  if (rank() == 0) asm volatile("INSTRUCTION" :: "r"(TO), "r"(SIGNAL), "l"(out) : "memory");
  cluster_sync();
}"""


@pytest.mark.parametrize(
    ("to", "signal", "fault", "text"),
    [
        ("mapa(smem(x) + 2, 1)", "mapa(smem(&bar), 1)", Misaligned, "4 bytes"),
        ("mapa(smem(x), 1)", "mapa(smem(&bar) + 4, 1)", Misaligned, "8 bytes"),
        ("mapa(smem(x), 1)", "smem(&bar)", InvalidAddress, "one CTA"),
        ("mapa(smem(x), 2)", "mapa(smem(&bar), 2)", InvalidAddress, "rank 2"),
        ("smem(x)", "smem(&bar)", BarrierFault, "no mbarrier"),
    ],
)
def test_stores_check_addresses(to: str, signal: str, fault: type, text: str) -> None:
    program = FAULTY.replace("INSTRUCTION", f"{STORE}.u32 [%0], 5, [%1];").replace("TO", to).replace("SIGNAL", signal)
    with pytest.raises(fault, match=text):
        launch(program, np.zeros(4, np.uint32), grid=2, cluster=2, schedule="early")


def test_a_release_store_to_shared_memory_faults() -> None:
    program = FAULTY.replace("INSTRUCTION", "{.reg .b64 a; cvta.shared.u64 a, %3; st.async.release.gpu.u32 [a], 5;}")
    program = program.replace('"r"(TO), "r"(SIGNAL), "l"(out)', '"r"(0), "r"(0), "l"(out), "l"((u64)smem(x))')
    with pytest.raises(InvalidAddress, match="this form does not write"):
        launch(program, np.zeros(4, np.uint32), grid=2, cluster=2)


@pytest.mark.parametrize(
    "instruction",
    [
        "st.async.shared::cluster.u32 [%r], %r, [%r];",
        "st.async.shared::cta.mbarrier::complete_tx::bytes.u32 [%r], %r, [%r];",
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.u16 [%r], %h, [%r];",
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.u32 [%r], %r, [%r];",
        "st.async.mmio.release.gpu.global.u32 [%rd], %r;",
        "st.async.release.gpu.global.v2.u32 [%rd], {%r, %r};",
        "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.s64 [%r], %rd, [%r];",
        "red.async.relaxed.gpu.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r], %r, [%r];",
        "red.async.release.gpu.global.min.u32 [%rd], %r;",
        "st.bulk.shared::cta [%r], %r, 1;",
        "st.bulk.shared::cluster [%r], %r, 0;",
    ],
)
def test_what_does_not_exist_is_refused(instruction: str) -> None:
    with pytest.raises(UnsupportedInstruction):
        run_lanes(f".reg .b16 %h; .reg .b32 %r; .reg .b64 %rd; {instruction}", {}, {"y": "u32"})
