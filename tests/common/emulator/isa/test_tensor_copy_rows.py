"""Instructions that copy rows by number or along a walk: im2col, im2col::w, gather4, scatter4."""

from __future__ import annotations

import numpy as np
import pytest

from common.emulator import Deadlock, DescriptorFault, TensorMap
from tests.common.emulator.isa.async_programs import each_schedule, launch

LOAD = "cp.async.bulk.tensor.{}.shared::cluster.global.{}.mbarrier::complete_tx::bytes"
COPIES = r"""
// Copy number c has its coordinates and offsets at place[8 * c]; its `words` words go to out[c].
KERNEL(MAP map, const int* place, u32* out, u32 bytes, u32 words, u32 copies) {
  extern __shared__ __align__(1024) u32 pool[];
  __shared__ u64 bar;
  int t = threadIdx.x;
  if (t == 0) init(smem(&bar), 1);
  fence();
  __syncthreads();
  for (int c = 0; c < copies; c++, place += 8) {
    if (t == 0) {
      expect(smem(&bar), bytes);
      asm volatile("PREFETCH; INSTRUCTION;"
        :: "r"(smem(pool)), "l"(&map), "r"(smem(&bar)), "r"(place[0]), "r"(place[1]), "r"(place[2]), "r"(place[3]),
           "r"(place[4]), "h"((u16)place[5]), "h"((u16)place[6]), "h"((u16)place[7]) : "memory");
    }
    wait(smem(&bar), c & 1);
    for (int i = t; i < words; i += 32) out[c * words + i] = pool[i];
    __syncthreads();
  }
}"""


def copies(
    form: str, rank: int, tensor_map: TensorMap, places: list, rows: int, columns: int, schedule: str, expected=None
) -> np.ndarray:
    """What loads at `places` (coordinates, then im2col offsets) bring: float32 (copies, rows, columns).

    Unswizzled rows. `expected`: bytes that the kernel expects, if not all of them.
    """
    coordinates = 5 if "gather4" in form else rank
    offsets = len(places[0]) - coordinates
    vector = ", ".join(f"%{3 + number}" for number in range(coordinates))
    info = ", {" + ", ".join(f"%{8 + number}" for number in range(offsets)) + "}" if offsets else ""
    load = f"{LOAD.format(f'{rank}d', form)} [%0], [%1, {{{vector}}}], [%2]{info}"
    prefetch = f"cp.async.bulk.prefetch.tensor.{rank}d.L2.global.{form} [%1, {{{vector}}}]{info}"
    table = np.zeros((len(places), 8), np.int32)
    for row, place in zip(table, places):
        row[:coordinates], row[5 : 5 + offsets] = place[:coordinates], place[coordinates:]
    out = np.zeros((len(places), rows, columns), np.float32)
    size = out[0].nbytes
    text = COPIES.replace("PREFETCH", prefetch).replace("INSTRUCTION", load)
    run = launch(
        text, tensor_map, table, out, size if expected is None else expected, size // 4, len(places), shared=32768,
        schedule=schedule,
    )  # fmt: skip
    assert run.counters.bytes["L2 prefetch"] == run.counters.bytes["TMA load"] == out.nbytes
    return out


def floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def byte_strides(array: np.ndarray) -> tuple[int, ...]:
    return array.strides[::-1][1:]


@each_schedule
def test_the_taps_of_a_padded_convolution(schedule: str) -> None:
    """For each tap of a 3x3 filter, columns of 32 output pixels; their products with the weights add up."""
    image, weights = floats(2, 7, 6, 16), floats(3, 3, 16)  # NHWC, RSC
    tensor_map = TensorMap.im2col(
        "float32", image, image.shape[::-1], byte_strides(image),
        pixel_box_lower_corner=(-1, -1), pixel_box_upper_corner=(-1, -1), channels_per_pixel=16, pixels_per_column=32,
    )  # fmt: skip
    pixels = [(w, h, n) for n in range(2) for h in range(7) for w in range(6)]
    starts = pixels[::32]
    places = [[0, w - 1, h - 1, n, s, r] for r in range(3) for s in range(3) for w, h, n in starts]
    columns = copies("im2col", 4, tensor_map, places, 32, 16, schedule).reshape(3, 3, -1, 16)
    found = np.einsum("rspc,rsc->p", columns, weights)[: len(pixels)].reshape(2, 7, 6)
    padded = np.pad(image, ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
    np.testing.assert_allclose(found, np.einsum("nhwcrs,rsc->nhw", windows, weights), rtol=1e-4, atol=1e-4)


@each_schedule
@pytest.mark.parametrize("rank", [3, 5])
def test_columns_of_other_ranks(schedule: str, rank: int) -> None:
    shape = (2, 5, 12) if rank == 3 else (2, 2, 3, 4, 12)
    data = floats(*shape)
    axes = rank - 2
    tensor_map = TensorMap.im2col("float32", data, shape[::-1], byte_strides(data), [0] * axes, [0] * axes, 8, 20)
    (found,) = copies("im2col", rank, tensor_map, [[4, *[0] * axes, 0, *[0] * axes]], 20, 8, schedule)
    expected = np.zeros((20, 8), np.float32)
    pixels = data.reshape(-1, 12)[:20, 4:]
    expected[: len(pixels)] = pixels
    np.testing.assert_array_equal(found, expected)


def wide_map(data: np.ndarray, mode: str, pixels: int = 16) -> TensorMap:
    strides = byte_strides(data)
    return TensorMap.im2col_wide("float32", data, data.shape[::-1], strides, 0, 0, 32, pixels, mode=mode)


def unswizzled(rows: np.ndarray) -> np.ndarray:
    """Rows of 128 bytes as they are without the 128B swizzle."""
    chunks = rows.reshape(*rows.shape[:-1], 8, 4)
    order = np.arange(8) ^ (np.arange(rows.shape[-2]) % 8)[:, None]
    return np.take_along_axis(chunks, order[..., None], axis=-2).reshape(rows.shape)


@each_schedule
def test_wide_columns_have_their_halo_and_count_it(schedule: str) -> None:
    data = floats(3, 4, 9, 32)  # NHWC
    (found,) = copies("im2col::w", 4, wide_map(data, "w"), [[0, 2, 1, 0, 3, 1]], 19, 32, schedule)
    pixels = [(n, w + 1) for n in range(3) for w in range(9)][2:21]
    expected = [data[n, 1, w] if w < 9 else np.zeros(32, np.float32) for n, w in pixels]
    np.testing.assert_array_equal(unswizzled(found), expected)
    with pytest.raises(Deadlock, match="384 bytes more than expected"):
        copies("im2col::w", 4, wide_map(data, "w"), [[0, 2, 1, 0, 3, 1]], 19, 32, schedule, expected=16 * 128)


@each_schedule
def test_128_pixels_with_a_halo_after_every_32(schedule: str) -> None:
    data = floats(2, 200, 32)
    (found,) = copies("im2col::w::128", 3, wide_map(data, "w128"), [[0, 10, 1, 2, 0]], 136, 32, schedule)
    expected = [data[1, 10 + 32 * group : 44 + 32 * group] for group in range(4)]
    np.testing.assert_array_equal(unswizzled(found), np.concatenate(expected))


@each_schedule
def test_four_rows_of_a_table(schedule: str) -> None:
    table = floats(50, 40)
    tensor_map = TensorMap("float32", table, (40, 50), (160,), (16, 1))
    rows = [[16, 7, 49, 7, 0], [32, 50, -3, 12, 13]]
    first, second = copies("tile::gather4", 2, tensor_map, rows, 4, 16, schedule)
    np.testing.assert_array_equal(first, table[[7, 49, 7, 0], 16:32])
    np.testing.assert_array_equal(second[2:, :8], table[12:14, 32:])
    assert not second[:2].any() and not second[2:, 8:].any()


WRITES = r"""
KERNEL(MAP map, const u32* in, u32 words, u32* seen) {
  extern __shared__ __align__(1024) u32 pool[];
  int t = threadIdx.x;
  for (int i = t; i < words; i += 32) pool[i] = in[i];
  fence();
  __syncthreads();
  if (t == 0) {
    asm volatile("INSTRUCTION [%0, {PLACE}], [%1];" :: "l"(&map), "r"(smem(pool)) : "memory");
    drain_reads();
    if (seen) seen[1] = *(volatile u32*)seen;
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
  __syncthreads();
}"""


def write(instruction: str, place: tuple, tensor_map: TensorMap, values: np.ndarray, schedule: str, seen=0) -> None:
    text = WRITES.replace("INSTRUCTION", instruction).replace("PLACE", ", ".join(map(str, place)))
    launch(text, tensor_map, values, values.nbytes // 4, seen, shared=8192, schedule=schedule)


@each_schedule
@pytest.mark.parametrize("op", [None, "add", "max"])
def test_columns_are_stored_and_reduced(schedule: str, op: str | None) -> None:
    images, values = np.full((2, 3, 5, 16), 100, np.int32), np.arange(160, dtype=np.int32).reshape(20, 8)
    tensor_map = TensorMap.im2col(
        "int32", images, (16, 5, 3, 2), byte_strides(images), (1, 0), (0, 0), 8, 20, element_strides=(1, 2, 1, 1)
    )
    expected = images.copy()
    pixels = [(n, h, w) for n in range(2) for h in range(3) for w in (1, 3)][3:]  # from (w, h, n) = (3, 1, 0) on
    for (n, h, w), row in zip(pixels, values):
        old = expected[n, h, w, 8:]
        old[...] = {None: row, "add": old + row, "max": np.maximum(old, row)}[op]
    kind = "cp.async" if op is None else "cp.reduce.async"
    operation = "" if op is None else f".{op}"
    instruction = f"{kind}.bulk.tensor.4d.global.shared::cta{operation}.im2col_no_offs.bulk_group"
    write(instruction, (8, 3, 1, 0), tensor_map, values, schedule)
    np.testing.assert_array_equal(images, expected)


@each_schedule
def test_four_rows_are_scattered(schedule: str) -> None:
    table, values = np.zeros((30, 24), np.float32), floats(4, 16)
    tensor_map = TensorMap("float32", table, (24, 30), (96,), (16, 1))
    instruction = "cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group"
    write(instruction, (16, 3, 29, 30, 8), tensor_map, values, schedule)
    expected = np.zeros_like(table)
    expected[[3, 29, 8], 16:] = values[[0, 1, 3], :8]
    np.testing.assert_array_equal(table, expected)


def test_a_scattered_row_is_poison_until_the_store_is_complete() -> None:
    table, values, seen = np.zeros((8, 16), np.uint32), np.arange(64, dtype=np.uint32), np.zeros(2, np.uint32)
    tensor_map = TensorMap("uint32", table, (16, 8), (64,), (16, 1))
    text = WRITES.replace("seen[1] = *(volatile u32*)seen", "seen[1] = ((volatile u32*)seen)[2 * 16]")
    instruction = "cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group"
    text = text.replace("INSTRUCTION", instruction).replace("PLACE", "0, 2, 3, 4, 5")
    text = text.replace("u32* seen)", "u32* seen, u32* kept)").replace("seen[1] =", "kept[0] =")
    launch(text, tensor_map, values, 64, table, seen, shared=8192)
    assert seen[0] == 0xFFFF_FFFF
    np.testing.assert_array_equal(table[2:6].reshape(-1), values)


PAIRED = r"""
KERNEL(MAP map, u32* out) {
  extern __shared__ __align__(1024) u32 pool[];
  __shared__ u64 bar;
  int t = threadIdx.x;
  u32 leader = smem(&bar) & 0xFEFFFFFF;
  if (t == 0) { init(smem(&bar), 1); if (rank() % 2 == 0) expect(smem(&bar), 2 * BYTES); }
  fence();
  cluster_sync();
  if (t == 0 && rank() == 3)
    asm volatile("INSTRUCTION.multicast::cluster.cta_group::2 OPERANDS, %3;"
                 :: "r"(smem(pool)), "l"(&map), "r"(leader), "h"((u16)15) : "memory");
  if (rank() % 2 == 0) wait(leader, 0);
  cluster_sync();
  for (int i = t; i < BYTES / 4; i += 32) out[BYTES / 4 * blockIdx.x + i] = pool[i];
}"""


@each_schedule
@pytest.mark.parametrize("form", ["im2col", "tile::gather4"])
def test_a_paired_multicast(schedule: str, form: str) -> None:
    """Every CTA of four gets the rows; the even CTA of each pair is told of both deliveries."""
    data = floats(2, 6, 32)
    if form == "im2col":
        tensor_map = TensorMap.im2col("float32", data, (32, 6, 2), byte_strides(data), [0], [0], 32, 4)
        dimensions, operands = "3d", "[%0], [%1, {0, 4, 0}], [%2], {0}"
    else:
        tensor_map = TensorMap("float32", data, (32, 12), (128,), (32, 1))
        dimensions, operands = "2d", "[%0], [%1, {0, 4, 5, 6, 7}], [%2]"
    text = PAIRED.replace("INSTRUCTION", LOAD.format(dimensions, form)).replace("OPERANDS", operands)
    out = np.zeros((4, 4, 32), np.float32)
    launch(text.replace("BYTES", "512"), tensor_map, out, grid=4, cluster=4, shared=4096, schedule=schedule)
    np.testing.assert_array_equal(out, np.broadcast_to(data.reshape(12, 32)[4:8], out.shape))


def test_a_map_of_another_mode_faults() -> None:
    data = floats(2, 6, 32)
    tiled = TensorMap("float32", data, (32, 6, 2), byte_strides(data), (32, 4, 1))
    pixels = TensorMap.im2col("float32", data, (32, 6, 2), byte_strides(data), [0], [0], 32, 4)
    for form, tensor_map, place in [
        ("im2col", tiled, [0, 0, 0, 0]),
        ("tile", pixels, [0, 0, 0]),
        ("im2col", wide_map(data, "w"), [0, 0, 0, 0]),
        ("im2col::w", pixels, [0, 0, 0, 0, 0]),
        ("im2col::w", wide_map(data, "w128"), [0, 0, 0, 0, 0]),
        ("im2col::w::128", wide_map(data, "w"), [0, 0, 0, 0, 0]),
    ]:
        with pytest.raises(DescriptorFault, match="needs a tensor map for"):
            copies(form, 3, tensor_map, [place], 4, 32, "late")


def test_places_that_stop_the_hardware_fault() -> None:
    data = floats(2, 6, 32)
    pixels = TensorMap.im2col("float32", data, (32, 6, 2), byte_strides(data), [0], [-1], 32, 4)
    for place, message in [([0, 5, 0, 0], "must be in the pixel box"), ([2, 0, 0, 0], "must be a multiple of 4")]:
        with pytest.raises(DescriptorFault, match=message):
            copies("im2col", 3, pixels, [place], 4, 32, "late")
    with pytest.raises(DescriptorFault, match="wHalo: must be 0 to 31"):
        copies("im2col::w::128", 3, wide_map(data, "w128"), [[0, 0, 0, 32, 0]], 4, 32, "late")
    with pytest.raises(DescriptorFault, match="offsets: must be 0 to 31"):
        copies("im2col::w", 3, wide_map(data, "w"), [[0, 0, 0, 0, 32]], 4, 32, "late")
    with pytest.raises(DescriptorFault, match="boxes of one row"):
        copies("tile::gather4", 2, TensorMap("float32", data, (32, 12), (128,), (32, 4)), [[0] * 5], 4, 32, "late")
