"""The 32-bit instruction descriptor of `tcgen05.mma`, for every kind (PTX ISA 9.7.16.4.2 and 9.7.16.2.1)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from common.emulator.faults import DescriptorFault, UnsupportedInstruction

FLOAT_KINDS = ("f16", "tf32", "f8f6f4")
SCALED_KINDS = ("mxf8f6f4", "mxf4", "mxf4nvf4")
KINDS = (*FLOAT_KINDS, "i8", *SCALED_KINDS)
_FOUR_BIT = ("mxf4", "mxf4nvf4")
_EIGHT_BIT_TYPES = {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"}
_TYPES = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "f8f6f4": _EIGHT_BIT_TYPES,
    "i8": {0: "u8", 1: "s8"},
    "mxf8f6f4": _EIGHT_BIT_TYPES,
    "mxf4": {1: "e2m1"},
    "mxf4nvf4": {1: "e2m1"},
}
_ACCUMULATORS = {
    "f16": {0: "f16", 1: "f32"},
    "tf32": {1: "f32"},
    "f8f6f4": {0: "f16", 1: "f32"},
    "i8": {2: "s32"},
}
_TRANSPOSABLE = ("f16", "bf16", "tf32", "e4m3", "e5m2", "u8", "s8")
_DENSE_K = {"f16": 16, "tf32": 8, "f8f6f4": 32, "i8": 32, "mxf8f6f4": 32, "mxf4": 64, "mxf4nvf4": 64}
_SCALE_TYPES = {
    ("mxf8f6f4", 1): ("ue8m0",),
    ("mxf4", 2): ("ue8m0",),
    ("mxf4nvf4", 2): ("ue8m0",),
    ("mxf4nvf4", 4): ("ue8m0", "ue4m3"),
}


@dataclass(frozen=True)
class MmaForm:
    """What the qualifiers of a `tcgen05.mma` say. `scale_vector` is N of `.scale_vec::NX`, 0 without scale factors."""

    kind: str
    group: int = 1
    weight_stationary: bool = False
    sparse: bool = False
    scale_vector: int = 0

    def __str__(self) -> str:
        parts = ["tcgen05.mma", *["ws"] * self.weight_stationary, *["sp"] * self.sparse]
        return ".".join((*parts, f"cta_group::{self.group}", f"kind::{self.kind}"))


@dataclass(frozen=True)
class InstructionDescriptor:
    """A decoded and checked descriptor together with its form.

    `m`, `n` and `k` are the shape of the whole instruction (of both CTAs of a pair); `k` counts the elements of a row
    of A before sparse compression. `a` and `b` are element types, `d` the accumulator's type. `scale_a` and `scale_b`
    are scale factor ids, `selector` is the sparsity selector.
    """

    form: MmaForm
    m: int
    n: int
    k: int
    a: str
    b: str
    d: str
    negate_a: bool = False
    negate_b: bool = False
    transpose_a: bool = False
    transpose_b: bool = False
    saturate: bool = False
    selector: int = 0
    scale_type: str = ""
    scale_a: int = 0
    scale_b: int = 0

    @staticmethod
    def from_bits(bits: int, form: MmaForm) -> InstructionDescriptor:
        """Raises DescriptorFault naming the field that the form does not allow."""
        return _decode(int(bits), form)

    @property
    def label(self) -> str:
        return f"{self.form} {self.m}x{self.n}x{self.k} {self.a} {self.b} {self.d}"


class _Reader:
    """Fields of the bits of one descriptor, and the fault for a bad one."""

    def __init__(self, bits: int, form: MmaForm) -> None:
        self.bits, self.form = bits, form

    def field(self, low: int, width: int = 1) -> int:
        return self.bits >> low & ((1 << width) - 1)

    def refuse(self, name: str, why: str) -> DescriptorFault:
        return DescriptorFault(f"instruction descriptor {self.bits:#010x} of {self.form}: {name}: {why}")

    def zero(self, low: int, width: int, name: str = "reserved") -> None:
        if self.field(low, width):
            place = f"bit {low}" if width == 1 else f"bits {low}-{low + width - 1}"
            raise self.refuse(f"{name} ({place})", f"{self.field(low, width)} must be 0 for this form")

    def choice(self, name: str, low: int, width: int, table: dict[int, str]) -> str:
        code = self.field(low, width)
        if code not in table:
            legal = ", ".join(f"{number} ({value})" for number, value in table.items())
            raise self.refuse(f"{name} (bits {low}-{low + width - 1})", f"{code} is none of {legal}")
        return table[code]


@lru_cache(maxsize=1024)
def _decode(bits: int, form: MmaForm) -> InstructionDescriptor:
    read = _Reader(bits, form)
    if bool(read.field(2)) != form.sparse:
        raise read.refuse("sparsity (bit 2)", f"{read.field(2)} contradicts the instruction")
    fields = _scaled_fields(read) if form.kind in SCALED_KINDS else _plain_fields(read)
    k = _DENSE_K[form.kind] * (2 if form.sparse else 1)
    result = InstructionDescriptor(form, k=k, n=read.field(17, 6) << 3, **fields)
    if result.d == "f16" and "bf16" in (result.a, result.b):
        raise read.refuse("dtype (bits 4-5)", "an f16 accumulator takes f16 multiplicands, not bf16")
    _check_transpose(read, result)
    _check_shape(read, result)
    return result


def _common_fields(read: _Reader) -> dict[str, object]:
    types = _TYPES[read.form.kind]
    width = 2 if read.form.kind in _FOUR_BIT else 3
    return {
        "a": read.choice("atype", 7, 3, types),
        "b": read.choice("btype", 10, width, types),
        "negate_a": bool(read.field(13)),
        "negate_b": bool(read.field(14)),
        "transpose_a": bool(read.field(15)),
        "transpose_b": bool(read.field(16)),
    }


def _plain_fields(read: _Reader) -> dict[str, object]:
    """Table 42: kinds without scale factors."""
    form = read.form
    for low in (6, 23, 29):
        read.zero(low, 1)
    if form.kind != "i8":
        read.zero(3, 1, "saturate")
    else:
        read.zero(13, 2, "negate")
    if not form.weight_stationary:
        read.zero(30, 2, "maximum shift")
    if not form.sparse or form.kind in ("i8", "f8f6f4"):
        read.zero(0, 2, "sparsity selector")
    elif read.field(0, 2) > 1:
        raise UnsupportedInstruction(
            f"instruction descriptor {read.bits:#010x}: sparsity selector {read.field(0, 2)} is not supported, as its "
            "metadata columns are documented in a figure only: use 0 or 1"
        )
    return {
        **_common_fields(read),
        "d": read.choice("dtype", 4, 2, _ACCUMULATORS[form.kind]),
        "m": read.field(24, 5) << 4,
        "saturate": bool(read.field(3)),
        "selector": read.field(0, 2),
    }


def _scaled_fields(read: _Reader) -> dict[str, object]:
    """Tables 43 and 44: kinds with scale factors."""
    form = read.form
    for low, width in ((0, 2), (3, 1), (6, 1), (24, 3)):
        read.zero(low, width)
    if form.kind in _FOUR_BIT:
        read.zero(12, 1)
        if read.field(31):
            raise UnsupportedInstruction(
                f"instruction descriptor {read.bits:#010x}: K dimension (bit 31) 1, K = 96, exists on sm_103a alone"
            )
    else:
        read.zero(31, 1)
    scale_type = ("ue4m3", "ue8m0")[read.field(23)]
    allowed = _SCALE_TYPES[form.kind, form.scale_vector]
    if scale_type not in allowed:
        raise read.refuse(
            "scale matrix type (bit 23)",
            f"{scale_type} does not go with scale_vec::{form.scale_vector}X, which takes {' or '.join(allowed)}",
        )
    ids = {"scale_b": read.field(4, 2), "scale_a": read.field(29, 2)}
    for name, value in ids.items():
        if value % form.scale_vector:
            raise read.refuse(f"{name} factor data id", f"{value} must be a multiple of {form.scale_vector}")
    return {**_common_fields(read), **ids, "d": "f32", "m": read.field(27, 2) << 7, "scale_type": scale_type}


def _check_transpose(read: _Reader, result: InstructionDescriptor) -> None:
    for name, bit, kind, transposed in (
        ("transpose A", 15, result.a, result.transpose_a),
        ("transpose B", 16, result.b, result.transpose_b),
    ):
        if transposed and (result.form.kind in _FOUR_BIT or kind not in _TRANSPOSABLE):
            raise read.refuse(f"{name} (bit {bit})", f"a matrix of {kind} must be K-major for kind::{result.form.kind}")


def _check_shape(read: _Reader, result: InstructionDescriptor) -> None:
    """Tables 39 and 52."""
    form = result.form
    heights = _heights(form)
    if result.m not in heights:
        place = "27-28" if form.kind in SCALED_KINDS else "24-28"
        raise read.refuse(f"M (bits {place})", f"{result.m} is none of {', '.join(map(str, heights))}")
    widths = _widths(result)
    if result.n not in widths:
        legal = ", ".join(map(str, widths)) if len(widths) < 4 else f"{widths[0]}, {widths[1]}, ... {widths[-1]}"
        raise read.refuse("N (bits 17-22)", f"{result.n} is none of {legal}")


def _heights(form: MmaForm) -> tuple[int, ...]:
    if form.weight_stationary:
        return (32, 64, 128)
    if form.kind in SCALED_KINDS:
        if form.group == 1:
            return (128,)
        return (256,) if form.sparse else (128, 256)
    return (64, 128) if form.group == 1 else (128, 256)


def _widths(result: InstructionDescriptor) -> tuple[int, ...]:
    form = result.form
    if form.weight_stationary:
        return (64, 128) if form.sparse else (64, 128, 256)
    if form.kind == "i8":
        widths = tuple(range(32, 257, 32)) if form.group == 2 else (8, 16, 24, *range(32, 257, 16))
    else:
        widths = tuple(range(8 * form.group, 257, 8 * form.group))
    if result.transpose_b and result.b in ("e4m3", "e5m2", "u8", "s8"):
        return tuple(n for n in widths if n % (16 * form.group) == 0)
    return widths
