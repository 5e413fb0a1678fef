"""tcgen05.cp, .shift and .commit: where the bytes go, what orders them, and what faults."""

import numpy as np
import pytest

from common.emulator import (
    BarrierFault,
    Deadlock,
    DescriptorFault,
    Emulator,
    InvalidAddress,
    OutOfBounds,
    TensorMemoryFault,
    UnsupportedInstruction,
)
from common.emulator.machine.events import SCHEDULES
from tests.common.emulator.isa.tensor_programs import (
    WAIT_BARRIER,
    launch,
    program,
    registers,
    store_outputs,
)

POISON = 0xFFFF_FFFF
DATA = 1024  # shared offset of `data` in a `program`
SPANS = {0: 16, 2: 128, 4: 64, 6: 32}  # swizzle code of a descriptor -> bytes of a row of its atom
ROWS = {"128x256b": 128, "128x128b": 128, "64x128b": 64, "32x128b": 32, "4x256b": 4}
MULTICASTS = {"64x128b": ("warpx2::02_13", "warpx2::01_23"), "32x128b": ("warpx4",)}
FORMS = [(shape, cast) for shape in ROWS for cast in MULTICASTS.get(shape, ("",))]


def chunk_address(code: int, row: int, chunk: int, lbo: int, sbo: int) -> int:
    """Where a K-major matrix at DATA has 16 bytes, by the canonical layouts of PTX 9.7.16.3.3."""
    if code == 0:
        return DATA + row % 8 * 16 + row // 8 * sbo + chunk * lbo
    address = DATA + row % 8 * SPANS[code] + row // 8 * sbo + chunk * 16
    bits = {2: 7, 4: 3, 6: 1}[code]
    return address ^ (address >> 7 & bits) << 4


def descriptor(code: int, lbo: int, sbo: int, address: int = DATA) -> int:
    return address >> 4 | lbo >> 4 << 16 | sbo >> 4 << 32 | 1 << 46 | code << 61


def lanes_of(shape: str, cast: str, row: int) -> list[int]:
    if shape == "4x256b":
        return [32 * row]
    if cast == "warpx4":
        return [row + 32 * warp for warp in range(4)]
    if cast == "warpx2::02_13":
        return [row, row + 64]
    if cast == "warpx2::01_23":
        return [row % 32 + row // 32 * 64 + extra for extra in (0, 32)]
    return [row]


def expected_memory(shape: str, cast: str, code: int, lbo: int, sbo: int, shared: np.ndarray) -> np.ndarray:
    """Columns 0-7 of tensor memory, uint32 (128, 8), after the copy of `shared` (bytes from DATA on)."""
    memory = np.full((128, 8), POISON, np.uint32)
    for row in range(ROWS[shape]):
        for chunk in range(2 if shape.endswith("256b") else 1):
            at = chunk_address(code, row, chunk, lbo, sbo) - DATA
            for lane in lanes_of(shape, cast, row):
                memory[lane, 4 * chunk : 4 * chunk + 4] = shared[at : at + 16].view(np.uint32)
    return memory


def copy_program(instructions: str, size: int, *, group: int = 1, then: str = WAIT_BARRIER, columns: int = 32) -> str:
    """Fills shared memory from the input, runs `instructions` in one thread of the first CTA, then stores columns 0-7.

    In a pair the second CTA adds 1 to its words; every CTA has its own rows of the output.
    """
    sync = "barrier.cluster.arrive; barrier.cluster.wait;" if group == 2 else "bar.sync 0;"
    return program(
        f"""
    .reg .u32 %i, %w, %to32, %rank, %cta;
    .reg .u64 %from, %desc;
    .reg .pred %more, %issue;
    .reg .b32 %d<8>;
    mov.u32 %rank, %cluster_ctarank;
    mov.u32 %cta, %ctaid.x;
    mov.u32 %i, %tid;
  FILL:
    mad.wide.u32 %from, %i, 4, %in;
    ld.global.u32 %w, [%from];
    add.u32 %w, %w, %rank;
    mad.lo.u32 %to32, %i, 4, %data;
    st.shared.u32 [%to32], %w;
    add.u32 %i, %i, 128;
    setp.lt.u32 %more, %i, {size // 4};
    @%more bra FILL;
    fence.proxy.async.shared::cta;
    {sync}
    setp.eq.u32 %issue, %tid, 0;
    @%issue setp.eq.u32 %issue, %rank, 0;
    @!%issue bra ISSUED;
{instructions}
  ISSUED:
    bar.warp.sync 0xffffffff;
    {then}
    tcgen05.fence::after_thread_sync;
    tcgen05.ld.sync.aligned.32x32b.x8.b32 {registers("d", 8)}, [%taddr];
    tcgen05.wait::ld.sync.aligned;
    mad.lo.u32 %tid, %cta, 128, %tid;
{store_outputs("d", 8)}
    tcgen05.fence::before_thread_sync;
""",
        shared=size,
        group=group,
        columns=columns,
    ).replace("@%first tcgen05.dealloc", "mov.u32 %tid, %tid.x;\n  @%first tcgen05.dealloc")


WAIT_AGAIN = WAIT_BARRIER.replace("AGAIN", "SECOND").replace(", 0;", ", 1;")
COMMIT = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%bar];"


def cp(shape: str, cast: str = "", group: int = 1, at: str = "%taddr", formats: str = "") -> str:
    suffix = "".join(f".{part}" for part in (cast, formats) if part)
    return f"tcgen05.cp.cta_group::{group}.{shape}{suffix} [{at}], %desc;"


def random_bytes(size: int) -> np.ndarray:
    return np.random.default_rng(size).integers(0, 256, size, np.uint16).astype(np.uint8)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("code", SPANS)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: ".".join(form))
def test_copies(form, code, schedule):
    """Every shape and multicast from every swizzle, with strides that leave gaps."""
    shape, cast = form
    lbo = 128 if code == 0 else 0
    sbo = 8 * max(SPANS[code], 32)
    shared = random_bytes(16 * sbo + 256)
    body = f"    mov.u64 %desc, {descriptor(code, lbo, sbo)};\n    {cp(shape, cast)}\n    {COMMIT}"
    out = launch(
        copy_program(body, shared.size), shared.view(np.uint32), np.zeros((128, 8), np.uint32), schedule
    )  # fmt: skip
    np.testing.assert_array_equal(out, expected_memory(shape, cast, code, lbo, sbo, shared))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("formats", ["b8x16.b4x16_p64", "b8x16.b6x16_p32"])
def test_decompression(formats, schedule):
    """16 packed elements become 16 bytes; 4-bit ones move to bits 2-5."""
    width = 4 if "b4" in formats else 6
    codes = np.random.default_rng(width).integers(0, 1 << width, (128, 16))
    shared = random_bytes(2048).reshape(128, 16)
    for row in range(128):
        packed = sum(int(code) << (width * place) for place, code in enumerate(codes[row]))
        shared[row, : 2 * width] = np.frombuffer(packed.to_bytes(2 * width, "little"), np.uint8)
    body = f"    mov.u64 %desc, {descriptor(0, 0, 128)};\n    {cp('128x128b', formats=formats)}\n    {COMMIT}"
    out = launch(
        copy_program(body, 2048), shared.reshape(-1).view(np.uint32), np.zeros((128, 8), np.uint32), schedule
    )  # fmt: skip
    expected = (codes << (2 if width == 4 else 0)).astype(np.uint8)
    np.testing.assert_array_equal(out[:, :4], np.ascontiguousarray(expected).view(np.uint32))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_copy_by_a_pair(schedule):
    """.cta_group::2: each CTA gets its own shared memory, and a multicast commit tells both."""
    shared = random_bytes(2048)
    body = f"""
    .reg .b16 %mask;
    mov.b16 %mask, 3;
    mov.u64 %desc, {descriptor(0, 0, 128)};
    {cp("128x128b", group=2)}
    tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%bar], %mask;
"""
    out = launch(
        copy_program(body, 2048, group=2), shared.view(np.uint32), np.zeros((256, 8), np.uint32), schedule, cluster=2
    )  # fmt: skip
    words = shared.view(np.uint32).reshape(128, 4)
    np.testing.assert_array_equal(out[:128, :4], words)
    np.testing.assert_array_equal(out[128:, :4], words + np.uint32(1))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_4x256b_counts_from_the_lane_of_the_address(schedule):
    shared = random_bytes(1024)
    body = f"""
    add.u32 %w, %taddr, {31 << 16};
    mov.u64 %desc, {descriptor(0, 128, 256)};
    {cp("4x256b", at="%w")}
    {COMMIT}
"""
    out = launch(copy_program(body, 1024), shared.view(np.uint32), np.zeros((128, 8), np.uint32), schedule)
    words = shared.view(np.uint32)
    for row in range(4):
        np.testing.assert_array_equal(out[31 + 32 * row, :4], words[4 * row : 4 * row + 4])
        np.testing.assert_array_equal(out[31 + 32 * row, 4:], words[32 + 4 * row : 36 + 4 * row])
    assert (np.delete(out, [31, 63, 95, 127], axis=0) == POISON).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_shift_and_refresh(schedule):
    """Rows move to lower lanes, warp by warp; the copy that follows fills the last lane (shift -> cp.4x256b)."""
    shared = random_bytes(4096 + 1024)
    shifts = "\n".join(
        f"    add.u32 %w, %taddr, {warp << 21};\n    tcgen05.shift.down.cta_group::1 [%w];" for warp in range(4)
    )
    body = f"""
    mov.u64 %desc, {descriptor(0, 2048, 128)};
    {cp("128x256b")}
    {COMMIT}
    {WAIT_BARRIER}
{shifts}
    add.u32 %w, %taddr, {31 << 16};
    mov.u64 %desc, {descriptor(0, 128, 256, DATA + 4096)};
    {cp("4x256b", at="%w")}
    {COMMIT}
    {WAIT_AGAIN}
"""
    text = copy_program(body, shared.size, then="bar.sync 0;")
    out = launch(text, shared.view(np.uint32), np.zeros((128, 8), np.uint32), schedule)
    matrix = shared[:4096].view(np.uint32).reshape(2, 128, 4).transpose(1, 0, 2).reshape(128, 8)
    fresh = shared[4096:].view(np.uint32)
    expected = np.roll(matrix, -1, axis=0)
    for warp in range(4):
        expected[32 * warp + 31, :4] = fresh[4 * warp : 4 * warp + 4]
        expected[32 * warp + 31, 4:] = fresh[32 + 4 * warp : 36 + 4 * warp]
    np.testing.assert_array_equal(out, expected)


def test_shift_leaves_the_last_lane():
    shared = random_bytes(4096)
    body = f"""
    mov.u64 %desc, {descriptor(0, 2048, 128)};
    {cp("128x256b")}
    {COMMIT}
    {WAIT_BARRIER}
    add.u32 %w, %taddr, {32 << 16};
    tcgen05.shift.cta_group::1.down [%w];
    {COMMIT}
    {WAIT_AGAIN}
"""
    text = copy_program(body, shared.size, then="bar.sync 0;")
    out = launch(text, shared.view(np.uint32), np.zeros((128, 8), np.uint32), "late")
    expected = shared.view(np.uint32).reshape(2, 128, 4).transpose(1, 0, 2).reshape(128, 8).copy()
    expected[32:63] = expected[33:64].copy()
    np.testing.assert_array_equal(out, expected)


# -- order ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_load_before_the_commit_finds_poison(schedule):
    """Without a wait for the commit the load finds cells in flight, also when the copy completes before the load."""
    shared = random_bytes(2048)
    body = f"    mov.u64 %desc, {descriptor(0, 0, 128)};\n    {cp('128x128b')}\n    {COMMIT}"
    text = copy_program(body, 2048, then="bar.sync 0;").replace(
        "st.global.b32 [%to+28], %d7;", f"st.global.b32 [%to+28], %d7;\n{WAIT_BARRIER}"
    )
    out = launch(text, shared.view(np.uint32), np.zeros((128, 8), np.uint32), schedule)
    words = shared.view(np.uint32).reshape(128, 4)
    if schedule == "early":
        np.testing.assert_array_equal(out[:, :4], words)
    elif schedule == "late":
        assert (out[:, :4] == POISON).all()


def test_commit_without_anything_before_it():
    for schedule in SCHEDULES:
        launch(copy_program(f"    {COMMIT}", 1024), np.zeros(256, np.uint32), np.zeros((128, 8), np.uint32), schedule)


def test_commit_tracks_its_own_thread():
    """A commit by another thread than the one that copied says nothing about the copy."""
    shared = random_bytes(2048)
    body = f"    mov.u64 %desc, {descriptor(0, 0, 128)};\n    {cp('128x128b')}"
    then = f"""
    .reg .pred %other;
    bar.sync 0;
    setp.eq.u32 %other, %tid, 64;
    @%other {COMMIT}
    {WAIT_BARRIER}"""
    seen = set()
    for seed in range(12):
        out = np.zeros((128, 8), np.uint32)
        Emulator("random", seed).launch(
            copy_program(body, 2048, then=then), "tensor", grid=1, block=128, args=[shared.view(np.uint32), out]
        )
        rows = shared.view(np.uint32).reshape(128, 4)
        assert ((out[:, :4] == rows) | (out[:, :4] == POISON)).all()
        seen.add(bool((out[:, :4] == rows).all()))
    assert seen == {True, False}


def test_commits_of_one_thread_arrive_in_their_order():
    """A CTA that waits for the second of two commits may exit: the first one's arrival is not still to come."""
    body = f"    mov.u64 %desc, {descriptor(0, 0, 128)};\n    {cp('128x128b')}"
    first = COMMIT.replace("[%bar]", "[%bar+8]")
    text = copy_program(f"{body}\n    {first}\n    {COMMIT}", 2048).replace(".b64 bar;", ".b64 bar[2];")
    text = text.replace(
        "mbarrier.init.shared::cta.b64 [%bar], 1;",
        "mbarrier.init.shared::cta.b64 [%bar], 1;\n  @%leader mbarrier.init.shared::cta.b64 [%bar+8], 1;",
    )
    for seed in range(12):
        arguments = [np.zeros(512, np.uint32), np.zeros((128, 8), np.uint32)]
        Emulator("random", seed).launch(text, "tensor", grid=1, block=128, args=arguments)


def test_a_missing_commit_is_a_deadlock():
    body = f"    mov.u64 %desc, {descriptor(0, 0, 128)};\n    {cp('128x128b')}"
    with pytest.raises(Deadlock, match="1 of 1 arrivals missing"):
        launch(copy_program(body, 2048), np.zeros(512, np.uint32), np.zeros((128, 8), np.uint32), "late")


# -- faults --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bits", "instruction", "fault", "message"),
    [
        (descriptor(0, 0, 128) & ~(1 << 46), cp("128x128b"), DescriptorFault, "bits 46-48"),
        (descriptor(3, 0, 128), cp("128x128b"), DescriptorFault, "swizzle mode"),
        (descriptor(0, 0, 128, 0), cp("128x128b"), OutOfBounds, "reads shared memory from 0x0"),
        (descriptor(0, 0, 0x4000), cp("128x128b"), OutOfBounds, "reads shared memory"),
        (descriptor(0, 0, 128), cp("128x128b", at="%taddr+32"), TensorMemoryFault, "outside the CTA's allocations"),
        (descriptor(0, 0, 128), cp("128x128b", at="%taddr+0x100000"), TensorMemoryFault, "128 lanes"),
        (descriptor(0, 0, 128), cp("4x256b", at="%taddr+0x200000"), TensorMemoryFault, "below 32"),
        (descriptor(0, 0, 128), cp("128x128b", group=2), TensorMemoryFault, "same .cta_group"),
        (0, "tcgen05.shift.down.cta_group::1 [%taddr+0x10000];", TensorMemoryFault, "multiple of 32"),
        (0, COMMIT.replace("[%bar]", "[%data]"), BarrierFault, "no mbarrier"),
        (
            0, COMMIT.replace("b64 [%bar]", "multicast::cluster.b64 [%bar], 2").replace("2;", "%mask;"),
            InvalidAddress, "rank 1",
        ),
        (0, COMMIT.replace("shared::cluster.b64 [%bar]", "b64 [%desc]"), InvalidAddress, "not in shared memory"),
    ],
)  # fmt: skip
def test_faults(bits, instruction, fault, message):
    body = f"    .reg .b16 %mask;\n    mov.b16 %mask, 2;\n    mov.u64 %desc, {bits};\n    {instruction}\n    {COMMIT}"
    for schedule in ("late", "early"):
        with pytest.raises(fault, match=message) as caught:
            launch(copy_program(body, 2048), np.zeros(512, np.uint32), np.zeros((128, 8), np.uint32), schedule)
        assert "tcgen05" in caught.value.place.instruction


@pytest.mark.parametrize(
    "instruction", [cp("64x128b"), cp("32x128b"), cp("128x128b", "warpx4"), cp("32x128b", "warpx2::02_13")]
)
def test_refused_forms(instruction):
    body = f"    mov.u64 %desc, {descriptor(0, 0, 128)};\n    {instruction}"
    with pytest.raises(UnsupportedInstruction, match="64x128b needs"):
        launch(copy_program(body, 2048), np.zeros(512, np.uint32), np.zeros((128, 8), np.uint32), "early")
