"""Counters of whole launches: figures by instruction and line, arithmetic, roles, waits."""

import numpy as np
import pytest

from common.emulator import Emulator
from common.emulator.hardware.instruction_descriptor import InstructionDescriptor, MmaForm
from common.emulator.machine.events import SCHEDULES
from common.emulator.machine.operations import operations_of
from common.emulator.machine.tensor_core import mma_plan
from common.emulator.ptx.module import Instruction

HEADER = ".version 9.0\n.target sm_100a\n.address_size 64\n"


def launch(body, *, args=(), parameters=(), block=64, grid=1, schedule="late", cluster=1):
    declared = ", ".join(f".param .u64 {name}" for name in parameters)
    ptx = f"""{HEADER}.file 1 "kernel.cu"
    .visible .entry k({declared}) {{
      .reg .b32 %r<16>; .reg .b64 %d<8>; .reg .f32 %f<8>; .reg .pred %p; .reg .b64 %state;
      .shared .align 128 .b8 pool[32768]; .shared .align 8 .b64 bar;
      mov.u32 %r0, %tid.x; mov.u32 %r1, pool; mov.f32 %f0, 0f3F800000;
      {body}
      ret;
    }}"""
    return Emulator(schedule).launch(ptx, "k", grid=grid, block=block, cluster=cluster, args=list(args)).counters


def figures_of(counters, start):
    """Figures of the one instruction whose text starts so."""
    (found,) = [figures for inst, figures in counters.by_instruction() if inst.text.startswith(start)]
    return found


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_wavefronts_of_shared_loads_and_stores_by_instruction(schedule):
    counters = launch(
        """mad.lo.u32 %r2, %r0, 4, %r1; mad.lo.u32 %r3, %r0, 8, %r1; mad.lo.u32 %r4, %r0, 16, %r1;
        st.shared.u32 [%r2], %r0;
        st.shared.u32 [%r3], %r0;
        ld.shared.u32 %r5, [%r1];
        ld.shared.v4.u32 {%r5, %r6, %r7, %r8}, [%r4];
        setp.lt.u32 %p, %r0, 3;
        @%p ld.shared.v2.u32 {%r5, %r6}, [%r3];""",
        schedule=schedule, grid=3,
    )  # fmt: skip
    warps = 3 * 2
    expected = {
        "st.shared.u32 [%r2]": (1, 1), "st.shared.u32 [%r3]": (2, 1), "ld.shared.u32": (1, 1), "ld.shared.v4": (4, 4),
    }  # fmt: skip
    for text, (wavefronts, ideal) in expected.items():
        figures = figures_of(counters, text)
        assert figures.shared_requests == figures.instructions == warps, text
        assert (figures.wavefronts, figures.ideal_wavefronts) == (warps * wavefronts, warps * ideal), text
        assert (figures.sectors, figures.global_requests) == (0, 0)
    guarded = figures_of(counters, "@%p ld.shared.v2")
    assert (guarded.shared_requests, guarded.wavefronts, guarded.instructions) == (3, 3, warps)
    assert counters.by_instruction()[0][0].text == "st.shared.u32 [%r3], %r0"
    assert counters.total().conflicts == warps


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_sectors_of_global_requests(schedule):
    data, out = np.arange(64 * 33, dtype=np.uint32), np.zeros(64, np.uint32)
    counters = launch(
        """ld.param.u64 %d0, [data]; ld.param.u64 %d1, [out];
        mul.wide.u32 %d2, %r0, 132; add.u64 %d2, %d2, %d0; mul.wide.u32 %d3, %r0, 4; add.u64 %d3, %d3, %d1;
        ld.global.u32 %r2, [%d2]; add.u64 %d4, %d3, %d0; sub.u64 %d4, %d4, %d1;
        ld.u32 %r3, [%d4+4];
        st.global.u32 [%d3], %r2;""",
        args=[data, out], parameters=["data", "out"], schedule=schedule,
    )  # fmt: skip
    assert out.tolist() == data[::33].tolist()
    strided, shifted, store = (figures_of(counters, text) for text in ("ld.global.u32", "ld.u32", "st.global.u32"))
    assert (strided.sectors, strided.ideal_sectors, strided.global_requests) == (64, 8, 2)
    assert (shifted.sectors, shifted.ideal_sectors) == (10, 8)
    assert (store.sectors, store.ideal_sectors, store.wavefronts) == (8, 8, 0)
    assert counters.total().sectors == 82


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_generic_access_counts_where_each_lane_goes(schedule):
    data = np.zeros(64, np.uint32)
    counters = launch(
        """ld.param.u64 %d0, [data]; mul.wide.u32 %d1, %r0, 4; add.u64 %d2, %d0, %d1;
        cvt.u64.u32 %d3, %r1; cvta.shared.u64 %d3, %d3; mad.wide.u32 %d4, %r0, 128, %d3;
        and.b32 %r2, %r0, 1; setp.eq.u32 %p, %r2, 0; selp.b64 %d5, %d2, %d4, %p;
        st.u32 [%d5], %r0;""",
        args=[data], parameters=["data"], schedule=schedule,
    )  # fmt: skip
    figures = figures_of(counters, "st.u32")
    assert (figures.sectors, figures.ideal_sectors, figures.global_requests) == (8, 4, 2)
    assert (figures.wavefronts, figures.ideal_wavefronts, figures.shared_requests) == (32, 2, 2)


def test_matrices_count_a_phase_for_each_eight_rows():
    counters = launch(
        """mad.lo.u32 %r2, %r0, 128, %r1; and.b32 %r3, %r0, 31; mad.lo.u32 %r3, %r3, 16, %r1;
        ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r4, %r5, %r6, %r7}, [%r2];
        ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r4}, [%r2];
        stmatrix.sync.aligned.m8n8.x2.shared.b16 [%r3], {%r4, %r5};"""
    )
    four, one, store = (
        figures_of(counters, text)
        for text in ("ldmatrix.sync.aligned.m8n8.x4", "ldmatrix.sync.aligned.m8n8.x1", "stmatrix")
    )
    assert (four.wavefronts, four.ideal_wavefronts, four.shared_requests) == (2 * 32, 2 * 4, 2)
    assert (one.wavefronts, one.ideal_wavefronts, one.shared_requests) == (2 * 8, 2, 2)
    assert (store.wavefronts, store.ideal_wavefronts, store.shared_requests) == (2 * 2, 2 * 2, 2)


def test_atomics_and_small_asynchronous_copies():
    data = np.arange(256, dtype=np.uint32)
    counters = launch(
        """ld.param.u64 %d0, [data]; mul.wide.u32 %d1, %r0, 16; add.u64 %d1, %d1, %d0; mad.lo.u32 %r2, %r0, 16, %r1;
        cp.async.cg.shared.global [%r2], [%d1], 16; cp.async.wait_all;
        red.shared.add.u32 [%r1+4096], 1;
        red.global.add.u32 [%d1], 1;""",
        args=[data], parameters=["data"],
    )  # fmt: skip
    copy, shared, far = (figures_of(counters, text) for text in ("cp.async.cg", "red.shared", "red.global"))
    assert (copy.wavefronts, copy.ideal_wavefronts, copy.sectors, copy.ideal_sectors) == (8, 8, 32, 32)
    assert (shared.wavefronts, shared.ideal_wavefronts) == (64, 2)
    assert (far.sectors, far.ideal_sectors) == (32, 8)


def test_shared_memory_of_another_cta_is_no_wavefront_of_this_one():
    counters = launch(
        """mov.u32 %r2, %cluster_ctarank; xor.b32 %r2, %r2, 1; mapa.shared::cluster.u32 %r3, %r1, %r2;
        barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
        st.shared::cluster.u32 [%r3], %r0;
        barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;""",
        grid=2, cluster=2,
    )  # fmt: skip
    assert counters.total().wavefronts == 0
    assert counters.bytes["shared::cluster store"] == 2 * 64 * 4


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_flops_count_lanes_that_execute(schedule):
    counters = launch(
        """fma.rn.f32 %f1, %f0, %f0, %f0; add.f32 %f2, %f0, %f0; ex2.approx.f32 %f3, %f0;
        setp.lt.u32 %p, %r0, 40; @%p mul.f32 %f4, %f0, %f0; @!%p sub.f32 %f4, %f0, %f0;
        @%p bra SKIP; fma.rn.f32 %f1, %f0, %f0, %f0; SKIP:""",
        schedule=schedule, grid=2, block=60,
    )  # fmt: skip
    assert counters.flops == {
        "fp32 fma": 2 * 2 * (60 + 20), "fp32 add": 2 * (60 + 20), "fp32 special": 120, "fp32 mul": 80,
    }  # fmt: skip
    assert counters.total().flops == sum(counters.flops.values()) - 120


@pytest.mark.parametrize(
    "text, expected",
    [
        ("add.rn.f32x2", ("fp32 add", 2)),
        ("fma.rn.f16x2", ("fp16 fma", 4)),
        ("fma.rn.bf16x2", ("bf16 fma", 4)),
        ("mul.f64", ("fp64 mul", 1)),
        ("add.f32.bf16", ("fp32 add", 1)),
        ("div.full.f32", ("fp32 special", 1)),
        ("add.s32", None),
        ("cvt.rn.f32.f16", None),
        ("max.f32", None),
        ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", ("tensor f16", 128)),
        ("mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e4m3.e2m1.f32", ("tensor e4m3 x e2m1", 256)),
        ("mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32", ("tensor s8", 256)),
        ("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64.rn", ("tensor f64", 16)),
    ],
)
def test_operations_by_unit(text, expected):
    opcode, *modifiers = text.split(".")
    assert operations_of(Instruction(opcode, tuple(modifiers), (), None, False, 1, None, text)) == expected


def test_operations_of_the_tensor_core_go_to_the_instruction_that_issued_them():
    counters = launch("add.u32 %r2, %r0, 1;")
    (inst,) = [inst for inst, _ in counters.by_instruction() if inst.text.startswith("add.u32")]
    m128n64_f32 = 1 << 4 | 64 // 8 << 17 | 128 // 16 << 24
    plan = mma_plan(InstructionDescriptor.from_bits(m128n64_f32, MmaForm("f16", 1, False, False, 0)), a_in_tmem=False)
    for _ in range(3):
        counters.count_mma(inst, plan)
    counters.settle()
    assert counters.flops == {"tensor f16": 3 * 2 * 128 * 64 * 16}
    assert figures_of(counters, "add.u32").flops == 3 * 2 * 128 * 64 * 16


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_roles_are_neighbouring_warps_that_run_the_same_code(schedule):
    counters = launch(
        """setp.ge.u32 %p, %r0, 32; @%p bra OTHERS; add.u32 %r2, %r0, 1; add.u32 %r2, %r2, 1; bra END;
        OTHERS: mul.lo.u32 %r2, %r0, 3; END:""",
        block=128, grid=2, schedule=schedule,
    )  # fmt: skip
    first, others = counters.roles()
    assert (first.first, first.last, others.first, others.last) == (0, 0, 1, 3)
    assert (first.opcodes["add"], first.opcodes["mul"]) == (4, 0)
    assert (others.opcodes["add"], others.opcodes["mul"]) == (0, 6)
    assert counters.by_warp() == [sum(mix.values()) for mix in counters.opcodes_by_warp()]
    assert counters.by_opcode() == first.opcodes + others.opcodes
    assert counters.warp_instructions == sum(counters.by_warp()) == counters.total().instructions


def test_waits_are_told_by_instruction():
    counters = launch(
        """setp.eq.u32 %p, %r0, 0; @%p mbarrier.init.shared.b64 [bar], 64; bar.sync 0;
        mbarrier.arrive.shared.b64 %state, [bar];
        WAIT: mbarrier.try_wait.shared.b64 %p, [bar], %state; @!%p bra WAIT;"""
    )
    waits = {inst.opcode: figures.waits for inst, figures in counters.by_instruction() if figures.waits}
    assert waits == {"bar": counters.events["barrier waits"], "mbarrier": counters.events["mbarrier waits"]}


def test_a_blocking_instruction_counts_once_though_code_runs_after_its_wait():
    counters = launch("setp.lt.u32 %p, %r0, 5; bar.red.popc.u32 %r2, 0, %p;")
    assert counters.by_opcode()["bar"] == 2


def test_inlined_code_counts_for_the_line_that_calls_it():
    counters = launch(
        """.loc 1 40 3
        mad.lo.u32 %r2, %r0, 8, %r1;
        .loc 1 7 1, function_name $L__info_string0, inlined_at 1 40 3
        st.shared.u32 [%r2], %r0;
        .loc 1 3 1, function_name $L__info_string1, inlined_at 1 7 1
        add.u32 %r2, %r2, 4;
        .loc 1 41 3
        st.shared.u32 [%r2], %r0;"""
    )
    lines = counters.by_source()
    assert lines["kernel.cu:40"].instructions == 2 * 3
    assert (lines["kernel.cu:40"].wavefronts, lines["kernel.cu:41"].wavefronts) == (4, 4)
    assert "kernel.cu:7" not in lines and "kernel.cu:3" not in lines
    (inlined,) = [inst for inst, _ in counters.by_instruction() if inst.text.startswith("add.u32 %r2, %r2")]
    assert (inlined.source, inlined.called_from) == ("kernel.cu:3", "kernel.cu:40")
    assert inlined.origin == "kernel.cu:3, called from kernel.cu:40"


def test_ptx_without_lines_is_told_by_its_own():
    sources = set(launch("add.u32 %r2, %r0, 1;").by_source())
    assert sources and all(source.startswith("PTX:") for source in sources)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_many_executions_with_changing_addresses_and_masks(schedule):
    """More than one batch, against a count made in the same loop in Python."""
    counters = launch(
        """mov.u32 %r9, 0;
        LOOP: add.u32 %r2, %r9, 1; mul.lo.u32 %r2, %r2, %r0; and.b32 %r2, %r2, 1023; mad.lo.u32 %r2, %r2, 4, %r1;
        xor.b32 %r3, %r0, %r9; setp.gt.u32 %p, %r3, 37;
        st.shared.u32 [%r2], %r0;
        @%p ld.shared.u32 %r4, [%r2];
        add.u32 %r9, %r9, 1; setp.lt.u32 %p, %r9, 150; @%p bra LOOP;""",
        schedule=schedule,
    )  # fmt: skip
    store = load = requests = 0
    for step in range(150):
        for warp in range(2):
            tid = np.arange(32) + 32 * warp
            words = tid * (step + 1) % 1024
            chosen = (tid ^ step) > 37
            store += busiest_bank(words)
            load += busiest_bank(words[chosen])
            requests += chosen.any()
    assert figures_of(counters, "st.shared.u32").wavefronts == store
    assert figures_of(counters, "@%p ld.shared.u32").wavefronts == load
    assert figures_of(counters, "@%p ld.shared.u32").shared_requests == requests


def busiest_bank(words):
    return max((sum(word % 32 == bank for word in set(words.tolist())) for bank in range(32)), default=0)
