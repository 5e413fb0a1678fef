"""Rearranged straight-line code: which instructions run together, and that nothing else can tell."""

from __future__ import annotations

import random

import numpy as np
import pytest

from common.emulator import Emulator, OutOfBounds
from common.emulator.emulator import _PROGRAMS
from common.emulator.isa import load_families
from common.emulator.machine import program
from common.emulator.machine.fusion import make_nodes, schedule
from common.emulator.machine.program import Compiler, compile_kernel
from common.emulator.ptx.parser import parse

HEADER = ".version 8.8\n.target sm_100a\n.address_size 64\n"
LANES = 192


def groups_of(body: str) -> list[list[str]]:
    """The first segment of a kernel as groups of instruction texts."""
    load_families()
    module = parse(f"{HEADER}.visible .entry k() {{ .reg .b32 %r<64>; .reg .b64 %d<16>; .reg .pred %p<8>;\n{body}\n}}")
    instructions = module.functions["k"].instructions
    nodes = make_nodes([None] * len(instructions), instructions, set())
    return [[node.inst.text.strip().rstrip(";") for node in group.nodes] for group in schedule(nodes)]


def test_an_unrolled_loop_becomes_one_group_per_instruction() -> None:
    body = "\n".join(f"mul.f32 %r{i + 8}, %r{i}, %r60; ex2.approx.f32 %r{i + 16}, %r{i + 8};" for i in range(8))
    assert [len(group) for group in groups_of(body)] == [8, 8]


def test_a_chain_stays_a_chain() -> None:
    assert [len(group) for group in groups_of("add.f32 %r0, %r0, %r1;" * 4)] == [1, 1, 1, 1]


def test_a_register_is_not_overwritten_before_it_is_read() -> None:
    groups = groups_of("add.u32 %r1, %r0, 1; mul.lo.u32 %r0, %r2, %r3; add.u32 %r5, %r0, 1;")
    assert groups == [["add.u32 %r1, %r0, 1"], ["mul.lo.u32 %r0, %r2, %r3"], ["add.u32 %r5, %r0, 1"]]


def test_literals_of_shifts_must_agree() -> None:
    """The decoder of a shift looks at its amount; that of a sum does not."""
    assert [len(g) for g in groups_of("shl.b32 %r1, %r0, 1; shl.b32 %r2, %r0, 2; shl.b32 %r3, %r0, 2;")] == [1, 2]
    assert [len(g) for g in groups_of("add.u32 %r1, %r0, 1; add.u32 %r2, %r0, 2;")] == [2]


def test_guarded_instructions_and_memory_keep_their_order() -> None:
    body = """@%p0 add.u32 %r1, %r0, 1; @%p0 add.u32 %r2, %r0, 1;
              st.shared.u32 [%r9], %r3; st.shared.u32 [%r8], %r4; add.u32 %r5, %r1, 1;"""
    assert [group[0].split()[0] for group in groups_of(body)] == [
        "@%p0",
        "@%p0",
        "st.shared.u32",
        "st.shared.u32",
        "add.u32",
    ]


def unfused(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep_order(self: Compiler) -> None:
        self.layout.settle_rest()
        for segment in self.segments:
            segment.origins = segment.instructions

    monkeypatch.setattr(program.Compiler, "_fuse", keep_order)


def random_body(draw: random.Random, length: int, registers: int) -> str:
    """Few registers make many dependences, many registers make large groups."""
    r, f, d, p = (lambda kind=kind: f"%{kind}{draw.randrange(registers)}" for kind in "rfdp")
    number = lambda: str(draw.randrange(-9, 9))  # noqa: E731
    forms = [
        lambda: f"add.s32 {r()}, {r()}, {draw.choice((r, number))()};",
        lambda: f"mad.lo.s32 {r()}, {r()}, {r()}, {r()};",
        lambda: f"xor.b32 {r()}, {r()}, {draw.choice((r, number))()};",
        lambda: f"shl.b32 {r()}, {r()}, {draw.randrange(4)};",
        lambda: f"prmt.b32 {r()}, {r()}, {r()}, {draw.choice(('0x5410', '0x7632', r()))};",
        lambda: f"mov.b64 {d()}, {{{r()}, {r()}}};",
        lambda: f"mov.b64 {{%r{(a := draw.randrange(registers - 1))}, %r{a + 1}}}, {d()};",
        lambda: f"fma.rn.f32x2 {d()}, {d()}, {d()}, {d()};",
        lambda: f"fma.rz.ftz.f32x2 {d()}, {d()}, {d()}, {d()};",
        lambda: f"add.f32 {f()}, {f()}, {f()};",
        lambda: f"fma.rn.ftz.f32 {f()}, {f()}, {f()}, {f()};",
        lambda: f"max.f32 {f()}, {f()}, {f()}, {f()};",
        lambda: f"mul.f32 {f()}, {f()}, 0f3F8147AE;",
        lambda: f"cvt.rn.f16x2.f32 {r()}, {f()}, {f()};",
        lambda: f"cvt.rn.bf16x2.f32 {r()}, {f()}, {f()};",
        lambda: f"mov.b32 {f()}, {r()};",
        lambda: f"ex2.approx.ftz.f32 {f()}, {f()};",
        lambda: f"setp.lt.s32 {p()}, {r()}, {draw.choice((r, number))()};",
        lambda: f"setp.gt.f32 {p()}, {f()}, {f()};",
        lambda: f"selp.b32 {r()}, {r()}, {draw.choice((r, number))()}, {p()};",
        lambda: f"@{p()} add.s32 {r()}, {r()}, 1;",
        lambda: f"setp.eq.and.s32 {p()}, {r()}, {r()}, !{p()};",
        lambda: f"add.cc.u32 {r()}, {r()}, {r()}; addc.u32 {r()}, {r()}, {r()};",
        lambda: f"shfl.sync.bfly.b32 {r()}, {r()}, 1, 31, -1;",
        lambda: f"st.shared.b32 [%at], {r()}; ld.shared.b32 {r()}, [%at];",
    ]
    return "\n".join(draw.choice(forms)() for _ in range(length))


def registers_after(body: str, schedule: str, registers: int) -> np.ndarray:
    """Every register of every lane, as a kernel of six warps leaves it."""
    names = [f"%{kind}{i}" for kind in "rf" for i in range(registers)]
    first = "\n".join(
        f"mad.lo.s32 %r{i}, %t, {7 * i + 3}, {i}; cvt.rn.f32.s32 %f{i}, %r{i}; mov.b64 %d{i}, {{%f{i}, %f{i}}};"
        f"setp.lt.s32 %p{i}, %r{i}, {100 * i};"
        for i in range(registers)
    )
    stores = "\n".join(f"st.global.b32 [%out+{4 * place}], {name};" for place, name in enumerate(names))
    stores += "\n".join(f"st.global.b64 [%out+{8 * (registers + i)}], %d{i};" for i in range(registers))
    ptx = f"""{HEADER}
    .shared .align 4 .b8 memory[{4 * LANES}];
    .visible .entry k(.param .u64 out) {{
      .reg .b32 %r<{registers}>; .reg .f32 %f<{registers}>; .reg .b64 %d<{registers}>; .reg .pred %p<{registers}>;
      .reg .b32 %t; .reg .b32 %at; .reg .b64 %out; .reg .b64 %base;
      mov.u32 %t, %tid.x; mov.u32 %at, memory; mad.lo.u32 %at, %t, 4, %at;
      ld.param.u64 %base, [out]; mad.wide.u32 %out, %t, {16 * registers}, %base;
      {first}
      {body}
      {stores}
      ret;
    }}"""
    out = np.zeros((LANES, 4 * registers), np.uint32)
    Emulator(schedule).launch(ptx, "k", grid=1, block=LANES, args=[out])
    return out


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("schedule", ("late", "early", "random"))
def test_random_code_gives_the_same_registers(seed: int, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    registers = 60 if seed % 2 else 10
    body = random_body(random.Random(seed), 400, registers)
    fused = registers_after(body, schedule, registers)
    unfused(monkeypatch)
    _PROGRAMS.clear()
    expected = registers_after(body, schedule, registers)
    _PROGRAMS.clear()
    np.testing.assert_array_equal(fused, expected)


def test_a_fault_names_its_own_instruction() -> None:
    """Though the store runs before or after instructions that stand elsewhere in the text."""
    ptx = f"""{HEADER}
    .visible .entry k(.param .u64 out) {{
      .reg .b32 %r<8>; .reg .b64 %out;
      ld.param.u64 %out, [out];
      mov.u32 %r0, %tid.x; add.u32 %r1, %r0, 1; add.u32 %r2, %r0, 2; mul.lo.u32 %r5, %r1, %r2;
      st.global.u32 [%out+4096], %r5; add.u32 %r3, %r0, 3; add.u32 %r4, %r0, 4; st.global.u32 [%out], %r4; ret;
    }}"""
    with pytest.raises(OutOfBounds, match=r"st\.global\.u32 \[%out\+4096\], %r5"):
        Emulator().launch(ptx, "k", grid=1, block=32, args=[np.zeros(4, np.uint32)])


def test_registers_of_a_group_are_neighbours() -> None:
    text = f"""{HEADER}.visible .entry k() {{ .reg .b32 %r<16>;
      add.u32 %r9, %r1, 1; add.u32 %r3, %r2, 1; add.u32 %r7, %r4, 1; ret; }}"""
    module = parse(text)
    layout = compile_kernel(module, "k").layout
    targets = [inst.operands[0] for inst in module.functions["k"].instructions[:3]]
    assert layout.spacing(targets) == slice(0, 3, 1)
