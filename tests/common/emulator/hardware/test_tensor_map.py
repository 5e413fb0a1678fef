"""Tensor maps: rules, encoding, and box copies against a definition that goes element by element."""

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest

from common.emulator.hardware import tensor_map as tm
from common.emulator.hardware.tensor_map import (
    DataType,
    TensorMap,
    TensorMapAccessError,
    TensorMapDescriptor,
    TensorMapError,
    load_tile,
    reduce_tile,
    smem_addresses,
    smem_bytes,
    store_tile,
    tile_indices,
)

BASE = 1 << 32
SHARED = 48 * 1024
SIZES = {"uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
SPANS = (16, 32, 64, 128, 128, 128, 128)


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


def reference_swizzle(mode: int, address: int) -> int:
    line = address >> 7
    chunk = (address >> 4) & 7
    if mode in (1, 2, 3):
        chunk ^= line & (1, 3, 7)[mode - 1]
    elif mode in (4, 5):
        chunk ^= 2 * (line & 3)
    elif mode == 6:
        chunk ^= 4 * (line & 1)
    low = address & 15
    if mode == 5 and line & 1:
        low ^= 8
    return line << 7 | chunk << 4 | low


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
    whole = [c.descriptor().plan.whole(c.start, c.data, BASE, shared, c.shared) is not None for c in loads]
    assert len(loads) // 8 < sum(whole) < len(loads) // 2
    assert {c.swizzle for c in loads} == set(range(7))
    assert {(c.interleave, len(c.dims)) for c in loads} >= {(0, r) for r in range(1, 6)} | {(1, 4), (2, 5)}


@pytest.mark.parametrize("seed", range(2))
def test_indices_match_the_definition(seed):
    for case in random_cases(200 + seed, 60, negative=True):
        d = case.descriptor()
        access = tile_indices(d, case.start)
        units = list(reference_units(case))
        assert access.addresses.dtype == np.int64
        assert access.addresses.shape == access.in_bounds.shape == access.smem_offsets.shape
        assert access.unit_bytes == units[0][2]
        assert list(access.smem_offsets.ravel()) == [offset for offset, _, _ in units]
        assert list(access.in_bounds.ravel()) == [address is not None for _, address, _ in units]
        assert [int(a) - BASE for a, ok in zip(access.addresses.ravel(), access.in_bounds.ravel()) if ok] == [
            address for _, address, _ in units if address is not None
        ]
        stored = [address is not None for _, address, _ in reference_units(case, storing=True)]
        assert list(access.stored.ravel()) == stored
        assert smem_bytes(d) == len(units) * units[0][2]
        granule = 8 if case.swizzle == 5 else 16
        starts = [case.shared + o + b for o, _, u in units for b in range(0, u, granule) if (o + b) % granule == 0]
        expected = [reference_swizzle(case.swizzle, start) for start in starts]
        assert list(smem_addresses(d, case.shared)) == expected


def simple(**changes) -> dict:
    arguments = dict(dtype="float16", tensor=BASE, dims=[64, 32], strides=[128], box=[64, 8])
    return {**arguments, **changes}


def cube(**changes) -> dict:
    arguments = dict(dtype="float16", tensor=BASE, dims=[64, 32, 8], strides=[1024, 32768], box=[16, 8, 2])
    return {**arguments, **changes}


BROKEN = [
    (simple(dims=[], strides=[], box=[]), r"dims: the rank must be 1 to 5, got 0"),
    (simple(dims=[8] * 6, strides=[16] * 5, box=[8] * 6), r"dims: the rank must be 1 to 5, got 6"),
    (simple(strides=[128, 128]), r"strides: needs 1 values for rank 2 \(rank - 1\)"),
    (simple(box=[64]), r"box: needs 2 values for rank 2"),
    (simple(element_strides=[1]), r"element_strides: needs 2 values"),
    (simple(interleave="16B"), r"dims: interleave needs rank 3 or more, got 2"),
    (simple(byte_offset=8), r"tensor, byte_offset: .* multiple of 16 .* got 0x100000008"),
    (simple(tensor=BASE + 4), r"tensor, byte_offset: .* multiple of 16"),
    (cube(byte_offset=16, interleave=2, swizzle=1), r"tensor, byte_offset: .* multiple of 32"),
    (simple(dims=[0, 32]), r"dims\[0\]: must be 1 to 2\^32, got 0"),
    (simple(dims=[64, 2**32 + 1]), r"dims\[1\]: must be 1 to 2\^32"),
    (simple(strides=[120]), r"strides\[0\]: must be a multiple of 16 .* got 120"),
    (simple(strides=[-128]), r"strides\[0\]: .* at least 0"),
    (simple(strides=[2**40]), r"strides\[0\]: .* below 2\^40"),
    (cube(strides=[1040, 32768], interleave=2, swizzle=1), r"strides\[0\]: must be a multiple of 32"),
    (simple(box=[64, 0]), r"box\[1\]: must be 1 to 256, got 0"),
    (simple(box=[264, 8]), r"box\[0\]: must be 1 to 256, got 264"),
    (simple(box=[12, 8]), r"box\[0\]: the inner dimension must be a multiple of 16 bytes, got 12"),
    (cube(box=[4, 2, 2], interleave=1), r"box\[0\]: the inner dimension must be a multiple of 16 bytes"),
    (simple(element_strides=[1, 0]), r"element_strides\[1\]: must be 1 to 8, got 0"),
    (simple(element_strides=[9, 1]), r"element_strides\[0\]: must be 1 to 8, got 9"),
    (simple(swizzle="32B", box=[24, 8]), r"box\[0\]: .* at most the 32 bytes of swizzle B32 .* got 48"),
    (simple(swizzle="64B"), r"box\[0\]: .* at most the 64 bytes"),
    (simple(swizzle="128B", box=[72, 8]), r"box\[0\]: .* at most the 128 bytes"),
    (simple(dtype="float32", strides=[256], box=[256, 229]), r"box: must fit in the 233472 bytes .* got 234496"),
    (simple(dtype="uint8", oob_fill="nan"), r"oob_fill: NaN needs a floating-point dtype, got UINT8"),
    (simple(dtype="int32", oob_fill=1), r"oob_fill: NaN"),
    (cube(interleave=2, swizzle=4), r"swizzle: interleave 32B excludes B128_ATOM_32B"),
    (cube(interleave=3), r"interleave: 3 is no driver code \(0 to 2\)"),
    (simple(swizzle=7), r"swizzle: 7 is no driver code \(0 to 6\)"),
    (simple(swizzle="96B"), r"swizzle: unknown name '96B'"),
    (simple(l2_promotion=4), r"l2_promotion: 4 is no driver code"),
    (simple(oob_fill="inf"), r"oob_fill: unknown name 'inf'"),
    (simple(oob_fill=2.0), r"oob_fill: needs a name or a driver code"),
    (simple(dtype="complex64"), r"dtype: 'complex64' has no CUtensorMapDataType"),
    (simple(dtype=16), r"dtype: 16 is no CUtensorMapDataType code"),
    (simple(tensor="A"), r"tensor: needs an array or an int address"),
    (simple(dims=[64.5, 32]), r"dims: needs integers"),
    (simple(dtype=14, dims=[128, 8], box=[64, 8]), r"box\[0\]: must be 128 for dtype U4_ALIGN16B"),
    (simple(dtype=15, dims=[192, 8], box=[128, 8]), r"dims\[0\]: must be a multiple of 128 for dtype U6_ALIGN16B"),
    (simple(dtype=15, dims=[128, 8], strides=[112], box=[128, 8]), r"strides\[0\]: must be a multiple of 32"),
    (simple(dtype=14, dims=[128, 8], box=[128, 8], byte_offset=16), r"tensor, byte_offset: .* multiple of 32"),
    (simple(dtype=14, dims=[128, 8], box=[128, 8], swizzle=6), r"swizzle: dtype U4_ALIGN16B excludes B128_ATOM_64B"),
    (simple(dtype=15, dims=[128, 8], box=[128, 8], swizzle=5), r"swizzle: dtype U6_ALIGN16B excludes"),
    (simple(dtype=13, dims=[63, 8], box=[64, 8]), r"dims\[0\]: must be a multiple of 2 for dtype U4_ALIGN8B"),
    (simple(dtype=13, box=[16, 8]), r"box\[0\]: the inner dimension must be a multiple of 16 bytes"),
    (simple(dtype=13, oob_fill=1), r"oob_fill: NaN"),
]


@pytest.mark.parametrize("arguments, message", BROKEN, ids=range(len(BROKEN)))
def test_broken_rules_name_argument_rule_and_value(arguments, message):
    with pytest.raises(TensorMapError, match=message):
        TensorMap(**arguments)


ACCEPTED = [
    simple(dims=[2**32, 2**32], strides=[2**40 - 16]),
    simple(strides=[0]),
    simple(strides=[16]),
    cube(strides=[1024, 16]),
    simple(box=[8, 256]),
    simple(element_strides=[2, 8]),
    simple(box=[64, 4], element_strides=[1, 8]),
    simple(dims=[8, 2]),
    simple(dtype="float32", strides=[256], box=[256, 228]),
    simple(dtype="float32", strides=[256], box=[256, 256], element_strides=[1, 2]),
    cube(interleave=1, swizzle=1, box=[256, 2, 2]),
    cube(interleave=2, swizzle=3),
    *[simple(dtype=code, dims=[16, 8], box=[16, 8], oob_fill=1) for code in range(6, 13)],
]


@pytest.mark.parametrize("arguments", ACCEPTED, ids=range(len(ACCEPTED)))
def test_what_the_driver_accepts_is_accepted(arguments):
    assert TensorMap(**arguments).descriptor(BASE).global_address == BASE


@pytest.mark.parametrize(
    "dtype, code",
    [
        ("float16", 6),
        ("torch.bfloat16", 9),
        ("float8_e4m3fn", 0),
        ("torch.float8_e5m2", 0),
        ("tf32", 11),
        ("tfloat32_ftz", 12),
        ("CU_TENSOR_MAP_DATA_TYPE_FLOAT32_FTZ", 10),
        ("CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN8B", 13),
        ("CU_TENSOR_MAP_DATA_TYPE_16U6_ALIGN16B", 15),
        ("int8", 0),
        (np.float64, 8),
        (np.dtype(np.int64), 5),
        (np.uint16, 1),
        (DataType.UINT32, 2),
        (3, 3),
    ],
)
def test_data_types_by_any_name(dtype, code):
    assert tm.data_type(dtype) == code


def test_torch_types_and_tensors():
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(32, 64, dtype=torch.bfloat16)
    built = TensorMap(tensor.dtype, tensor, [64, 32], [128], [64, 8])
    assert built.tensor is tensor
    assert built.descriptor(BASE).dtype == DataType.BFLOAT16


@pytest.mark.parametrize(
    "name, code",
    [("none", 0), ("32B", 1), ("CU_TENSOR_MAP_SWIZZLE_64B", 2), ("128b", 3), ("128B_ATOM_32B_FLIP_8B", 5)],
)
def test_options_by_name(name, code):
    assert TensorMap(**simple(swizzle=name, box=[16, 8])).descriptor(BASE).swizzle == code


def test_other_options_by_name():
    d = TensorMap(**cube(interleave="CU_TENSOR_MAP_INTERLEAVE_16B", l2_promotion="L2::128B", oob_fill="nan"))
    d = d.descriptor(BASE)
    assert (d.interleave, d.l2_promotion, d.oob_fill) == (1, 2, 1)
    named = TensorMap(**simple(l2_promotion="CU_TENSOR_MAP_L2_PROMOTION_L2_256B", oob_fill="zero")).descriptor(BASE)
    assert (named.l2_promotion, named.oob_fill) == (3, 0)
    fill = "CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA"
    assert TensorMap(**simple(oob_fill=fill)).descriptor(BASE).oob_fill == 1


def test_arrays_get_their_address_from_the_caller():
    built = TensorMap("float32", np.zeros((4, 16), np.float32), [8, 4], [64], [8, 4], byte_offset=32)
    assert built.descriptor(0x1000).global_address == 0x1020
    with pytest.raises(TensorMapError, match="multiple of 16"):
        built.descriptor(0x1008)


@pytest.mark.parametrize("seed", range(3))
def test_encoding_round_trips(seed):
    for case in random_cases(300 + seed, 20, negative=False):
        d = case.descriptor()
        data = d.to_bytes()
        assert len(data) == 128
        assert TensorMapDescriptor.from_bytes(data) == d
    largest = TensorMap(**simple(dims=[2**32] * 5, strides=[2**40 - 16] * 4, box=[64] + [1] * 4)).descriptor(BASE)
    assert TensorMapDescriptor.from_bytes(largest.to_bytes()) == largest


def test_garbage_is_no_tensor_map():
    good = TensorMap(**simple()).descriptor(BASE).to_bytes()
    for bad in (bytes(128), b"\xff" * 128, good[:1] + b"x" + good[2:], good[:-60] + b"\x07" + good[-59:]):
        with pytest.raises(TensorMapError, match="no tensor map"):
            TensorMapDescriptor.from_bytes(bad)
    with pytest.raises(TensorMapError, match="128 bytes, got 64"):
        TensorMapDescriptor.from_bytes(good[:64])


def test_values_that_do_not_fit_are_not_encoded():
    d = TensorMap(**simple()).descriptor(BASE)
    with pytest.raises(TensorMapError, match="cannot be encoded"):
        tm.replace_field(d, "box_dim", 1 << 16, 0).to_bytes()


def test_replace_builds_another_tensor_map_field_by_field():
    d = TensorMap(**simple()).descriptor(BASE)
    wanted = TensorMap(
        "bfloat16", BASE + 256, [40, 30, 20], [96, 4096], [32, 4, 2], [1, 2, 1], swizzle=4, oob_fill="nan"
    )
    changes = [
        ("global_address", BASE + 256, None),
        ("rank", 2, None),
        *[("global_dim", v, i) for i, v in enumerate([40, 30, 20])],
        *[("global_stride", v, i) for i, v in enumerate([96, 4096])],
        *[("box_dim", v, i) for i, v in enumerate([32, 4, 2])],
        *[("element_stride", v, i) for i, v in enumerate([1, 2, 1])],
        ("elemtype", 10, None),
        ("swizzle_mode", 3, None),
        ("swizzle_atomicity", 1, None),
        ("swizzle_mode", 3, None),
        ("interleave_layout", 0, None),
        ("fill_mode", 1, None),
    ]
    for name, value, ordinal in changes:
        d = tm.replace_field(TensorMapDescriptor.from_bytes(d.to_bytes()), name, value, ordinal)
    assert d == wanted.descriptor(BASE + 256)


def test_replace_uses_the_numbering_of_ptx():
    d = TensorMap(**simple()).descriptor(BASE)
    order = [0, 1, 2, 3, 4, 5, 6, 7, 10, 8, 9, 11, 12, 13, 14, 15]
    assert [tm.replace_field(d, "elemtype", v).dtype for v in range(16)] == order


@pytest.mark.parametrize(
    "name, value, ordinal, message",
    [
        ("elemtype", 16, None, "not in 0 to 15"),
        ("swizzle_mode", 4, None, "not in 0 to 3"),
        ("swizzle_atomicity", 1, None, "only the 128B"),
        ("box_dim", 8, 5, "ordinal 5"),
        ("global_stride", 16, 4, "ordinal 4"),
        ("box_dim", 8, None, "ordinal None"),
        ("colour", 1, None, "unknown field .colour"),
    ],
)
def test_replace_refuses_nonsense(name, value, ordinal, message):
    with pytest.raises(TensorMapError, match=message):
        tm.replace_field(TensorMap(**simple()).descriptor(BASE), name, value, ordinal)


def test_a_replaced_descriptor_is_checked_when_used():
    d = tm.replace_field(TensorMap(**simple()).descriptor(BASE), "box_dim", 12, 0)
    with pytest.raises(TensorMapError, match="multiple of 16 bytes"):
        load_tile(d, [0, 0], np.zeros(8192, np.uint8), BASE, np.zeros(4096, np.uint8), 0)


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
    assert smem_bytes(d) == 64
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
    assert smem_bytes(d) == 2 * 8 * unit
    assert tile_indices(d, [0, 2]).elements_per_unit == 16
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
