"""tcgen05.mma with hand-encoded descriptors, compiled from CUDA C++, against an element-by-element model."""

from __future__ import annotations

import numpy as np
import pytest

from common.emulator.faults import (
    DescriptorFault,
    Fault,
    MissingFence,
    OutOfBounds,
    TensorMemoryFault,
    UnsupportedInstruction,
)
from tests.common.emulator.isa.mma_programs import (
    COLUMNS,
    LANES,
    Instruction,
    instruction_bits,
    matrix_bits,
    mma_text,
    run_mma,
    scaled_bits,
)
from tests.common.emulator.isa.mma_reference import (
    SPANS,
    accumulator,
    put_accumulator,
    random_codes,
    row_lanes,
    value_of,
    write_matrix,
    write_packed,
)

K = {"f16": 16, "tf32": 8, "f8f6f4": 32, "i8": 32, "mxf8f6f4": 32, "mxf4": 64, "mxf4nvf4": 64}
B_START = 64 << 10  # of B in the image of shared memory


def blank(ctas: int = 1, size: int = 128 << 10) -> np.ndarray:
    """Shared memory in which every unwritten byte is part of a NaN."""
    return np.full((ctas, size), 0xFF, np.uint8)


def poison(ctas: int = 1) -> np.ndarray:
    return np.full((ctas, LANES, COLUMNS), 0xFFFF_FFFF, np.uint32)


def store_operand(image: np.ndarray, start: int, codes: np.ndarray, kind: str) -> int:
    """Without swizzle, K-major, in the format of kinds that give every element a byte; the matrix descriptor."""
    if kind in ("e2m1", "e2m3", "e3m2"):
        sbo = 8 * codes.shape[1]
        write_packed(image, start, codes, kind, 16, sbo, 128)
        return matrix_bits(start, 128, sbo, "none")
    size = {"f16": 2, "bf16": 2, "tf32": 4}.get(kind, 1)
    sbo = 8 * codes.shape[1] * size
    write_matrix(image, start, codes, kind, "none", False, 128, sbo)
    return matrix_bits(start, 128, sbo, "none")


def close(cells: np.ndarray, a: np.ndarray, b: np.ndarray, before: np.ndarray | float = 0.0) -> None:
    """D as float32 cells equals a b^T + before within the rounding of a float32 sum."""
    exact = a @ b.T + before
    bound = np.abs(a) @ np.abs(b).T + np.abs(before)
    np.testing.assert_array_less(np.abs(cells.view(np.float32) - exact), 2e-6 * bound + 1e-30)


def split_rows(image: np.ndarray, a: np.ndarray, b: np.ndarray, kinds: tuple[str, str]) -> tuple[int, int]:
    """Stores A and B (all rows) in the CTAs of a group, an equal part of the rows of each in every CTA."""
    ctas = image.shape[0]
    for cta in range(ctas):
        rows, columns = a.shape[0] // ctas, b.shape[0] // ctas
        bits_a = store_operand(image[cta], 0, a[cta * rows : (cta + 1) * rows], kinds[0])
        bits_b = store_operand(image[cta], B_START, b[cta * columns : (cta + 1) * columns], kinds[1])
    return bits_a, bits_b


# -- layouts of shared memory --------------------------------------------------------------------------------------

SWIZZLES = ("none", "32B", "64B", "128B")


def odd_strides(swizzle: str, mn_major: bool) -> tuple[int, int]:
    """(LBO, SBO) in bytes that no packed tile has, yet without two elements in one place."""
    if swizzle == "none":
        return (144, 656) if mn_major else (176, 320)
    atom = (4 if swizzle == "128B-32B" else 8) * 16 * SPANS[swizzle]
    return 5 * atom + 16 * 13, atom + 48


def store_with_layout(image: np.ndarray, start: int, codes: np.ndarray, kind: str, swizzle: str, mn_major: int) -> int:
    """The matrix descriptor of `codes` (rows, K), stored with `odd_strides`."""
    lbo, sbo = odd_strides(swizzle, bool(mn_major))
    write_matrix(image, start, codes, kind, swizzle, bool(mn_major), lbo, sbo)
    return matrix_bits(start, lbo, sbo, swizzle)


@pytest.mark.parametrize("start", [0, 2048 + 3 * 128 + 32])
@pytest.mark.parametrize("swizzle", SWIZZLES)
@pytest.mark.parametrize("majors", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_layouts_of_16_bit_operands(majors, swizzle, start):
    rng = np.random.default_rng(1)
    a, b = random_codes(rng, "f16", (64, 16)), random_codes(rng, "bf16", (80, 16))
    image = blank()
    bits_a = store_with_layout(image[0], start, a, "f16", swizzle, majors[0])
    bits_b = store_with_layout(image[0], B_START + start, b, "bf16", swizzle, majors[1])
    descriptor = instruction_bits(64, 80, "f16", "bf16", "f32", transpose=majors)
    memory, _ = run_mma(mma_text("f16"), [Instruction(bits_a, bits_b, descriptor)], image, schedule="early")
    close(accumulator(memory[:, :, :80], (64, 80), "F"), value_of("f16", a), value_of("bf16", b))


@pytest.mark.parametrize("swizzle", SWIZZLES)
@pytest.mark.parametrize("majors", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_layouts_of_8_bit_operands(majors, swizzle):
    rng = np.random.default_rng(2)
    a, b = random_codes(rng, "e4m3", (128, 32)), random_codes(rng, "e5m2", (48, 32))
    image = blank()
    bits_a = store_with_layout(image[0], 0, a, "e4m3", swizzle, majors[0])
    bits_b = store_with_layout(image[0], B_START, b, "e5m2", swizzle, majors[1])
    descriptor = instruction_bits(128, 48, "e4m3", "e5m2", "f32", transpose=majors)
    memory, _ = run_mma(mma_text("f8f6f4"), [Instruction(bits_a, bits_b, descriptor)], image, schedule="early")
    close(accumulator(memory, (128, 48), "D"), value_of("e4m3", a), value_of("e5m2", b))


@pytest.mark.parametrize("swizzles", [("none", "32B"), ("64B", "128B"), ("128B-32B", "128B-32B")])
@pytest.mark.parametrize("majors", [(0, 0), (1, 1)])
def test_layouts_of_32_bit_operands(majors, swizzles):
    if any(majors) and swizzles[0] != "128B-32B":
        swizzles = ("128B-32B", "128B-32B")  # the only mode that an MN-major tf32 operand may have
    rng = np.random.default_rng(3)
    a, b = random_codes(rng, "tf32", (64, 8)), random_codes(rng, "tf32", (72, 8))
    image = blank()
    bits_a = store_with_layout(image[0], 1024 + 128, a, "tf32", swizzles[0], majors[0])
    bits_b = store_with_layout(image[0], B_START, b, "tf32", swizzles[1], majors[1])
    descriptor = instruction_bits(64, 72, "tf32", "tf32", "f32", transpose=majors)
    memory, _ = run_mma(mma_text("tf32"), [Instruction(bits_a, bits_b, descriptor)], image, schedule="early")
    close(accumulator(memory, (64, 72), "F"), value_of("tf32", a), value_of("tf32", b))


def test_base_offset_moves_the_start_of_the_swizzle_pattern():
    """A pattern that starts three lines after a 1024-byte boundary, as software wrote it."""
    rng = np.random.default_rng(4)
    a, b = random_codes(rng, "f16", (64, 16)), random_codes(rng, "f16", (16, 16))
    image, pattern = blank(), np.full(32 << 10, 0xFF, np.uint8)
    write_matrix(pattern, 0, a, "f16", "128B", False, 16, 1024)
    image[0, 384 : 384 + pattern.size] = pattern
    bits_b = store_operand(image[0], B_START, b, "f16")
    bits_a = matrix_bits(384, 16, 1024, "128B", base_offset=3)
    instruction = Instruction(bits_a, bits_b, instruction_bits(64, 16, "f16", "f16", "f32"))
    memory, _ = run_mma(mma_text("f16"), [instruction], image, schedule="early")
    close(accumulator(memory, (64, 16), "F"), value_of("f16", a), value_of("f16", b))


# -- shapes, types, data paths -------------------------------------------------------------------------------------

LAYOUTS = {(1, 64): "F", (1, 128): "D", (2, 128): "B", (2, 256): "A"}


@pytest.mark.parametrize("schedule", ["late", "early", "random"])
@pytest.mark.parametrize(
    "group,m,n",
    [(1, 64, 8), (1, 64, 256), (1, 128, 8), (1, 128, 24), (1, 128, 136), (1, 128, 256)]
    + [(2, 128, 16), (2, 128, 176), (2, 128, 256), (2, 256, 16), (2, 256, 208), (2, 256, 256)],
)
def test_shapes(group, m, n, schedule):
    rng = np.random.default_rng(5)
    a, b = random_codes(rng, "f16", (m, 16)), random_codes(rng, "f16", (n, 16))
    image = blank(group)
    bits = split_rows(image, a, b, ("f16", "f16"))
    instruction = Instruction(*bits, instruction_bits(m, n, "f16", "f16", "f32"), d=64)
    memory, _ = run_mma(mma_text("f16", group=group), [instruction], image, schedule=schedule)
    layout = LAYOUTS[group, m]
    close(accumulator(memory, (m, n), layout, 64), value_of("f16", a), value_of("f16", b))
    put_accumulator(memory, np.full((m, n), 0xFFFF_FFFF, np.uint32), layout, 64)
    np.testing.assert_array_equal(memory, poison(group))  # and nothing else was written


@pytest.mark.parametrize(
    "kind,a_kind,b_kind",
    [("f16", "bf16", "bf16"), ("tf32", "tf32", "tf32"), ("f8f6f4", "e4m3", "e5m2"), ("f8f6f4", "e2m1", "e3m2")]
    + [("f8f6f4", "e2m3", "e4m3"), ("f8f6f4", "e3m2", "e2m1"), ("i8", "s8", "u8"), ("i8", "u8", "u8")],
)
@pytest.mark.parametrize("group", [1, 2])
def test_types(group, kind, a_kind, b_kind):
    rng = np.random.default_rng(6)
    m, n = 128, 96
    a, b = random_codes(rng, a_kind, (m, K[kind])), random_codes(rng, b_kind, (n, K[kind]))
    image = blank(group)
    bits = split_rows(image, a, b, (a_kind, b_kind))
    d = "s32" if kind == "i8" else "f32"
    instruction = Instruction(*bits, instruction_bits(m, n, a_kind, b_kind, d))
    memory, _ = run_mma(mma_text(kind, group=group), [instruction], image)
    cells = accumulator(memory, (m, n), LAYOUTS[group, m])
    if d == "s32":
        np.testing.assert_array_equal(cells.view(np.int32), value_of(a_kind, a) @ value_of(b_kind, b).T)
    else:
        close(cells, value_of(a_kind, a), value_of(b_kind, b))


@pytest.mark.parametrize("m,n,layout", [(32, 64, "G"), (32, 256, "G"), (64, 128, "E"), (128, 64, "D")])
@pytest.mark.parametrize("kind,element", [("f16", "f16"), ("f8f6f4", "e4m3")])
def test_weight_stationary(kind, element, m, n, layout):
    rng = np.random.default_rng(7)
    a, b = random_codes(rng, element, (m, K[kind])), random_codes(rng, element, (n, K[kind]))
    image = blank()
    bits = split_rows(image, a, b, (element, element))
    text = mma_text(kind, variant=".ws", qualifiers=".collector::b1::fill", tail=", 0")
    memory, _ = run_mma(text, [Instruction(*bits, instruction_bits(m, n, element, element, "f32"))], image)
    close(accumulator(memory, (m, n), layout), value_of(element, a), value_of(element, b))


def tensor_rows(codes: np.ndarray, kind: str) -> np.ndarray:
    """Rows of A as uint32 cells (rows, 8) of tensor memory: e2m1 in bits 2-5 of a byte, 6-bit types in bits 0-5."""
    size = {"f16": 2, "bf16": 2, "tf32": 4}.get(kind, 1)
    values = codes << 2 if kind == "e2m1" else codes
    return np.ascontiguousarray(values.astype({1: np.uint8, 2: np.uint16, 4: np.uint32}[size])).view(np.uint32)


def put_rows(memory: np.ndarray, rows: np.ndarray, layout: str, address: int) -> None:
    """Stores the rows of an operand in every lane that computes with them."""
    for m, row in enumerate(rows):
        cta, lanes = row_lanes(m, layout, address >> 16)
        column = address & 0xFFFF
        memory[cta, lanes, column : column + rows.shape[1]] = row


@pytest.mark.parametrize(
    "kind,element",
    [("f16", "f16"), ("tf32", "tf32"), ("f8f6f4", "e5m2"), ("f8f6f4", "e2m1"), ("f8f6f4", "e3m2"), ("i8", "s8")],
)
def test_types_of_a_in_tensor_memory(kind, element):
    rng = np.random.default_rng(8)
    a, b = random_codes(rng, element, (128, K[kind])), random_codes(rng, element, (32, K[kind]))
    image, memory = blank(), poison()
    bits_b = store_operand(image[0], B_START, b, element)
    put_rows(memory, tensor_rows(a, element), "D", 256)
    d = "s32" if kind == "i8" else "f32"
    instruction = Instruction(256, bits_b, instruction_bits(128, 32, element, element, d))
    memory, _ = run_mma(mma_text(kind, a_in_tmem=True), [instruction], image, memory)
    cells = accumulator(memory, (128, 32), "D")
    if kind == "i8":
        np.testing.assert_array_equal(cells.view(np.int32), value_of(element, a) @ value_of(element, b).T)
    else:
        close(cells, value_of(element, a), value_of(element, b))


@pytest.mark.parametrize(
    "group,variant,m,n,layout,lane",
    [(1, "", 64, 40, "F", 0), (1, "", 64, 40, "F", 16), (1, "", 128, 40, "D", 0), (2, "", 128, 64, "B", 0)]
    + [(2, "", 256, 64, "A", 0), (1, ".ws", 64, 64, "E", 0), (1, ".ws", 32, 64, "G", 0)],
)
def test_data_paths_of_a_in_tensor_memory(group, variant, m, n, layout, lane):
    rng = np.random.default_rng(9)
    a, b = random_codes(rng, "f16", (m, 16)), random_codes(rng, "f16", (n, 16))
    image, memory = blank(group), poison(group)
    for cta in range(group):
        rows = n // group
        bits_b = store_operand(image[cta], B_START, b[cta * rows : (cta + 1) * rows], "f16")
    start = lane << 16
    put_rows(memory, tensor_rows(a, "f16"), layout, start + 300)
    instruction = Instruction(start + 300, bits_b, instruction_bits(m, n, "f16", "f16", "f32"), d=start + 8)
    text = mma_text("f16", group=group, a_in_tmem=True, variant=variant)
    memory, _ = run_mma(text, [instruction], image, memory)
    close(accumulator(memory, (m, n), layout, start + 8), value_of("f16", a), value_of("f16", b))


def test_each_half_of_n_multiplies_with_its_own_copy_of_a():
    """Layout B with A in tensor memory: CUTLASS calls the copies in lanes 64-127 duplicated."""
    rng = np.random.default_rng(10)
    a, other, b = (random_codes(rng, "f16", (rows, 16)) for rows in (128, 128, 32))
    image, memory = blank(2), poison(2)
    for cta in range(2):
        bits_b = store_operand(image[cta], B_START, b[cta * 16 : (cta + 1) * 16], "f16")
    put_rows(memory, tensor_rows(a, "f16"), "B", 300)
    for m, row in enumerate(tensor_rows(other, "f16")):
        memory[m // 64, 64 + m % 64, 300:308] = row
    instruction = Instruction(300, bits_b, instruction_bits(128, 32, "f16", "f16", "f32"))
    memory, _ = run_mma(mma_text("f16", group=2, a_in_tmem=True), [instruction], image, memory)
    cells = accumulator(memory, (128, 32), "B")
    close(cells[:, :16].copy(), value_of("f16", a), value_of("f16", b[:16]))
    close(cells[:, 16:].copy(), value_of("f16", other), value_of("f16", b[16:]))


@pytest.mark.parametrize("seed", range(4))
def test_an_instruction_of_the_same_shape_may_overwrite_the_a_of_the_one_before(seed):
    """The scores of the next block overwrite the weights of this one as soon as the product with V has read them."""
    rng = np.random.default_rng(15)
    first, second, b = (random_codes(rng, "f16", (rows, 16)) for rows in (128, 128, 32))
    image, memory = blank(), poison()
    bits_b = store_operand(image[0], B_START, b, "f16")
    descriptor = instruction_bits(128, 32, "f16", "f16", "f32")
    put_rows(memory, tensor_rows(first, "f16"), "D", 256)
    put_rows(memory, tensor_rows(second, "f16"), "D", 300)
    instructions = [Instruction(256, bits_b, descriptor, d=0), Instruction(300, bits_b, descriptor, d=256)]
    memory, _ = run_mma(mma_text("f16", a_in_tmem=True), instructions, image, memory, schedule="random", seed=seed)
    close(accumulator(memory, (128, 32), "D", 0), value_of("f16", first), value_of("f16", b))
    close(accumulator(memory, (128, 32), "D", 256), value_of("f16", second), value_of("f16", b))


# -- accumulation --------------------------------------------------------------------------------------------------


def k_steps(image: np.ndarray, rng: np.random.Generator, m: int, n: int, steps: int, **bits) -> tuple:
    """Float16 A and B of `steps` K steps under 128-byte swizzling (a step inside an atom is 32 bytes)."""
    a, b = random_codes(rng, "f16", (m, 64)), random_codes(rng, "f16", (n, 64))
    write_matrix(image, 0, a, "f16", "128B", False, 16, 1024)
    write_matrix(image, B_START, b, "f16", "128B", False, 16, 1024)
    descriptor = instruction_bits(m, n, "f16", "f16", bits.pop("d", "f32"), **bits)
    instructions = [
        Instruction(
            matrix_bits(32 * k, 16, 1024, "128B"),
            matrix_bits(B_START + 32 * k, 16, 1024, "128B"),
            descriptor,
            keep=k > 0,
        )
        for k in range(steps)
    ]
    return value_of("f16", a)[:, : 16 * steps], value_of("f16", b)[:, : 16 * steps], instructions


@pytest.mark.parametrize("schedule", ["late", "early", "random"])
def test_steps_inside_a_swizzle_atom_accumulate(schedule):
    image = blank()
    a, b, instructions = k_steps(image[0], np.random.default_rng(11), 128, 64, 4)
    memory, run = run_mma(mma_text("f16"), instructions, image, schedule=schedule)
    close(accumulator(memory, (128, 64), "D"), a, b)
    assert run.counters.events["tcgen05.mma.cta_group::1.kind::f16 128x64x16 f16 f16 f32"] == 4
    assert run.counters.flops["tensor f16"] == 4 * 2 * 128 * 64 * 16


@pytest.mark.parametrize("seed", range(3))
def test_an_instruction_that_does_not_keep_d_discards_what_came_before(seed):
    image = blank()
    a, b, instructions = k_steps(image[0], np.random.default_rng(12), 128, 64, 4)
    instructions[2] = Instruction(instructions[2].a, instructions[2].b, instructions[2].descriptor, keep=False)
    for schedule in ("late", "random"):
        memory, _ = run_mma(mma_text("f16"), instructions, image, schedule=schedule, seed=seed)
        close(accumulator(memory, (128, 64), "D"), a[:, 32:], b[:, 32:])


def test_alternating_accumulators_stay_apart():
    image = blank()
    a, b, instructions = k_steps(image[0], np.random.default_rng(13), 128, 64, 4)
    moved = [Instruction(i.a, i.b, i.descriptor, d=128 * (k % 2), keep=k > 1) for k, i in enumerate(instructions)]
    for schedule in ("late", "random"):
        memory, _ = run_mma(mma_text("f16"), moved, image, schedule=schedule)
        for parity in range(2):
            chosen = np.flatnonzero(np.arange(64) // 16 % 2 == parity)
            close(accumulator(memory, (128, 64), "D", 128 * parity), a[:, chosen], b[:, chosen])


def test_an_mma_that_overwrites_what_an_earlier_one_reads_comes_after_it():
    """Attention kernels put the next scores where the probabilities were, right after the product that reads them."""
    rng = np.random.default_rng(27)
    a, b = random_codes(rng, "f16", (128, 16)), random_codes(rng, "f16", (64, 16))
    image, memory = blank(), poison()
    bits_b = store_operand(image[0], B_START, b, "f16")
    put_rows(memory, tensor_rows(a, "f16"), "D", 320)
    put_rows(memory, tensor_rows(a, "f16"), "D", 400)
    descriptor = instruction_bits(128, 64, "f16", "f16", "f32")
    instructions = [Instruction(320, bits_b, descriptor), Instruction(400, bits_b, descriptor, d=300)]
    for seed in range(6):
        after, _ = run_mma(mma_text("f16", a_in_tmem=True), instructions, image, memory, schedule="random", seed=seed)
        for start in (0, 300):
            close(accumulator(after, (128, 64), "D", start), value_of("f16", a), value_of("f16", b))


def test_d_is_an_input_and_scale_input_d_divides_it():
    image, memory = blank(), poison()
    rng = np.random.default_rng(14)
    a, b, (instruction,) = k_steps(image[0], rng, 128, 64, 1)
    before = rng.standard_normal((128, 64)).astype(np.float32)
    put_accumulator(memory, before.view(np.uint32), "D")
    kept = Instruction(instruction.a, instruction.b, instruction.descriptor, keep=True)
    after, _ = run_mma(mma_text("f16"), [kept], image, memory)
    close(accumulator(after, (128, 64), "D"), a, b, before.astype(np.float64))
    after, _ = run_mma(mma_text("f16", lanes=True, tail=", 3"), [kept, kept], image, memory)
    close(accumulator(after, (128, 64), "D"), a, b, (a @ b.T + before / 8.0) / 8)


@pytest.mark.parametrize("negate,sign", [((1, 0), -1), ((0, 1), -1), ((1, 1), 1)])
def test_negate(negate, sign):
    image = blank()
    a, b, instructions = k_steps(image[0], np.random.default_rng(15), 128, 64, 2, negate=negate)
    memory, _ = run_mma(mma_text("f16"), instructions, image)
    close(accumulator(memory, (128, 64), "D"), sign * a, b)


def test_f16_accumulators_round_once_per_instruction():
    image = blank()
    a, b, instructions = k_steps(image[0], np.random.default_rng(16), 128, 64, 4, d="f16")
    memory, _ = run_mma(mma_text("f16"), instructions, image)
    total = np.zeros((128, 64), np.float16)
    for k in range(4):
        part = slice(16 * k, 16 * k + 16)
        total = (a[:, part] @ b[:, part].T + total.astype(np.float64)).astype(np.float16)
    cells = accumulator(memory, (128, 64), "D")
    halves = (cells & 0xFFFF).astype(np.uint16).view(np.float16)
    np.testing.assert_allclose(halves.astype(float), total.astype(float), atol=0.5)
    assert (halves == total).mean() > 0.99  # but for double rounding
    assert (halves != (a @ b.T).astype(np.float16)).mean() > 0.1


def test_int8_wraps_or_saturates():
    a, b = np.full((128, 32), 127), np.full((32, 32), 127)
    before = np.full((128, 32), 2**31 - 5, np.uint32)
    for saturate, expected in ((False, before.astype(np.int64) + 32 * 127**2 - 2**32), (True, np.int64(2**31 - 1))):
        image, memory = blank(), poison()
        bits = split_rows(image, a, b, ("s8", "s8"))
        put_accumulator(memory, before, "D")
        instruction = Instruction(*bits, instruction_bits(128, 32, "s8", "s8", "s32", saturate=saturate), keep=True)
        memory, _ = run_mma(mma_text("i8"), [instruction], image, memory)
        assert (accumulator(memory, (128, 32), "D").view(np.int32) == expected).all()


@pytest.mark.parametrize("group,m", [(1, 64), (1, 128), (2, 128)])
def test_disabled_lanes_keep_what_they_hold(group, m):
    rng = np.random.default_rng(17)
    a, b = random_codes(rng, "f16", (m, 16)), random_codes(rng, "f16", (32, 16))
    image = blank(group)
    bits = split_rows(image, a, b, ("f16", "f16"))
    words = (0x0000_F00F, 0xFFFF_FFFF, 0, 0x8000_0001)  # the same lanes in both CTAs
    instruction = Instruction(*bits, instruction_bits(m, 32, "f16", "f16", "f32"), disabled=words)
    memory, _ = run_mma(mma_text("f16", group=group, lanes=True), [instruction], image)
    disabled = np.array([words[lane // 32] >> lane % 32 & 1 for lane in range(128)], bool)
    assert (memory[:, disabled] == 0xFFFF_FFFF).all()
    full, _ = run_mma(mma_text("f16", group=group, lanes=True), [Instruction(*bits, instruction.descriptor)], image)
    np.testing.assert_array_equal(memory[:, ~disabled], full[:, ~disabled])


# -- block scales --------------------------------------------------------------------------------------------------


def factor_values(kind: str, codes: np.ndarray) -> np.ndarray:
    return 2.0 ** (codes - 127.0) if kind == "ue8m0" else value_of("e4m3", codes & 0x7F)


def put_factors(memory: np.ndarray, codes: np.ndarray, address: int, first: int, *, folds: int = 1) -> None:
    """Factors (rows, per row) of one CTA: row r in lane r % 32 of every partition, column r / 32, bytes from `first`.

    With two folds the rows of each half go to its own 64 lanes.
    """
    cells = memory[:, address:].view(np.uint8).reshape(LANES, -1, 4)
    rows = codes.shape[0] // folds
    for row, factors in enumerate(codes):
        fold, place = divmod(row, rows)
        for partition in range(4):
            if folds == 1 or partition // 2 == fold:
                cells[32 * partition + place % 32, place // 32, first : first + len(factors)] = factors


SCALED = [
    ("mxf8f6f4", "e4m3", "e5m2", "ue8m0", 1, ".scale_vec::1X", (0, 0)),
    ("mxf8f6f4", "e2m1", "e3m2", "ue8m0", 1, ".block32", (3, 1)),
    ("mxf8f6f4", "e5m2", "e4m3", "ue8m0", 1, "", (2, 2)),
    ("mxf4", "e2m1", "e2m1", "ue8m0", 2, ".scale_vec::2X", (2, 0)),
    ("mxf4", "e2m1", "e2m1", "ue8m0", 2, "", (0, 2)),
    ("mxf4nvf4", "e2m1", "e2m1", "ue4m3", 4, ".scale_vec::4X", (0, 0)),
    ("mxf4nvf4", "e2m1", "e2m1", "ue8m0", 4, ".block16", (0, 0)),
    ("mxf4nvf4", "e2m1", "e2m1", "ue8m0", 2, ".block32", (2, 2)),
]


def store_scaled(image: np.ndarray, start: int, codes: np.ndarray, kind: str, element: str) -> int:
    if not kind.startswith("mxf4"):
        return store_operand(image, start, codes, element)
    write_packed(image, start, codes, element, 32, 4 * codes.shape[1], 128)
    return matrix_bits(start, 128, 4 * codes.shape[1], "none")


@pytest.mark.parametrize("group,m,n", [(1, 128, 128), (1, 128, 24), (2, 128, 64), (2, 256, 192)])
@pytest.mark.parametrize("kind,a_kind,b_kind,scale,vector,qualifier,ids", SCALED)
def test_block_scales(kind, a_kind, b_kind, scale, vector, qualifier, ids, group, m, n):
    rng = np.random.default_rng(18)
    k = K[kind]
    a, b = random_codes(rng, a_kind, (m, k)), random_codes(rng, b_kind, (n, k))
    low, high = (120, 134) if scale == "ue8m0" else (0x20, 0x50)
    factors_a, factors_b = (rng.integers(low, high, (rows, vector)) for rows in (m, n))
    image, memory = blank(group), poison(group)
    for cta in range(group):
        rows, columns = m // group, n // group
        bits_a = store_scaled(image[cta], 0, a[cta * rows : (cta + 1) * rows], kind, a_kind)
        bits_b = store_scaled(image[cta], B_START, b[cta * columns : (cta + 1) * columns], kind, b_kind)
        put_factors(memory[cta], factors_a[cta * rows : (cta + 1) * rows], 400, ids[0])
        put_factors(memory[cta], factors_b, 420, ids[1], folds=2 if (group, m) == (2, 128) else 1)
    packed = kind != "mxf8f6f4"
    descriptor = scaled_bits(m, n, a_kind, b_kind, scale, ids=ids, packed=packed)
    instruction = Instruction(bits_a, bits_b, descriptor, scale_a=400, scale_b=420 | 1 << 30)
    text = mma_text(kind, group=group, qualifiers=".block_scale" + qualifier)
    memory, _ = run_mma(text, [instruction], image, memory)
    scaled_a = value_of(a_kind, a) * np.repeat(factor_values(scale, factors_a), k // vector, axis=1)
    scaled_b = value_of(b_kind, b) * np.repeat(factor_values(scale, factors_b), k // vector, axis=1)
    close(accumulator(memory, (m, n), LAYOUTS[group, m]), scaled_a, scaled_b)


def test_each_partition_takes_its_own_copy_of_the_factors_of_b():
    rng = np.random.default_rng(19)
    a, b = random_codes(rng, "e4m3", (128, 32)), random_codes(rng, "e4m3", (32, 32))
    image, memory = blank(), poison()
    bits = split_rows(image, a, b, ("e4m3", "e4m3"))
    put_factors(memory[0], np.full((128, 1), 127), 400, 0)
    put_factors(memory[0], np.full((32, 1), 127), 420, 0)
    memory[0, 64:96, 420] = 128  # twice as much for rows 64-95
    instruction = Instruction(*bits, scaled_bits(128, 32, "e4m3", "e4m3", "ue8m0"), scale_a=400, scale_b=420)
    memory, _ = run_mma(mma_text("mxf8f6f4", qualifiers=".block_scale"), [instruction], image, memory)
    factor = np.where(np.arange(128) // 32 == 2, 2.0, 1.0)[:, None]
    close(accumulator(memory, (128, 32), "D"), value_of("e4m3", a) * factor, value_of("e4m3", b))


def test_factors_beyond_the_range_of_float32():
    rng = np.random.default_rng(20)
    a, b = random_codes(rng, "e4m3", (128, 32)), random_codes(rng, "e4m3", (32, 32))
    image, memory = blank(), poison()
    bits = split_rows(image, a, b, ("e4m3", "e4m3"))
    put_factors(memory[0], np.full((128, 1), 254), 400, 0)
    put_factors(memory[0], np.full((32, 1), 1), 420, 0)
    instruction = Instruction(*bits, scaled_bits(128, 32, "e4m3", "e4m3", "ue8m0"), scale_a=400, scale_b=420)
    memory, _ = run_mma(mma_text("mxf8f6f4", qualifiers=".block_scale"), [instruction], image, memory)
    close(accumulator(memory, (128, 32), "D"), value_of("e4m3", a) * 2.0, value_of("e4m3", b))


# -- sparse A ------------------------------------------------------------------------------------------------------


def sparse_rows(rng: np.random.Generator, kind: str, element: str, m: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Stored codes (m, K / 2), 4-bit indices (m, chunks), and values in full (m, K)."""
    k = 2 * K[kind]
    stored = random_codes(rng, element, (m, k // 2))
    if kind == "tf32":
        indices = rng.choice([0b0100, 0b1110], (m, k // 2))
        places = 2 * np.arange(k // 2) + (indices == 0b1110)
    else:
        unit = 2 if kind.startswith("mxf4") else 1
        indices = rng.choice([0b0100, 0b1000, 0b1100, 0b1001, 0b1101, 0b0110, 0b1110], (m, k // (4 * unit)))
        pair = np.stack((indices & 3, indices >> 2), axis=-1)
        start = 4 * unit * np.arange(k // (4 * unit))[:, None]
        first = (start + unit * pair).reshape(m, -1)
        places = (first[..., None] + np.arange(unit)).reshape(m, -1)
    full = np.zeros((m, k))
    np.put_along_axis(full, places, value_of(element, stored), axis=1)
    return stored, indices, full


def put_metadata(memory: np.ndarray, indices: np.ndarray, kind: str, layout: str, address: int, selector: int) -> None:
    """Metadata where CUTLASS's `tmem_e_frg` has it."""
    for m, row in enumerate(indices):
        bits = sum(int(index) << (4 * place) for place, index in enumerate(row))
        if kind in ("f16", "tf32"):
            for half in range(2):
                cta, lanes = row_lanes(m // 16 * 16 + m % 8 + 8 * half, layout, address >> 16)
                for lane in lanes:
                    cells = memory[cta, lane].view(np.uint16)
                    cells[2 * ((address & 0xFFFF) + selector) + m // 8 % 2] = bits >> (16 * half) & 0xFFFF
        else:
            cta, lanes = row_lanes(m, layout, address >> 16)
            for lane in lanes:
                memory[cta, lane, address & 0xFFFF : (address & 0xFFFF) + 2] = [bits & 0xFFFF_FFFF, bits >> 32]


@pytest.mark.parametrize(
    "group,variant,m,n,layout,lane",
    [(1, "", 128, 40, "D", 0), (1, "", 64, 40, "F", 16), (2, "", 128, 64, "C", 0), (2, "", 128, 64, "C", 16)]
    + [(2, "", 256, 32, "A", 0), (1, ".ws", 64, 64, "E", 0), (1, ".ws", 32, 128, "G", 0)],
)
@pytest.mark.parametrize(
    "kind,element,selector",
    [("f16", "f16", 0), ("f16", "bf16", 1), ("tf32", "tf32", 1), ("f8f6f4", "e4m3", 0), ("i8", "s8", 0)],
)
def test_sparse(kind, element, selector, group, variant, m, n, layout, lane):
    rng = np.random.default_rng(21)
    stored, indices, full = sparse_rows(rng, kind, element, m)
    if kind == "i8":
        n = -(-n // 32) * 32  # not every N is there for integers
    b = random_codes(rng, element, (n, 2 * K[kind]))
    image, memory = blank(group), poison(group)
    bits = split_rows(image, stored, b, (element, element))
    start = lane << 16
    put_metadata(memory, indices, kind, layout, start + 480, selector)
    d = "s32" if kind == "i8" else "f32"
    descriptor = instruction_bits(m, n, element, element, d, sparse=True, selector=selector)
    instruction = Instruction(*bits, descriptor, d=start, metadata=start + 480)
    memory, _ = run_mma(mma_text(kind, group=group, variant=variant + ".sp"), [instruction], image, memory)
    cells = accumulator(memory, (m, n), layout, start)
    if kind == "i8":
        np.testing.assert_array_equal(cells.view(np.int32), full @ value_of(element, b).T)
    else:
        close(cells, full, value_of(element, b))


@pytest.mark.parametrize("kind,element,vector", [("mxf8f6f4", "e5m2", 1), ("mxf4", "e2m1", 2), ("mxf4nvf4", "e2m1", 4)])
def test_sparse_with_block_scales(kind, element, vector):
    rng = np.random.default_rng(22)
    stored, indices, full = sparse_rows(rng, kind, element, 128)
    k = 2 * K[kind]
    b = random_codes(rng, element, (64, k))
    image, memory = blank(), poison()
    bits_a = store_scaled(image[0], 0, stored, kind, element)
    bits_b = store_scaled(image[0], B_START, b, kind, element)
    put_metadata(memory, indices, kind, "D", 480, 0)
    factors_a, factors_b = (rng.integers(120, 134, (rows, vector)) for rows in (128, 64))
    put_factors(memory[0], factors_a, 400, 0)
    put_factors(memory[0], factors_b, 420, 0)
    descriptor = scaled_bits(128, 64, element, element, "ue8m0", packed=kind != "mxf8f6f4", sparse=True)
    instruction = Instruction(bits_a, bits_b, descriptor, metadata=480, scale_a=400, scale_b=420)
    text = mma_text(kind, variant=".sp", qualifiers=f".block_scale.scale_vec::{vector}X")
    memory, _ = run_mma(text, [instruction], image, memory)
    scaled_a = full * np.repeat(factor_values("ue8m0", factors_a), k // vector, axis=1)
    scaled_b = value_of(element, b) * np.repeat(factor_values("ue8m0", factors_b), k // vector, axis=1)
    close(accumulator(memory, (128, 64), "D"), scaled_a, scaled_b)


def test_an_undefined_sparsity_index_is_a_fault():
    rng = np.random.default_rng(23)
    stored, indices, _ = sparse_rows(rng, "f16", "f16", 128)
    indices[70, 3] = 0b0101
    image, memory = blank(), poison()
    bits = split_rows(image, stored, random_codes(rng, "f16", (16, 32)), ("f16", "f16"))
    put_metadata(memory, indices, "f16", "D", 480, 0)
    instruction = Instruction(*bits, instruction_bits(128, 16, "f16", "f16", "f32", sparse=True), metadata=480)
    with pytest.raises(Fault, match="0b0101 of row 70, chunk 3"):
        run_mma(mma_text("f16", variant=".sp"), [instruction], image, memory)


# -- asynchrony ----------------------------------------------------------------------------------------------------


def test_without_a_wait_for_the_commit_d_is_not_there():
    image = blank()
    a, b, instructions = k_steps(image[0], np.random.default_rng(24), 128, 64, 4)
    memory, _ = run_mma(mma_text("f16"), instructions, image, waits=False, schedule="early")
    close(accumulator(memory, (128, 64), "D"), a, b)
    memory, _ = run_mma(mma_text("f16"), instructions, image, waits=False)
    first_loads = accumulator(memory, (128, 64), "D")[:, :8]  # later ones come after the loads' own wait
    assert (first_loads == 0xFFFF_FFFF).all(axis=1).any()


def test_operands_are_read_at_completion():
    """Shared memory that is refilled before the wait is what the instruction multiplies."""
    image = blank()
    a, b, instructions = k_steps(image[0], np.random.default_rng(25), 128, 64, 4)
    zero = "for (int i = threadIdx.x; i < 1024; i += 128) ((uint4*)window)[i] = uint4{0, 0, 0, 0};"
    refill = zero + 'asm volatile("fence.proxy.async;");'
    memory, _ = run_mma(mma_text("f16"), instructions, image, before_wait=refill, schedule="early")
    close(accumulator(memory, (128, 64), "D"), a, b)
    memory, _ = run_mma(mma_text("f16"), instructions, image, before_wait=refill)
    assert (accumulator(memory, (128, 64), "D") == 0).all()


def test_operands_that_threads_have_written_need_a_proxy_fence():
    image = blank()
    _, _, instructions = k_steps(image[0], np.random.default_rng(27), 128, 64, 1)
    write = "{ .reg .b32 at; mov.u32 at, window; st.shared.b32 [at], 0; %s } "
    with pytest.raises(MissingFence, match="tcgen05.mma, for its matrix A, reads shared 0x400"):
        run_mma(write % "" + mma_text("f16"), instructions, image)
    run_mma(write % "fence.proxy.async;" + mma_text("f16"), instructions, image)


def test_tensor_memory_must_outlive_its_instructions():
    image = blank()
    _, _, instructions = k_steps(image[0], np.random.default_rng(26), 128, 64, 1)
    dealloc = 'asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, 512;" :: "r"(base));'
    leave = f"if (warp == 0) {dealloc} return;"
    with pytest.raises(Fault, match="have been deallocated") as caught:
        run_mma(mma_text("f16"), instructions, image, before_wait=leave)
    assert "tcgen05.mma" in caught.value.place.instruction


# -- what is refused -----------------------------------------------------------------------------------------------

PLAIN = instruction_bits(128, 64, "f16", "f16", "f32")
MATRIX = matrix_bits(0, 128, 256, "none")
FAULTS = [
    (dict(descriptor=PLAIN | 1 << 2), DescriptorFault, r"sparsity \(bit 2\)"),
    (dict(descriptor=PLAIN | 1 << 3), DescriptorFault, r"saturate \(bit 3\)"),
    (dict(descriptor=PLAIN | 2 << 4), DescriptorFault, r"dtype \(bits 4-5\): 3"),
    (dict(descriptor=PLAIN | 1 << 6), DescriptorFault, r"reserved \(bit 6\)"),
    (dict(descriptor=PLAIN | 2 << 7), DescriptorFault, r"atype \(bits 7-9\): 2"),
    (dict(descriptor=PLAIN | 7 << 10), DescriptorFault, r"btype \(bits 10-12\): 7"),
    (dict(descriptor=instruction_bits(128, 0, "f16", "f16", "f32")), DescriptorFault, r"N \(bits 17-22\): 0"),
    (dict(descriptor=instruction_bits(96, 64, "f16", "f16", "f32")), DescriptorFault, r"M \(bits 24-28\): 96"),
    (dict(descriptor=PLAIN | 1 << 30), DescriptorFault, r"maximum shift \(bits 30-31\)"),
    (dict(descriptor=instruction_bits(128, 64, "bf16", "bf16", "f16")), DescriptorFault, "dtype"),
    (dict(b=MATRIX ^ 3 << 46), DescriptorFault, "bits 46-48"),
    (dict(b=MATRIX | 1 << 55), DescriptorFault, "bits 53-60"),
    (dict(a=MATRIX | 3 << 61), DescriptorFault, r"swizzle mode \(bits 61-63\)"),
    (dict(a=MATRIX | 1 << 52), UnsupportedInstruction, "bit 52"),
    (dict(a=MATRIX | 1 << 61, descriptor=PLAIN | 1 << 15), DescriptorFault, "swizzle mode"),
    (dict(a=matrix_bits(120 << 10, 128, 4096, "none")), OutOfBounds, "matrix A"),
    (dict(d=16 << 16), DescriptorFault, "D of tcgen05.mma: lane 16"),
    (dict(d=480), TensorMemoryFault, "column"),
]


@pytest.mark.parametrize("change,fault,message", FAULTS)
def test_illegal_descriptors(change, fault, message):
    fields = {"a": MATRIX, "b": MATRIX, "descriptor": PLAIN, **change}
    with pytest.raises(fault, match=message) as caught:
        run_mma(mma_text("f16"), [Instruction(**fields)], blank())
    assert "tcgen05.mma" in caught.value.place.instruction


def test_illegal_combinations_of_kinds():
    cases = [
        ("i8", {}, instruction_bits(128, 40, "s8", "s8", "s32"), r"N \(bits 17-22\): 40"),
        ("i8", {}, instruction_bits(128, 64, "s8", "s8", "s32", negate=(1, 0)), "negate"),
        ("f8f6f4", {}, instruction_bits(128, 64, "e2m1", "e4m3", "f32", transpose=(1, 0)), r"transpose A \(bit 15\)"),
        ("f8f6f4", {}, instruction_bits(128, 24, "e4m3", "e4m3", "f32", transpose=(0, 1)), "N .*24"),
        ("f16", {"group": 2}, instruction_bits(64, 64, "f16", "f16", "f32"), r"M \(bits 24-28\): 64"),
        ("f16", {"variant": ".ws"}, instruction_bits(64, 32, "f16", "f16", "f32"), "N .*32"),
        (
            "mxf4",
            {"qualifiers": ".block_scale"},
            scaled_bits(128, 64, "", "", "ue4m3", packed=True),
            "scale matrix type",
        ),
        (
            "mxf4",
            {"qualifiers": ".block_scale"},
            scaled_bits(128, 64, "", "", "ue8m0", packed=True, ids=(1, 0)),
            "scale_a",
        ),
        (
            "mxf8f6f4",
            {"qualifiers": ".block_scale"},
            scaled_bits(0, 64, "e4m3", "e4m3", "ue8m0"),
            r"M \(bits 27-28\): 0",
        ),
    ]
    for kind, options, descriptor, message in cases:
        with pytest.raises(DescriptorFault, match=message):
            group = options.get("group", 1)
            run_mma(mma_text(kind, **options), [Instruction(MATRIX, MATRIX, descriptor)], blank(group))


def test_operands_in_tensor_memory_share_the_lane_alignment():
    descriptor = instruction_bits(64, 64, "f16", "f16", "f32")
    with pytest.raises(DescriptorFault, match="lane 0 must be that of D, 16"):
        run_mma(mma_text("f16", a_in_tmem=True), [Instruction(256, MATRIX, descriptor, d=16 << 16)], blank())


@pytest.mark.parametrize(
    "text,message",
    [
        (mma_text("f16", a_in_tmem=True, qualifiers=".ashift"), "ashift"),
        (mma_text("f16", variant=".ws", tail=", 1"), "zero-column mask"),
    ],
)
def test_unsupported_forms_say_so(text, message):
    with pytest.raises(UnsupportedInstruction, match=message):
        run_mma(text, [Instruction(MATRIX, MATRIX, PLAIN)], blank())
