"""Tensor maps that kernels change or make, as grouped matrix products do, and what the copy engine keeps of them."""

from __future__ import annotations

import numpy as np
import pytest

from common.emulator import DescriptorFault, InvalidAddress, OutOfBounds, TensorMap, UnsupportedInstruction
from tests.common.emulator.isa.async_programs import each_schedule, launch
from tests.common.emulator.ptx_kernels import run_lanes

PUBLISH = "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [%0], [%1], 128;"
ACQUIRE = "fence.proxy.tensormap::generic.acquire.gpu [%0], 128;"
GROUPED = r"""
// For each group: its matrix and its rows; the CTA's map for them is in `room`. Each tile of 8 x 32 is added to out.
KERNEL(MAP first, float const* data, int const* rows, Map* room, float* out, int groups) {
  __shared__ __align__(128) u64 map[16];
  __shared__ __align__(128) float tile[256];
  __shared__ u64 bar;
  int t = threadIdx.x, phase = 0;
  u32 made = smem(map);
  room += blockIdx.x;
  if (t == 0) init(smem(&bar), 1);
  fence();
  for (int g = 0; g < groups; g++) {
    if (t < 16) map[t] = START;
    __syncthreads();
    if (t == 0) {
      asm volatile("tensormap.replace.tile.global_address.shared::cta.b1024.b64 [%0], %1;"
                   :: "r"(made), "l"(data + 24 * 32 * g) : "memory");
      asm volatile("tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [%0], 1, %1;"
                   :: "r"(made), "r"(rows[g]) : "memory");
      MORE
    }
    __syncwarp();
    if (t < 32) asm volatile("PUBLISH" :: "l"(room), "r"(made) : "memory");
    asm volatile("ACQUIRE" :: "l"(room) : "memory");
    __syncthreads();
    for (int y = 0; y < rows[g]; y += 8, phase ^= 1) {
      if (t == 0) { expect(smem(&bar), 1024); tile_load(smem(tile), *room, 0, y, smem(&bar)); }
      wait(smem(&bar), phase);
      for (int i = t; i < 256; i += blockDim.x) atomicAdd(out + i, tile[i] * (blockIdx.x + 1));
      __syncthreads();
    }
  }
}"""
COPIED, ZEROS = "first.words[t]", "0"
_SET = 'asm volatile("tensormap.replace.tile.{}.shared::cta.b1024.b32 [%0], {};" :: "r"(made) : "memory");'
FIELDS = "\n".join(
    [_SET.format("box_dim", "0, 32"), _SET.format("box_dim", "1, 8"), _SET.format("global_dim", "0, 32")]
    + [_SET.format("element_stride", "0, 1"), _SET.format("element_stride", "1, 1"), _SET.format("rank", 1)]
    + [_SET.format("elemtype", 7), _SET.format("interleave_layout", 0), _SET.format("swizzle_mode", 0)]
    + [_SET.format("fill_mode", 0), _SET.format("global_stride", "0, %1").replace("b32", "b64")]
).replace('%1;" :: "r"(made)', '%1;" :: "r"(made), "l"(128ull)')


def grouped(schedule: str, start: str, more: str = "", acquire: str = ACQUIRE, blocks: int = 2):
    """Sums of tiles over groups of 8, 20 and 13 rows; what the kernel makes, and what it should."""
    rows = np.array([8, 20, 13], np.int32)
    rng = np.random.default_rng(5)
    matrices = rng.integers(-50, 50, (3, 24, 32)).astype(np.float32)
    flat, out, room = matrices.reshape(-1), np.zeros((8, 32), np.float32), np.zeros((blocks, 128), np.uint8)
    expected = np.zeros((8, 32), np.float32)
    for matrix, count in zip(matrices, rows):
        for y in range(0, count, 8):
            part = matrix[y : min(y + 8, count)]
            expected[: len(part)] += part * (blocks * (blocks + 1) // 2)
    text = GROUPED.replace("START", start).replace("MORE", more).replace("PUBLISH", PUBLISH).replace("ACQUIRE", acquire)
    # The map that kernels start from describes another matrix of the same shape.
    first = TensorMap(np.float32, flat, (32, 1), (128,), (32, 8))
    launch(text, first, flat, rows, room, out, 3, grid=blocks, block=64, schedule=schedule)
    return out, expected


@each_schedule
@pytest.mark.parametrize(("start", "more"), [(COPIED, ""), (ZEROS, FIELDS)], ids=["copied", "zeros"])
def test_a_map_made_anew_for_every_group(schedule: str, start: str, more: str) -> None:
    out, expected = grouped(schedule, start, more)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("schedule", ["late", "random"])
def test_without_an_acquire_fence_the_copies_go_on_with_the_old_map(schedule: str) -> None:
    out, expected = grouped(schedule, COPIED, acquire="")
    assert not np.array_equal(out, expected)


def test_early_keeps_no_maps() -> None:
    out, expected = grouped("early", COPIED, acquire="")
    np.testing.assert_array_equal(out, expected)


TWICE = r"""
KERNEL(MAP given, Map* map, const u32* other, u32* out) {
  __shared__ __align__(128) u32 tile[32];
  __shared__ u64 bar;
  init(smem(&bar), 1);
  fence();
  *map = given;
  for (int i = 0; i < 2; i++) {
    expect(smem(&bar), 128);
    asm volatile("cp.async.bulk.tensor.1d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%2}], [%3];" :: "r"(smem(tile)), "l"(map), "r"(0), "r"(smem(&bar)) : "memory");
    wait(smem(&bar), i);
    out[i] = tile[0];
    asm volatile("tensormap.replace.tile.global_address.SPACEb1024.b64 [%0], %1;" :: "l"(map), "l"(other) : "memory");
    FENCES
  }
}"""
RELEASE_FENCE = 'asm volatile("fence.proxy.tensormap::generic.release.gpu;" ::: "memory");'
FENCE = 'asm volatile("fence.proxy.tensormap::generic.acquire.SCOPE [%0], 128;" :: "l"(WHERE) : "memory");'


@pytest.mark.parametrize(
    ("fences", "seen"),
    [("", 1), (RELEASE_FENCE, 1), (RELEASE_FENCE + FENCE.replace("WHERE", "map"), 2),
     (FENCE.replace("WHERE", "map"), 2), (FENCE.replace("WHERE", "(char*)map + 128"), 1)],
)  # fmt: skip
@pytest.mark.parametrize("scope", ["cta", "cluster", "gpu", "sys"])
def test_the_map_of_the_first_copy_stays_until_an_acquire_of_its_address(fences: str, seen: int, scope: str) -> None:
    """The first four ran on an H200, with scope gpu, and gave these results."""
    assert twice(fences.replace("SCOPE", scope), "late") == [1, seen]


def twice(fences: str, schedule: str, space: str = "global.") -> list[int]:
    """The matrix, 1 or 2, that each of two loads brings; between them the map in global memory is changed."""
    first, other, out = np.full(32, 1, np.uint32), np.full(32, 2, np.uint32), np.zeros(2, np.uint32)
    text = TWICE.replace("FENCES", fences).replace("SPACE", space)
    given = TensorMap("uint32", first, (32,), (), (32,))
    launch(text, given, np.zeros(256, np.uint8), other, out, block=1, schedule=schedule)
    return out.tolist()


@each_schedule
@pytest.mark.parametrize("space", ["global.", ""])
def test_a_map_changed_in_global_memory(schedule: str, space: str) -> None:
    fences = RELEASE_FENCE + FENCE.replace("SCOPE", "gpu").replace("WHERE", "map")
    assert twice(fences, schedule, space) == [1, 2]


def changed(line: str, start: np.ndarray, space: str = "shared::cta") -> np.ndarray:
    """The 128 bytes after one instruction on a map at %at, in shared or global memory."""
    registers = ".reg .b32 %at<32>; .reg .b64 %ag, %v; .reg .pred %p;"
    data = start.view(np.uint32)
    show = "mad.lo.u32 %s, %t, 4, %s; ld.shared.b32 %y, [%s];" if "shared" in space else "ld.global.b32 %y, [%o];"
    return run_lanes(
        f"""{registers} .reg .b32 %s, %t; .reg .b64 %o;
        mov.u32 %t, %tid.x; mov.u32 %s, made; mad.lo.u32 %s, %t, 4, %s; st.shared.b32 [%s], %x;
        mov.u64 %ag, room; mul.wide.u32 %o, %t, 4; add.u64 %o, %ag, %o; st.global.b32 [%o], %x;
        bar.sync 0; setp.eq.u32 %p, %t, 0; mov.u32 %s, made;
        @%p {line}
        bar.sync 0; {show}
        """,
        {"x": ("b32", data)}, {"y": "b32"},
        variables=".shared .align 128 .b8 made[128];\n.global .align 128 .b8 room[128];",
    )["y"].view(np.uint8)  # fmt: skip


def plain() -> TensorMap:
    return TensorMap("float16", 1 << 32, (64, 32), (128,), (64, 8))


@pytest.mark.parametrize(
    ("line", "arguments"),
    [
        ("box_dim.shared::cta.b1024.b32 [%s], 1, 16", dict(box=(64, 16))),
        ("box_dim.global.b1024.b32 [%ag], 0, 8", dict(box=(8, 8))),
        ("global_dim.b1024.b32 [%ag], 0, 100", dict(dims=(100, 32))),
        ("global_stride.shared::cta.b1024.b64 [%s], 0, 4096", dict(strides=(4096,))),
        ("element_stride.shared::cta.b1024.b32 [%s], 1, 3", dict(element_strides=(1, 3))),
        ("elemtype.shared::cta.b1024.b32 [%s], 10", dict(dtype="bfloat16")),
        ("swizzle_mode.shared::cta.b1024.b32 [%s], 3", dict(swizzle="128B")),
        ("fill_mode.global.b1024.b32 [%ag], 1", dict(oob_fill="nan")),
    ],
)
def test_one_field_at_a_time(line: str, arguments: dict) -> None:
    wanted = {**dict(dtype="float16", tensor=1 << 32, dims=(64, 32), strides=(128,), box=(64, 8)), **arguments}
    space = "shared::cta" if "shared" in line else "global"
    found = changed(f"tensormap.replace.tile.{line};", bytes_of(plain()), space)
    np.testing.assert_array_equal(found, bytes_of(TensorMap(**wanted)))


def bytes_of(tensor_map: TensorMap) -> np.ndarray:
    return np.frombuffer(tensor_map.descriptor(1 << 32).to_bytes(), np.uint8)


def test_what_is_no_map_cannot_be_changed() -> None:
    with pytest.raises(DescriptorFault, match="holds no tensor map"):
        changed("tensormap.replace.tile.rank.shared::cta.b1024.b32 [%s], 1;", np.arange(128, dtype=np.uint8))
    pixels = TensorMap.im2col("float16", 1 << 32, (64, 8, 8), (128, 1024), [0], [0], 64, 8)
    with pytest.raises(DescriptorFault, match="needs a tensor map for TILED"):
        changed("tensormap.replace.tile.rank.shared::cta.b1024.b32 [%s], 1;", bytes_of(pixels))


@pytest.mark.parametrize(
    ("line", "fault", "message"),
    [
        ("swizzle_mode.shared::cta.b1024.b32 [%s], 5", DescriptorFault, "value 5 is not in 0 to 3"),
        ("elemtype.shared::cta.b1024.b32 [%s], 16", DescriptorFault, "value 16 is not in 0 to 15"),
        ("box_dim.shared::cta.b1024.b32 [%s], 5, 1", DescriptorFault, "ordinal 5 is not in 0 to 4"),
        ("global_stride.shared::cta.b1024.b64 [%s], 4, 16", DescriptorFault, "ordinal 4 is not in 0 to 3"),
        ("global_dim.shared::cta.b1024.b32 [%s], 0, 0", DescriptorFault, "cannot be encoded"),
        ("rank.shared::cta.b1024.b32 [%s+8], 1", OutOfBounds, "shared"),
        ("rank.global.b1024.b32 [%ag+1048576], 1", OutOfBounds, "allocation|global"),
        ("rank.shared::cta.b1024.b64 [%s], 1", UnsupportedInstruction, "needs one of .b32"),
        ("global_address.shared::cta.b1024.b32 [%s], 1", UnsupportedInstruction, "needs one of .b64"),
        ("rank.shared::cta.b1024.b32 [%s], 0, 1", UnsupportedInstruction, "does not take 3 operands"),
        ("box_dim.shared::cta.b1024.b32 [%s], 1", UnsupportedInstruction, "does not take 2 operands"),
        ("elemtype.shared::cta.b1024.b32 [%s], %t", UnsupportedInstruction, "must be an integer constant"),
        ("box_dim.shared::cta.b1024.b32 [%s], %t, 1", UnsupportedInstruction, "must be an integer constant"),
        ("rank.local.b1024.b32 [%s], 1", UnsupportedInstruction, "local"),
        ("colour.shared::cta.b1024.b32 [%s], 1", UnsupportedInstruction, "needs one of"),
    ],
)
def test_changes_outside_the_rules(line: str, fault: type, message: str) -> None:
    space = "shared::cta" if "shared" in line else "global"
    with pytest.raises(fault, match=message):
        changed(f"tensormap.replace.tile.{line};", bytes_of(plain()), space)


def test_a_parameter_is_read_only() -> None:
    text = r"""
    KERNEL(MAP map) {
      asm volatile("tensormap.replace.tile.rank.b1024.b32 [%0], 1;" :: "l"(&map) : "memory");
    }"""
    with pytest.raises(InvalidAddress, match="read-only"):
        launch(text, plain(), block=1)


def test_each_lane_copies_one_word() -> None:
    """As on an H200: lane i copies word i, from its own source to its own target."""
    text = r"""
    KERNEL(u32* out, int apart) {
      __shared__ __align__(128) u32 rows[32][32];
      int t = threadIdx.x;
      for (int i = 0; i < 32; i++) rows[t][i] = 100 * t + i;
      __syncwarp();
      asm volatile("PUBLISH" :: "l"(out + 32 * apart * t), "r"(smem(rows[t])) : "memory");
    }""".replace("PUBLISH", PUBLISH)
    together, apart = np.zeros(1024, np.uint32), np.zeros((32, 32), np.uint32)
    launch(text, together, 0)
    launch(text, apart, 1)
    np.testing.assert_array_equal(together[:32], 101 * np.arange(32))
    np.testing.assert_array_equal(apart, np.diag(101 * np.arange(32, dtype=np.uint32)))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (PUBLISH.replace("128", "64"), "copies 128 bytes"),
        (PUBLISH.replace(".release", ".acquire"), "needs one of .release"),
        (PUBLISH.replace(".aligned", ""), "needs one of .aligned"),
        (PUBLISH.replace(".gpu", ""), "needs one of .cta"),
    ],
)
def test_other_fused_copies_do_not_exist(line: str, message: str) -> None:
    with pytest.raises(UnsupportedInstruction, match=message):
        changed(line.replace("%0", "%ag").replace("%1", "%s"), bytes_of(plain()))
