"""wgmma (PTX ISA 9.7.15.5 to 9.7.15.7)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from common.emulator import Deadlock, DivergenceFault, Emulator, Fault, OutOfBounds, UnsupportedInstruction
from common.emulator.faults import DescriptorFault, PtxSyntaxError
from common.emulator.machine.events import SCHEDULES
from tests.common.emulator.isa.wgmma_programs import (
    B_AT,
    COMMIT,
    DTYPES,
    FENCE,
    FINISH,
    HALVES,
    IMAGE,
    K_OF,
    SPARSE_TYPES,
    TYPES,
    WAIT,
    WARPGROUP,
    M,
    Product,
    compress,
    inputs_of,
    matrix_of_d,
    product,
    program,
    random_d,
    registers_of_d,
    run,
    scale_d,
    vector,
)


def execute(p: Product, old: np.ndarray | None) -> np.ndarray:
    """D (64, N) after D = A B + `old`, or after D = A B."""
    before = np.full((p.registers, WARPGROUP), 0xFFFF_FFFF, np.uint32) if old is None else registers_of_d(old)
    text = scale_d(old is not None) + FENCE + p.text + FINISH
    after = run(text, p.image(), before, inputs_of(p))
    return matrix_of_d(after, next(DTYPES[part] for part in p.opcode.split(".") if part in DTYPES))


def wrapped(exact: np.ndarray) -> np.ndarray:
    return exact.astype(np.int64).astype(np.int32)


@pytest.mark.parametrize("in_registers", [False, True], ids=["smem", "registers"])
@pytest.mark.parametrize(("d", "a", "b"), TYPES)
def test_every_type(d: str, a: str, b: str, in_registers: bool) -> None:
    p = product(d, a, b, n=24, a_in_registers=in_registers)
    old = random_d(np.random.default_rng(1), d, 24)
    exact = p.a.values @ p.b.values.T
    as_d = wrapped if d == "s32" else lambda values: values.astype(DTYPES[d])
    np.testing.assert_array_equal(execute(p, None), as_d(exact))
    np.testing.assert_array_equal(execute(p, old), as_d(exact + old))


@pytest.mark.parametrize("n", range(8, 257, 8))
def test_every_width(n: int) -> None:
    p = product("f32", "f16", "f16", n)
    np.testing.assert_array_equal(execute(p, None), p.a.values @ p.b.values.T)
    p = product("s32", "s8", "u8", n)
    if n > 32 and n % 16:
        with pytest.raises(UnsupportedInstruction, match="is not a form of wgmma that exists"):
            execute(p, None)
    else:
        np.testing.assert_array_equal(execute(p, None), p.a.values @ p.b.values.T)


@pytest.mark.parametrize("swizzle", ["none", "32B", "64B", "128B"])
@pytest.mark.parametrize(("a_mn", "b_mn"), [(False, True), (True, False), (True, True)])
@pytest.mark.parametrize("kind", HALVES)
def test_transposed(kind: str, a_mn: bool, b_mn: bool, swizzle: str) -> None:
    p = product("f32", kind, kind, n=64, a_layout=(swizzle, a_mn), b_layout=(swizzle, b_mn))
    np.testing.assert_array_equal(execute(p, None), p.a.values @ p.b.values.T)


def test_transposed_b_with_a_in_registers() -> None:
    p = product(n=64, b_layout=("128B", True), a_in_registers=True)
    np.testing.assert_array_equal(execute(p, None), p.a.values @ p.b.values.T)


@pytest.mark.parametrize(("signs", "sign"), [("-1, 1", -1), ("1, -1", -1), ("-1, -1", 1)])
def test_negated(signs: str, sign: int) -> None:
    p = product("f32", "tf32", "tf32", constants=signs)
    old = random_d(np.random.default_rng(1), "f32", 16)
    np.testing.assert_array_equal(execute(p, old), sign * (p.a.values @ p.b.values.T) + old)


def test_a_negated_zero_is_no_minus_zero() -> None:
    p = product("f32", "tf32", "tf32", constants="-1, 1")
    p = replace(p, a=replace(p.a, codes=np.zeros_like(p.a.codes)))
    assert (execute(p, None).view(np.uint32) == 0).all()


@pytest.mark.parametrize("types", ["satfinite.s32.s8.s8", "s32.s8.s8.satfinite"])
def test_saturation(types: str) -> None:
    p = replace(product("s32", "s8", "s8"), opcode=f".sync.aligned.m64n16k32.{types}")
    old = np.random.default_rng(1).choice([-(1 << 31), (1 << 31) - 1], (M, 16)).astype(np.int32)
    exact = p.a.values @ p.b.values.T + old
    np.testing.assert_array_equal(execute(p, old), np.clip(exact, -(1 << 31), (1 << 31) - 1))


def test_f16_accumulators_round_once() -> None:
    p = product("f16", n=16)
    old = np.full((M, 16), 2048, np.float16)  # odd numbers are not in f16 up there
    exact = (p.a.values @ p.b.values.T + 2048).astype(np.float16)
    np.testing.assert_array_equal(execute(p, old), exact)


def test_nan_is_canonical() -> None:
    p = product("f32", "bf16", "bf16")
    p = replace(p, a=replace(p.a, codes=np.full_like(p.a.codes, 0xFFC1)))
    assert (execute(p, None).view(np.uint32) == 0x7FFF_FFFF).all()


# -- sparse A ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_registers", [False, True], ids=["smem", "registers"])
@pytest.mark.parametrize(("d", "a", "b"), SPARSE_TYPES)
def test_sparse(d: str, a: str, b: str, in_registers: bool) -> None:
    for selector in (0, 1) if K_OF[a] < 32 else (0,):
        p = product(d, a, b, n=24, sparse=f", %meta, {selector}", a_in_registers=in_registers, b_layout=("64B", False))
        full, metadata = compress(np.random.default_rng(2), p)
        before = np.zeros((p.registers, WARPGROUP), np.uint32)
        after = run(scale_d(True) + FENCE + p.text + FINISH, p.image(), before, inputs_of(p, metadata))
        exact = full @ p.b.values.T
        as_d = wrapped if d == "s32" else lambda values: values.astype(DTYPES[d])
        np.testing.assert_array_equal(matrix_of_d(after, DTYPES[d]), as_d(exact))


def test_undefined_metadata_is_refused() -> None:
    p = product(sparse=", %meta, 0")
    with pytest.raises(Fault, match="sparsity metadata: index 0b0000 of row 0"):
        execute(p, None)


def test_a_selector_of_eight_bit_types_is_refused() -> None:
    with pytest.raises(UnsupportedInstruction, match="sparsity selector 1"):
        execute(product("s32", "s8", "s8", sparse=", %meta, 1"), None)


# -- what is asynchronous ------------------------------------------------------------------------------------------

TWO_SETS = 2 * product(n=16).registers


def values_of(p: Product) -> np.ndarray:
    return (p.a.values @ p.b.values.T).astype(np.float32)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_instructions_on_one_accumulator_add_up(schedule: str) -> None:
    p = product()
    text = FENCE + scale_d(False) + p.text + scale_d(True) + 3 * p.text + FINISH
    after = run(text, p.image(), np.zeros((p.registers, WARPGROUP), np.uint32), schedule=schedule)
    np.testing.assert_array_equal(matrix_of_d(after, np.float32), 4 * values_of(p))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_saturation_happens_at_each_instruction(schedule: str) -> None:
    """The order of two instructions on one accumulator shows."""
    p = replace(product("s32", "s8", "s8"), opcode=".sync.aligned.m64n16k32.s32.s8.s8.satfinite")
    p = replace(p, a=replace(p.a, codes=np.full_like(p.a.codes, 127)), b=replace(p.b, codes=np.full_like(p.b.codes, 1)))
    minus = replace(p, b=replace(p.b, codes=np.full_like(p.b.codes, 255), at=B_AT + 8192))
    image = p.image()
    minus.b.put(image)
    old = np.full((M, 16), (1 << 31) - 1, np.int32)
    text = FENCE + scale_d(True) + p.text + minus.text + FINISH
    after = matrix_of_d(run(text, image, registers_of_d(old), schedule=schedule), np.int32)
    assert (after == (1 << 31) - 1 - 32 * 127).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("warpgroups", [1, 2, 3])
def test_groups(schedule: str, warpgroups: int) -> None:
    """Two sets of accumulators, of which the first is waited for with the second in flight."""
    p = product()
    second = replace(p, first=p.registers)
    use = "".join(f"add.f32 %d{r}, %d{r}, 0f3F800000;" for r in range(p.registers))
    wait = "wgmma.wait_group.sync.aligned 1;"
    text = FENCE + scale_d(False) + p.text + COMMIT + second.text + COMMIT + wait + use + WAIT
    after = run(text, p.image(), np.zeros((TWO_SETS, warpgroups * WARPGROUP), np.uint32), schedule=schedule, seed=3)
    for group in range(warpgroups):
        words = after[:, group * WARPGROUP : (group + 1) * WARPGROUP]
        np.testing.assert_array_equal(matrix_of_d(words[: p.registers], np.float32), values_of(p) + 1)
        np.testing.assert_array_equal(matrix_of_d(words[p.registers :], np.float32), values_of(p))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_accumulators_stay_in_flight_through_a_loop(schedule: str) -> None:
    """As kernels that keep one group in flight do: the wait is for the operations of the round before."""
    p = product()
    text = f"""
{FENCE} mov.u32 %x, 0;
LOOP: setp.ne.u32 %q, %x, 0; {p.text} {COMMIT}
wgmma.wait_group.sync.aligned 1;
add.u32 %x, %x, 1; setp.lt.u32 %p, %x, 5; @%p bra LOOP;
{WAIT}"""
    after = run(text, p.image(), np.zeros((p.registers, WARPGROUP), np.uint32), schedule=schedule)
    np.testing.assert_array_equal(matrix_of_d(after, np.float32), 5 * values_of(p))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warps_may_take_their_time(schedule: str) -> None:
    """Each warp sleeps for another time first, and a wait is for the whole warpgroup's operation."""
    p = product()
    text = f"mul.lo.u32 %x, %warp, 1000; nanosleep.u32 %x; {FENCE} {scale_d(True)} {p.text} {FINISH}"
    after = run(text, p.image(), np.zeros((p.registers, WARPGROUP), np.uint32), schedule=schedule)
    np.testing.assert_array_equal(matrix_of_d(after, np.float32), values_of(p))


def test_registers_read_as_poison_until_the_wait() -> None:
    p = product()
    text = FENCE + scale_d(False) + p.text + COMMIT
    assert np.isnan(run(text, p.image(), np.zeros((p.registers, WARPGROUP), np.uint32)).view(np.float32)).all()


def test_waiting_for_too_few_groups_shows() -> None:
    p = product()
    text = FENCE + scale_d(False) + p.text + COMMIT + "wgmma.wait_group.sync.aligned 1;"
    assert np.isnan(run(text, p.image(), np.zeros((p.registers, WARPGROUP), np.uint32)).view(np.float32)).all()


def test_what_was_not_committed_is_not_waited_for() -> None:
    p = product()
    text = FENCE + scale_d(False) + COMMIT + p.text + WAIT
    assert np.isnan(run(text, p.image(), np.zeros((p.registers, WARPGROUP), np.uint32)).view(np.float32)).all()


@pytest.mark.parametrize("overwrite", ["st.shared.b32 [%at], 0;", "mov.b32 %a0, 0;"], ids=["B", "A in registers"])
def test_operands_are_read_when_the_operation_runs(overwrite: str) -> None:
    """Changing them before the wait changes the product."""
    p = product(a_in_registers=True)
    issue = f"mad.lo.u32 %at, %thread, 4, %base; add.u32 %at, %at, {B_AT};" + FENCE + scale_d(False) + p.text
    before = np.zeros((p.registers, WARPGROUP), np.uint32)
    early, late = (
        matrix_of_d(run(issue + rest, p.image(), before, inputs_of(p)), np.float32)
        for rest in (FINISH + overwrite, overwrite + FINISH)
    )
    np.testing.assert_array_equal(early, values_of(p))
    assert (late != early).any()


def test_counters() -> None:
    p = product()
    arrays = [p.image(), *(np.zeros((rows, WARPGROUP), np.uint32) for rows in (p.registers, 5, p.registers))]
    text = program(FENCE + scale_d(False) + p.text + p.text + FINISH, p.registers)
    counters = Emulator().launch(text, "k", grid=1, block=WARPGROUP, shared_bytes=IMAGE, args=arrays).counters
    assert counters.flops["tensor f16"] == 2 * 2 * 64 * 16 * 16
    assert counters.events["wgmma m64n16k16 f16 f16 f32"] == 2
    assert counters.bytes["MMA shared read"] == 2 * (64 + 16) * 32


# -- misuse --------------------------------------------------------------------------------------------------------


def fails(text: str, threads: int = WARPGROUP, registers: int = 8, schedule: str = "late") -> None:
    run(text, np.zeros(IMAGE, np.uint8), np.zeros((registers, threads), np.uint32), schedule=schedule)


MMA = product().text


def test_a_fence_must_come_first() -> None:
    with pytest.raises(Fault, match=r"without a wgmma.fence before the warp's first one"):
        fails(scale_d(False) + MMA + FINISH)


def test_a_warpgroup_has_four_warps() -> None:
    with pytest.raises(DivergenceFault, match="all 128 threads of warpgroup 0: 96 are there"):
        fails(FENCE + scale_d(False) + MMA + FINISH, threads=96)
    with pytest.raises(DivergenceFault, match="needs all 32 lanes|all 128 threads of warpgroup 0: 120"):
        fails(FENCE + scale_d(False) + MMA + FINISH, threads=120)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_missing_warp_is_named(schedule: str) -> None:
    with pytest.raises((Deadlock, DivergenceFault), match=r"warpgroup 0"):
        fails(f"setp.eq.u32 %p, %warp, 2; @%p exit; {FENCE} {scale_d(False)} {MMA} {FINISH}", schedule=schedule)


def test_a_warp_that_takes_another_way_is_named() -> None:
    with pytest.raises(Deadlock, match=r"for the other warps of warpgroup 0 to execute wgmma m64n16k16 f16 f16 f32"):
        fails(f"setp.eq.u32 %p, %warp, 2; {FENCE} {scale_d(False)} @%p bra WAIT; {MMA} {FINISH} WAIT: bar.sync 0;")


def test_warps_must_execute_the_same_instruction() -> None:
    text = f"setp.eq.u32 %p, %warp, 2; {FENCE} {scale_d(False)} @%p bra B; {MMA} bra JOIN; B: {MMA} JOIN: {FINISH}"
    with pytest.raises(DivergenceFault, match="warps of warpgroup 0 execute different instructions"):
        fails(text)


def test_warps_must_give_the_same_descriptors() -> None:
    p = product()
    issue = p.text.split("\n")[1]
    text = f"{FENCE} {scale_d(False)} add.u64 %da, %memory, {p.a.descriptor}; add.u64 %db, %memory, {p.b.descriptor};"
    with pytest.raises(Fault, match="warps of warpgroup 0 give different descriptors or scale-d"):
        fails(f"{text} cvt.u64.u32 %offset, %warp; add.u64 %db, %db, %offset; {issue} {FINISH}")
    with pytest.raises(Fault, match="threads of a warp give different descriptors or scale-d"):
        fails(f"{text} cvt.u64.u32 %offset, %thread; add.u64 %db, %db, %offset; {issue} {FINISH}")
    with pytest.raises(Fault, match="threads of a warp give different descriptors or scale-d"):
        fails(f"{text} setp.eq.u32 %q, %thread, 3; {issue} {FINISH}")


def test_registers_of_an_operation_in_flight() -> None:
    wide = product(n=32)
    with pytest.raises(Fault, match=r"accumulators that overlap those of a wgmma m64n32k16 f16 f16 f32 in flight"):
        fails(FENCE + scale_d(False) + wide.text + MMA + FINISH, registers=16)
    a_is_d = product(a_in_registers=True, first=8).text.replace("%a", "%d")  # A in %d0 to %d3, D from %d8 on
    with pytest.raises(Fault, match="registers of A that are accumulators of"):
        fails(FENCE + scale_d(False) + MMA + a_is_d + FINISH, registers=16)
    with pytest.raises(Fault, match="accumulators that are registers of A of"):
        fails(FENCE + scale_d(False) + a_is_d + MMA + FINISH, registers=16)


@pytest.mark.parametrize("schedule", ["late", "random"])
def test_the_same_registers_after_a_wait(schedule: str) -> None:
    wide, p = product(n=32), product()
    text = FENCE + scale_d(False) + wide.text + FINISH + FENCE + p.text + FINISH
    after = run(text, p.image(), np.zeros((16, WARPGROUP), np.uint32), schedule=schedule)
    np.testing.assert_array_equal(matrix_of_d(after[:8], np.float32), values_of(p))


@pytest.mark.parametrize(
    ("bits", "message"),
    [(1 << 46, r"bits 46-48: 0b001 must be 0 for wgmma"), (1 << 61, r"bits 52-61: 0x200 must be 0")],
)
def test_descriptor_bits_that_must_be_zero(bits: int, message: str) -> None:
    p = product()
    text = p.text.replace(f"%memory, {p.b.descriptor:#x}", f"%memory, {p.b.descriptor | bits:#x}")
    with pytest.raises(DescriptorFault, match=message):
        fails(FENCE + scale_d(False) + text + FINISH)


def test_operands_outside_shared_memory() -> None:
    p = product()
    p = replace(p, b=replace(p.b, at=IMAGE - 128))
    with pytest.raises(OutOfBounds, match="matrix B of wgmma at shared"):
        fails(FENCE + scale_d(False) + p.text + FINISH)


@pytest.mark.parametrize(
    "opcode",
    [
        "m64n16k8.f32.f16.f16", "m64n20k16.f32.f16.f16", "m64n264k16.f32.f16.f16", "m64n0k16.f32.f16.f16",
        "m64n16k16.f16.bf16.bf16", "m64n16k16.f32.f16.bf16", "m64n16k32.f32.s8.s8", "m64n16k16.satfinite.f32.f16.f16",
        "m64n16k256.s32.b1.b1", "m64n16k256.s32.b1.b1.xor.popc", "m64n16k16.f32.f16.f16.f32", "m64n16k16.f32.f16",
        "m128n16k16.f32.f16.f16", "m64n16k16.f32.f16.f16.L2",
    ],
)  # fmt: skip
def test_forms_that_do_not_exist(opcode: str) -> None:
    text = f"wgmma.mma_async.sync.aligned.{opcode} {vector(8)}, %da, %db, %q, 1, 1, 0, 0;"
    with pytest.raises(UnsupportedInstruction):
        fails(FENCE + scale_d(False) + text + FINISH)


@pytest.mark.parametrize(
    "operands",
    [
        f"{vector(7)}, %da, %db, %q, 1, 1, 0, 0", f"{vector(8)}, {vector(3, name='%a')}, %db, %q, 1, 1, 0",
        f"{vector(8)}, %da, %db, %q, 1, 1, 0", f"{vector(8)}, %da, %db, %q, 1, 1, 0, 0, 0",
        f"{vector(8)}, %da, %db, %q, 2, 1, 0, 0", f"{vector(8)}, %da, %db, %q, 1, 1, 0, 2",
        f"{vector(8)}, {vector(4, name='%a')}, %db, %q, 1, 1, 0, 0", f"{vector(8)}, %da, %db",
    ],
)  # fmt: skip
def test_operands_that_do_not_fit(operands: str) -> None:
    text = f"wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {operands};"
    with pytest.raises((UnsupportedInstruction, PtxSyntaxError)):
        fails(FENCE + scale_d(False) + text + FINISH)


@pytest.mark.parametrize("target", ["sm_90", "sm_100a"])
def test_only_sm_90a_has_it(target: str) -> None:
    with pytest.raises(UnsupportedInstruction, match=f"wgmma exists on sm_90a alone, not on {target}"):
        buffers = [np.zeros(IMAGE, np.uint8), *(np.zeros((8, WARPGROUP), np.uint32) for _ in range(3))]
        Emulator().launch(program(FENCE, 8, target), "k", grid=1, block=WARPGROUP, shared_bytes=IMAGE, args=buffers)
