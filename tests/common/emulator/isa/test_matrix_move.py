"""ldmatrix, stmatrix and movmatrix against their definitions element by element, and their faults."""

from __future__ import annotations

import numpy as np
import pytest

from common.emulator import DivergenceFault, Emulator, InvalidAddress, Misaligned, OutOfBounds, UnsupportedInstruction
from common.emulator.machine.events import SCHEDULES
from tests.common.emulator.cuda import compile_ptx
from tests.common.emulator.ptx_kernels import run_lanes

each_schedule = pytest.mark.parametrize("schedule", SCHEDULES)
WARPS = 3
ROW = 16

# A lane's own place in a shared array of one row per lane; the row that it names as address is %pick.
PLACES = """
.shared .align 16 .b8 tile[4096];
.reg .b32 %base, %own, %row;
.reg .b64 %wide;
mov.u32 %base, tile;
mad.lo.u32 %own, %lane_, 16, %base;
mad.lo.u32 %row, %pick, 16, %base;
"""


def shuffled_rows(seed: int) -> np.ndarray:
    """For each lane the row it names: the rows of all warps, shuffled."""
    return np.random.default_rng(seed).permutation(32 * WARPS).astype(np.uint32)


def random_rows(seed: int) -> np.ndarray:
    """Bytes (rows, 16) of shared memory: one row per lane."""
    return np.random.default_rng(seed).integers(0, 256, (32 * WARPS, ROW)).astype(np.uint8)


def load(form: str, registers: int, rows: np.ndarray, pick: np.ndarray, *, address: str = "[%row]",
         schedule: str = "early") -> np.ndarray:  # fmt: skip
    """Registers (registers, lanes) that `form` loads when lane i names row `pick[i]`."""
    words = rows.view(np.uint32)
    inputs = {f"w{i}": ("u32", words[:, i]) for i in range(4)} | {"pick": ("u32", pick)}
    names = [f"d{i}" for i in range(registers)]
    targets = ", ".join(f"%{name}" for name in names)
    body = f"""{PLACES}
    st.shared.v4.b32 [%own], {{%w0, %w1, %w2, %w3}};
    bar.sync 0;
    add.u32 %own, %row, 16;
    cvt.u64.u32 %wide, %row;
    cvta.shared.u64 %wide, %wide;
    {form} {{{targets}}}, {address};"""
    return np.stack(list(run_lanes(body, inputs, dict.fromkeys(names, "u32"), schedule=schedule).values()))


def store(form: str, values: np.ndarray, pick: np.ndarray, *, schedule: str = "early") -> np.ndarray:
    """Rows (lanes, 16 bytes) of shared memory, zero at first, once `form` has stored `values` (registers, lanes)."""
    inputs = {f"s{i}": ("u32", row) for i, row in enumerate(values)} | {"pick": ("u32", pick)}
    sources = ", ".join(f"%s{i}" for i in range(len(values)))
    body = f"""{PLACES}
    st.shared.v4.b32 [%own], {{0, 0, 0, 0}};
    bar.sync 0;
    {form} [%row], {{{sources}}};
    bar.sync 0;
    ld.shared.v4.b32 {{%w0, %w1, %w2, %w3}}, [%own];"""
    found = run_lanes(body, inputs, {f"w{i}": "u32" for i in range(4)}, schedule=schedule)
    return np.ascontiguousarray(np.stack(list(found.values()), axis=1)).view(np.uint8)


def named_rows(rows: np.ndarray, pick: np.ndarray, warp: int) -> np.ndarray:
    """The rows that the lanes of a warp name."""
    return rows[pick[32 * warp : 32 * warp + 32]]


def expected_m8n8(rows: np.ndarray, pick: np.ndarray, count: int, transposed: bool) -> np.ndarray:
    """Lane l holds columns 2 * (l % 4) and + 1 of row l / 4, of the transposed matrix with .trans."""
    result = np.zeros((count, 32 * WARPS), np.uint32)
    for warp in range(WARPS):
        elements = named_rows(rows, pick, warp).view(np.uint16)
        for matrix in range(count):
            for lane in range(32):
                pair = []
                for i in range(2):
                    row, column = lane // 4, lane % 4 * 2 + i
                    row, column = (column, row) if transposed else (row, column)
                    pair.append(int(elements[8 * matrix + row, column]))
                result[matrix, 32 * warp + lane] = pair[0] | pair[1] << 16
    return result


@each_schedule
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix_m8n8(count: int, transposed: bool, schedule: str) -> None:
    rows, pick = random_rows(count), shuffled_rows(count)
    for space, address in (("shared", "[%row]"), ("shared::cta", "[%own + -16]"), ("", "[%wide]")):
        form = ".".join(filter(None, ["ldmatrix.sync.aligned.m8n8", f"x{count}", "trans" * transposed, space, "b16"]))
        found = load(form, count, rows, pick, address=address, schedule=schedule)
        np.testing.assert_array_equal(found, expected_m8n8(rows, pick, count, transposed))


def unpacked(row: np.ndarray, source: str) -> list[int]:
    """The 16 elements of a memory row, one byte each."""
    if source == "b8":
        return row.tolist()
    bits, number = {"b4x16_p64": 4, "b6x16_p32": 6}[source], int.from_bytes(row.tobytes(), "little")
    return [number >> bits * i & ((1 << bits) - 1) for i in range(16)]


@pytest.mark.parametrize("source", ["b4x16_p64", "b6x16_p32"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix_m8n16(count: int, source: str) -> None:
    rows, pick = random_rows(count + 10), shuffled_rows(count)
    found = load(f"ldmatrix.sync.aligned.m8n16.x{count}.shared.b8x16.{source}", count, rows, pick)
    for warp in range(WARPS):
        elements = [unpacked(row, source) for row in named_rows(rows, pick, warp)]
        for matrix in range(count):
            for lane in range(32):
                four = elements[8 * matrix + lane // 4][lane % 4 * 4 : lane % 4 * 4 + 4]
                assert int(found[matrix, 32 * warp + lane]).to_bytes(4, "little") == bytes(four)


@pytest.mark.parametrize("source", ["b8", "b4x16_p64", "b6x16_p32"])
@pytest.mark.parametrize("count", [1, 2])
def test_ldmatrix_m16n16(count: int, source: str) -> None:
    """Transposed: register r of lane l holds columns 4 * (l % 4) to + 3 of row l / 4 + 8 * r."""
    rows, pick = random_rows(count + 20), shuffled_rows(count)
    kind = source if source == "b8" else f"b8x16.{source}"
    found = load(f"ldmatrix.sync.aligned.m16n16.x{count}.trans.shared.{kind}", 2 * count, rows, pick)
    for warp in range(WARPS):
        elements = np.array([unpacked(row, source) for row in named_rows(rows, pick, warp)])
        for register in range(2 * count):
            matrix = elements[16 * (register // 2) : 16 * (register // 2) + 16].T
            for lane in range(32):
                four = matrix[lane // 4 + 8 * (register % 2), lane % 4 * 4 : lane % 4 * 4 + 4]
                assert int(found[register, 32 * warp + lane]).to_bytes(4, "little") == bytes(four.tolist())


@each_schedule
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix_m8n8_undoes_ldmatrix(count: int, transposed: bool, schedule: str) -> None:
    pick = shuffled_rows(count + 1)
    values = np.random.default_rng(count).integers(0, 1 << 32, (count, 32 * WARPS), np.uint64).astype(np.uint32)
    trans = ".trans" * transposed
    rows = store(f"stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16", values, pick, schedule=schedule)
    np.testing.assert_array_equal(expected_m8n8(rows, pick, count, transposed), values)
    written = np.isin(np.arange(32 * WARPS), pick.reshape(WARPS, 32)[:, : 8 * count])
    assert not rows[~written].any() and rows[written].any(axis=1).all()
    np.testing.assert_array_equal(
        load(f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16", count, rows, pick), values
    )


@pytest.mark.parametrize("count", [1, 2, 4])
def test_stmatrix_m16n8(count: int) -> None:
    """A lane's bytes: row l / 4 of columns 2 * (l % 4) and + 1, then row l / 4 + 8; columns lie along memory rows."""
    pick = shuffled_rows(count + 2)
    values = np.random.default_rng(count).integers(0, 1 << 32, (count, 32 * WARPS), np.uint64).astype(np.uint32)
    rows = store(f"stmatrix.sync.aligned.m16n8.x{count}.trans.shared.b8", values, pick)
    for warp in range(WARPS):
        memory = named_rows(rows, pick, warp)
        for matrix in range(count):
            for lane in range(32):
                for i, byte in enumerate(int(values[matrix, 32 * warp + lane]).to_bytes(4, "little")):
                    row, column = lane // 4 + i // 2 * 8, lane % 4 * 2 + i % 2
                    assert memory[8 * matrix + column, row] == byte


@each_schedule
def test_movmatrix_transposes(schedule: str) -> None:
    values = np.random.default_rng(1).integers(0, 1 << 32, 32 * WARPS, np.uint64).astype(np.uint32)
    body = (
        "movmatrix.sync.aligned.m8n8.trans.b16 %y, %x;\nmov.b32 %z, %x;\nmovmatrix.sync.aligned.m8n8.trans.b16 %z, %z;"
    )
    found = run_lanes(body, {"x": ("u32", values)}, {"y": "u32", "z": "u32"}, schedule=schedule)
    matrices = values.view(np.uint16).reshape(WARPS, 8, 8)
    expected = np.ascontiguousarray(matrices.transpose(0, 2, 1)).reshape(-1).view(np.uint32)
    np.testing.assert_array_equal(found["y"], expected)
    np.testing.assert_array_equal(found["z"], expected)


@each_schedule
def test_one_warp_alone_loads(schedule: str) -> None:
    rows, pick = random_rows(5), shuffled_rows(5)
    expected = expected_m8n8(rows, pick, 2, False)
    form = (
        "setp.eq.u32 %go, %which, 1;\nmov.b32 %d0, 7;\nmov.b32 %d1, 7;\n@%go ldmatrix.sync.aligned.m8n8.x2.shared.b16"
    )
    declare = ".reg .pred %go;\n.reg .b32 %which;\nshr.u32 %which, %lane_, 5;\n"
    found = load(declare + form, 2, rows, pick, schedule=schedule)
    np.testing.assert_array_equal(found[:, 32:64], expected[:, 32:64])
    assert (found[:, :32] == 7).all() and (found[:, 64:] == 7).all()


def test_lanes_beyond_the_addresses_are_not_read() -> None:
    rows, pick = random_rows(6), shuffled_rows(6)
    wild = pick.copy()
    wild.reshape(WARPS, 32)[:, 16:] = 0x0FFF_FFFF
    found = load("ldmatrix.sync.aligned.m8n8.x2.shared.b16", 2, rows, wild)
    np.testing.assert_array_equal(found, expected_m8n8(rows, pick, 2, False))


@pytest.mark.parametrize("form", ["ldmatrix.sync.aligned.m8n8.x4.shared.b16", "ldmatrix.sync.aligned.m8n8.x4.b16"])
def test_row_faults_name_the_lane(form: str) -> None:
    address = "[%wide + {}]" if "shared" not in form else "[%row + {}]"
    rows, pick = random_rows(7), shuffled_rows(7)
    with pytest.raises(Misaligned, match="16 bytes") as fault:
        load(form, 4, rows, pick, address=address.format(8))
    assert fault.value.place is not None and fault.value.place.instruction.startswith("ldmatrix")
    far = pick.copy()
    far[37] = 1 << 16
    with pytest.raises(OutOfBounds) as fault:
        load(form, 4, rows, far, address=address.format(0))
    assert fault.value.lanes == (37,)


def test_stmatrix_faults() -> None:
    values = np.zeros((4, 32 * WARPS), np.uint32)
    pick = shuffled_rows(8)
    with pytest.raises(Misaligned, match="16 bytes"):
        store("add.u32 %row, %row, 4;\nstmatrix.sync.aligned.m8n8.x4.shared.b16", values, pick)
    pick[70] = 1 << 15
    with pytest.raises(OutOfBounds) as fault:
        store("stmatrix.sync.aligned.m8n8.x4.shared.b16", values, pick)
    assert fault.value.lanes == (70,)


def test_a_generic_address_must_be_shared() -> None:
    source = """
    extern "C" __global__ void k(unsigned* x) {
      unsigned r;
      asm volatile("ldmatrix.sync.aligned.m8n8.x1.b16 {%0}, [%1];" : "=r"(r) : "l"(x + threadIdx.x * 4));
      x[threadIdx.x] = r;
    }"""
    with pytest.raises(InvalidAddress, match="not in shared memory"):
        Emulator().launch(compile_ptx(source), "k", grid=1, block=32, args=[np.zeros(128, np.uint32)])


def test_a_divergent_warp_meets_before_it_loads() -> None:
    """Lanes that took two ways come together at the instruction behind them."""
    rows, pick = random_rows(9), shuffled_rows(9)
    form = """.reg .pred %odd;
    .reg .b32 %low;
    and.b32 %low, %lane_, 1;
    setp.eq.u32 %odd, %low, 1;
    @%odd bra LATER;
    add.u32 %row, %row, 0;
    LATER:
    ldmatrix.sync.aligned.m8n8.x4.shared.b16"""
    np.testing.assert_array_equal(load(form, 4, rows, pick), expected_m8n8(rows, pick, 4, False))


def test_a_warp_with_missing_lanes_is_a_fault() -> None:
    with pytest.raises(DivergenceFault, match="32 lanes"):
        run_lanes(
            "movmatrix.sync.aligned.m8n8.trans.b16 %y, %x;", {"x": ("u32", np.zeros(48, np.uint32))}, {"y": "u32"}
        )


@pytest.mark.parametrize(
    ("form", "registers"),
    [
        ("ldmatrix.sync.aligned.m8n8.x1.shared.b8", 1),
        ("ldmatrix.sync.aligned.m8n8.x2.shared.b16", 1),
        ("ldmatrix.sync.aligned.m16n16.x1.shared.b8", 2),
        ("ldmatrix.sync.aligned.m16n16.x4.trans.shared.b8", 8),
        ("ldmatrix.sync.aligned.m16n16.x1.trans.shared.b16", 2),
        ("ldmatrix.sync.aligned.m8n16.x1.trans.shared.b8x16.b4x16_p64", 1),
        ("ldmatrix.sync.aligned.m8n16.x1.shared.b8", 1),
        ("ldmatrix.sync.aligned.m8n8.x1.global.b16", 1),
        ("ldmatrix.sync.aligned.m8n8.x1.shared::cluster.b16", 1),
        ("ldmatrix.aligned.m8n8.x1.shared.b16", 1),
    ],
)
def test_refused_loads(form: str, registers: int) -> None:
    with pytest.raises(UnsupportedInstruction):
        load(form, registers, random_rows(1), shuffled_rows(1))


@pytest.mark.parametrize(
    "form",
    [
        "stmatrix.sync.aligned.m8n8.x1.shared.b8",
        "stmatrix.sync.aligned.m16n8.x1.shared.b8",
        "stmatrix.sync.aligned.m16n8.x1.trans.shared.b16",
        "stmatrix.sync.aligned.m8n8.x2.shared.b16",
        "stmatrix.sync.aligned.m8n8.x1.noisy.shared.b16",
    ],
)
def test_refused_stores(form: str) -> None:
    with pytest.raises(UnsupportedInstruction):
        store(form, np.zeros((1, 32 * WARPS), np.uint32), shuffled_rows(1))
