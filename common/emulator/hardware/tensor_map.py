"""Tensor maps and the tiled copies that the tensor copy engine (TMA) makes with them.

Three layers: `TensorMap` takes what `cuTensorMapEncodeTiled` takes and checks the same rules; `TensorMapDescriptor` is
what the hardware sees, with a 128-byte encoding of our own; `load_tile`, `store_tile` and `reduce_tile` move one box
between the bytes of a global allocation and shared memory.

Sources: the CUDA driver's documentation of `cuTensorMapEncodeTiled`, PTX ISA 5.5 and 9.7.9.27, and, where these are
silent, an H200 with driver 580 (marked "measured" below). Dimensions are innermost first everywhere.

- The driver accepts any stride that is a multiple of 16 and below 2^40: 0 and overlapping rows too (measured).
- The driver accepts dimensions up to 2^32 (measured; the documentation of CUDA 13.5 says 2^31).
- Without interleave the element stride of dimension 0 is ignored.
- With a swizzle and no interleave, rows of the box start at multiples of the swizzle span in shared memory, also when
  a row is shorter; the bytes between are not written. The transaction count has the bytes of the box alone (measured).
- With interleave, dimension 0 counts slices of 16 or 32 bytes that lie side by side (W of NC/8HWC8), and the second
  outermost dimension (C/8) contributes one slice whatever `box` says (measured).
- The innermost byte offset of a box, `coordinates[0] * element size`, must be a multiple of 16, and the number of
  coordinates must be the rank; anything else stops an H200 with an illegal instruction (measured).
- Stores and reductions need non-negative coordinates (PTX ISA 9.7.9.27.1.1), or they fault likewise (measured). They
  clip whole 16-byte chunks: the tail of a chunk whose first element is inside the tensor *is* written (measured).
- OOB-NaN is 0x7ff7 in every 16 bits, for every floating-point type (measured).
- A load of `TFLOAT32` or `TFLOAT32_FTZ` rounds to 10 mantissa bits, nearest even, and turns any NaN into 0x7fffe000; it
  flushes nothing. A load of `FLOAT32_FTZ` and every store copy bits. Reductions flush for `*_FTZ` alone (measured).
"""

from __future__ import annotations

import math
import operator
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from common.emulator.hardware.reductions import REDUCTIONS, Reduction, reduction
from common.emulator.hardware.swizzle import Swizzle, swizzle_chunks, swizzle_pattern

DESCRIPTOR_BYTES = 128
CHUNK_BYTES = 16
SHARED_ALIGNMENT = 128
MAX_RANK = 5
MAX_BOX_BYTES = 228 * 1024
OOB_NAN = 0x7FF7
PADDING = 0xFF


class TensorMapError(ValueError):
    """A tensor map, or an access through one, breaks a rule; the message names what, the rule and the value."""


class TensorMapAccessError(TensorMapError):
    """An access inside the tensor's bounds lies outside the memory that was given. `address`: the first such byte."""

    def __init__(self, message: str, address: int) -> None:
        super().__init__(message)
        self.address = address


class DataType(IntEnum):
    """Element types, numbered as the driver's `CUtensorMapDataType`."""

    UINT8 = 0
    UINT16 = 1
    UINT32 = 2
    INT32 = 3
    UINT64 = 4
    INT64 = 5
    FLOAT16 = 6
    FLOAT32 = 7
    FLOAT64 = 8
    BFLOAT16 = 9
    FLOAT32_FTZ = 10
    TFLOAT32 = 11
    TFLOAT32_FTZ = 12
    U4_ALIGN8B = 13
    U4_ALIGN16B = 14
    U6_ALIGN16B = 15


class Interleave(IntEnum):
    """Interleaved layouts, numbered as the driver's `CUtensorMapInterleave`."""

    NONE = 0
    B16 = 1
    B32 = 2


class L2Promotion(IntEnum):
    """L2 fetch sizes, numbered as the driver's `CUtensorMapL2promotion`. They change no value here."""

    NONE = 0
    B64 = 1
    B128 = 2
    B256 = 3


class OobFill(IntEnum):
    """What a load puts where the box leaves the tensor, numbered as the driver's `CUtensorMapFloatOOBfill`."""

    ZERO = 0
    NAN = 1


@dataclass(frozen=True)
class Storage:
    """How one type lies in memory: units of `elements` elements, `unit` bytes in global and `shared` bytes in SMEM."""

    elements: int
    unit: int
    shared: int


_STORAGE = {
    DataType.UINT8: Storage(1, 1, 1),
    **{code: Storage(1, 2, 2) for code in (DataType.UINT16, DataType.FLOAT16, DataType.BFLOAT16)},
    **{code: Storage(1, 4, 4) for code in (DataType.UINT32, DataType.INT32, DataType.FLOAT32, DataType.FLOAT32_FTZ)},
    **{code: Storage(1, 4, 4) for code in (DataType.TFLOAT32, DataType.TFLOAT32_FTZ)},
    **{code: Storage(1, 8, 8) for code in (DataType.UINT64, DataType.INT64, DataType.FLOAT64)},
    DataType.U4_ALIGN8B: Storage(2, 1, 1),
    DataType.U4_ALIGN16B: Storage(16, 8, 16),
    DataType.U6_ALIGN16B: Storage(16, 12, 16),
}
_PADDED = (DataType.U4_ALIGN16B, DataType.U6_ALIGN16B)
_FLOATS = tuple(range(DataType.FLOAT16, DataType.TFLOAT32_FTZ + 1))

_TYPE_NAMES = {code.name.lower(): code for code in DataType} | {
    "bool": DataType.UINT8,
    "int8": DataType.UINT8,
    "int16": DataType.UINT16,
    "half": DataType.FLOAT16,
    "tf32": DataType.TFLOAT32,
    "tf32_ftz": DataType.TFLOAT32_FTZ,
    "16u4_align8b": DataType.U4_ALIGN8B,
    "16u4_align16b": DataType.U4_ALIGN16B,
    "16u6_align16b": DataType.U6_ALIGN16B,
    "float4_e2m1fn": DataType.U4_ALIGN8B,
    "float4_e2m1fn_x2": DataType.UINT8,
}
_INTERLEAVE_NAMES = {"NONE": Interleave.NONE, "16B": Interleave.B16, "32B": Interleave.B32}
_SWIZZLE_NAMES = {
    "NONE": Swizzle.NONE,
    "32B": Swizzle.B32,
    "64B": Swizzle.B64,
    "128B": Swizzle.B128,
    "128B_ATOM_32B": Swizzle.B128_ATOM_32B,
    "128B_ATOM_32B_FLIP_8B": Swizzle.B128_ATOM_32B_FLIP_8B,
    "128B_ATOM_64B": Swizzle.B128_ATOM_64B,
}
_L2_NAMES = {"NONE": L2Promotion.NONE, "64B": L2Promotion.B64, "128B": L2Promotion.B128, "256B": L2Promotion.B256}
_FILL_NAMES = {"NONE": OobFill.ZERO, "ZERO": OobFill.ZERO, "NAN": OobFill.NAN, "NAN_REQUEST_ZERO_FMA": OobFill.NAN}


def data_type(dtype: Any) -> DataType:
    """Return the driver's type code for a TVM, torch or NumPy type, a driver enumerator's name, or the code itself.

    Eight-bit floats are `UINT8`, as in TVM. Raises `TensorMapError` for anything the tensor copy engine cannot move.
    """
    if isinstance(dtype, type) and issubclass(dtype, np.generic):
        dtype = np.dtype(dtype)
    try:
        return DataType(operator.index(dtype))
    except TypeError:
        pass
    except ValueError:
        raise TensorMapError(f"dtype: {dtype} is no CUtensorMapDataType code (0 to 15)") from None
    name = str(dtype).lower().removeprefix("torch.").removeprefix("cu_tensor_map_data_type_")
    if name in _TYPE_NAMES:
        return _TYPE_NAMES[name]
    if name.startswith("float8_"):
        return DataType.UINT8
    raise TensorMapError(f"dtype: {dtype!r} has no CUtensorMapDataType; known names: {', '.join(sorted(_TYPE_NAMES))}")


def _option(argument: str, value: Any, names: dict[str, IntEnum], prefixes: tuple[str, ...]) -> int:
    codes = sorted({int(code) for code in names.values()})
    if isinstance(value, str):
        name = value.upper().replace("::", "_")
        for prefix in prefixes:
            name = name.removeprefix(prefix)
        if name in names:
            return int(names[name])
        raise TensorMapError(f"{argument}: unknown name {value!r}; known names: {', '.join(names)}")
    try:
        code = operator.index(value)
    except TypeError:
        raise TensorMapError(f"{argument}: needs a name or a driver code, got {value!r}") from None
    if code not in codes:
        raise TensorMapError(f"{argument}: {code} is no driver code ({codes[0]} to {codes[-1]})")
    return code


@dataclass(frozen=True)
class TensorMapDescriptor:
    """What the hardware sees. All tuples have the full length; entries from `rank` on mean nothing.

    `global_address`: bytes. `dims` (5) and `box` (5): elements. `strides` (4): bytes, of dimensions 1 to 4.
    `element_strides` (5): steps in elements. The options are driver codes. `mode` is 0, tiled; the im2col fields are
    kept for the im2col modes, which no function here accepts yet.
    """

    global_address: int
    dtype: int
    rank: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    interleave: int = 0
    swizzle: int = 0
    l2_promotion: int = 0
    oob_fill: int = 0
    mode: int = 0
    lower_corner: tuple[int, ...] = (0, 0, 0)
    upper_corner: tuple[int, ...] = (0, 0, 0)
    channels_per_pixel: int = 0
    pixels_per_column: int = 0

    def to_bytes(self) -> bytes:
        """Encode as 128 bytes, little-endian: the field order of `_LAYOUT`, then a CRC-32 of everything before it.

        `dims` are kept minus one. Raises `TensorMapError` when a value does not fit its field.
        """
        try:
            body = _LAYOUT.pack(
                _MAGIC,
                self.global_address,
                *(extent - 1 for extent in self.dims),
                *self.strides,
                *self.box,
                *self.element_strides,
                *(self.rank, self.dtype, self.interleave, self.swizzle, self.l2_promotion, self.oob_fill, self.mode),
                *self.lower_corner,
                *self.upper_corner,
                self.channels_per_pixel,
                self.pixels_per_column,
            )
        except struct.error as error:
            raise TensorMapError(f"the tensor map cannot be encoded: {error} ({self})") from None
        return body + struct.pack("<I", zlib.crc32(body))

    @staticmethod
    def from_bytes(data: bytes) -> TensorMapDescriptor:
        """Decode `to_bytes`; raises `TensorMapError` for anything else (memory that holds no tensor map)."""
        return _decode(bytes(data))

    @cached_property
    def plan(self) -> _Plan:
        """Everything about tiled copies that does not depend on coordinates; raises when a rule is broken."""
        validate(self)
        return _Plan(self)


_MAGIC = b"emuTMAP1"
_LAYOUT = struct.Struct("<8sQ5I4Q5H5B7B3h3h2H18x")


@lru_cache(maxsize=4096)
def _decode(data: bytes) -> TensorMapDescriptor:
    if len(data) != DESCRIPTOR_BYTES:
        raise TensorMapError(f"a tensor map has {DESCRIPTOR_BYTES} bytes, got {len(data)}")
    body = data[:-4]
    if body[:8] != _MAGIC or struct.unpack("<I", data[-4:])[0] != zlib.crc32(body):
        raise TensorMapError("the memory holds no tensor map: it was never encoded, or something wrote over it")
    v = _LAYOUT.unpack(body)
    return TensorMapDescriptor(
        global_address=v[1],
        dims=tuple(extent + 1 for extent in v[2:7]),
        strides=v[7:11],
        box=v[11:16],
        element_strides=v[16:21],
        rank=v[21],
        dtype=v[22],
        interleave=v[23],
        swizzle=v[24],
        l2_promotion=v[25],
        oob_fill=v[26],
        mode=v[27],
        lower_corner=v[28:31],
        upper_corner=v[31:34],
        channels_per_pixel=v[34],
        pixels_per_column=v[35],
    )


_PTX_ELEMENT_TYPES = (
    *(DataType.UINT8, DataType.UINT16, DataType.UINT32, DataType.INT32, DataType.UINT64, DataType.INT64),
    *(DataType.FLOAT16, DataType.FLOAT32, DataType.FLOAT32_FTZ, DataType.FLOAT64, DataType.BFLOAT16),
    *(DataType.TFLOAT32, DataType.TFLOAT32_FTZ, DataType.U4_ALIGN8B, DataType.U4_ALIGN16B, DataType.U6_ALIGN16B),
)
_PTX_ATOMS = (Swizzle.B128, Swizzle.B128_ATOM_32B, Swizzle.B128_ATOM_32B_FLIP_8B, Swizzle.B128_ATOM_64B)
_VECTOR_FIELDS = {
    "box_dim": ("box", MAX_RANK),
    "global_dim": ("dims", MAX_RANK),
    "global_stride": ("strides", MAX_RANK - 1),
    "element_stride": ("element_strides", MAX_RANK),
}


def replace_field(
    descriptor: TensorMapDescriptor, field: str, value: int, ordinal: int | None = None
) -> TensorMapDescriptor:
    """Return a descriptor with one field replaced, as `tensormap.replace.tile` does (PTX ISA 9.7.9.28, table 33).

    `field`: the qualifier without its dot. `ordinal`: the dimension, for the fields that have one. `value` is in PTX's
    numbering, which differs from the driver's for `elemtype`; `rank` is one less than the rank. The rules of a whole
    tensor map are checked when it is used, since replacing goes field by field.
    """
    if field in _VECTOR_FIELDS:
        name, length = _VECTOR_FIELDS[field]
        if ordinal is None or not 0 <= ordinal < length:
            raise TensorMapError(f"tensormap.replace.{field}: ordinal {ordinal} is not in 0 to {length - 1}")
        values = list(getattr(descriptor, name))
        values[ordinal] = value
        return replace(descriptor, **{name: tuple(values)})
    if field == "global_address":
        return replace(descriptor, global_address=value)
    if field == "rank":
        return replace(descriptor, rank=value + 1)
    code = _replacement_code(descriptor, field, value)
    name = {"elemtype": "dtype", "interleave_layout": "interleave", "fill_mode": "oob_fill"}.get(field, "swizzle")
    return replace(descriptor, **{name: int(code)})


def _replacement_code(descriptor: TensorMapDescriptor, field: str, value: int) -> int:
    tables: dict[str, Sequence[int]] = {
        "elemtype": _PTX_ELEMENT_TYPES,
        "interleave_layout": tuple(Interleave),
        "fill_mode": tuple(OobFill),
        "swizzle_mode": (Swizzle.NONE, Swizzle.B32, Swizzle.B64, Swizzle.B128),
        "swizzle_atomicity": _PTX_ATOMS,
    }
    if field not in tables:
        raise TensorMapError(f"tensormap.replace: unknown field .{field}")
    if not 0 <= value < len(tables[field]):
        raise TensorMapError(f"tensormap.replace.{field}: value {value} is not in 0 to {len(tables[field]) - 1}")
    if field == "swizzle_mode" and value == 3 and descriptor.swizzle in _PTX_ATOMS:
        return descriptor.swizzle
    if field == "swizzle_atomicity" and descriptor.swizzle not in _PTX_ATOMS:
        if value:
            raise TensorMapError("tensormap.replace.swizzle_atomicity: only the 128B swizzle mode has atoms over 16B")
        return descriptor.swizzle
    return tables[field][value]


class TensorMap:
    """A tensor map to be passed to a kernel: the arguments of `cuTensorMapEncodeTiled`, checked by the same rules.

    Args:
        dtype: element type, by TVM, torch or NumPy name or object, or driver code (see `data_type`).
        tensor: NumPy array or torch CPU tensor that holds the data, or an int, a device address.
        dims: elements per dimension, innermost first, 1 to 5 of them.
        strides: bytes from one element to the next along dimensions 1 and up; one fewer than `dims`.
        box: elements to traverse per dimension, 1 to 256 each.
        element_strides: step per dimension, 1 to 8; a step of n takes every n-th element (default: all 1).
        byte_offset: bytes from the start of `tensor` to the first element.
        interleave, swizzle, l2_promotion, oob_fill: driver code or name, short ("128B") or full
            ("CU_TENSOR_MAP_SWIZZLE_128B"); `oob_fill` is "zero" or "nan".

    Raises `TensorMapError` naming the argument, the rule and the value.
    """

    def __init__(
        self,
        dtype: Any,
        tensor: Any,
        dims: Sequence[int],
        strides: Sequence[int],
        box: Sequence[int],
        element_strides: Sequence[int] | None = None,
        byte_offset: int = 0,
        interleave: int | str = 0,
        swizzle: int | str = 0,
        l2_promotion: int | str = 0,
        oob_fill: int | str = 0,
    ) -> None:
        rank = len(dims)
        if not 1 <= rank <= MAX_RANK:
            raise TensorMapError(f"dims: the rank must be 1 to {MAX_RANK}, got {rank} dimensions")
        steps = [1] * rank if element_strides is None else element_strides
        self.tensor = tensor if hasattr(tensor, "shape") else _integer("tensor", tensor)
        self.byte_offset = _integer("byte_offset", byte_offset)
        self._template = TensorMapDescriptor(
            global_address=0,
            dtype=int(data_type(dtype)),
            rank=rank,
            dims=_integers("dims", dims, rank, MAX_RANK, 1),
            strides=_integers("strides", strides, rank - 1, MAX_RANK - 1, 0),
            box=_integers("box", box, rank, MAX_RANK, 1),
            element_strides=_integers("element_strides", steps, rank, MAX_RANK, 1),
            interleave=_option("interleave", interleave, _INTERLEAVE_NAMES, ("CU_TENSOR_MAP_INTERLEAVE_",)),
            swizzle=_option("swizzle", swizzle, _SWIZZLE_NAMES, ("CU_TENSOR_MAP_SWIZZLE_",)),
            l2_promotion=_option("l2_promotion", l2_promotion, _L2_NAMES, ("CU_TENSOR_MAP_L2_PROMOTION_", "L2_")),
            oob_fill=_option("oob_fill", oob_fill, _FILL_NAMES, ("CU_TENSOR_MAP_FLOAT_OOB_FILL_",)),
        )
        self.descriptor(self.tensor if isinstance(self.tensor, int) else 0)

    def descriptor(self, base_address: int) -> TensorMapDescriptor:
        """Return the descriptor for a tensor whose first byte is at `base_address` (bytes); checks all the rules."""
        bound = replace(self._template, global_address=base_address + self.byte_offset)
        validate(bound)
        return bound


def _integer(argument: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        wanted = "an array or an int address" if argument == "tensor" else "integers"
        raise TensorMapError(f"{argument}: needs {wanted}, got {value!r}") from None


def _integers(argument: str, values: Sequence[int], count: int, length: int, filler: int) -> tuple[int, ...]:
    """Check the number of values and pad them to the descriptor's length."""
    if len(values) != count:
        raise TensorMapError(f"{argument}: needs {count} values for {_dimensions(argument, count)}, got {list(values)}")
    return tuple(_integer(argument, value) for value in values) + (filler,) * (length - count)


def _dimensions(argument: str, count: int) -> str:
    return f"rank {count + 1} (rank - 1)" if argument == "strides" else f"rank {count}"


def validate(d: TensorMapDescriptor) -> None:
    """Check a descriptor by the rules of `cuTensorMapEncodeTiled`; raises `TensorMapError`."""
    if d.mode != 0:
        raise TensorMapError(f"mode: only tiled tensor maps (0) are supported, got {d.mode}")
    if not 1 <= d.rank <= MAX_RANK:
        raise TensorMapError(f"dims: the rank must be 1 to {MAX_RANK}, got {d.rank}")
    for argument, value, codes in (
        ("dtype", d.dtype, DataType),
        ("interleave", d.interleave, Interleave),
        ("swizzle", d.swizzle, Swizzle),
        ("l2_promotion", d.l2_promotion, L2Promotion),
        ("oob_fill", d.oob_fill, OobFill),
    ):
        if value not in tuple(codes):
            raise TensorMapError(f"{argument}: {value} is no driver code (0 to {len(codes) - 1})")
    _check_layout(d)
    _check_box(d)
    _check_modes(d)


def _check_layout(d: TensorMapDescriptor) -> None:
    alignment = 32 if d.interleave == Interleave.B32 or d.dtype in _PADDED else 16
    reason = f"with interleave {Interleave(d.interleave).name} and dtype {DataType(d.dtype).name}"
    if d.global_address % alignment or d.global_address < 0:
        raise TensorMapError(
            f"tensor, byte_offset: the global address must be a multiple of {alignment} {reason}, "
            f"got {d.global_address:#x}"
        )
    if d.interleave and d.rank < 3:
        raise TensorMapError(f"dims: interleave needs rank 3 or more, got {d.rank}")
    for i, extent in enumerate(d.dims[: d.rank]):
        if not 1 <= extent <= 1 << 32:
            raise TensorMapError(f"dims[{i}]: must be 1 to 2^32, got {extent}")
    multiple = 128 if d.dtype in _PADDED else _STORAGE[DataType(d.dtype)].elements
    if d.dims[0] % multiple:
        raise TensorMapError(
            f"dims[0]: must be a multiple of {multiple} for dtype {DataType(d.dtype).name}, got {d.dims[0]}"
        )
    for i, stride in enumerate(d.strides[: d.rank - 1]):
        if stride % alignment or not 0 <= stride < 1 << 40:
            raise TensorMapError(
                f"strides[{i}]: must be a multiple of {alignment} {reason}, at least 0 and below 2^40, got {stride}"
            )


def _check_box(d: TensorMapDescriptor) -> None:
    storage = _STORAGE[DataType(d.dtype)]
    for i, (extent, step) in enumerate(zip(d.box[: d.rank], d.element_strides[: d.rank], strict=True)):
        if not 1 <= extent <= 256:
            raise TensorMapError(f"box[{i}]: must be 1 to 256, got {extent}")
        if not 1 <= step <= 8:
            raise TensorMapError(f"element_strides[{i}]: must be 1 to 8, got {step}")
    if d.dtype in _PADDED and d.box[0] != 128:
        raise TensorMapError(f"box[0]: must be 128 for dtype {DataType(d.dtype).name}, got {d.box[0]}")
    row = d.box[0] * storage.shared // storage.elements
    if d.box[0] % storage.elements or row % CHUNK_BYTES:
        raise TensorMapError(
            f"box[0]: the inner dimension must be a multiple of {CHUNK_BYTES} bytes, "
            f"got {d.box[0]} elements of {DataType(d.dtype).name}"
        )
    span = swizzle_pattern(d.swizzle).span
    if d.swizzle and not d.interleave and row > span:
        raise TensorMapError(
            f"box[0]: the inner dimension must be at most the {span} bytes of swizzle {Swizzle(d.swizzle).name} "
            f"without interleave, got {row} bytes"
        )
    total = smem_bytes(d)
    if total > MAX_BOX_BYTES:
        raise TensorMapError(f"box: must fit in the {MAX_BOX_BYTES} bytes of shared memory, got {total} bytes")


def _check_modes(d: TensorMapDescriptor) -> None:
    if d.oob_fill == OobFill.NAN and d.dtype not in _FLOATS:
        raise TensorMapError(f"oob_fill: NaN needs a floating-point dtype, got {DataType(d.dtype).name}")
    # The documentation asks for the 32B swizzle here, but the driver and an H200 take the other three as well.
    if d.interleave == Interleave.B32 and d.swizzle > Swizzle.B128:
        raise TensorMapError(f"swizzle: interleave 32B excludes {Swizzle(d.swizzle).name}")
    if d.dtype in _PADDED:
        if d.interleave:
            raise TensorMapError(f"interleave: must be none for dtype {DataType(d.dtype).name}, got {d.interleave}")
        allowed = [Swizzle.NONE, Swizzle.B128, Swizzle.B128_ATOM_32B]
        if d.dtype == DataType.U6_ALIGN16B:
            allowed.append(Swizzle.B128_ATOM_64B)
        if d.swizzle not in allowed:
            raise TensorMapError(f"swizzle: dtype {DataType(d.dtype).name} excludes {Swizzle(d.swizzle).name}")
    if d.dtype == DataType.U4_ALIGN8B and d.interleave:
        raise TensorMapError("interleave: not supported here for dtype U4_ALIGN8B, because no text defines its slices")


def _counts(d: TensorMapDescriptor) -> tuple[int, ...]:
    """Units of one box along each dimension: elements, groups of packed elements, or interleaved slices."""
    steps = [-(-extent // step) for extent, step in zip(d.box[: d.rank], d.element_strides[: d.rank], strict=True)]
    if d.interleave:
        steps[d.rank - 2] = 1
    else:
        steps[0] = d.box[0] // _STORAGE[DataType(d.dtype)].elements
    return tuple(steps)


def _unit_storage(d: TensorMapDescriptor) -> Storage:
    if d.interleave:
        slice_bytes = CHUNK_BYTES * d.interleave
        return Storage(1, slice_bytes, slice_bytes)
    return _STORAGE[DataType(d.dtype)]


def smem_bytes(d: TensorMapDescriptor) -> int:
    """Bytes that one access moves, which is what it completes on its mbarrier, in bounds or not (measured).

    Padding counts for nothing: neither the gaps between rows shorter than the swizzle span, nor those that the packed
    types get in shared memory (for these the ISA says "data copied" and nobody has measured it here).
    """
    return math.prod(_counts(d)) * _unit_storage(d).unit


@dataclass(frozen=True)
class TileAccess:
    """Every unit of a box, in arrays of the box's shape, outermost dimension first.

    A unit is an element; for packed types, a group of `elements_per_unit` elements; with interleave, a slice.
    `addresses`: int64 global byte address. `in_bounds`: bool, inside the tensor. `stored`: bool, what a store or
    reduction writes, which rounds the inner dimension up to 16 bytes. `smem_offsets`: int64 byte offset from the start
    of the box in shared memory, before swizzling.
    """

    addresses: np.ndarray
    in_bounds: np.ndarray
    stored: np.ndarray
    smem_offsets: np.ndarray
    unit_bytes: int
    elements_per_unit: int


def tile_indices(d: TensorMapDescriptor, coordinates: Sequence[int]) -> TileAccess:
    """Return where the box at `coordinates` (elements, innermost first, any sign) lies, element by element."""
    plan = d.plan
    first = plan.first_unit(coordinates)
    addresses = np.full((1,) * d.rank, d.global_address, np.int64)
    in_bounds = np.ones((1,) * d.rank, bool)
    stored = in_bounds
    for i in range(d.rank):
        index = first[i] + plan.steps[i] * np.arange(plan.counts[i], dtype=np.int64)
        index = index.reshape((-1,) + (1,) * i)
        inside = (index >= 0) & (index < plan.extents[i])
        addresses = addresses + index * plan.strides[i]
        in_bounds = in_bounds & inside
        stored = stored & (inside if i else (index >= 0) & (index < plan.stored_extent))
    rows = np.arange(plan.rows, dtype=np.int64)[:, None] * plan.pitch
    offsets = rows + np.arange(plan.counts[0], dtype=np.int64) * plan.storage.shared
    return TileAccess(
        addresses, in_bounds, stored, offsets.reshape(plan.counts[::-1]), plan.storage.unit, plan.storage.elements
    )


def smem_addresses(d: TensorMapDescriptor, base_address: int) -> np.ndarray:
    """Absolute swizzled shared memory addresses of a box at `base_address`, one per chunk in SMEM order (int64, 1-D).

    A chunk has 16 bytes, or 8 for the swizzle that flips 8-byte halves (`swizzle_pattern(d.swizzle).granule`).
    """
    plan = d.plan
    plan.check_shared(None, base_address)
    return base_address + plan.chunk_index(base_address) * plan.granule


class _Region(NamedTuple):
    """The part of a box inside the tensor: index ranges of the box, and where they lie in global memory."""

    low: tuple[int, ...]
    high: tuple[int, ...]
    address: int
    row_bytes: int
    last_address: int


class _Plan:
    """Geometry of one descriptor's box, computed once."""

    def __init__(self, d: TensorMapDescriptor) -> None:
        self.descriptor = d
        self.rank = d.rank
        self.storage = _unit_storage(d)
        self.counts = _counts(d)
        self.extents = (d.dims[0] // self.storage.elements, *d.dims[1 : d.rank])
        self.strides = (self.storage.unit, *d.strides[: d.rank - 1])
        self.steps = d.element_strides[: d.rank] if d.interleave else (1, *d.element_strides[1 : d.rank])
        pattern = swizzle_pattern(d.swizzle)
        self.granule = pattern.granule
        self.row = self.counts[0] * self.storage.shared
        self.pitch = self.row if d.interleave or not d.swizzle else pattern.span
        self.rows = math.prod(self.counts[1:])
        self.transaction_bytes = smem_bytes(d)
        self.linear_bytes = self.rows * self.pitch
        self.shared_bytes = -(-self.linear_bytes // pattern.span) * pattern.span
        per_chunk = max(1, CHUNK_BYTES // self.storage.unit)
        self.stored_extent = -(-self.extents[0] // per_chunk) * per_chunk
        # A row is one run of bytes in global and in shared memory, unless units are padded or skipped.
        self.solid_rows = self.steps[0] == 1 and self.storage.unit == self.storage.shared
        self.dense = self.row == self.pitch and self.shared_bytes == self.linear_bytes
        self.staging_shape = (*self.counts[:0:-1], self.row)
        self.rounds = d.dtype in (DataType.TFLOAT32, DataType.TFLOAT32_FTZ)
        if d.interleave:
            self.inner_multiple = 1
        elif d.dtype in _PADDED:
            self.inner_multiple = 128
        else:
            self.inner_multiple = max(1, CHUNK_BYTES * self.storage.elements // self.storage.unit)
        self.item = np.dtype(np.complex128 if self.granule == CHUNK_BYTES else np.uint64)
        self._chunk_indices: dict[int, np.ndarray] = {}
        self._direct_indices: dict[int, np.ndarray] = {}
        # Boxes that lie wholly inside the tensor move as one gather or scatter of 16-byte (or 8-byte) items.
        geometry = zip(self.extents, self.counts, self.steps, self.strides, strict=True)
        self.bounds = [(extent - (count - 1) * step, stride) for extent, count, step, stride in geometry]
        self.reach = self.storage.unit + sum(
            (count - 1) * step * stride
            for count, step, stride in zip(self.counts, self.steps, self.strides, strict=True)
        )
        self.direct = self.dense and self.storage.elements == 1

    @cached_property
    def overlaps(self) -> bool:
        """Whether two units of one box can share global bytes."""
        reach = ((self.counts[0] - 1) * self.steps[0] + 1) * self.storage.unit
        geometry = zip(self.strides[1:], self.steps[1:], self.counts[1:], strict=True)
        outer = sorted((stride * step, count) for stride, step, count in geometry if count > 1)
        for step, count in outer:
            if step < reach:
                return True
            reach += (count - 1) * step
        return False

    def chunk_index(self, address: int) -> np.ndarray:
        """Swizzled place of each chunk of the box, as a chunk number from `address` (int64, in SMEM order)."""
        phase = address % 1024
        if phase not in self._chunk_indices:
            row = np.arange(0, self.row, self.granule, dtype=np.int64)
            offsets = (np.arange(self.rows, dtype=np.int64)[:, None] * self.pitch + row).reshape(-1)
            self._chunk_indices[phase] = swizzle_chunks(self.descriptor.swizzle, phase, offsets) // self.granule
        return self._chunk_indices[phase]

    def direct_index(self, address: int) -> np.ndarray:
        """For each item of a dense box in shared memory at `address`, its place in global memory, in items (int64)."""
        phase = address % 1024
        if phase not in self._direct_indices:
            places = np.zeros(1, np.int64)
            for count, step, stride in zip(self.counts[::-1], self.steps[::-1], self.strides[::-1], strict=True):
                places = (places[:, None] + np.arange(count, dtype=np.int64) * (step * stride)).reshape(-1)
            units_per_item = max(1, self.granule // self.storage.unit)
            parts = np.arange(0, max(self.storage.unit, self.granule), self.granule, dtype=np.int64)
            items = (places[::units_per_item, None] + parts).reshape(-1) // self.granule
            # A swizzle is its own inverse: what lands at chunk i is the chunk that i swizzles to.
            self._direct_indices[phase] = items[self.chunk_index(address)]
        return self._direct_indices[phase]

    def whole(
        self, coordinates: Sequence[int], memory: np.ndarray, memory_address: int, smem: np.ndarray, address: int
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Global and shared memory as items, for a box that a gather or scatter can move; None for any other.

        The caller takes the slow path then, which also finds what is wrong with wrong arguments.
        """
        if not self.direct or len(coordinates) != self.rank or coordinates[0] % self.inner_multiple:
            return None
        begin = self.descriptor.global_address - memory_address
        for coordinate, (bound, stride) in zip(coordinates, self.bounds):
            if not 0 <= coordinate < bound:
                return None
            begin += coordinate * stride
        if begin < 0 or begin + self.reach > memory.size:
            return None
        if address % SHARED_ALIGNMENT or not 0 <= address <= smem.size - self.shared_bytes:
            return None
        size = self.granule
        flat = np.ndarray((self.reach // size,), self.item, memory, begin)
        return flat, np.ndarray((self.shared_bytes // size,), self.item, smem, address)

    def first_unit(self, coordinates: Sequence[int]) -> tuple[int, ...]:
        """Coordinates in units; raises when their number or the inner alignment is wrong."""
        if len(coordinates) != self.rank:
            raise TensorMapError(
                f"coordinates: a tensor map of rank {self.rank} needs {self.rank}, got {list(coordinates)}"
            )
        first = tuple(int(c) for c in coordinates)
        if first[0] % self.inner_multiple:
            raise TensorMapError(
                f"coordinates[0]: must be a multiple of {self.inner_multiple} for dtype "
                f"{DataType(self.descriptor.dtype).name} (a box starts on {CHUNK_BYTES} bytes), got {first[0]}"
            )
        return (first[0] // self.storage.elements, *first[1:])

    def check_shared(self, smem: np.ndarray | None, address: int) -> None:
        if address % SHARED_ALIGNMENT:
            raise TensorMapError(
                f"shared memory address: must be a multiple of {SHARED_ALIGNMENT} for a tensor copy, got {address:#x}"
            )
        if smem is not None and not 0 <= address <= smem.size - self.shared_bytes:
            raise TensorMapAccessError(
                f"shared memory address: {self.shared_bytes} bytes at {address:#x} leave the {smem.size} bytes "
                "of shared memory",
                max(address, smem.size),
            )

    def clip(self, first: tuple[int, ...], extents: tuple[int, ...]) -> _Region | None:
        """The part of the box at `first` within `extents`; None when there is none."""
        low, high = [], []
        address = last = self.descriptor.global_address
        geometry = zip(first, self.steps, self.counts, extents, self.strides, strict=True)
        for start, step, count, extent, stride in geometry:
            lo = max(0, -(start // step))
            hi = min(count, -((start - extent) // step))
            if lo >= hi:
                return None
            low.append(lo)
            high.append(hi)
            address += (start + lo * step) * stride
            last += (start + (hi - 1) * step) * stride
        row_bytes = (high[0] - low[0]) * self.storage.unit
        return _Region(tuple(low), tuple(high), address, row_bytes, last + self.storage.unit - 1)

    def window(self, region: _Region, memory: np.ndarray, memory_address: int) -> np.ndarray:
        """The region's global bytes as a view: outer dimensions, then bytes of a row (or units, bytes of a unit)."""
        if region.address < memory_address or region.last_address >= memory_address + memory.size:
            raise self._outside(region, memory, memory_address)
        shape = [high - low for low, high in zip(region.low[:0:-1], region.high[:0:-1], strict=True)]
        strides = [stride * step for stride, step in zip(self.strides[:0:-1], self.steps[:0:-1], strict=True)]
        if self.solid_rows:
            shape, strides = [*shape, region.row_bytes], [*strides, 1]
        else:
            shape = [*shape, region.high[0] - region.low[0], self.storage.unit]
            strides = [*strides, self.strides[0] * self.steps[0], 1]
        return np.ndarray(shape, np.uint8, memory, region.address - memory_address, strides)

    def _outside(self, region: _Region, memory: np.ndarray, memory_address: int) -> TensorMapAccessError:
        end = memory_address + memory.size
        address = region.address if region.address < memory_address else max(region.address, end)
        return TensorMapAccessError(
            f"the tensor map describes memory outside the allocation: the access takes bytes {region.address:#x} to "
            f"{region.last_address:#x} of the tensor at {self.descriptor.global_address:#x}, the allocation is "
            f"{memory_address:#x} to {end - 1:#x}",
            address,
        )

    def part(self, staging: np.ndarray, region: _Region) -> np.ndarray:
        """The region of a staged box (`staging_shape`, uint8), shaped as `window`."""
        outer = tuple(slice(low, high) for low, high in zip(region.low[:0:-1], region.high[:0:-1], strict=True))
        if self.solid_rows:
            start = region.low[0] * self.storage.unit
            return staging[(*outer, slice(start, start + region.row_bytes))]
        units = staging.reshape(*self.staging_shape[:-1], self.counts[0], self.storage.shared)
        return units[(*outer, slice(region.low[0], region.high[0]), slice(0, self.storage.unit))]

    def blank(self) -> np.ndarray:
        """A staged box of fill values; the padding of packed types, which the ISA leaves undefined, is poison."""
        staging = np.empty(self.staging_shape, np.uint8)
        if self.descriptor.oob_fill == OobFill.NAN:
            staging.view(np.uint16)[...] = OOB_NAN
        else:
            staging[...] = 0
        if self.storage.unit != self.storage.shared:
            staging.reshape(-1, self.storage.shared)[:, self.storage.unit :] = PADDING
        return staging

    def scatter(self, staging: np.ndarray, smem: np.ndarray, address: int) -> None:
        """Write a staged box to shared memory."""
        if not self.descriptor.swizzle:
            smem[address : address + self.linear_bytes] = staging.reshape(-1)
            return
        target = smem[address : address + self.shared_bytes].view(self.item)
        chunks = staging.reshape(-1).view(self.item)
        index = self.chunk_index(address)
        if self.dense:  # a swizzle is its own inverse, so the scatter can be a gather, which is faster
            np.take(chunks, index, out=target, mode="clip")
        else:
            target[index] = chunks

    def gather(self, smem: np.ndarray, address: int) -> np.ndarray:
        """Read a box from shared memory, unswizzled: `staging_shape`, uint8."""
        if not self.descriptor.swizzle:
            return smem[address : address + self.linear_bytes].reshape(self.staging_shape)
        source = smem[address : address + self.shared_bytes].view(self.item)
        return np.take(source, self.chunk_index(address)).view(np.uint8).reshape(self.staging_shape)


def load_tile(
    d: TensorMapDescriptor,
    coordinates: Sequence[int],
    global_bytes: np.ndarray,
    allocation_address: int,
    smem: np.ndarray,
    smem_address: int,
) -> None:
    """Copy the box at `coordinates` (elements, innermost first, any sign) from global to shared memory.

    `global_bytes`: uint8, the flat bytes of the allocation that starts at `allocation_address`. `smem`: uint8, shared
    memory from address 0 on; `smem_address` indexes it, and its bits drive the swizzle. Elements outside the tensor
    get the fill value. Raises `TensorMapError` for misaligned addresses or coordinates, `TensorMapAccessError` when an
    element inside the tensor is outside the allocation, or the box outside `smem`.
    """
    plan = d.plan
    whole = plan.whole(coordinates, global_bytes, allocation_address, smem, smem_address)
    if whole is not None:
        source, target = whole
        source.take(plan.direct_index(smem_address), out=target, mode="clip")
        if plan.rounds:
            target[...] = _round_tfloat32(target).view(plan.item)
        return
    first = plan.first_unit(coordinates)
    plan.check_shared(smem, smem_address)
    region = plan.clip(first, plan.extents)
    staging = plan.blank()
    if region is not None:
        source = plan.window(region, global_bytes, allocation_address)
        plan.part(staging, region)[...] = _round_tfloat32(source) if plan.rounds else source
    plan.scatter(staging, smem, smem_address)


def store_tile(
    d: TensorMapDescriptor,
    coordinates: Sequence[int],
    global_bytes: np.ndarray,
    allocation_address: int,
    smem: np.ndarray,
    smem_address: int,
) -> None:
    """Copy the box at `coordinates` from shared to global memory; what lies outside the tensor is dropped.

    Arguments and errors as for `load_tile`; coordinates must not be negative. The inner dimension is clipped to whole
    16-byte chunks, so a tensor whose rows end within one has the bytes after them written too: `TensorMapAccessError`
    when these lie outside the allocation.
    """
    whole = d.plan.whole(coordinates, global_bytes, allocation_address, smem, smem_address)
    if whole is not None:
        target, source = whole
        target[d.plan.direct_index(smem_address)] = source
        return
    written = _written(d, coordinates, global_bytes, allocation_address, smem, smem_address, "a store")
    if written is not None:
        target, source = written
        target[...] = source


def reduce_tile(
    d: TensorMapDescriptor,
    coordinates: Sequence[int],
    global_bytes: np.ndarray,
    allocation_address: int,
    smem: np.ndarray,
    smem_address: int,
    op: str,
) -> None:
    """Combine the box at `coordinates` of global memory with shared memory, as `cp.reduce.async.bulk.tensor`.

    `op`: add, min, max, inc, dec, and, or, xor, on the descriptor's type. Arguments, clipping and errors as for
    `store_tile`; a type that the operation does not take raises `TensorMapError` (an H200 faults).
    """
    combine = _reduction(op, d.dtype)
    written = _written(d, coordinates, global_bytes, allocation_address, smem, smem_address, "a reduction")
    if written is None:
        return
    target, source = written
    if not d.plan.overlaps:
        combine(target, source)
        return
    for row in np.ndindex(target.shape[: d.rank - 1]):  # rows share bytes: one after the other
        combine(target[row], source[row])


def _written(
    d: TensorMapDescriptor,
    coordinates: Sequence[int],
    global_bytes: np.ndarray,
    allocation_address: int,
    smem: np.ndarray,
    smem_address: int,
    what: str,
) -> tuple[np.ndarray, np.ndarray] | None:
    """Global view and shared bytes of what a store or reduction writes; None when the box is outside the tensor."""
    plan = d.plan
    if d.dtype == DataType.U4_ALIGN16B:
        raise TensorMapError(f"dtype: {what} to global memory does not take U4_ALIGN16B")
    first = plan.first_unit(coordinates)
    if min(first) < 0:
        raise TensorMapError(f"coordinates: {what} needs non-negative coordinates, got {list(coordinates)}")
    plan.check_shared(smem, smem_address)
    region = plan.clip(first, (plan.stored_extent, *plan.extents[1:]))
    if region is None:
        return None
    target = plan.window(region, global_bytes, allocation_address)
    staging = plan.gather(smem, smem_address)
    if d.dtype == DataType.U6_ALIGN16B:
        staging = _pack_six_bits(staging)
    return target, plan.part(staging, region)


def _pack_six_bits(staging: np.ndarray) -> np.ndarray:
    """Type `.b6p2x16`: sixteen bytes with six bits each become twelve bytes, in front of each group (PTX 5.5.1.1)."""
    bits = np.unpackbits(staging.reshape(-1, 16, 1), axis=2, bitorder="little")[:, :, :6]
    packed = np.full(staging.shape, PADDING, np.uint8)
    packed.reshape(-1, 16)[:, :12] = np.packbits(bits.reshape(-1, 96), axis=1, bitorder="little")
    return packed


def _round_tfloat32(source: np.ndarray) -> np.ndarray:
    """Round float32 bytes to 10 mantissa bits, to nearest even; any NaN becomes 0x7fffe000."""
    bits = np.ascontiguousarray(source).view(np.uint32)
    rounded = (bits + (np.uint32(0xFFF) + ((bits >> np.uint32(13)) & np.uint32(1)))) & np.uint32(0xFFFFE000)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    special = magnitude >= np.uint32(0x7F800000)
    if special.any():
        rounded[special] = np.where(magnitude > np.uint32(0x7F800000), np.uint32(0x7FFFE000), bits)[special]
    return rounded.view(np.uint8)


# Element types each reduction takes on an H200 (measured): the table of PTX ISA 9.7.9.27.1.3, and for add also float64
# and the float32 variants. Bitwise operations take int32 but not int64.
_REDUCED_KINDS = {
    DataType.UINT32: "u32",
    DataType.INT32: "s32",
    DataType.UINT64: "u64",
    DataType.INT64: "s64",
    DataType.FLOAT16: "f16",
    DataType.BFLOAT16: "bf16",
    DataType.FLOAT32: "f32",
    DataType.TFLOAT32: "f32",
    DataType.FLOAT32_FTZ: "f32_flushed",
    DataType.TFLOAT32_FTZ: "f32_flushed",
    DataType.FLOAT64: "f64",
}


def _reduction(op: str, dtype: int) -> Reduction:
    if op not in REDUCTIONS:
        raise TensorMapError(f"op: unknown reduction {op!r}; known: {', '.join(REDUCTIONS)}")
    takes = [code for code, kind in _REDUCED_KINDS.items() if kind in REDUCTIONS[op]]
    if dtype not in takes:
        names = ", ".join(code.name for code in takes)
        raise TensorMapError(f"dtype: reduction {op} does not take {DataType(dtype).name}, only {names}")
    return reduction(op, _REDUCED_KINDS[DataType(dtype)])
