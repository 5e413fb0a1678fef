"""What a PTX module holds, as plain records. Nothing here executes."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

TYPE_BYTES = {
    "pred": 1, "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2,
    "b32": 4, "u32": 4, "s32": 4, "f32": 4, "f16x2": 4, "bf16x2": 4, "tf32": 4,
    "b64": 8, "u64": 8, "s64": 8, "f64": 8, "f32x2": 8, "b128": 16,
    "e4m3": 1, "e5m2": 1, "e4m3x2": 2, "e5m2x2": 2, "texref": 8, "samplerref": 8, "surfref": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Register:
    """A virtual register. `index` is unique in the module, so nested scopes may reuse a name."""

    name: str
    type: str
    index: int

    @property
    def bytes(self) -> int:
        return TYPE_BYTES[self.type]


@dataclass(frozen=True)
class SpecialRegister:
    name: str  # without the percent sign: "tid.x", "clock64"


@dataclass(frozen=True)
class Immediate:
    """A literal. `kind` is "int", "f32" or "f64"; for the float kinds `value` holds the bits when written 0f/0d."""

    value: int | float
    kind: str = "int"


@dataclass(frozen=True)
class Symbol:
    """A variable, function or label by name, plus a byte offset."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Not:
    """`!%p`"""

    operand: Operand


@dataclass(frozen=True)
class Pair:
    """`%r1|%p1`: two destinations of one instruction."""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Vector:
    """`{%r1, %r2}`"""

    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Address:
    """`[base + offset]`; with `items` the bracket has further parts, as in `[map, {c0, c1}]`."""

    base: Operand | None
    offset: int = 0
    items: tuple[Operand, ...] = ()


@dataclass(frozen=True)
class Arguments:
    """`(a, b)` of a call."""

    items: tuple[Operand, ...]


@dataclass(frozen=True)
class Sink:
    """`_`: the result is not wanted."""


Operand = Register | SpecialRegister | Immediate | Symbol | Not | Pair | Vector | Address | Arguments | Sink


@dataclass
class Instruction:
    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: Register | None
    guard_negated: bool
    line: int
    source: str | None  # "kernel.cu:42"
    text: str
    called_from: str | None = None  # where the kernel calls the inlined function that holds `source`

    @property
    def origin(self) -> str | None:
        """Where it comes from, for a message: the line, and the line of the kernel that led there."""
        return self.source if self.called_from is None else f"{self.source}, called from {self.called_from}"


@dataclass(frozen=True)
class Relocation:
    """An initialiser that holds the address of another variable."""

    offset: int
    symbol: str
    addend: int
    size: int


@dataclass
class Variable:
    name: str
    space: str  # global, const, shared, local, param
    type: str
    align: int
    size: int | None  # bytes; None for `extern .shared x[]`
    data: bytes | None = None
    relocations: tuple[Relocation, ...] = ()
    extern: bool = False


@dataclass
class Function:
    name: str
    is_entry: bool
    parameters: list[Variable] = field(default_factory=list)
    returns: list[Variable] = field(default_factory=list)
    variables: dict[str, Variable] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    branch_targets: dict[str, tuple[str, ...]] = field(default_factory=dict)
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)
    has_body: bool = True


@dataclass
class Module:
    version: str
    target: str
    functions: dict[str, Function] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    files: dict[int, str] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)

    @property
    def entries(self) -> list[str]:
        return [name for name, function in self.functions.items() if function.is_entry]


def immediate_bits(value: Immediate, kind: str) -> int:
    """The bits a literal has as an operand of type `kind` (PTX ISA 4.5): 0f and 0d literals are bit patterns, which
    an f64 or f32 operand converts; integers wrap to the width, and are converted for float types."""
    size = TYPE_BYTES.get(kind, 4)
    if kind in ("f32", "f64", "f16"):
        if value.kind == "int" and kind == "f16":
            return int(value.value) & 0xFFFF
        code, integer = {"f16": ("<e", "<H"), "f32": ("<f", "<I"), "f64": ("<d", "<Q")}[kind]
        if not isinstance(value.value, float) and value.kind == kind:
            return int(value.value)
        return struct.unpack(integer, struct.pack(code, immediate_number(value)))[0]
    if isinstance(value.value, float):
        return struct.unpack("<Q", struct.pack("<d", value.value))[0] & ((1 << (8 * size)) - 1)
    return int(value.value) & ((1 << (8 * size)) - 1)


def immediate_number(value: Immediate) -> float:
    """The number a literal stands for: `0f3F800000` is 1.0, `0d...` its double, an integer its value."""
    if isinstance(value.value, float) or value.kind == "int":
        return float(value.value)
    if value.kind == "f32":
        return struct.unpack("<f", struct.pack("<I", value.value))[0]
    return struct.unpack("<d", struct.pack("<Q", value.value))[0]
