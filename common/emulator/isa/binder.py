"""Operands to frame slots, modifiers to choices: what a decoder asks while it looks at one instruction.

The *frame* of a CTA is a plain list of NumPy arrays of L lanes. The binder hands out indices into it and remembers
what each one must be (`FrameLayout`), so that a thread block can build its frame once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from common.emulator.faults import UnsupportedInstruction
from common.emulator.isa.registry import Run
from common.emulator.ptx.module import (
    Function,
    Immediate,
    Instruction,
    Module,
    Not,
    Operand,
    Register,
    Sink,
    SpecialRegister,
    Symbol,
    immediate_bits,
)

DTYPES: dict[str, Any] = {
    "u8": np.uint8, "u16": np.uint16, "u32": np.uint32, "u64": np.uint64,
    "s8": np.int8, "s16": np.int16, "s32": np.int32, "s64": np.int64,
    "b8": np.uint8, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64,
    "f16": np.float16, "f32": np.float32, "f64": np.float64, "pred": np.bool_,
    "bf16": np.uint16, "f16x2": np.uint32, "bf16x2": np.uint32, "f32x2": np.uint64, "tf32": np.uint32,
    "u16x2": np.uint32, "s16x2": np.uint32, "b128": np.uint64,
}  # fmt: skip
VOLATILE_REGISTERS = ("clock", "clock_hi", "clock64", "globaltimer", "globaltimer_lo", "globaltimer_hi")


def dtype_of(kind: str) -> np.dtype:
    """The NumPy type of a PTX type; packed and alternate formats are their bits. Raises KeyError for unknown names."""
    return np.dtype(DTYPES[kind])


def size_of(kind: str) -> int:
    """Bytes of a PTX type; `pred` counts as 1."""
    return 16 if kind == "b128" else dtype_of(kind).itemsize


@dataclass(frozen=True)
class RegisterBundle(Register):
    """The registers, all of one type, that one operand names in several instructions executed together."""

    members: tuple[Register, ...] = ()


@dataclass(frozen=True)
class ImmediateBundle(Immediate):
    """The literals, all of one kind, that one operand is in several instructions executed together."""

    members: tuple[Immediate, ...] = ()


@dataclass(frozen=True)
class Slot:
    """What a frame entry is; `key` says which one. `source`:

    register, constant, symbol, special, scratch: an array (L,);
    bundle: registers whose rows are evenly spaced, (R, L);
    gathered: any registers, copied to (R, L) for one group of instructions;
    constants: one literal per instruction of a group, (R, 1);
    bank: all registers of one width, (registers, L).
    """

    source: str
    key: Any
    kind: str


@dataclass
class FrameLayout:
    """All slots of a program, in frame order, and the registers behind them.

    Registers of one width in bytes (predicates: 0) lie in one array, a row each; `rows` says where.
    """

    slots: list[Slot] = field(default_factory=list)
    registers: dict[int, Register] = field(default_factory=dict)
    rows: dict[int, tuple[int, int]] = field(default_factory=dict)
    _places: dict[Slot, int] = field(default_factory=dict)
    _counts: dict[int, int] = field(default_factory=dict)

    def place(self, slot: Slot) -> int:
        if slot not in self._places:
            self._places[slot] = len(self.slots)
            self.slots.append(slot)
        return self._places[slot]

    def settle(self, registers: Iterable[Register]) -> None:
        """Gives those of the registers that have none the next free rows, in this order."""
        for register in registers:
            if register.index not in self.rows:
                width = 0 if register.type == "pred" else register.bytes
                row = self._counts.get(width, 0)
                self.rows[register.index] = width, row
                self._counts[width] = row + 1

    def settle_rest(self) -> dict[int, int]:
        """Gives every register a row; the number of rows by width."""
        self.settle(self.registers.values())
        return self._counts

    def spacing(self, registers: Sequence[Register]) -> slice | None:
        """The rows of the registers where they are evenly spaced and ascending, else None."""
        rows = [self.rows[register.index][1] for register in registers]
        step = rows[1] - rows[0] if len(rows) > 1 else 1
        if step < 1 or any(b - a != step for a, b in pairwise(rows)):
            return None
        return slice(rows[0], rows[-1] + 1, step)


class Modifiers:
    """The dot parts of an opcode; each must be consumed, so that none is ignored by accident."""

    def __init__(self, inst: Instruction) -> None:
        self._inst = inst
        self._left = list(inst.modifiers)

    def take(self, name: str) -> bool:
        """Whether the modifier is there; consumes it."""
        if name in self._left:
            self._left.remove(name)
            return True
        return False

    def one_of(self, *names: str, default: str | None = None) -> str:
        """The one of `names` that is there (the first in text order); consumes it.

        Raises UnsupportedInstruction when none is and there is no default.
        """
        for name in self._left:
            if name in names:
                self._left.remove(name)
                return name
        if default is None:
            raise UnsupportedInstruction(
                f"`{self.opcode}` needs one of .{', .'.join(names)}: this form is not supported"
            )
        return default

    def optional(self, *names: str) -> str | None:
        """The one of `names` that is there, or None; consumes it."""
        return self.one_of(*names, default="") or None

    def drop(self, *names: str) -> None:
        """Consumes hints that change no value (cache operators, eviction priorities, scopes that add nothing here)."""
        self._left = [name for name in self._left if name not in names]

    def last(self) -> str:
        """Consumes and returns the last modifier, usually the type."""
        if not self._left:
            raise UnsupportedInstruction(f"`{self.opcode}` has no type")
        return self._left.pop()

    def rest(self) -> tuple[str, ...]:
        return tuple(self._left)

    def done(self) -> None:
        """Raises UnsupportedInstruction naming the modifiers nobody consumed."""
        if self._left:
            raise UnsupportedInstruction(f"`{self.opcode}`: modifier .{', .'.join(self._left)} is not supported here")

    @property
    def opcode(self) -> str:
        return ".".join((self._inst.opcode, *self._inst.modifiers))


class Binder:
    """Binds the operands of one function's instructions to frame slots."""

    def __init__(
        self,
        layout: FrameLayout,
        module: Module,
        function: Function,
        space_of: Callable[[Symbol], str],
        want: Callable[[str], None],
    ) -> None:
        self.layout = layout
        self.module = module
        self.function = function
        self.space_of = space_of  # the state space of a symbol
        self.want = want  # asks for a function to be compiled
        self.prelude: list[Run] = []
        self._scratch = 0

    def modifiers(self, inst: Instruction) -> Modifiers:
        return Modifiers(inst)

    def read(self, operand: Operand, kind: str) -> int:
        """Slot of a source operand seen as `kind`: an array (L,), or (L, 2) uint64 for b128.

        A register wider than `kind` gives its low part. Raises UnsupportedInstruction for a register that is too
        narrow.
        """
        if isinstance(operand, RegisterBundle):
            return self._bundle(operand, kind)
        if isinstance(operand, Register):
            return self._register(operand, kind)
        if isinstance(operand, ImmediateBundle):
            bits = tuple(immediate_bits(member, kind) for member in operand.members)
            return self.layout.place(Slot("constants", bits, kind))
        if isinstance(operand, Immediate):
            return self.layout.place(Slot("constant", immediate_bits(operand, kind), kind))
        if isinstance(operand, SpecialRegister):
            return self._special(operand.name, kind)
        if isinstance(operand, Symbol):
            if self.space_of(operand) == "function":
                self.want(operand.name)
            return self.layout.place(Slot("symbol", (self.function.name, operand.name, operand.offset), kind))
        if isinstance(operand, Not):
            return self._inverted(operand)
        raise UnsupportedInstruction(f"operand {operand} cannot be read as .{kind}")

    def write(self, operand: Operand, kind: str) -> int:
        """Slot of a destination register of the width of `kind`; `_` gives a scratch array."""
        if isinstance(operand, Sink):
            return self.scratch(kind)
        if not isinstance(operand, Register):
            raise UnsupportedInstruction(f"{operand} is not a register: it cannot be written")
        if operand.bytes != size_of(kind) or (operand.type == "pred") != (kind == "pred"):
            raise UnsupportedInstruction(f"register {operand.name} (.{operand.type}) cannot take a .{kind} result")
        return self._register(operand, kind)

    def write_extended(self, operand: Operand, kind: str) -> int:
        """Slot of a destination at its full width, signed as `kind` is: assigning a narrower value extends it."""
        if isinstance(operand, Sink):
            return self.scratch(kind)
        if not isinstance(operand, Register) or operand.type == "pred":
            raise UnsupportedInstruction(f"{operand} cannot take a .{kind} result")
        if operand.bytes < size_of(kind):
            raise UnsupportedInstruction(f"register {operand.name} (.{operand.type}) is too narrow for .{kind}")
        if operand.bytes == size_of(kind):
            return self._register(operand, kind)
        return self._register(operand, ("s" if kind.startswith("s") else "u") + str(8 * operand.bytes))

    def scratch(self, kind: str) -> int:
        """Slot of an array that belongs to this instruction alone."""
        self._scratch += 1
        return self.layout.place(Slot("scratch", (self.function.name, self._scratch), kind))

    def constant(self, value: int, kind: str) -> int:
        return self.read(Immediate(value), kind)

    def _bundle(self, operand: RegisterBundle, kind: str) -> int:
        """Registers that are not evenly spaced are copied before the instruction runs: they can be read alone."""
        self._check_register(operand, kind)
        key = tuple(register.index for register in operand.members)
        if self.layout.spacing(operand.members) is not None:
            return self.layout.place(Slot("bundle", key, kind))
        width = self.layout.rows[key[0]][0]
        rows = np.array([self.layout.rows[index][1] for index in key])
        bank = self.layout.place(Slot("bank", width, kind))
        slot = self.layout.place(Slot("gathered", key, kind))

        def gather(f: Any, m: Any, cta: Any) -> None:
            f[slot] = f[bank][rows]

        self.prelude.append(gather)
        return slot

    def _register(self, register: Register, kind: str) -> int:
        if isinstance(register, RegisterBundle):
            return self._bundle(register, kind)
        self._check_register(register, kind)
        self.layout.registers[register.index] = register
        return self.layout.place(Slot("register", register.index, kind))

    def _check_register(self, register: Register, kind: str) -> None:
        if kind not in DTYPES:
            raise UnsupportedInstruction(f"type .{kind} is not supported")
        if (register.type == "pred") != (kind == "pred"):
            raise UnsupportedInstruction(f"register {register.name} (.{register.type}) is used as .{kind}")
        if register.bytes < size_of(kind):
            raise UnsupportedInstruction(f"register {register.name} (.{register.type}) is too narrow for .{kind}")

    def _special(self, name: str, kind: str) -> int:
        if name not in VOLATILE_REGISTERS:
            return self.layout.place(Slot("special", name, kind))
        slot = self.scratch(kind)

        def sample(f: list, m: Any, cta: Any) -> None:
            f[slot][...] = np.array(cta.clock(name) & 0xFFFF_FFFF_FFFF_FFFF, np.uint64).astype(f[slot].dtype)

        self.prelude.append(sample)
        return slot

    def _inverted(self, operand: Not) -> int:
        source, slot = self.read(operand.operand, "pred"), self.scratch("pred")

        def invert(f: list, m: Any, cta: Any) -> None:
            np.logical_not(f[source], out=f[slot])

        self.prelude.append(invert)
        return slot


def constant_array(bits: int, kind: str, lanes: int) -> np.ndarray:
    """An immediate as an array of `lanes` equal elements, of the NumPy type of `kind`."""
    if kind == "pred":
        return np.full(lanes, bool(bits))
    if kind == "b128":
        return np.tile(np.frombuffer(bits.to_bytes(16, "little"), np.uint64), (lanes, 1))
    dtype = dtype_of(kind)
    return np.full(lanes, np.frombuffer(bits.to_bytes(dtype.itemsize, "little"), dtype)[0])
