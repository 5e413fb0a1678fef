"""tcgen05.ld and .st against maps written down from the formulas, cell by cell, and their faults."""

import numpy as np
import pytest

from common.emulator import DivergenceFault, Emulator, TensorMemoryFault, UnsupportedInstruction
from common.emulator.machine.events import SCHEDULES
from tests.common.emulator.isa.tensor_programs import (
    launch,
    load_inputs,
    program,
    registers,
    store_outputs,
)

POISON = 0xFFFF_FFFF
SHAPES = ("32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2")
PER_COUNT = {"32x32b": 1, "16x64b": 1, "16x128b": 2, "16x256b": 4, "16x32bx2": 1}
SPLIT = 160


def cells(shape: str, count: int, lane: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(lanes, columns) that the registers of four warps hold, (128, count) each, for an address at `lane`, column 0."""
    thread, r = np.arange(128)[:, None], np.arange(count)[None, :]
    t = thread % 32
    lanes, columns = {
        "32x32b": (t, r),
        "16x64b": (t // 4 + 8 * (t & 1), (t >> 1 & 1) + 2 * r),
        "16x128b": (t // 4 + 8 * (r & 1), t % 4 + 4 * (r >> 1)),
        "16x256b": (t // 4 + 8 * (r >> 1 & 1), 2 * (t % 4) + (r & 1) + 8 * (r >> 2)),
        "16x32bx2": (t % 16, r + SPLIT * (t // 16)),
    }[shape]
    return np.broadcast_arrays(lanes + thread // 32 * 32 + lane, columns)


FORMS = [
    (shape, f"x{1 << power}", PER_COUNT[shape] << power)
    for shape in SHAPES
    for power in range(8)
    if PER_COUNT[shape] << power <= 128
]


def operands(shape: str, address: str) -> str:
    return f"[{address}], {SPLIT}" if shape == "16x32bx2" else f"[{address}]"


def memory_after_store(shape: str, values: np.ndarray, lane: int = 0) -> np.ndarray:
    """Tensor memory (128, 512) after all four warps have stored `values`, uint32 (128, registers)."""
    memory = np.full((128, 512), POISON, np.uint32)
    memory[cells(shape, values.shape[1], lane)] = values
    return memory


def transfer(store: tuple[str, str, int], load: tuple[str, str, int], lane: int = 0) -> str:
    (shape_st, num_st, count_st), (shape_ld, num_ld, count_ld) = store, load
    return f"""
{load_inputs(count_st)}
    .reg .b32 %d<{count_ld}>;
    .reg .u32 %at;
    add.u32 %at, %taddr, {lane << 16};
    tcgen05.st.sync.aligned.{shape_st}.{num_st}.b32 {operands(shape_st, "%at")}, {registers("r", count_st)};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.{shape_ld}.{num_ld}.b32 {registers("d", count_ld)}, {operands(shape_ld, "%at")};
    tcgen05.wait::ld.sync.aligned;
{store_outputs("d", count_ld)}
"""


def random_words(count: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, 1 << 32, (128, count), np.uint64).astype(np.uint32)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form[0]}.{form[1]}")
def test_stored_cells(form):
    """The cells that a store writes, seen by a 32x32b load of the first 128 columns and of the split ones."""
    shape, num, count = form
    values = random_words(count)
    lane = 16 if shape.startswith("16") else 0
    reference = ("32x32b", "x128", 128)
    body = transfer(form, reference, lane)
    for first in (0, 128):
        text = program(body.replace(f"{registers('d', 128)}, [%at]", f"{registers('d', 128)}, [%taddr+{first}]"))
        out = launch(text, values, np.empty((128, 128), np.uint32), "early")
        np.testing.assert_array_equal(out, memory_after_store(shape, values, lane)[:, first : first + 128])


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("load", FORMS, ids=lambda form: f"ld.{form[0]}.{form[1]}")
def test_every_pair_of_shapes(load, schedule):
    """Round trips: a load in every form of what a store of every shape has written, poison where it has not."""
    for shape in SHAPES:
        store = (shape, "x16", 16 * PER_COUNT[shape])
        values = random_words(store[2])
        memory = memory_after_store(shape, values)
        out = launch(program(transfer(store, load)), values, np.empty((128, load[2]), np.uint32), schedule)
        np.testing.assert_array_equal(out, memory[cells(load[0], load[2])], err_msg=f"st.{shape}")


@pytest.mark.parametrize("shape", SHAPES)
def test_packing(shape):
    """pack::16b takes the low halves of two neighbouring columns; unpack::16b puts them there."""
    count = 4 * PER_COUNT[shape]
    values = random_words(count)
    plain = f"tcgen05.ld.sync.aligned.{shape}.x4.b32"
    packed = transfer((shape, "x4", count), (shape, "x4", count)).replace(
        f"tcgen05.st.sync.aligned.{shape}.x4.b32", f"tcgen05.st.sync.aligned.{shape}.x4.unpack::16b.b32"
    )
    out = launch(
        program(packed.replace(plain, plain.replace(".b32", ".pack::16b.b32"))),
        values, np.empty((128, count), np.uint32), "late",
    )  # fmt: skip
    np.testing.assert_array_equal(out, values)
    memory = np.full((128, 512), POISON, np.uint32)
    lanes, columns = cells(shape, count)
    half = columns // SPLIT * SPLIT
    memory[lanes, half + 2 * (columns - half)] = values & 0xFFFF
    memory[lanes, half + 2 * (columns - half) + 1] = values >> 16
    out = launch(program(packed), values, np.empty((128, count), np.uint32), "late")
    np.testing.assert_array_equal(out, memory[cells(shape, count)])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_lane_field_with_and_without_the_window(schedule):
    """The lane of the address counts from the warp's window, or from lane 0: both name the warp's own lanes."""
    body = f"""
{load_inputs(4)}
    .reg .u32 %window, %at;
    .reg .b32 %d<4>;
    shl.b32 %window, %warp, 21;
    add.u32 %at, %taddr, %window;
    tcgen05.st.sync.aligned.32x32b.x4.b32 [%taddr], {registers("r", 4)};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x4.b32 {registers("d", 4)}, [%at];
    tcgen05.wait::ld.sync.aligned;
{store_outputs("d", 4)}
"""
    values = random_words(4)
    np.testing.assert_array_equal(
        launch(program(body, columns=32), values, np.zeros((128, 4), np.uint32), schedule), values
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_lanes_of_the_odd_cta_of_a_pair_may_count_from_128(schedule):
    """What the odd CTA stores at lane 128 on is in its lanes 0 to 127."""
    body = """
    .reg .b32 %value, %rank, %at;
    .reg .u64 %to;
    mov.u32 %rank, %cluster_ctarank;
    mad.lo.u32 %value, %rank, 1000, %tid;
    shl.b32 %at, %rank, 23;
    add.u32 %at, %at, %taddr;
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%at], {%value};
    tcgen05.wait::st.sync.aligned;
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {%value}, [%taddr];
    tcgen05.wait::ld.sync.aligned;
    mad.lo.u32 %at, %rank, 128, %tid;
    mad.wide.u32 %to, %at, 4, %out;
    st.global.u32 [%to], %value;"""
    out = np.zeros((2, 128), np.uint32)
    launch(program(body, group=2), np.zeros(1, np.uint32), out, schedule, cluster=2)
    np.testing.assert_array_equal(out, np.arange(128) + np.array([[0], [1000]]))


def simple(load: str, columns: int = 64, lines: str = "") -> str:
    return program(f"    .reg .b32 %d<8>;\n{lines}\n    {load}\n    tcgen05.wait::ld.sync.aligned;", columns=columns)


@pytest.mark.parametrize(
    ("load", "message"),
    [
        ("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%d0}, [%taddr+0x100000];", r"warp \d reaches lanes"),
        ("tcgen05.ld.sync.aligned.16x64b.x1.b32 {%d0}, [%taddr+0x080000];", r"from lane \d+ or \d+ on"),
        ("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%d0}, [%taddr+0x800000];", r"warp \d reaches lanes"),
        (
            "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%d0, %d1}, [%taddr+63];",
            "column 64 is outside the CTA's allocations",
        ),
        ("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%d0}, [%taddr+512];", "512 columns"),
        ("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%d0}, [%tid];", "different values for the address"),
    ],
)
def test_addresses_that_fault(load, message):
    with pytest.raises(TensorMemoryFault, match=message) as caught:
        launch(simple(load), np.zeros(1, np.uint32), np.zeros(1, np.uint32), "early")
    assert "tcgen05.ld" in str(caught.value)
    assert caught.value.place.lanes


@pytest.mark.parametrize(
    "instruction",
    [
        "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%d0}, [%taddr];",
        "tcgen05.st.sync.aligned.32x32b.x1.b32 [%taddr], {%d0};",
    ],
)
def test_transfer_by_part_of_a_warp(instruction):
    with pytest.raises(DivergenceFault):
        text = simple(instruction).replace("bar.sync 0;", "")
        launch(text, np.zeros(1, np.uint32), np.zeros(1, np.uint32), "early", threads=48)


@pytest.mark.parametrize(
    ("instruction", "message"),
    [
        ("tcgen05.ld.sync.aligned.16x256b.x64.b32 {%d0}, [%taddr];", "256 registers"),
        ("tcgen05.ld.sync.aligned.32x32b.x2.b32 {%d0}, [%taddr];", "1 registers: this form has 2"),
        ("tcgen05.ld.sync.aligned.16x32bx2.x1.b32 {%d0}, [%taddr];", "immHalfSplitoff"),
        ("tcgen05.ld.sync.aligned.32x32b.x1.b32 {%d0}, [%taddr], 4;", "immHalfSplitoff"),
        ("tcgen05.ld.sync.aligned.32x32b.x1.unpack::16b.b32 {%d0}, [%taddr];", "unpack"),
        ("tcgen05.ld.red.sync.aligned.32x32b.x2.max.f32 {%d0, %d1}, %d2, [%taddr];", "does not exist on sm_100a"),
        ("tcgen05.ldx.sync.aligned [%taddr];", "tcgen05.ldx"),
    ],
)
def test_refused_forms(instruction, message):
    with pytest.raises(UnsupportedInstruction, match=message):
        launch(simple(instruction), np.zeros(1, np.uint32), np.zeros(1, np.uint32), "early")


@pytest.mark.parametrize(
    ("suffix", "reduce"),
    [
        ("min.u32", lambda v: v.min(axis=1)),
        ("max.s32", lambda v: v.view(np.int32).max(axis=1).view(np.uint32)),
        ("max.f32", lambda v: np.fmax.reduce(v.view(np.float32), axis=1).view(np.uint32)),
        ("min.abs.f32", lambda v: np.fmin.reduce(np.abs(v.view(np.float32)), axis=1).view(np.uint32)),
        ("max.NaN.f32", None),
    ],
)
def test_load_with_reduction(suffix, reduce):
    """`.red` on sm_103a: each thread's extreme of what it loads."""
    values = np.random.default_rng(1).standard_normal((128, 8)).astype(np.float32)
    values[3, 2] = np.nan
    body = transfer(("32x32b", "x8", 8), ("32x32b", "x8", 8)).replace(
        f"tcgen05.ld.sync.aligned.32x32b.x8.b32 {registers('d', 8)}",
        f".reg .b32 %best; tcgen05.ld.red.sync.aligned.32x32b.x8.{suffix} {registers('d', 8)}, %best",
    )
    body = body.replace("st.global.b32 [%to+28], %d7", "st.global.b32 [%to+28], %best")
    out = launch(
        program(body, target="sm_103a"), values.view(np.uint32), np.zeros((128, 8), np.uint32), "late"
    )  # fmt: skip
    np.testing.assert_array_equal(out[:, :7], values.view(np.uint32)[:, :7])
    if reduce is None:
        expected = np.maximum.reduce(values, axis=1).view(np.uint32)
        expected[3] = 0x7FFF_FFFF
    else:
        expected = reduce(values.view(np.uint32))
    np.testing.assert_array_equal(out[:, 7], expected)


# -- asynchrony ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_loaded_registers_are_there_without_a_wait(schedule):
    """An instruction that reads, or overwrites, a register of a load waits for it, in any place of the program."""
    body = f"""
{load_inputs(4)}
    .reg .b32 %d<4>, %sum;
    .reg .u32 %i;
    .reg .pred %more, %big;
    tcgen05.st.sync.aligned.32x32b.x4.b32 [%taddr], {registers("r", 4)};
    tcgen05.wait::st.sync.aligned;
    mov.u32 %i, 0;
    mov.u32 %sum, 0;
  LOOP:
    add.u32 %sum, %sum, %i;
    tcgen05.ld.sync.aligned.32x32b.x4.b32 {registers("d", 4)}, [%taddr];
    add.u32 %i, %i, 1;
    setp.lt.u32 %more, %i, 3;
    @%more bra LOOP;
    setp.gt.u32 %big, %d3, 100;
    @%big add.u32 %sum, %sum, %d0;
    @!%big add.u32 %sum, %sum, %d1;
    mov.u32 %d2, 7;
    mov.b32 %d0, %sum;
{store_outputs("d", 4)}
"""
    values = random_words(4) % np.uint32(200)
    out = launch(program(body, columns=32), values, np.zeros((128, 4), np.uint32), schedule)
    expected = values.copy()
    expected[:, 2] = 7
    expected[:, 0] = 3 + np.where(values[:, 3] > 100, values[:, 0], values[:, 1])
    np.testing.assert_array_equal(out, expected)


HANDSHAKE = """
    .reg .u32 %at;
    .reg .b32 %d<2>, %new;
    tcgen05.st.sync.aligned.32x32b.x2.b32 [%taddr], {{%r0, %r1}};
    {first}
    tcgen05.ld.sync.aligned.32x32b.x2.b32 {{%d0, %d1}}, [%taddr];
    {second}
    mov.u32 %new, 99;
    tcgen05.st.sync.aligned.32x32b.x2.b32 [%taddr], {{%new, %new}};
    tcgen05.wait::st.sync.aligned;
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("missing", ["nothing", "wait::st", "wait::ld"])
def test_what_a_missing_wait_does(missing, schedule):
    """The load comes after the store of its cells, but not before the next one: without wait::ld, under `late`, it
    finds what that has put there."""
    first = "" if missing == "wait::st" else "tcgen05.wait::st.sync.aligned;"
    second = "" if missing == "wait::ld" else "tcgen05.wait::ld.sync.aligned;"
    body = load_inputs(2) + HANDSHAKE.format(first=first, second=second) + store_outputs("d", 2)
    values = random_words(2)
    out = launch(program(body, columns=32), values, np.zeros((128, 2), np.uint32), schedule)
    if missing != "wait::ld" or schedule == "early":
        np.testing.assert_array_equal(out, values)
    elif schedule == "late":
        np.testing.assert_array_equal(out, np.full_like(out, 99))


@pytest.mark.parametrize(("schedule", "seed"), [("late", 0), ("early", 0), *(("random", seed) for seed in range(5))])
def test_stores_of_the_same_cells_keep_their_order(schedule, seed):
    """Two stores that share column 1, then a load of what both have written, without a wait."""
    body = f"""
{load_inputs(4)}
    .reg .b32 %d<3>;
    tcgen05.st.sync.aligned.32x32b.x2.b32 [%taddr], {{%r0, %r1}};
    tcgen05.st.sync.aligned.32x32b.x2.b32 [%taddr+1], {{%r2, %r3}};
    tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%d0}}, [%taddr];
    tcgen05.ld.sync.aligned.32x32b.x2.b32 {{%d1, %d2}}, [%taddr+1];
{store_outputs("d", 3)}
"""
    values = random_words(4)
    out = launch(program(body, columns=32), values, np.zeros((128, 3), np.uint32), schedule, seed=seed)
    np.testing.assert_array_equal(out, values[:, [0, 2, 3]])


@pytest.mark.parametrize(
    ("load", "ordered"),
    [
        ("32x32b.x2.b32 {%d0, %d1}, [%taddr+1]", True),
        ("32x32b.x1.b32 {%d0}, [%taddr+2]", False),
        ("16x64b.x1.b32 {%d0}, [%at]", True),
        ("16x64b.x1.b32 {%d0}, [%taddr]", False),
    ],
    ids=["one_column_of_two", "the_next_column", "the_same_lanes", "the_other_lanes"],
)
def test_a_load_waits_for_stores_of_its_cells_alone(load, ordered):
    """Columns 0 and 1 of lanes 16-31: whether the store is over once the load is shows when they are deallocated."""
    text = program(
        f"""
    .reg .b32 %d<2>;
    .reg .u32 %at;
    add.u32 %at, %taddr, {16 << 16};
    tcgen05.st.sync.aligned.16x64b.x1.b32 [%at], {{%tid}};
    tcgen05.ld.sync.aligned.{load};
    tcgen05.wait::ld.sync.aligned;""",
        columns=32,
    )
    if ordered:
        launch(text, np.zeros(1), np.zeros(1), "late")
    else:
        with pytest.raises(TensorMemoryFault, match="tcgen05.st touches .* deallocated: wait for it"):
            launch(text, np.zeros(1), np.zeros(1), "late")


BETWEEN_WARPS = """
    .reg .b32 %d0;
    .reg .pred %stores;
    setp.lt.u32 %stores, %warp, 4;
    mov.u32 %d0, 0;
    @%stores tcgen05.st.sync.aligned.32x32b.x1.b32 [%taddr], {{%r0}};
    {barrier}
    @!%stores tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%d0}}, [{address}];
"""


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_another_warp_loads_what_has_been_stored(schedule):
    """Warps 4 to 7 load what warps 0 to 3 have stored: after a barrier, which needs no wait::st before it."""
    body = load_inputs(1) + BETWEEN_WARPS.format(barrier="bar.sync 0;", address="%taddr") + store_outputs("d", 1)
    values = np.random.default_rng(0).integers(1, 1 << 32, (256, 1), np.uint64).astype(np.uint32)
    out = launch(program(body, columns=32), values, np.zeros((256, 1), np.uint32), schedule, threads=256)
    np.testing.assert_array_equal(out[128:], values[:128])


def test_a_load_that_nobody_reads():
    """A CTA may exit with a load in flight: its registers are gone."""
    text = program("    .reg .b32 %d;\n    tcgen05.ld.sync.aligned.32x32b.x1.b32 {%d}, [%taddr];", columns=32)
    for schedule in ("late", "early"):
        Emulator(schedule).launch(text, "tensor", grid=4, block=128, args=[np.zeros(1), np.zeros(1)])


def test_columns_freed_under_a_store():
    text = program("    tcgen05.st.sync.aligned.32x32b.x1.b32 [%taddr], {%tid};", columns=32)
    with pytest.raises(TensorMemoryFault, match="deallocated: wait for it"):
        Emulator("late").launch(text, "tensor", grid=1, block=128, args=[np.zeros(1), np.zeros(1)])


def test_a_wait_holds_only_warps_with_transfers_in_flight():
    """Warp 3 has nothing in flight: it passes the wait and does what lets the others go on."""
    body = f"""
{load_inputs(1)}
    .reg .b32 %d0;
    .reg .pred %last;
    setp.eq.u32 %last, %warp, 3;
    @%last bra SKIP;
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%taddr], {{%r0}};
  SKIP:
    tcgen05.wait::st.sync.aligned;
    mov.u32 %d0, 5;
    @!%last tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%d0}}, [%taddr];
    tcgen05.wait::ld.sync.aligned;
{store_outputs("d", 1)}
"""
    values = random_words(1)
    expected = np.where(np.arange(128)[:, None] < 96, values, np.uint32(5))
    for schedule in SCHEDULES:
        out = launch(program(body, columns=32), values, np.zeros((128, 1), np.uint32), schedule)
        np.testing.assert_array_equal(out, expected)
