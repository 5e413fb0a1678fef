"""Tensor maps of the tensor copy engine (TMA): what the host says, what the hardware sees, and the rules.

`TensorMap` takes what `cuTensorMapEncodeTiled`, `cuTensorMapEncodeIm2col` and `cuTensorMapEncodeIm2colWide` take and
checks the same rules. `TensorMapDescriptor` is what the hardware sees, in the hardware's encoding. How bytes move is
in `tile_copy` (boxes) and `row_copy` (im2col, gather4, scatter4).

Sources: the CUDA driver's documentation of these functions, PTX ISA 5.5 and 9.7.9.27, and, where these are silent, an
H200 with driver 580 (marked "measured" below). Dimensions are innermost first everywhere.

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
- An im2col map needs at least one pixel position per dimension, 1 to 1024 pixels, channels of whole 16 bytes up to
  256, and no more bytes than a box (measured).
- OOB-NaN is 0x7ff7 in every 16 bits, for every floating-point type (measured).
- A load of `TFLOAT32` or `TFLOAT32_FTZ` rounds to 10 mantissa bits, nearest even, and turns any NaN into 0x7fffe000; it
  flushes nothing. A load of `FLOAT32_FTZ` and every store copy bits. Reductions flush for `*_FTZ` alone (measured).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from common.emulator.hardware.swizzle import Swizzle, swizzle_pattern

if TYPE_CHECKING:
    from common.emulator.hardware.shared_rows import SharedRows

Copy = TypeVar("Copy", bound="SharedRows")

DESCRIPTOR_BYTES = 128
ENCODED_BYTES = 64  # the rest is not read: some kernels do not even copy it
CHUNK_BYTES = 16
MAX_RANK = 5
_SOME_ADDRESS = 1 << 40  # of a tensor that has none yet; a byte offset may lead to before its start
MAX_BOX_BYTES = 228 * 1024
MAX_CHANNELS = 256
MAX_PIXELS = 1024
W128_PIXELS = 128  # of a column in mode .im2col::w::128, whatever the map says


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


class Mode(IntEnum):
    """Which function made a tensor map, and so which instructions may use it. The numbers are ours."""

    TILED = 0
    IM2COL = 1
    IM2COL_W = 2
    IM2COL_W128 = 3


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
PADDED = (DataType.U4_ALIGN16B, DataType.U6_ALIGN16B)
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
    `element_strides` (5): steps in elements. The options are driver codes, `mode` a `Mode`. The im2col modes have, in
    place of `box`, the corners of the pixel box (3 each: W, H, D) and how many channels and pixels a copy takes.
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
        """Encode as the driver does: 64 bytes of fields (see `_fields`), then 64 that nothing reads.

        Raises `TensorMapError` when a value does not fit its field.
        """
        number = 0
        for bit, width, value in _fields(self):
            if not 0 <= value < 1 << width:
                raise TensorMapError(f"the tensor map cannot be encoded: a field of {width} bits gets {value} ({self})")
            number |= value << bit
        return number.to_bytes(DESCRIPTOR_BYTES, "little")

    @staticmethod
    def from_bytes(data: bytes) -> TensorMapDescriptor:
        """Decode `to_bytes`, or what a driver encoded; raises `TensorMapError` for memory that holds no tensor map."""
        return _decode(bytes(data))

    def plan(self, kind: Callable[..., Copy], *details: int) -> Copy:
        """The copies of one kind through this map, `kind(self, *details)`, made on first use.

        Raises `TensorMapError` when the map breaks a rule, or is not for this kind.
        """
        key = (kind, *details)
        if key not in self._plans:
            validate(self)
            self._plans[key] = kind(self, *details)
        return self._plans[key]

    @cached_property
    def _plans(self) -> dict[tuple, Any]:
        return {}

    def require(self, *modes: Mode) -> None:
        """Raises `TensorMapError` for a map of another mode."""
        if self.mode not in modes:
            names = " or ".join(mode.name for mode in modes)
            raise TensorMapError(f"mode: the instruction needs a tensor map for {names}, not {Mode(self.mode).name}")

    @property
    def pixel_axes(self) -> range:
        """The dimensions that a pixel box has: W, H, D."""
        return range(self.rank - 2) if self.interleave else range(1, self.rank - 1)


# The hardware's numbers of the element types; those that round to tf32 are the float32 ones with a flag.
_ENCODED_TYPES = (
    *(DataType.UINT8, DataType.UINT16, DataType.UINT32, DataType.INT32, DataType.UINT64, DataType.INT64),
    *(DataType.FLOAT16, DataType.FLOAT32, DataType.FLOAT32_FTZ, DataType.FLOAT64, DataType.BFLOAT16),
    *(DataType.U4_ALIGN8B, DataType.U4_ALIGN16B, DataType.U6_ALIGN16B),
)
_ROUNDED_TYPES = {DataType.TFLOAT32: DataType.FLOAT32, DataType.TFLOAT32_FTZ: DataType.FLOAT32_FTZ}
_UNREAD_BITS = 1 << 65 | 1 << 85  # set in some drivers' tensor maps for Blackwell; what they mean is not known


def _fields(d: TensorMapDescriptor) -> list[tuple[int, int, int]]:
    """The encoding of a tensor map, as (lowest bit, width, value) in a little-endian number.

    Every field was found in 144 tensor maps that an H200's driver 580 encoded, except what that driver refuses: the 4-
    and 6-bit types and the atoms of the 128-byte swizzle (bit 83) are where CuTe DSL's host code puts them, and the
    two bits that tell the wide im2col modes from im2col are our own.
    """
    dtype = DataType(d.dtype)
    atom = _PTX_ATOMS.index(d.swizzle) if d.swizzle in _PTX_ATOMS else 0
    fields = [
        (0, 64, d.global_address),
        (64, 1, int(d.mode != Mode.TILED)),
        (68, 3, d.rank - 1),
        (71, 4, _ENCODED_TYPES.index(_ROUNDED_TYPES.get(dtype, dtype))),
        (75, 2, d.interleave),
        (77, 2, min(d.swizzle, Swizzle.B128)),
        (79, 1, d.oob_fill),
        (80, 1, int(dtype in _ROUNDED_TYPES)),
        (81, 2, d.l2_promotion),
        (83, 2, atom),
        (86, 2, max(d.mode - Mode.IM2COL, 0)),
    ]
    for i, stride in enumerate(d.strides):
        if stride % 16:
            raise TensorMapError(f"the tensor map cannot be encoded: stride {stride} is no multiple of 16 ({d})")
        fields += [(96 + 32 * i, 32, stride >> 4 & 0xFFFF_FFFF), (224 + 4 * i, 4, stride >> 36)]
    fields += [(256 + 32 * i, 32, extent - 1) for i, extent in enumerate(d.dims)]
    fields += [(416 + 3 * i, 3, step - 1) for i, step in enumerate(d.element_strides)]
    if d.mode == Mode.TILED:
        return fields + [(440 + 8 * i, 8, extent - 1) for i, extent in enumerate(d.box)]
    fields += [(440, 8, d.channels_per_pixel - 1), (480, 10, d.pixels_per_column - 1)]
    count, width = _corner_fields(d.mode, d.rank)
    for start, corner in ((448, d.lower_corner), (464, d.upper_corner)):
        limit = 1 << width - 1
        if not all(-limit <= value < limit for value in corner[:count]):
            raise TensorMapError(f"the tensor map cannot be encoded: corner {corner} ({d})")
        fields += [(start + width * i, width, value % (1 << width)) for i, value in enumerate(corner[:count])]
    return fields


def _corner_fields(mode: int, rank: int) -> tuple[int, int]:
    """How many numbers a corner of the pixel box has, and the bits of each."""
    count = rank - 2 if mode == Mode.IM2COL else 1
    return count, {1: 16, 2: 8, 3: 5}[count]


@lru_cache(maxsize=4096)
def _decode(data: bytes) -> TensorMapDescriptor:
    if len(data) != DESCRIPTOR_BYTES:
        raise TensorMapError(f"a tensor map has {DESCRIPTOR_BYTES} bytes, got {len(data)}")
    number = int.from_bytes(data[:ENCODED_BYTES], "little") & ~_UNREAD_BITS
    found = _descriptor(lambda bit, width: number >> bit & (1 << width) - 1) if number else None
    if found is None or int.from_bytes(found.to_bytes(), "little") != number:
        raise TensorMapError("the memory holds no tensor map: it was never encoded, or something wrote over it")
    return found


def _descriptor(field: Callable[[int, int], int]) -> TensorMapDescriptor | None:
    """The inverse of `_fields`, from a function of (lowest bit, width); None for what no tensor map has."""
    mode = Mode.IM2COL + field(86, 2) if field(64, 1) else Mode.TILED
    rank, code, swizzle = field(68, 3) + 1, field(71, 4), field(77, 2)
    if code >= len(_ENCODED_TYPES) or mode > Mode.IM2COL_W128 or (mode != Mode.TILED and not 3 <= rank <= MAX_RANK):
        return None
    dtype = _ENCODED_TYPES[code]
    if field(80, 1):
        dtype = next((rounded for rounded, exact in _ROUNDED_TYPES.items() if exact == dtype), dtype)
    box, pixels = [field(440 + 8 * i, 8) + 1 for i in range(MAX_RANK)], {}
    if mode != Mode.TILED:
        count, width = _corner_fields(mode, rank)
        lower, upper = ([_signed(field(at + width * i, width), width) for i in range(count)] for at in (448, 464))
        pixels = {
            "lower_corner": (*lower, 0, 0)[:3],
            "upper_corner": (*upper, 0, 0)[:3],
            "channels_per_pixel": box[0],
            "pixels_per_column": field(480, 10) + 1,
        }
        box = [1] * MAX_RANK
    return TensorMapDescriptor(
        global_address=field(0, 64),
        dtype=int(dtype),
        rank=rank,
        dims=tuple(field(256 + 32 * i, 32) + 1 for i in range(MAX_RANK)),
        strides=tuple((field(96 + 32 * i, 32) | field(224 + 4 * i, 4) << 32) << 4 for i in range(MAX_RANK - 1)),
        box=tuple(box),
        element_strides=tuple(field(416 + 3 * i, 3) + 1 for i in range(MAX_RANK)),
        interleave=field(75, 2),
        swizzle=int(_PTX_ATOMS[field(83, 2)] if swizzle == Swizzle.B128 else swizzle),
        l2_promotion=field(81, 2),
        oob_fill=field(79, 1),
        mode=int(mode),
        **pixels,
    )


def _signed(value: int, width: int) -> int:
    return value - (value >> width - 1 << width)


# Memory full of zeros, on which kernels build a tensor map field by field: extents and steps are kept minus one there
# (measured), so that each is one.
BLANK = TensorMapDescriptor(0, 0, 1, (1,) * 5, (0,) * 4, (1,) * 5, (1,) * 5)

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
    numbering, which differs from the driver's for `elemtype`; `rank` is one less than the rank; extents, steps and
    strides (in bytes) are as they are (measured: the 128 bytes come out as the driver encodes them). The rules of a
    whole tensor map are checked when it is used, since replacing goes field by field.
    """
    descriptor.require(Mode.TILED)
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

    `TensorMap.im2col` and `TensorMap.im2col_wide` make the others.

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
        self._encode(
            *(tensor, byte_offset, dtype, dims, strides, element_strides, interleave, swizzle, l2_promotion, oob_fill),
            lambda rank: {"box": _integers("box", box, rank, MAX_RANK, 1)},
        )

    @classmethod
    def im2col(
        cls,
        dtype: Any,
        tensor: Any,
        dims: Sequence[int],
        strides: Sequence[int],
        pixel_box_lower_corner: Sequence[int],
        pixel_box_upper_corner: Sequence[int],
        channels_per_pixel: int,
        pixels_per_column: int,
        element_strides: Sequence[int] | None = None,
        byte_offset: int = 0,
        interleave: int | str = 0,
        swizzle: int | str = 0,
        l2_promotion: int | str = 0,
        oob_fill: int | str = 0,
    ) -> TensorMap:
        """A tensor map for `.im2col` and `.im2col_no_offs`: the arguments of `cuTensorMapEncodeIm2col`.

        `dims` are 3 to 5, C first and N last (with interleave: W first, then C slices and N last). The corners, one
        value per dimension between (W, H, D), are offsets of the pixel box from the first and from the last pixel. A
        copy takes `pixels_per_column` positions (1 to 1024), of `channels_per_pixel` elements (1 to 256) each. The rest
        as for `TensorMap`.
        """

        def column(rank: int) -> dict[str, Any]:
            return {
                "mode": Mode.IM2COL,
                "lower_corner": _integers("pixel_box_lower_corner", pixel_box_lower_corner, rank - 2, 3, 0),
                "upper_corner": _integers("pixel_box_upper_corner", pixel_box_upper_corner, rank - 2, 3, 0),
                "channels_per_pixel": _integer("channels_per_pixel", channels_per_pixel),
                "pixels_per_column": _integer("pixels_per_column", pixels_per_column),
            }

        made = cls.__new__(cls)
        made._encode(
            *(tensor, byte_offset, dtype, dims, strides, element_strides, interleave, swizzle, l2_promotion, oob_fill),
            column,
        )
        return made

    @classmethod
    def im2col_wide(
        cls,
        dtype: Any,
        tensor: Any,
        dims: Sequence[int],
        strides: Sequence[int],
        pixel_box_lower_corner_width: int,
        pixel_box_upper_corner_width: int,
        channels_per_pixel: int,
        pixels_per_column: int,
        element_strides: Sequence[int] | None = None,
        byte_offset: int = 0,
        mode: str = "w",
        swizzle: int | str = "128B",
        l2_promotion: int | str = 0,
        oob_fill: int | str = 0,
    ) -> TensorMap:
        """A tensor map for `.im2col::w` (`mode` "w") or `.im2col::w::128` ("w128"): `cuTensorMapEncodeIm2colWide`.

        The corners are those of W; `pixels_per_column` means nothing in mode "w128". The rest as for `im2col`.
        """
        modes = {"w": Mode.IM2COL_W, "w128": Mode.IM2COL_W128}
        if mode not in modes:
            raise TensorMapError(f"mode: must be 'w' or 'w128', got {mode!r}")

        def column(rank: int) -> dict[str, Any]:
            return {
                "mode": modes[mode],
                "lower_corner": (_integer("pixel_box_lower_corner_width", pixel_box_lower_corner_width), 0, 0),
                "upper_corner": (_integer("pixel_box_upper_corner_width", pixel_box_upper_corner_width), 0, 0),
                "channels_per_pixel": _integer("channels_per_pixel", channels_per_pixel),
                "pixels_per_column": _integer("pixels_per_column", pixels_per_column),
            }

        made = cls.__new__(cls)
        made._encode(
            *(tensor, byte_offset, dtype, dims, strides, element_strides, 0, swizzle, l2_promotion, oob_fill), column
        )
        return made

    def _encode(
        self,
        tensor: Any,
        byte_offset: int,
        dtype: Any,
        dims: Sequence[int],
        strides: Sequence[int],
        element_strides: Sequence[int] | None,
        interleave: int | str,
        swizzle: int | str,
        l2_promotion: int | str,
        oob_fill: int | str,
        more: Callable[[int], dict[str, Any]],
    ) -> None:
        """`more(rank)`: the fields that only one mode has."""
        rank = len(dims)
        if not 1 <= rank <= MAX_RANK:
            raise TensorMapError(f"dims: the rank must be 1 to {MAX_RANK}, got {rank} dimensions")
        steps = [1] * rank if element_strides is None else element_strides
        self.tensor = tensor if hasattr(tensor, "shape") else _integer("tensor", tensor)
        self.byte_offset = _integer("byte_offset", byte_offset)
        self._template = replace(
            BLANK,
            dtype=int(data_type(dtype)),
            rank=rank,
            dims=_integers("dims", dims, rank, MAX_RANK, 1),
            strides=_integers("strides", strides, rank - 1, MAX_RANK - 1, 0),
            element_strides=_integers("element_strides", steps, rank, MAX_RANK, 1),
            interleave=_option("interleave", interleave, _INTERLEAVE_NAMES, ("CU_TENSOR_MAP_INTERLEAVE_",)),
            swizzle=_option("swizzle", swizzle, _SWIZZLE_NAMES, ("CU_TENSOR_MAP_SWIZZLE_",)),
            l2_promotion=_option("l2_promotion", l2_promotion, _L2_NAMES, ("CU_TENSOR_MAP_L2_PROMOTION_", "L2_")),
            oob_fill=_option("oob_fill", oob_fill, _FILL_NAMES, ("CU_TENSOR_MAP_FLOAT_OOB_FILL_",)),
            **more(rank),
        )
        self.descriptor(self.tensor if isinstance(self.tensor, int) else _SOME_ADDRESS)

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
    """Check a descriptor by the rules of the driver's function that makes it; raises `TensorMapError`."""
    if not 1 <= d.rank <= MAX_RANK:
        raise TensorMapError(f"dims: the rank must be 1 to {MAX_RANK}, got {d.rank}")
    for argument, value, codes in (
        ("dtype", d.dtype, DataType),
        ("interleave", d.interleave, Interleave),
        ("swizzle", d.swizzle, Swizzle),
        ("l2_promotion", d.l2_promotion, L2Promotion),
        ("oob_fill", d.oob_fill, OobFill),
        ("mode", d.mode, Mode),
    ):
        if value not in tuple(codes):
            raise TensorMapError(f"{argument}: {value} is no driver code (0 to {len(codes) - 1})")
    _check_layout(d)
    if d.mode == Mode.TILED:
        _check_box(d)
    else:
        _check_column(d)
    _check_modes(d)


def _check_layout(d: TensorMapDescriptor) -> None:
    alignment = 32 if d.interleave == Interleave.B32 or d.dtype in PADDED else 16
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
    multiple = 128 if d.dtype in PADDED else _STORAGE[DataType(d.dtype)].elements
    if d.dims[0] % multiple:
        raise TensorMapError(
            f"dims[0]: must be a multiple of {multiple} for dtype {DataType(d.dtype).name}, got {d.dims[0]}"
        )
    for i, step in enumerate(d.element_strides[: d.rank]):
        if not 1 <= step <= 8:
            raise TensorMapError(f"element_strides[{i}]: must be 1 to 8, got {step}")
    for i, stride in enumerate(d.strides[: d.rank - 1]):
        if stride % alignment or not 0 <= stride < 1 << 40:
            raise TensorMapError(
                f"strides[{i}]: must be a multiple of {alignment} {reason}, at least 0 and below 2^40, got {stride}"
            )


def _check_box(d: TensorMapDescriptor) -> None:
    for i, extent in enumerate(d.box[: d.rank]):
        if not 1 <= extent <= 256:
            raise TensorMapError(f"box[{i}]: must be 1 to 256, got {extent}")
    _check_row(d, "box[0]", d.box[0])
    total = math.prod(box_units(d)) * unit_storage(d).unit
    if total > MAX_BOX_BYTES:
        raise TensorMapError(f"box: must fit in the {MAX_BOX_BYTES} bytes of shared memory, got {total} bytes")


def _check_row(d: TensorMapDescriptor, argument: str, elements: int) -> None:
    """`elements`: how many a copy takes along the inner dimension; `argument`: what says so."""
    storage = _STORAGE[DataType(d.dtype)]
    if d.dtype in PADDED and elements != 128:
        raise TensorMapError(f"{argument}: must be 128 for dtype {DataType(d.dtype).name}, got {elements}")
    row = elements * storage.shared // storage.elements
    if elements % storage.elements or row % CHUNK_BYTES:
        raise TensorMapError(
            f"{argument}: the inner dimension must be a multiple of {CHUNK_BYTES} bytes, "
            f"got {elements} elements of {DataType(d.dtype).name}"
        )
    span = swizzle_pattern(d.swizzle).span
    if d.swizzle and not d.interleave and row > span:
        raise TensorMapError(
            f"{argument}: the inner dimension must be at most the {span} bytes of swizzle {Swizzle(d.swizzle).name} "
            f"without interleave, got {row} bytes"
        )


_CORNER_BITS = {3: 15, 4: 7, 5: 4}  # of a corner's magnitude, by rank
_WIDE_SWIZZLES = (Swizzle.B64, Swizzle.B128, Swizzle.B128_ATOM_32B)


def _check_column(d: TensorMapDescriptor) -> None:
    if d.rank < 3:
        raise TensorMapError(f"dims: im2col needs rank 3 or more, got {d.rank}")
    wide = d.mode != Mode.IM2COL
    if wide and (d.interleave or d.swizzle not in _WIDE_SWIZZLES):
        names = ", ".join(swizzle.name for swizzle in _WIDE_SWIZZLES)
        raise TensorMapError(f"swizzle: {Mode(d.mode).name} takes no interleave, and of the swizzles {names}")
    limit = 1 << (15 if wide else _CORNER_BITS[d.rank])
    for i, axis in enumerate(d.pixel_axes[:1] if wide else d.pixel_axes):
        lower, upper = d.lower_corner[i], d.upper_corner[i]
        for name, value in (("lower", lower), ("upper", upper)):
            if not -limit <= value < limit:
                raise TensorMapError(f"pixel_box_{name}_corner[{i}]: must be {-limit} to {limit - 1}, got {value}")
        if d.dims[axis] + upper - lower < 1:
            raise TensorMapError(
                f"pixel_box_upper_corner[{i}]: the pixel box from {lower} to {d.dims[axis] - 1 + upper} is empty"
            )
    if not 1 <= d.channels_per_pixel <= MAX_CHANNELS:
        raise TensorMapError(f"channels_per_pixel: must be 1 to {MAX_CHANNELS}, got {d.channels_per_pixel}")
    _check_row(d, "channels_per_pixel", d.channels_per_pixel)
    pixels = W128_PIXELS if d.mode == Mode.IM2COL_W128 else d.pixels_per_column
    if not 1 <= pixels <= MAX_PIXELS:
        raise TensorMapError(f"pixels_per_column: must be 1 to {MAX_PIXELS}, got {pixels}")
    total = pixels * channel_units(d) * unit_storage(d).unit
    if total > MAX_BOX_BYTES:
        raise TensorMapError(
            f"pixels_per_column: a column must fit in the {MAX_BOX_BYTES} bytes of shared memory, got {total} bytes"
        )


def _check_modes(d: TensorMapDescriptor) -> None:
    if d.oob_fill == OobFill.NAN and d.dtype not in _FLOATS:
        raise TensorMapError(f"oob_fill: NaN needs a floating-point dtype, got {DataType(d.dtype).name}")
    # The documentation asks for the 32B swizzle here, but the driver and an H200 take the other three as well.
    if d.interleave == Interleave.B32 and d.swizzle > Swizzle.B128:
        raise TensorMapError(f"swizzle: interleave 32B excludes {Swizzle(d.swizzle).name}")
    if d.dtype in PADDED:
        if d.interleave:
            raise TensorMapError(f"interleave: must be none for dtype {DataType(d.dtype).name}, got {d.interleave}")
        allowed = [Swizzle.NONE, Swizzle.B128, Swizzle.B128_ATOM_32B]
        if d.dtype == DataType.U6_ALIGN16B:
            allowed.append(Swizzle.B128_ATOM_64B)
        if d.swizzle not in allowed:
            raise TensorMapError(f"swizzle: dtype {DataType(d.dtype).name} excludes {Swizzle(d.swizzle).name}")
    if d.dtype == DataType.U4_ALIGN8B and d.interleave:
        raise TensorMapError("interleave: not supported here for dtype U4_ALIGN8B, because no text defines its slices")


def box_units(d: TensorMapDescriptor) -> tuple[int, ...]:
    """Units of one box along each dimension: elements, groups of packed elements, or interleaved slices."""
    steps = [-(-extent // step) for extent, step in zip(d.box[: d.rank], d.element_strides[: d.rank], strict=True)]
    if d.interleave:
        steps[d.rank - 2] = 1
    else:
        steps[0] = d.box[0] // _STORAGE[DataType(d.dtype)].elements
    return tuple(steps)


def channel_units(d: TensorMapDescriptor) -> int:
    """Units that one pixel of an im2col column takes."""
    return 1 if d.interleave else d.channels_per_pixel // _STORAGE[DataType(d.dtype)].elements


def unit_storage(d: TensorMapDescriptor) -> Storage:
    """How a unit lies in memory."""
    if d.interleave:
        slice_bytes = CHUNK_BYTES * d.interleave
        return Storage(1, slice_bytes, slice_bytes)
    return _STORAGE[DataType(d.dtype)]
