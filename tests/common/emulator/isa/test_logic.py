"""Logic and shift instructions against Python integers (PTX ISA 9.7.8)."""

from __future__ import annotations

import numpy as np
import pytest

from common.emulator import UnsupportedInstruction
from tests.common.emulator.isa.instruction_case import Case, check
from tests.common.emulator.ptx_kernels import run_lanes

BITS = ("b16", "b32", "b64")


def funnel(low: int, high: int, amount: int, left: bool, clamp: bool) -> int:
    n = min(amount, 32) if clamp else amount & 31
    both = high << 32 | low
    return (both << n >> 32 if left else both >> n) & 0xFFFF_FFFF


def by_table(a: int, b: int, c: int, table: int) -> int:
    bits = range(32)
    return sum((table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1) & 1) << i for i in bits)


def cases() -> list[Case]:
    result = []
    for kind in BITS:
        two = (kind, kind)
        result += [
            Case(f"and.{kind}", kind, two, lambda a, b: a & b),
            Case(f"or.{kind}", kind, two, lambda a, b: a | b),
            Case(f"xor.{kind}", kind, two, lambda a, b: a ^ b),
            Case(f"not.{kind}", kind, (kind,), lambda a: ~a),
            Case(f"cnot.{kind}", kind, (kind,), lambda a: a == 0),
            Case(f"shl.{kind}", kind, (kind, "u32"), lambda a, b: a << min(b, 64), (1,)),
        ]
    for kind in (*BITS, "u16", "u32", "u64", "s16", "s32", "s64"):
        result.append(Case(f"shr.{kind}", kind, (kind, "u32"), lambda a, b: a >> min(b, 64), (1,)))
    for direction in "lr":
        for mode in ("clamp", "wrap"):
            left, clamp = direction == "l", mode == "clamp"
            result.append(
                Case(
                    f"shf.{direction}.{mode}.b32",
                    "b32",
                    ("b32", "b32", "u32"),
                    lambda a, b, c, x=left, y=clamp: funnel(a, b, c, x, y),
                    (2,),
                )
            )
    for table in (0x80, 0xFE, 0x40, 0x1A, 0x96, 0xCA, 0x00, 0xFF):
        result.append(
            Case("lop3.b32", "b32", ("b32",) * 3, lambda a, b, c, t=table: by_table(a, b, c, t), tail=f", {table:#x}")
        )
    return result


CASES = cases()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_instruction(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("opcode, operation", [("and", np.logical_and), ("or", np.logical_or), ("xor", np.logical_xor)])
def test_predicates(opcode: str, operation: np.ufunc) -> None:
    p, q = np.arange(64) % 2 == 0, np.arange(64) // 2 % 2 == 0
    body = f"{opcode}.pred %d, %p, %q; {opcode}.pred %e, %p, !%q; mov.pred %r, %p; @%q {opcode}.pred %r, %r, %r;"
    result = run_lanes(body, {"p": ("pred", p), "q": ("pred", q)}, {"d": "pred", "e": "pred", "r": "pred"})
    np.testing.assert_array_equal(result["d"], operation(p, q))
    np.testing.assert_array_equal(result["e"], operation(p, ~q))
    np.testing.assert_array_equal(result["r"], np.where(q, operation(p, p), p))


def test_not_of_a_predicate() -> None:
    p = np.arange(32) % 3 == 0
    np.testing.assert_array_equal(run_lanes("not.pred %d, %p;", {"p": ("pred", p)}, {"d": "pred"})["d"], ~p)


@pytest.mark.parametrize("first", range(0, 256, 32))
def test_every_look_up_table(first: int) -> None:
    """The operands' low bytes run through all combinations of a, b and c: the result is the table itself."""
    tables = range(first, first + 32)
    outputs = {f"d{table}": "b32" for table in tables}
    body = "\n".join(f"lop3.b32 %d{table}, %a, %b, %c, {table};" for table in tables)
    result = run_lanes(body, {"a": ("b32", 0xF0), "b": ("b32", 0xCC), "c": ("b32", 0xAA)}, outputs)
    for table in tables:
        assert (result[f"d{table}"] & 0xFF == table).all()
        assert (result[f"d{table}"] >> 8 == (0xFFFFFF if table & 1 else 0)).all()


@pytest.mark.parametrize("operation", ["or", "and"])
@pytest.mark.parametrize("target", ["%d|%p", "_|%p"])
def test_logic_with_a_predicate_result(operation: str, target: str) -> None:
    a = np.arange(64, dtype=np.uint32) % 4
    q = np.arange(64) // 4 % 2 == 0
    inputs = {"a": ("b32", a), "q": ("pred", q)}
    body = f"mov.b32 %d, 7; lop3.{operation}.b32 {target}, %a, 1, 3, 0x80, %q;"
    result = run_lanes(body, inputs, {"d": "b32", "p": "pred"})
    nonzero = (a & 1) != 0
    np.testing.assert_array_equal(result["p"], nonzero | q if operation == "or" else nonzero & q)
    np.testing.assert_array_equal(result["d"], a & 1 if "%d" in target else 7)


@pytest.mark.parametrize(
    "text",
    [
        "and.u32 %a, %a, %a",
        "or.b8 %a, %a, %a",
        "not.s32 %a, %a",
        "cnot.pred %p, %p",
        "shl.u32 %a, %a, 1",
        "shr.pred %p, %p, 1",
        "shr.wrap.u32 %a, %a, 1",
        "shf.l.b32 %a, %a, %a, 1",
        "shf.clamp.b32 %a, %a, %a, 1",
        "lop3.xor.b32 %a|%p, %a, %a, %a, 1, %p",
        "lop3.or.b32 %a, %a, %a, %a, 1, %p",
        "lop3.b32 %a, %a, %a, %a, 256",
        "lop3.b32 %a, %a, %a, %a, %a",
    ],
)
def test_forms_that_do_not_exist_are_refused(text: str) -> None:
    with pytest.raises(UnsupportedInstruction):
        run_lanes(f"{text};", {"a": ("u32", 1), "p": ("pred", True)}, {"d": "u32"})
