"""The parser: names, scopes, literals, variables. What instructions mean is tested elsewhere."""

import struct

import pytest

from common.emulator import PtxSyntaxError
from common.emulator.ptx.module import (
    Address,
    Arguments,
    Immediate,
    Not,
    Pair,
    Register,
    Sink,
    SpecialRegister,
    Symbol,
    Vector,
    immediate_bits,
    immediate_number,
)
from common.emulator.ptx.parser import parse

HEADER = ".version 9.0\n.target sm_100a, debug\n.address_size 64\n"


def body(text: str, parameters: str = ""):
    return parse(f"{HEADER}.visible .entry k({parameters}) {{\n{text}\n}}").functions["k"]


def instruction(text: str, declarations: str = ".reg .b32 %r<9>; .reg .b64 %rd<9>; .reg .pred %p<9>;"):
    return body(declarations + "\n" + text).instructions[0]


def test_opcode_modifiers_and_guard() -> None:
    inst = instruction("@!%p1 ld.global.L1::no_allocate.v4.f32 {%r1, %r2, %r3, _}, [%rd1+-16];")
    assert inst.opcode == "ld"
    assert inst.modifiers == ("global", "L1::no_allocate", "v4", "f32")
    assert inst.guard.name == "%p1" and inst.guard_negated
    vector, address = inst.operands
    assert isinstance(vector, Vector) and isinstance(vector.items[3], Sink)
    assert isinstance(address, Address) and address.offset == -16 and address.base.name == "%rd1"


def test_pairs_negations_and_special_registers() -> None:
    inst = instruction("setp.lt.and.s32 %p1|%p2, %r1, 7, !%p3;")
    assert isinstance(inst.operands[0], Pair) and isinstance(inst.operands[3], Not)
    assert instruction("mov.u32 %r1, %cluster_ctaid.x;").operands[1] == SpecialRegister("cluster_ctaid.x")


def test_a_declared_register_hides_a_special_one() -> None:
    inst = instruction("mov.u32 %r1, %laneid;", ".reg .b32 %r<2>; .reg .b32 %laneid;")
    assert isinstance(inst.operands[1], Register)


def test_tensor_coordinates_are_items_of_the_address() -> None:
    inst = instruction("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%rd1, {%r1, %r2}];")
    assert isinstance(inst.operands[0].items[0], Vector)


def test_inner_scopes_have_registers_and_labels_of_their_own() -> None:
    function = body(
        """.reg .b32 %a;
        { .reg .b32 %a; L: mov.b32 %a, 1; bra L; }
        { .reg .b32 %a; L: mov.b32 %a, 2; bra L; }
        mov.b32 %a, 3;"""
    )
    registers = [i.operands[0].index for i in function.instructions if i.opcode == "mov"]
    assert len(set(registers)) == 3
    targets = [function.labels[i.operands[0].name] for i in function.instructions if i.opcode == "bra"]
    assert targets == [0, 2]


def test_a_branch_finds_a_label_declared_later_in_an_outer_scope() -> None:
    function = body("{ bra DONE; }\nDONE: ret;")
    assert function.labels[function.instructions[0].operands[0].name] == 1


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("10", 10), ("0x1F", 31), ("0b101", 5), ("017", 15), ("-3", -3), ("0xFFU", 255), ("(1 << 4) | 3", 19),
        ("-7 / 2", -3), ("-7 % 2", -1), ("~0", -1), ("2 + 3 * 4", 14), ("1 ? 5 : 6", 5),
    ],
)  # fmt: skip
def test_integer_constant_expressions(text: str, value: int) -> None:
    assert instruction(f"mov.b32 %r1, {text};").operands[1].value == value


def test_float_literals_are_bits() -> None:
    one = instruction("mov.b32 %r1, 0f3F800000;").operands[1]
    assert immediate_bits(one, "b32") == 0x3F800000 and immediate_number(one) == 1.0
    assert immediate_bits(one, "f64") == struct.unpack("<Q", struct.pack("<d", 1.0))[0]
    assert immediate_bits(Immediate(1.5, "f64"), "f32") == struct.unpack("<I", struct.pack("<f", 1.5))[0]
    assert immediate_bits(Immediate(-1), "b16") == 0xFFFF


def test_variables_with_initialisers_and_relocations() -> None:
    module = parse(
        HEADER
        + """.const .align 4 .f32 c[2] = {0f3F800000, 2.0};
        .global .align 8 .u64 p[2] = {generic(c)+4, 7};
        .extern .shared .align 16 .b8 pool[];
        .global .b8 text[4] = {104, 105};"""
    )
    assert struct.unpack("<2f", module.variables["c"].data) == (1.0, 2.0)
    relocation = module.variables["p"].relocations[0]
    assert (relocation.symbol, relocation.addend, relocation.offset) == ("c", 4, 0)
    assert module.variables["p"].data[8] == 7
    assert module.variables["pool"].size is None and module.variables["pool"].extern
    assert module.variables["text"].data == b"hi\0\0"


def test_short_rows_of_an_initialiser_are_filled_with_zeros() -> None:
    module = parse(HEADER + ".const .u8 c[2][3] = {{1, 2}, {3}}; .const .v2 .u8 v[4 / 2] = {{1}, {2, 3}};")
    assert module.variables["c"].data == bytes([1, 2, 0, 3, 0, 0])
    assert module.variables["v"].data == bytes([1, 0, 2, 3])


@pytest.mark.parametrize("variable", ["c[2] = {1, 2, 3}", "c[2][2] = {{1, 2, 3}}"])
def test_too_many_initial_values_are_an_error(variable: str) -> None:
    with pytest.raises(PtxSyntaxError, match="initial"):
        parse(HEADER + f".const .u8 {variable};")


def test_parameters_keep_type_alignment_and_size() -> None:
    function = body("ret;", ".param .u64 .ptr .global .align 16 a, .param .align 64 .b8 map[128], .param .f32 x")
    assert [(p.name, p.size, p.align) for p in function.parameters] == [("a", 8, 8), ("map", 128, 64), ("x", 4, 4)]


def test_performance_directives() -> None:
    module = parse(HEADER + ".entry k() .maxntid 128, 1, 1 .minnctapersm 2 .reqnctapercluster 2 { ret; }")
    assert module.functions["k"].directives == {"maxntid": (128, 1, 1), "minnctapersm": (2,), "reqnctapercluster": (2,)}


def test_calls() -> None:
    function = body("call.uni (result), f, (a, b);", "")
    results, callee, arguments = function.instructions[0].operands
    assert isinstance(results, Arguments) and callee == Symbol("f") and len(arguments.items) == 2


def test_source_lines_come_from_loc() -> None:
    module = parse(HEADER + '.entry k() {\n.loc 1 42 3\nret;\n}\n.file 1 "a.cu"')
    assert module.functions["k"].instructions[0].source == "a.cu:42"


def test_debug_sections_are_skipped() -> None:
    parse(HEADER + ".section .debug_str { .b8 1, 2 \n }")


@pytest.mark.parametrize("text", [".entry k() { ret;", ".entry k(.param", ".section .debug {", ".global .u32"])
def test_text_that_breaks_off_is_an_error(text: str) -> None:
    with pytest.raises(PtxSyntaxError, match=r"PTX line 4: (the text ends|the function body is not closed|expected)"):
        parse(HEADER + text)


@pytest.mark.parametrize("text", ["1 / 0", "1 % 0", "1 << -1", "1.5 & 1"])
def test_constant_expressions_without_a_value_are_an_error(text: str) -> None:
    with pytest.raises(PtxSyntaxError, match="PTX line 5"):
        body(f".reg .b32 %r<9>; mov.b32 %r1, {text};")


@pytest.mark.parametrize("text", ["mov.b32 %nope, 1;", "mov.b32 %r1 1;", "`"])
def test_errors_name_the_line(text: str) -> None:
    with pytest.raises(PtxSyntaxError, match=r"PTX line 5: (unknown register|expected ';'|unexpected character)"):
        body(f".reg .b32 %r<9>; {text}")
