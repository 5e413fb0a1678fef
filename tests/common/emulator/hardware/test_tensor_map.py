"""Tensor maps: rules, encoding, replacing fields."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from common.emulator.hardware import tensor_map as tm
from common.emulator.hardware.tensor_map import DataType, TensorMap, TensorMapDescriptor, TensorMapError
from common.emulator.hardware.tile_copy import TileCopy
from tests.common.emulator.hardware.tensor_copies import BASE, simple
from tests.common.emulator.hardware.test_tile_copy import random_cases


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


DRIVER = json.loads((Path(__file__).parent / "driver_tensor_maps.json").read_text())


@pytest.mark.parametrize("kind", ["tiled", "im2col"])
def test_encoding_is_that_of_the_driver(kind):
    """Recorded on an H200 with driver 580: the arguments, the options other than 0, and the 64 bytes it wrote."""
    make = {"tiled": TensorMap, "im2col": TensorMap.im2col}[kind]
    recorded = [case[1:] for case in DRIVER if case[0] == kind]
    assert len(recorded) == {"tiled": 120, "im2col": 15}[kind]
    for arguments, options, encoded in recorded:
        d = make(*arguments[:-1], element_strides=arguments[-1], **options).descriptor(arguments[1])
        assert d.to_bytes().hex() == encoded + 128 * "0"
        assert TensorMapDescriptor.from_bytes(bytes.fromhex(encoded) + bytes(range(64))) == d


@pytest.mark.parametrize("swizzle", range(7))
@pytest.mark.parametrize("dtype", range(16))
def test_encodings_that_the_driver_of_an_h200_refuses(dtype, swizzle):
    arguments = simple() | {"dtype": dtype, "dims": [128, 8], "strides": [2048], "box": [128, 2], "swizzle": 0}
    d = dataclasses.replace(TensorMap(**arguments).descriptor(BASE), swizzle=swizzle)
    assert TensorMapDescriptor.from_bytes(d.to_bytes()) == d


def test_the_encoding_of_cute_dsl():
    """Bits 1 and 21 of the third word are set there, and the 128-byte swizzle can have atoms of 32 bytes."""
    words = np.zeros(32, np.uint32)
    words[:5] = 0x1F1F000, 0x7100, 0x2C6392, 0x40, 0
    words[8:15] = 255, 255, 0, 0, 0, 0x1F000000, 63
    expected = TensorMap("float32", 0x710001F1F000, [256, 256], [1024], [32, 64], swizzle=4, l2_promotion=2)
    assert TensorMapDescriptor.from_bytes(words.tobytes()) == expected.descriptor(0x710001F1F000)


def test_garbage_is_no_tensor_map():
    good = TensorMap(**simple()).descriptor(BASE).to_bytes()
    unknown_type = good[:8] + bytes([good[8] | 0x80, good[9] | 0x07]) + good[10:]
    no_field = good[:62] + b"\x07" + good[63:]
    for bad in (bytes(128), b"\xff" * 128, unknown_type, no_field):
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
        d.plan(TileCopy)
