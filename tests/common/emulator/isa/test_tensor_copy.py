import numpy as np
import pytest

from common.emulator import (
    Deadlock,
    DescriptorFault,
    InvalidAddress,
    Misaligned,
    OutOfBounds,
    TensorMap,
    UnsupportedInstruction,
)
from common.emulator.hardware.swizzle import swizzle_addresses
from tests.common.emulator.isa.async_programs import each_schedule, launch
from tests.common.emulator.ptx_kernels import run_lanes


def halves(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float16)


def map_2d(array: np.ndarray, box: tuple[int, int], **options) -> TensorMap:
    """A tensor map of a row-major matrix; `box` is (rows, columns)."""
    rows, columns = array.shape
    return TensorMap(array.dtype, array, (columns, rows), (array.strides[0],), box[::-1], **options)


# -- a pipeline ----------------------------------------------------------------------------------------------------

RING = r"""
KERNEL(MAP in, MAP out, int tiles) {
  extern __shared__ __align__(1024) u16 pool[];  // 3 stages of 64 x 64, 2 results
  __shared__ u64 full[3], empty[3];
  int t = threadIdx.x;
  if (t == 0) for (int i = 0; i < 3; i++) { init(smem(full + i), 1); init(smem(empty + i), 64); }
  fence();
  __syncthreads();
  u32 base = smem(pool);
  if (t == 64) {
    for (int s = 0; s < tiles; s++) {
      wait(smem(empty + s % 3), (s / 3 & 1) ^ 1);
      expect(smem(full + s % 3), EXPECTED);
      tile_load(base + 8192 * (s % 3), in, 64 * s, 64 * blockIdx.x, smem(full + s % 3));
    }
  } else if (t < 64) {
    for (int s = 0; s < tiles; s++) {
      wait(smem(full + s % 3), s / 3 & 1);
      if (t == 0) asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
      asm volatile("bar.sync 1, 64;" ::: "memory");
      u16* from = (u16*)pool + 4096 * (s % 3);
      u16* to = (u16*)pool + 4096 * (3 + s % 2);
      for (int i = t; i < 4096; i += 64) to[i] = from[i] ^ 0x8000;
      arrive(smem(empty + s % 3));
      fence();
      asm volatile("bar.sync 1, 64;" ::: "memory");
      if (t == 0) { tile_store(out, 64 * s, 64 * blockIdx.x, smem(to)); commit(); }
    }
    if (t == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
}"""


def ring(expected: int, schedule: str = "late", seed: int = 1, rows: int = 100, columns: int = 300):
    """Copies a matrix with its signs flipped, in tiles of 64 x 64 that stick out of it."""
    data, out = halves(rows, columns + 4), np.zeros((rows, columns + 4), np.float16)
    options = {"swizzle": "128B"}
    run = launch(
        RING.replace("EXPECTED", str(expected)),
        *(map_2d(data, (64, 64), **options), map_2d(out, (64, 64), **options), -(-columns // 64)),
        grid=2, block=96, shared=5 * 8192, schedule=schedule, seed=seed,
    )  # fmt: skip
    return data, out, run


@each_schedule
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_ring_of_swizzled_tiles_over_a_ragged_matrix(schedule: str, seed: int) -> None:
    data, out, run = ring(8192, schedule=schedule, seed=seed)
    np.testing.assert_array_equal(out, -data)
    assert run.counters.bytes["TMA load"] == run.counters.bytes["TMA store"] == 2 * 5 * 8192


@each_schedule
@pytest.mark.parametrize(("expected", "owed"), [(8208, "16 bytes owed"), (4096, "4096 bytes more than expected")])
def test_a_wrong_byte_count_deadlocks_and_says_what_is_owed(schedule: str, expected: int, owed: str) -> None:
    with pytest.raises(Deadlock, match=owed):
        ring(expected, schedule=schedule)


# -- shapes --------------------------------------------------------------------------------------------------------


def copy_program(dimensions: int, form: str = "shared::cluster") -> str:
    """Loads one box, then stores it through a second map, at coordinates given as arguments."""
    letters = [f"c{i}" for i in range(dimensions)]
    vector = ", ".join(f"%{4 + i}" for i in range(dimensions))
    inputs = ", ".join(f'"r"({c})' for c in letters)
    return (
        r"""
    KERNEL(MAP in, MAP out, u32 bytes, PARAMETERS) {
      extern __shared__ __align__(1024) u8 pool[];
      __shared__ u64 bar;
      init(smem(&bar), 1);
      fence();
      expect(smem(&bar), bytes);
      asm volatile("cp.async.bulk.prefetch.tensor.Nd.L2.global.tile [%1, {VECTOR}];"
                   "cp.async.bulk.tensor.Nd.FORM.global.mbarrier::complete_tx::bytes.L2::cache_hint"
                   " [%0], [%1, {VECTOR}], [%2], %3;"
                   :: "r"(smem(pool)), "l"(&in), "r"(smem(&bar)), "l"(0ull), INPUTS : "memory");
      wait(smem(&bar), 0);
      asm volatile("cp.async.bulk.tensor.Nd.global.shared::cta.bulk_group.L2::cache_hint [%1, {VECTOR}], [%0], %3;"
                   :: "r"(smem(pool)), "l"(&out), "r"(0), "l"(0ull), INPUTS : "memory");
      drain();
    }""".replace("Nd", f"{dimensions}d")
        .replace("VECTOR", vector)
        .replace("INPUTS", inputs)
        .replace("FORM", form)
        .replace("PARAMETERS", ", ".join(f"int {c}" for c in letters))
    )


def tensor_map(array: np.ndarray, box: tuple[int, ...], **options) -> TensorMap:
    strides = array.strides[::-1][1:]
    return TensorMap(array.dtype, array, array.shape[::-1], strides, box[::-1], **options)


@each_schedule
@pytest.mark.parametrize("form", ["shared::cta", "shared::cluster"])
@pytest.mark.parametrize(
    ("shape", "box", "at"),
    [
        ((1000,), (256,), (800,)),
        ((50, 64), (32, 32), (30, 16)),
        ((5, 6, 32), (2, 4, 16), (4, 3, 8)),
        ((3, 4, 5, 16), (2, 2, 3, 8), (2, 1, 3, 8)),
        ((3, 2, 4, 5, 16), (2, 2, 2, 3, 8), (1, 1, 3, 2, 0)),
    ],
)
def test_boxes_of_every_rank(schedule: str, form: str, shape: tuple, box: tuple, at: tuple) -> None:
    data = np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape)
    out = np.zeros_like(data)
    size = 4 * int(np.prod(box))
    run = launch(
        copy_program(len(shape), form),
        *(tensor_map(data, box), tensor_map(out, box), size, *at[::-1]),
        block=1, shared=size + 1024, schedule=schedule,
    )  # fmt: skip
    inside = tuple(slice(start, start + extent) for start, extent in zip(at, box, strict=True))
    expected = np.zeros_like(data)
    expected[inside] = data[inside]
    np.testing.assert_array_equal(out, expected)
    assert run.counters.bytes["L2 prefetch"] == size


DUMP = r"""
KERNEL(MAP map, u32* out, int x, int y, u32 bytes, u32 offset, u32 words) {
  extern __shared__ __align__(1024) u8 pool[];
  __shared__ u64 bar;
  int t = threadIdx.x;
  if (t == 0) {
    init(smem(&bar), 1);
    fence();
    expect(smem(&bar), bytes);
    tile_load(smem(pool) + offset, map, x, y, smem(&bar));
  }
  __syncthreads();
  wait(smem(&bar), 0);
  for (int i = t; i < words; i += 32) out[i] = ((u32*)(pool + offset))[i];
}"""


@each_schedule
@pytest.mark.parametrize("offset", [0, 128, 896])
def test_the_swizzle_follows_absolute_addresses(schedule: str, offset: int) -> None:
    data = np.arange(64 * 64, dtype=np.uint16).reshape(64, 64)
    out = np.zeros(8192 // 4, np.uint32)
    launch(
        DUMP,
        *(map_2d(data, (32, 64), swizzle="128B"), out, 0, 16, 4096, offset, 1024),
        shared=16384,
        schedule=schedule,
    )
    linear = np.arange(0, 4096, 16) + offset
    places = (swizzle_addresses(3, linear) - offset) // 16
    chunks = data[16:48].reshape(-1, 8)
    expected = np.empty_like(chunks)
    expected[places] = chunks
    np.testing.assert_array_equal(out.view(np.uint16)[:2048], expected.reshape(-1))


@each_schedule
@pytest.mark.parametrize("fill", ["zero", "nan"])
def test_a_box_outside_the_tensor_is_filled_and_counted_in_full(schedule: str, fill: str) -> None:
    data = halves(20, 24)
    out = np.zeros(16 * 16 // 2, np.uint32)
    launch(
        DUMP,
        *(map_2d(data, (16, 16), oob_fill=fill), out, -8, 12, 512, 0, 128),
        shared=2048,
        schedule=schedule,
    )
    expected = np.full((16, 16), np.nan if fill == "nan" else 0, np.float16)
    expected[:8, 8:] = data[12:, :8]
    np.testing.assert_array_equal(out.view(np.float16).reshape(16, 16), expected)


def test_without_the_wait_the_box_is_poison_and_nothing_else_is() -> None:
    """Rows shorter than the swizzle span leave gaps, which a load does not touch."""
    data = np.arange(16 * 64, dtype=np.float32).reshape(16, 64)
    wait = "  wait(smem(&bar), 0);\n"
    text = DUMP.replace(wait, "").removesuffix("}") + wait + "}"
    text = text.replace("int t = threadIdx.x;", "int t = threadIdx.x; ((u32*)pool)[t] = 5; __syncthreads();")
    out = np.zeros(32, np.uint32)
    launch(text, map_2d(data, (8, 16), swizzle="128B"), out, 0, 0, 512, 0, 32, shared=2048)
    assert np.array_equal(out, np.where(np.arange(32) % 32 < 16, np.uint32(0xFFFF_FFFF), np.uint32(5)))


# -- clusters ------------------------------------------------------------------------------------------------------

MULTICAST = r"""
KERNEL(MAP in, u32* out, u16 mask) {
  extern __shared__ __align__(1024) u32 pool[];
  __shared__ u64 bar;
  int t = threadIdx.x;
  if (t == 0) { init(smem(&bar), 1); expect(smem(&bar), CLUSTER * 1024); }
  fence();
  cluster_sync();
  if (t == 0)
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
                 ".cta_group::1 [%0], [%1, {%2, %3}], [%4], %5;"
                 :: "r"(smem(pool) + 1024 * rank()), "l"(&in), "r"(0), "r"(8 * rank()), "r"(smem(&bar)), "h"(mask)
                 : "memory");
  wait(smem(&bar), 0);
  for (int i = t; i < 256 * CLUSTER; i += 32) out[256 * CLUSTER * blockIdx.x + i] = pool[i];
  cluster_sync();
}"""


@each_schedule
@pytest.mark.parametrize("cluster", [2, 4])
@pytest.mark.parametrize("seed", [1, 2])
def test_each_cta_multicasts_its_slice(schedule: str, cluster: int, seed: int) -> None:
    data = np.random.default_rng(3).integers(0, 1 << 32, (8 * cluster, 32), dtype=np.uint32)
    out = np.zeros((2 * cluster, 8 * cluster, 32), np.uint32)
    run = launch(
        MULTICAST.replace("CLUSTER", str(cluster)),
        *(map_2d(data, (8, 32)), out, (1 << cluster) - 1),
        grid=2 * cluster, cluster=cluster, shared=8192, schedule=schedule, seed=seed,
    )  # fmt: skip
    np.testing.assert_array_equal(out, np.broadcast_to(data, out.shape))
    assert run.counters.bytes["TMA load"] == out.nbytes


def test_a_multicast_that_misses_a_cta_hangs() -> None:
    data, out = np.zeros((16, 32), np.uint32), np.zeros((2, 16, 32), np.uint32)
    with pytest.raises(Deadlock, match="2048 bytes owed"):
        launch(MULTICAST.replace("CLUSTER", "2"), map_2d(data, (8, 32)), out, 0b01, grid=2, cluster=2, shared=8192)


PAIR = r"""
KERNEL(MAP in, u32* out) {
  extern __shared__ __align__(1024) u32 pool[];
  __shared__ u64 bar;
  int t = threadIdx.x;
  u32 leader = smem(&bar) & 0xFEFFFFFF;
  if (t == 0) { init(smem(&bar), 1); if (rank() % 2 == 0) expect(smem(&bar), BYTES); }
  fence();
  cluster_sync();
  if (t == 0 && ISSUES)
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytesMODE.cta_group::2"
                 " [%0], [%1, {%2, %3}], [%4]OPERAND;"
                 :: "r"(smem(pool)), "l"(&in), "r"(0), "r"(8 * rank()), "r"(leader), "h"((u16)15) : "memory");
  if (rank() % 2 == 0) wait(leader, 0);
  cluster_sync();
  for (int i = t; i < 256; i += 32) out[256 * blockIdx.x + i] = pool[i];
}"""


def pair(mode: str, operand: str, issues: str, size: int, schedule: str) -> tuple[np.ndarray, np.ndarray]:
    data = np.random.default_rng(3).integers(0, 1 << 32, (4, 8, 32), dtype=np.uint32)
    out = np.zeros_like(data)
    text = PAIR.replace("MODE", mode).replace("OPERAND", operand).replace("ISSUES", issues).replace("BYTES", str(size))
    launch(text, map_2d(data.reshape(32, 32), (8, 32)), out, grid=4, cluster=4, shared=8192, schedule=schedule)
    return data, out


@each_schedule
def test_both_ctas_of_a_pair_signal_its_leader(schedule: str) -> None:
    data, out = pair("", "", "true", 2048, schedule)
    np.testing.assert_array_equal(out, data)


@each_schedule
def test_a_paired_multicast_signals_the_even_cta_of_each_pair(schedule: str) -> None:
    data, out = pair(".multicast::cluster", ", %5", "rank() == 3", 2048, schedule)
    np.testing.assert_array_equal(out, np.broadcast_to(data[3], out.shape))


def test_an_mbarrier_in_another_cta_needs_cta_group_2() -> None:
    text = PAIR.replace("MODE", "").replace("OPERAND", "").replace("ISSUES", "true").replace("BYTES", "2048")
    data = np.zeros((32, 32), np.uint32)
    with pytest.raises(InvalidAddress, match="without .cta_group::2"):
        launch(text.replace(".cta_group::2", ""), map_2d(data, (8, 32)), data, grid=4, cluster=4, shared=8192)


# -- boxes that end within a tensor ----------------------------------------------------------------------------------

BOX_ROWS, BIG = 8, 1 << 30


def begins_before(array: np.ndarray) -> TensorMap:
    """(BOX_ROWS - n, end) are the n rows before row `end`: the tensor starts BOX_ROWS rows before the array."""
    (rows, columns), row = array.shape, array.strides[0]
    dims, box = (columns, rows + BOX_ROWS, BOX_ROWS), (columns, 1, BOX_ROWS)
    return TensorMap(array.dtype, array, dims, (row, row), box, byte_offset=-BOX_ROWS * row)


def wraps_around(array: np.ndarray) -> TensorMap:
    """(BIG, end, BIG - n) are the n rows before row `end`: BIG times the largest stride is -BIG rows modulo 2^64."""
    columns, row = array.shape[1], array.strides[0]
    dims, box = (columns, BIG, 2 * BIG - 1, 2 * BIG - 1), (columns, BOX_ROWS, 1, 1)
    return TensorMap(array.dtype, array, dims, (row, row, (1 << 34) - row), box)


@each_schedule
@pytest.mark.parametrize(
    ("make_map", "place"),
    [
        (begins_before, lambda count, end: (end, BOX_ROWS - count)),
        (wraps_around, lambda count, end: (BIG - count, end, BIG)),
    ],
)
@pytest.mark.parametrize("count", [0, 3, BOX_ROWS])
@pytest.mark.parametrize("end", [8, 20])
def test_a_box_may_end_within_an_array(schedule: str, make_map, place, count: int, end: int) -> None:
    """As kernels do it whose sequences lie one after the other. Nothing is there where the tensor starts."""
    data = np.arange(1, 20 * 32 + 1, dtype=np.float32).reshape(20, 32)
    out = np.zeros_like(data)
    at = place(count, end)
    text = copy_program(1 + len(at))
    launch(text, make_map(data), make_map(out), BOX_ROWS * 128, 0, *at, block=1, shared=2048, schedule=schedule)
    expected = np.zeros_like(data)
    expected[end - count : end] = data[end - count : end]
    np.testing.assert_array_equal(out, expected)


def test_what_lies_where_the_tensor_starts_does_not_matter() -> None:
    """Rows of half a megabyte: without room between them, the tensor of one array would start in the other."""
    data, out = (np.zeros((20, 1 << 17), np.float32)[:, :32] for _ in range(2))
    data[...] = np.arange(1, 20 * 32 + 1).reshape(20, 32)
    launch(copy_program(3), begins_before(data), begins_before(out), 1024, 0, 8, 0, block=1, shared=2048)
    np.testing.assert_array_equal(out[:8], data[:8])
    assert not out[8:].any()


def test_a_box_before_the_array_faults() -> None:
    data = np.zeros((20, 32), np.float32)
    with pytest.raises(OutOfBounds, match="lies in no allocation, nor does .* the first that the copy touches"):
        launch(copy_program(3), begins_before(data), begins_before(data), 1024, 0, 4, 0, block=1, shared=2048)


# -- stores and reductions -----------------------------------------------------------------------------------------

STORE = r"""
KERNEL(MAP map, const u32* in, int x, int y, u32 words, u32* seen) {
  extern __shared__ __align__(1024) u32 pool[];
  int t = threadIdx.x;
  for (int i = t; i < words; i += 32) pool[i] = in[i];
  fence();
  __syncthreads();
  if (t == 0) {
    asm volatile("INSTRUCTION [%0, {%1, %2}], [%3];" :: "l"(&map), "r"(x), "r"(y), "r"(smem(pool)) : "memory");
    WAIT
    if (seen) seen[1] = *(volatile u32*)seen;
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
  __syncthreads();
}"""
PLAIN = "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group"


def store(instruction: str, wait: str = "commit();") -> str:
    return STORE.replace("INSTRUCTION", instruction).replace("WAIT", wait)


@each_schedule
@pytest.mark.parametrize("at", [(0, 0), (8, 3), (24, 16)])
def test_a_store_is_clipped(schedule: str, at: tuple[int, int]) -> None:
    out, tile = np.full((20, 40), -1, np.float32), np.arange(256, dtype=np.float32)
    launch(store(PLAIN), map_2d(out, (8, 32)), tile, *at, 256, 0, shared=2048, schedule=schedule)
    expected = np.full((20, 40), -1, np.float32)
    x, y = at
    part = expected[y : y + 8, x : x + 32]
    part[...] = tile.reshape(8, 32)[: part.shape[0], : part.shape[1]]
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize(("read", "visible"), [("", True), (".read", False)])
def test_a_store_is_poison_until_it_is_complete(read: str, visible: bool) -> None:
    out, tile = np.zeros((8, 32), np.uint32), np.arange(100, 356, dtype=np.uint32)
    seen = out.reshape(-1)[16:]
    wait = f'commit(); asm volatile("cp.async.bulk.wait_group{read} 0;" ::: "memory");'
    text = store(PLAIN, wait).replace("u32* seen)", "u32* seen, u32* kept)").replace("seen[1]", "kept[0]")
    kept = np.zeros(1, np.uint32)
    launch(text, map_2d(out, (8, 32)), tile, 0, 0, 256, seen, kept, shared=2048)
    assert kept[0] == (116 if visible else 0xFFFF_FFFF)
    np.testing.assert_array_equal(out.reshape(-1), tile)


@each_schedule
def test_shared_memory_outlives_its_cta_until_a_store_has_read_it(schedule: str) -> None:
    text = store(PLAIN).replace('asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");', "")
    out, tile = np.zeros((8, 32), np.uint32), np.arange(256, dtype=np.uint32)
    launch(text, map_2d(out, (8, 32)), tile, 0, 0, 256, 0, shared=2048, schedule=schedule)
    np.testing.assert_array_equal(out.reshape(-1), tile)


INTEGERS = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "inc": lambda x, y: np.where(x >= y, 0, x + 1),
    "dec": lambda x, y: np.where((x == 0) | (x > y), y, x - 1),
}  # fmt: skip


def reduce(op: str, old: np.ndarray, new: np.ndarray, schedule: str) -> np.ndarray:
    result = old.copy()
    text = store(f"cp.reduce.async.bulk.tensor.2d.global.shared::cta.{op}.tile.bulk_group")
    launch(text, map_2d(result, new.shape), new, 0, 0, new.nbytes // 4, 0, shared=new.nbytes, schedule=schedule)
    return result


@each_schedule
@pytest.mark.parametrize(
    ("op", "kind"),
    [(op, kind) for op in INTEGERS for kind in ("u4", "i4", "u8") if kind == "u4" or op not in ("inc", "dec")],
)
def test_integer_reductions(schedule: str, op: str, kind: str) -> None:
    generator = np.random.default_rng(4)
    old, new = (generator.integers(-9, 9, (8, 32)).astype(kind) for _ in range(2))
    np.testing.assert_array_equal(reduce(op, old, new, schedule), INTEGERS[op](old, new))


@each_schedule
@pytest.mark.parametrize(("op", "kind"), [("add", "f2"), ("min", "f2"), ("max", "f2"), ("add", "f4")])
def test_float_reductions(schedule: str, op: str, kind: str) -> None:
    old, new = halves(8, 32).astype(kind), halves(8, 32, seed=1).astype(kind)
    np.testing.assert_array_equal(reduce(op, old, new, schedule), INTEGERS[op](old, new))


@each_schedule
def test_a_clipped_reduction(schedule: str) -> None:
    out, tile = np.ones((20, 40), np.int32), np.arange(256, dtype=np.int32)
    text = store("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group")
    launch(text, map_2d(out, (8, 32)), tile, 24, 16, 256, 0, shared=2048, schedule=schedule)
    expected = np.ones((20, 40), np.int32)
    expected[16:, 24:] += tile.reshape(8, 32)[:4, :16]
    np.testing.assert_array_equal(out, expected)


@each_schedule
@pytest.mark.parametrize("offset", [0, 128, 640])
@pytest.mark.parametrize(("instruction", "factor"), [("", 1), ("add", 2)])
def test_swizzled_sources_anywhere_in_the_period(schedule: str, offset: int, instruction: str, factor: int) -> None:
    source = r"""
    KERNEL(MAP in, MAP out, u32 offset) {
      extern __shared__ __align__(1024) u8 pool[];
      __shared__ u64 bar;
      init(smem(&bar), 1);
      fence();
      expect(smem(&bar), 4096);
      tile_load(smem(pool) + offset, in, 0, 0, smem(&bar));
      wait(smem(&bar), 0);
      asm volatile("INSTRUCTION [%0, {%1, %1}], [%2];" :: "l"(&out), "r"(0), "r"(smem(pool) + offset) : "memory");
      drain();
    }"""
    reduction = f"cp.reduce.async.bulk.tensor.2d.global.shared::cta.{instruction}.bulk_group"
    text = source.replace("INSTRUCTION", reduction if instruction else PLAIN)
    data = np.arange(2048, dtype=np.uint16).reshape(32, 64).view(np.float16)
    data = np.where(np.isfinite(data), data, np.float16(1)).astype(np.float16)
    out = data.copy() if instruction else np.zeros_like(data)
    maps = (map_2d(array, (32, 64), swizzle="128B") for array in (data, out))
    launch(text, *maps, offset, block=1, shared=8192, schedule=schedule)
    np.testing.assert_array_equal(out, factor * data)


def test_a_reduction_the_type_does_not_take_faults() -> None:
    with pytest.raises(DescriptorFault, match="reduction xor"):
        reduce("xor", np.ones((8, 32), np.float32), np.ones((8, 32), np.float32), "late")


# -- faults --------------------------------------------------------------------------------------------------------


def load_at(x: int, y: int, offset: int, box: tuple[int, int] = (8, 32), rows: int = 16) -> None:
    data = np.zeros((rows, 64), np.float32)
    size = 4 * box[0] * box[1]
    launch(DUMP, map_2d(data, box), np.zeros(1024, np.uint32), x, y, size, offset, 4, shared=2048)


@pytest.mark.parametrize(
    ("x", "offset", "fault", "text"),
    [(0, 64, Misaligned, "128"), (0, 16, Misaligned, "128"), (2, 0, DescriptorFault, r"coordinates\[0\]"),
     (0, 1152, OutOfBounds, "shared")],
)  # fmt: skip
def test_misaligned_and_overflowing_loads_fault(x: int, offset: int, fault: type, text: str) -> None:
    with pytest.raises(fault, match=text) as caught:
        load_at(x, 0, offset)
    assert "cp.async.bulk.tensor" in str(caught.value)


def test_a_tensor_larger_than_its_allocation_faults() -> None:
    data = np.zeros((16, 64), np.float32)
    long = TensorMap(np.float32, data, (64, 24), (256,), (32, 8))
    with pytest.raises(OutOfBounds, match="outside the allocation"):
        launch(DUMP, long, np.zeros(1024, np.uint32), 0, 16, 1024, 0, 4, shared=2048)


def test_memory_that_holds_no_tensor_map_faults() -> None:
    with pytest.raises(DescriptorFault, match="holds no tensor map"):
        launch(DUMP, bytes(128), np.zeros(1024, np.uint32), 0, 0, 1024, 0, 4, shared=2048)


def test_a_box_of_another_rank_faults() -> None:
    data = np.zeros((4, 4, 64), np.float32)
    with pytest.raises(DescriptorFault, match="rank 3"):
        launch(DUMP, tensor_map(data, (2, 4, 32)), np.zeros(1024, np.uint32), 0, 0, 1024, 0, 4, shared=2048)


def test_negative_coordinates_of_a_store_fault() -> None:
    with pytest.raises(DescriptorFault, match="non-negative"):
        launch(
            store(PLAIN),
            *(map_2d(np.zeros((8, 32), np.uint32), (8, 32)), np.zeros(256, np.uint32), -4, 0, 256, 0),
            shared=2048,
        )


@each_schedule
def test_a_tensor_map_in_global_memory(schedule: str) -> None:
    data, out = np.arange(512, dtype=np.float32).reshape(16, 32), np.zeros(256, np.float32)
    text = DUMP.replace("MAP map", "const Map* map").replace("map, x, y", "*map, x, y")
    launch(text, map_2d(data, (8, 32)), out, 0, 4, 1024, 0, 256, shared=2048, schedule=schedule)
    np.testing.assert_array_equal(out, data[4:12].reshape(-1))


def test_a_tensor_map_in_shared_memory_faults() -> None:
    text = DUMP.replace("map, x, y", "*(Map*)pool, x, y")
    with pytest.raises(DescriptorFault, match="must be in .param, .const or .global"):
        launch(
            text,
            *(map_2d(np.zeros((8, 32), np.uint32), (8, 32)), np.zeros(256, np.uint32), 0, 0, 1024, 0, 4),
            shared=2048,
        )


@pytest.mark.parametrize(
    ("instruction", "named"),
    [
        ("cp.async.bulk.tensor.3d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
         " [%r], [%rd, {%r, %r, %r}], [%r], {%h, %h};", "vector of 1"),
        ("cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
         " [%r], [%rd, {%r, %r, %r, %r}], [%r];", "im2col offsets is missing"),
        ("cp.async.bulk.tensor.2d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
         " [%r], [%rd, {%r, %r}], [%r], {%h};", "im2col needs .3d"),
        ("cp.async.bulk.tensor.4d.shared::cluster.global.im2col::w.mbarrier::complete_tx::bytes"
         " [%r], [%rd, {%r, %r, %r, %r}], [%r], {%h};", "vector of 2"),
        ("cp.async.bulk.tensor.3d.global.shared::cta.im2col.bulk_group [%rd, {%r, %r, %r}], [%r];", "im2col"),
        ("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile::scatter4.bulk_group"
         " [%rd, {%r, %r, %r, %r, %r}], [%r];", "scatter4"),
        ("cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes"
         " [%r], [%rd, {%r, %r}], [%r];", "vector of 5"),
        ("cp.async.bulk.tensor.3d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes"
         " [%r], [%rd, {%r, %r, %r, %r, %r}], [%r];", "are .2d"),
        ("cp.async.bulk.tensor.2d.global.shared::cta.tile::gather4.bulk_group [%rd, {%r, %r, %r, %r, %r}], [%r];",
         "gather4"),
        ("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group.cta_group::1 [%rd, {%r, %r}], [%r];", "cta_group"),
        ("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd, {%r}], [%r];", "vector of 2"),
        ("cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes.multicast::cluster"
         " [%r], [%rd, {%r, %r}], [%r], %h;", "multicast"),
        ("cp.reduce.async.bulk.tensor.2d.global.shared::cta.mul.bulk_group [%rd, {%r, %r}], [%r];", "needs one of"),
    ],
)  # fmt: skip
def test_forms_that_do_not_exist_are_refused_by_name(instruction: str, named: str) -> None:
    with pytest.raises(UnsupportedInstruction, match=named):
        run_lanes(f".reg .b16 %h; .reg .b32 %r; .reg .b64 %rd; {instruction}", {}, {"y": "u32"})
