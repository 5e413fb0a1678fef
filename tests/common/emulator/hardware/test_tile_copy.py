"""Copies of boxes against a definition that goes element by element."""

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest

from common.emulator.hardware.tensor_map import TensorMap, TensorMapAccessError, TensorMapDescriptor, TensorMapError
from common.emulator.hardware.tile_copy import TileCopy
from tests.common.emulator.hardware.tensor_copies import BASE, SHARED, SIZES, SPANS, reference_swizzle, simple


def load_tile(d, *arguments):
    d.plan(TileCopy).load(*arguments)


def store_tile(d, *arguments):
    d.plan(TileCopy).store(*arguments)


def reduce_tile(d, *arguments):
    d.plan(TileCopy).reduce(*arguments)


@dataclass
class Case:
    """One box access, in the terms of `cuTensorMapEncodeTiled`."""

    dtype: str
    dims: list
    strides: list
    box: list
    steps: list
    interleave: int
    swizzle: int
    fill: int
    start: list
    shared: int = 0
    bytes_needed: int = 0
    byte_offset: int = 0
    data: np.ndarray = field(default=None, repr=False)

    def descriptor(self) -> TensorMapDescriptor:
        return TensorMap(
            self.dtype,
            BASE,
            self.dims,
            self.strides,
            self.box,
            element_strides=self.steps,
            byte_offset=self.byte_offset,
            interleave=self.interleave,
            swizzle=self.swizzle,
            oob_fill=self.fill,
        ).descriptor(BASE)


def random_case(rng, *, negative: bool) -> Case:
    interleave = int(rng.choice([0, 0, 0, 1, 2]))
    dtype = str(rng.choice(list(SIZES)))
    size = SIZES[dtype]
    rank = int(rng.integers(3 if interleave else 1, 6))
    swizzle = int(rng.integers(0, 4 if interleave == 2 else 7))
    dims = [int(rng.integers(1, 10)) for _ in range(rank)]
    box = [int(rng.integers(1, 6)) for _ in range(rank)]
    steps = [int(rng.integers(1, 4)) if rng.random() < 0.3 else 1 for _ in range(rank)]
    unit = 16 * interleave or size
    per_chunk = max(1, 16 // size)
    if interleave:
        box[0] = per_chunk * int(rng.integers(1, 3))
    else:
        dims[0] = int(rng.integers(1, 200 // size + 4))
        chunks = SPANS[swizzle] // 16 if swizzle else 12
        box[0] = per_chunk * int(rng.integers(1, chunks + 1))
    inside = rng.random() < 0.4
    if inside:
        dims = [d + b - 1 for d, b in zip(dims, box)]
    align = 32 if interleave == 2 else 16
    strides, reach = [], -(-dims[0] * unit // align) * align + align * int(rng.integers(0, 2))
    for extent in dims[1:]:
        strides.append(reach)
        reach = reach * extent + align * int(rng.integers(0, 2))
    low = [-b - 1 if negative else 0 for b in box]
    start = [int(rng.integers(lo, d + 2)) for lo, d in zip(low, dims)]
    if inside:
        start = [int(rng.integers(0, d - b + 1)) for d, b in zip(dims, box)]
    if not interleave:
        start[0] = start[0] // per_chunk * per_chunk
    fill = int(rng.random() < 0.4 and dtype in ("float16", "bfloat16", "float32", "float64"))
    case = Case(dtype, dims, strides, box, steps, interleave, swizzle, fill, start)
    case.shared = 128 * int(rng.integers(0, 9))
    case.byte_offset = align * int(rng.integers(0, 5))
    case.bytes_needed = case.byte_offset + reach + 64
    return case


def random_cases(seed: int, count: int, **options) -> list:
    rng = np.random.default_rng(seed)
    cases = []
    while len(cases) < count:
        case = random_case(rng, **options)
        if case.bytes_needed < 1 << 20 and np.prod([-(-b // s) for b, s in zip(case.box, case.steps)]) < 1500:
            case.data = rng.integers(0, 256, case.bytes_needed, dtype=np.uint8)
            cases.append(case)
    return cases


def reference_units(case: Case, *, storing: bool = False):
    """Yield (shared byte offset, global byte offset or None, bytes) of every element or slice, in SMEM order."""
    rank, size = len(case.dims), SIZES[case.dtype]
    unit = 16 * case.interleave or size
    steps = case.steps if case.interleave else [1, *case.steps[1:]]
    counts = [-(-b // s) for b, s in zip(case.box, steps)]
    extents = list(case.dims)
    if case.interleave:
        counts[rank - 2] = 1
    elif storing:
        extents[0] = -(-case.dims[0] * size // 16) * 16 // size
    pitch = counts[0] * unit
    if case.swizzle and not case.interleave:
        pitch = SPANS[case.swizzle]
    order = itertools.product(*[range(c) for c in reversed(counts)])
    for number, reverse in enumerate(order):
        place = [s + i * step for s, i, step in zip(case.start, reversed(reverse), steps)]
        offset = number // counts[0] * pitch + number % counts[0] * unit
        inside = all(0 <= p < e for p, e in zip(place, extents))
        address = sum(p * s for p, s in zip(place, [unit, *case.strides]))
        yield offset, case.byte_offset + address if inside else None, unit


def reference_load(case: Case, shared: np.ndarray) -> None:
    fill = bytes([0xF7, 0x7F] * 16) if case.fill else bytes(32)
    for offset, address, unit in reference_units(case):
        for byte in range(unit):
            target = reference_swizzle(case.swizzle, case.shared + offset + byte)
            shared[target] = fill[byte] if address is None else case.data[address + byte]


def reference_store(case: Case, shared: np.ndarray, memory: np.ndarray) -> None:
    for offset, address, unit in reference_units(case, storing=True):
        if address is not None:
            for byte in range(unit):
                memory[address + byte] = shared[reference_swizzle(case.swizzle, case.shared + offset + byte)]


@pytest.mark.parametrize("seed", range(6))
def test_loads_match_the_definition(seed):
    rng = np.random.default_rng(1000 + seed)
    for case in random_cases(seed, 80, negative=True):
        before = rng.integers(0, 256, SHARED, dtype=np.uint8)
        expected, actual = before.copy(), before.copy()
        reference_load(case, expected)
        load_tile(case.descriptor(), case.start, case.data, BASE, actual, case.shared)
        assert np.array_equal(actual, expected), case


@pytest.mark.parametrize("seed", range(6))
def test_stores_match_the_definition(seed):
    rng = np.random.default_rng(2000 + seed)
    for case in random_cases(100 + seed, 80, negative=False):
        shared = rng.integers(0, 256, SHARED, dtype=np.uint8)
        expected, actual = case.data.copy(), case.data.copy()
        reference_store(case, shared, expected)
        store_tile(case.descriptor(), case.start, actual, BASE, shared, case.shared)
        assert np.array_equal(actual, expected), case


def test_random_cases_cover_both_paths_and_every_mode():
    loads = [case for seed in range(6) for case in random_cases(seed, 80, negative=True)]
    shared = np.zeros(SHARED, np.uint8)
    whole = [c.descriptor().plan(TileCopy).whole(c.start, c.data, BASE, shared, c.shared) is not None for c in loads]
    assert len(loads) // 8 < sum(whole) < len(loads) // 2
    assert {c.swizzle for c in loads} == set(range(7))
    assert {(c.interleave, len(c.dims)) for c in loads} >= {(0, r) for r in range(1, 6)} | {(1, 4), (2, 5)}


@pytest.mark.parametrize("seed", range(2))
def test_sizes_and_shared_addresses_match_the_definition(seed):
    for case in random_cases(200 + seed, 60, negative=True):
        copy = case.descriptor().plan(TileCopy)
        units = list(reference_units(case))
        assert copy.transaction_bytes == len(units) * units[0][2]
        granule = 8 if case.swizzle == 5 else 16
        starts = [case.shared + o + b for o, _, u in units for b in range(0, u, granule) if (o + b) % granule == 0]
        assert list(copy.shared_addresses(case.shared)) == [reference_swizzle(case.swizzle, start) for start in starts]


def moved(function=load_tile, start=(0, 0), smem=0, size=64 * 64, base=BASE, arguments=None):
    memory, shared = np.zeros(size, np.uint8), np.zeros(4096, np.uint8)
    function(TensorMap(**(arguments or simple())).descriptor(BASE), start, memory, base, shared, smem)


def reduce_add(*arguments):
    reduce_tile(*arguments, "add")


@pytest.mark.parametrize("function", [load_tile, store_tile, reduce_add])
def test_misuse_is_refused(function):
    for smem in (16, 64, 127):
        with pytest.raises(TensorMapError, match=f"shared memory address: must be a multiple of 128 .* {hex(smem)}"):
            moved(function, smem=smem)
    for smem in (4096 - 896, -128, 1 << 20):
        with pytest.raises(TensorMapAccessError, match="leave the 4096 bytes of shared memory"):
            moved(function, smem=smem)
    with pytest.raises(TensorMapError, match=r"coordinates\[0\]: must be a multiple of 8 for dtype FLOAT16 .* got 4"):
        moved(function, start=(4, 0))
    for start in ((0,), (0, 0, 0)):
        with pytest.raises(TensorMapError, match="rank 2 needs 2"):
            moved(function, start=start)


@pytest.mark.parametrize("function", [store_tile, reduce_add])
@pytest.mark.parametrize("start", [(-8, 0), (0, -1)])
def test_stores_refuse_negative_coordinates(function, start):
    with pytest.raises(TensorMapError, match="needs non-negative coordinates"):
        moved(function, start=start)


@pytest.mark.parametrize("function", [load_tile, store_tile, reduce_add])
def test_a_tensor_that_leaves_its_allocation_faults(function):
    with pytest.raises(TensorMapAccessError, match="outside the allocation") as caught:
        moved(function, start=(0, 24), size=31 * 128)
    assert caught.value.address == BASE + 31 * 128
    with pytest.raises(TensorMapAccessError) as caught:
        moved(function, base=BASE + 128)
    assert caught.value.address == BASE
    moved(function, start=(0, 16), size=31 * 128)
    moved(function, start=(0, 32), size=128)


def test_a_store_writes_whole_chunks_and_faults_past_the_allocation():
    arguments = simple(dims=[14], strides=[], box=[32])
    memory, shared = np.zeros(64, np.uint8), np.full(128, 7, np.uint8)
    d = TensorMap(**arguments).descriptor(BASE)
    store_tile(d, [0], memory, BASE, shared, 0)
    assert np.array_equal(memory, np.repeat([7, 0], 32))
    with pytest.raises(TensorMapAccessError):
        store_tile(d, [0], memory[:28], BASE, shared, 0)
    load_tile(d, [0], memory[:28], BASE, shared, 0)
    assert np.array_equal(shared[:64], np.repeat([7, 0], [28, 36]))


def copied(dtype, values, **changes):
    """Load a row of 32-bit values."""
    memory, shared = np.array(values, np.uint32).view(np.uint8), np.zeros(1024, np.uint8)
    count = len(values)
    d = TensorMap(dtype, BASE, [count], [], [count], **changes).descriptor(BASE)
    load_tile(d, [0], memory, BASE, shared, 128)
    return [int(v) for v in shared[128 : 128 + 4 * count].view(np.uint32)]


@pytest.mark.parametrize("dtype", ["tf32", "tfloat32_ftz"])
def test_tf32_loads_round_to_nearest_even(dtype):
    pairs = {
        0x00000001: 0x00000000,
        0x80000001: 0x80000000,
        0x007FFFFF: 0x00800000,
        0x00002000: 0x00002000,
        0x3F800FFF: 0x3F800000,
        0x3F801000: 0x3F800000,
        0x3F801001: 0x3F802000,
        0x3F803000: 0x3F804000,
        0xBF801000: 0xBF800000,
        0x7F7FFFFF: 0x7F800000,
        0xFF7FFFFF: 0xFF800000,
        0x7F800000: 0x7F800000,
        0xFF800000: 0xFF800000,
        0x7FC00000: 0x7FFFE000,
        0xFFC12345: 0x7FFFE000,
        0x7F800001: 0x7FFFE000,
    }
    assert copied(dtype, list(pairs)) == list(pairs.values())


@pytest.mark.parametrize("dtype", ["float32", "FLOAT32_FTZ"])
def test_other_float_loads_copy_bits(dtype):
    values = [1, 0x80000001, 0x7F800001, 0xFFC12345, 0x3F801001, 0, 0, 0]
    assert copied(dtype, values) == values


def test_tf32_rounds_what_is_inside_and_fills_the_rest_unrounded():
    memory, shared = np.full(4, 0x3F801001, np.uint32).view(np.uint8), np.zeros(128, np.uint8)
    d = TensorMap("tf32", BASE, [4], [], [8], oob_fill="nan").descriptor(BASE)
    load_tile(d, [0], memory, BASE, shared, 0)
    assert list(shared[:32].view(np.uint32)) == [0x3F802000] * 4 + [0x7FF77FF7] * 4


def reduced(op, dtype, old, new, item):
    memory, shared = np.zeros(256, np.uint8), np.zeros(256, np.uint8)
    memory.view(item)[: len(old)] = old
    shared.view(item)[: len(new)] = new
    count = 256 // np.dtype(item).itemsize
    d = TensorMap(dtype, BASE, [count], [], [count]).descriptor(BASE)
    reduce_tile(d, [0], memory, BASE, shared, 0, op)
    return memory.view(item)[: len(old)]


INTEGERS = [0, 1, 2, 5, 2**31 - 1, 2**31, 2**32 - 1, 7]


@pytest.mark.parametrize("op", ["add", "min", "max", "and", "or", "xor"])
@pytest.mark.parametrize("dtype", ["uint32", "int32", "uint64"])
def test_integer_reductions(op, dtype):
    bits = 64 if dtype == "uint64" else 32
    signed = dtype == "int32"
    old, new = zip(*itertools.product(INTEGERS[:5], INTEGERS[2:]))
    old, new = list(old)[:30], list(new)[:30]

    def value(x):
        return x - (1 << bits) if signed and x >> (bits - 1) else x

    functions = {
        "add": lambda a, b: (a + b) % (1 << bits),
        "min": lambda a, b: min(a, b, key=value),
        "max": lambda a, b: max(a, b, key=value),
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "xor": lambda a, b: a ^ b,
    }
    result = reduced(op, dtype, old, new, np.dtype(f"u{bits // 8}"))
    assert [int(v) for v in result] == [functions[op](a, b) for a, b in zip(old, new)]


def test_increment_and_decrement_wrap():
    old, new = [0, 4, 5, 6, 0, 2**32 - 1], [5, 5, 5, 5, 0, 2**32 - 1]
    assert list(reduced("inc", "uint32", old, new, np.uint32)) == [1, 5, 0, 0, 0, 0]
    assert list(reduced("dec", "uint32", old, new, np.uint32)) == [5, 3, 4, 5, 0, 2**32 - 2]


def test_signed_64_bit_minimum():
    old, new = np.array([-5, 3, 2**62]), np.array([4, -9, -1])
    assert list(reduced("min", "int64", old, new, np.int64)) == [-5, -9, -1]
    assert list(reduced("max", "int64", old, new, np.int64)) == [4, 3, 2**62]


def test_half_addition_rounds_once_to_nearest_even():
    rng = np.random.default_rng(5)
    old = rng.integers(0, 0x7C00, 100).astype(np.uint16)
    new = (rng.integers(0, 0x7C00, 100) | (rng.integers(0, 2, 100) << 15)).astype(np.uint16)
    exact = old.view(np.float16).astype(np.float64) + new.view(np.float16).astype(np.float64)
    with np.errstate(over="ignore"):
        assert np.array_equal(reduced("add", "float16", old, new, np.uint16), exact.astype(np.float16).view(np.uint16))


def test_bfloat_addition_rounds_once_to_nearest_even():
    # 1 + 2^-8 is a tie to even (down), (1 + 2^-7) + 2^-8 a tie up; the largest value plus itself overflows.
    old = [0x3F80, 0x3F81, 0x7F7F, 0x3F80, 0x0001]
    new = [0x3B80, 0x3B80, 0x7F7F, 0xBF80, 0x0001]
    assert list(reduced("add", "bfloat16", old, new, np.uint16)) == [0x3F80, 0x3F82, 0x7F80, 0x0000, 0x0002]


@pytest.mark.parametrize("dtype, nan, inf", [("float16", 0x7E01, 0x7C00), ("bfloat16", 0x7FC1, 0x7F80)])
def test_half_minimum_and_maximum_of_special_values(dtype, nan, inf):
    one, minus_zero = {0x7C00: 0x3C00, 0x7F80: 0x3F80}[inf], 0x8000
    old = [nan, one, nan, minus_zero, 0, inf, 0x0001, minus_zero]
    new = [one, nan, nan, 0, minus_zero, one, 0x8001, minus_zero]
    assert list(reduced("min", dtype, old, new, np.uint16)) == [
        *(one, one, 0x7FFF, minus_zero, minus_zero, one, 0x8001, minus_zero)
    ]
    assert list(reduced("max", dtype, old, new, np.uint16)) == [one, one, 0x7FFF, 0, 0, inf, 0x0001, minus_zero]


@pytest.mark.parametrize("dtype, flushes", [("float32", False), ("tf32", False), ("float32_ftz", True), (12, True)])
def test_float_addition_flushes_for_ftz_types_alone(dtype, flushes):
    old = [0x00000001, 0x80000001, 0x3F800000, 0x7F800000, 0x00800000, 0x7FC12345]
    new = [0x00000000, 0x80000001, 0x33800000, 0xFF800000, 0x80800001, 0x3F800000]
    kept = [0x00000001, 0x80000002, 0x3F800000, 0x7FFFFFFF, 0x80000001, 0x7FFFFFFF]
    flushed = [0x00000000, 0x80000000, 0x3F800000, 0x7FFFFFFF, 0x80000000, 0x7FFFFFFF]
    assert list(reduced("add", dtype, old, new, np.uint32)) == (flushed if flushes else kept)


def test_double_addition_keeps_nan_payloads():
    old = [0x3FF0000000000000, 0x7FF4000000000001, 0x3FF0000000000000]
    new = [0x4000000000000000, 0x3FF0000000000000, 0xFFFB58445C9CCF95]
    expected = [0x4008000000000000, 0x7FF4000000000001, 0xFFFB58445C9CCF95]
    assert list(reduced("add", "float64", old, new, np.uint64)) == expected


REFUSED = {
    "add": ["uint8", "uint16", "int64"],
    "min": ["uint8", "float32", "float64", "tf32"],
    "max": ["uint16", "float32"],
    "inc": ["int32", "uint64", "float32"],
    "dec": ["int32", "float16"],
    "and": ["int64", "float32", "uint16"],
    "xor": ["int64", "bfloat16"],
    "mul": ["uint32"],
}


@pytest.mark.parametrize("op, dtype", [(op, dtype) for op, dtypes in REFUSED.items() for dtype in dtypes])
def test_reductions_refuse_other_types(op, dtype):
    with pytest.raises(TensorMapError, match="does not take|unknown reduction 'mul'"):
        reduced(op, dtype, [1], [1], np.uint32)


def test_reduction_of_a_clipped_swizzled_box():
    rng = np.random.default_rng(3)
    memory = rng.integers(0, 1 << 30, (40, 64), dtype=np.uint32)
    shared = rng.integers(0, 1 << 30, SHARED // 4, dtype=np.uint32).view(np.uint8)
    case = Case("uint32", [50, 37], [256], [32, 16], [1, 2], 0, 3, 0, [32, 30], shared=384)
    expected = memory.copy().view(np.uint8).reshape(-1)
    for offset, address, unit in reference_units(case, storing=True):
        if address is not None:
            source = reference_swizzle(3, case.shared + offset)
            element = expected[address : address + unit].view(np.uint32)
            element += shared[source : source + unit].view(np.uint32)
    actual = memory.copy().view(np.uint8).reshape(-1)
    reduce_tile(case.descriptor(), case.start, actual, BASE, shared, case.shared, "add")
    assert np.array_equal(actual, expected)
    assert not np.array_equal(actual, memory.view(np.uint8).reshape(-1))


def test_reduction_onto_overlapping_rows_counts_every_row():
    memory, shared = np.zeros(64, np.uint8), np.ones(1024, np.uint32).view(np.uint8)
    d = TensorMap("uint32", BASE, [4, 8, 2], [0, 16], [4, 8, 2]).descriptor(BASE)
    reduce_tile(d, [0, 0, 0], memory, BASE, shared, 0, "add")
    assert list(memory.view(np.uint32)) == [8] * 8 + [0] * 8
    shifted = TensorMap("uint32", BASE, [8, 3], [16], [8, 3]).descriptor(BASE)
    reduce_tile(shifted, [0, 0], memory, BASE, shared, 0, "add")
    assert list(memory.view(np.uint32)) == [9] * 4 + [10] * 4 + [2] * 4 + [1] * 4


def test_broadcast_rows_load():
    memory, shared = np.arange(64, dtype=np.uint8), np.zeros(1024, np.uint8)
    load_tile(TensorMap("uint8", BASE, [64, 9], [0], [64, 4]).descriptor(BASE), [0, 2], memory, BASE, shared, 0)
    assert np.array_equal(shared[:256], np.tile(memory, 4))


def test_packed_four_bit_values_copy_as_they_are():
    memory, shared = np.arange(256, dtype=np.uint8), np.full(512, 9, np.uint8)
    d = TensorMap("16u4_align8b", BASE, [94, 4], [64], [64, 2], swizzle=1).descriptor(BASE)
    load_tile(d, [64, 1], memory, BASE, shared, 0)
    expected = np.full(512, 9, np.uint8)
    for row in range(2):
        expected[row * 32 : row * 32 + 32] = 0
        expected[row * 32 : row * 32 + 15] = memory[64 * (row + 1) + 32 : 64 * (row + 1) + 47]
    assert d.plan(TileCopy).transaction_bytes == 64
    assert np.array_equal(shared, expected)
    with pytest.raises(TensorMapError, match="multiple of 32 for dtype U4_ALIGN8B"):
        load_tile(d, [16, 0], memory, BASE, shared, 0)


@pytest.mark.parametrize("dtype, unit", [("16u4_align16b", 8), ("16u6_align16b", 12)])
def test_padded_values_load_in_groups_of_sixteen(dtype, unit):
    memory, shared = np.arange(4 * 128, dtype=np.uint32).astype(np.uint8), np.zeros(512, np.uint8)
    d = TensorMap(dtype, BASE, [128, 3], [128], [128, 2], swizzle="128B").descriptor(BASE)
    load_tile(d, [0, 2], memory, BASE, shared, 128)
    for group in range(8):
        place = reference_swizzle(3, 128 + 16 * group)
        assert np.array_equal(shared[place : place + unit], memory[256 + group * unit : 256 + group * unit + unit])
        assert set(shared[place + unit : place + 16]) == {0xFF}
        outside = reference_swizzle(3, 256 + 16 * group)
        assert not shared[outside : outside + unit].any()
    assert d.plan(TileCopy).transaction_bytes == 2 * 8 * unit
    with pytest.raises(TensorMapError, match=r"coordinates\[0\]: must be a multiple of 128"):
        load_tile(d, [64, 0], memory, BASE, shared, 128)


def test_six_bit_values_store_packed():
    rng = np.random.default_rng(2)
    values = rng.integers(0, 256, 128, dtype=np.uint8)
    memory = np.zeros(128, np.uint8)
    d = TensorMap("16u6_align16b", BASE, [128], [], [128]).descriptor(BASE)
    store_tile(d, [0], memory, BASE, values, 0)
    number = sum((int(v) & 63) << (6 * i) for i, v in enumerate(values))
    assert memory.tobytes() == number.to_bytes(96, "little") + bytes(32)


def test_padded_four_bit_values_do_not_store():
    d = TensorMap("16u4_align16b", BASE, [128], [], [128]).descriptor(BASE)
    with pytest.raises(TensorMapError, match="a store to global memory does not take U4_ALIGN16B"):
        store_tile(d, [0], np.zeros(64, np.uint8), BASE, np.zeros(128, np.uint8), 0)
