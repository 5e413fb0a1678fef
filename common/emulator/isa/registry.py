"""From an instruction's text to what runs: the table of decoders.

A decoder gets the `Instruction` and a `Binder` and returns one of

- a closure `run(f, m, cta)`: an instruction that neither blocks nor branches. `f` is the frame (a list of arrays,
  indexed by the slots the binder gave), `m` the `Mask` of executing lanes, `cta` the `ThreadBlock`;
- `collective(run, members)`: the same, for instructions whose lanes must meet first (shfl, vote, mma, ...);
- a `Control`: an instruction that may block, branch or split the path that executes it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from common.emulator.faults import UnsupportedInstruction
from common.emulator.ptx.module import Instruction

if TYPE_CHECKING:
    from common.emulator.isa.binder import Binder
    from common.emulator.machine.mask import Mask
    from common.emulator.machine.thread_block import Path, ThreadBlock

Run = Callable[[list, "Mask", "ThreadBlock"], None]


class Control(ABC):
    """An instruction that decides where a path goes next, or that it must wait.

    `run` must leave the path with a next position (`cta.advance(path)`, `cta.jump(path, segment)`), waiting
    (`cta.block(path, ...)`) or retired. `targets` are label names; the program linker fills `segments` in the same
    order and `next`, the segment that follows. `ends` says that nothing falls through to the next instruction.
    `after` makes up the segment that follows, so that lanes which a guard keeps from the instruction can pass it by.
    """

    targets: tuple[str, ...] = ()
    ends = False
    after: Run | None = None
    otherwise = -1  # with `after`: the segment behind it

    def __init__(self) -> None:
        self.segments: tuple[int, ...] = ()
        self.next = -1

    def link(self, segments: tuple[int, ...], following: int) -> None:
        """Called once the segments of the targets and the segment that follows are known."""
        self.segments, self.next = segments, following

    @abstractmethod
    def run(self, cta: ThreadBlock, path: Path) -> None:
        """Executes the instruction for the lanes of the path."""


class Collective:
    """A closure that runs only once all lanes that take part in a warp have arrived.

    `members` is the slot of the membermask operand (u32), or None when all live lanes of the warp take part
    (`.aligned`).
    """

    __slots__ = ("run", "members")

    def __init__(self, run: Run, members: int | None) -> None:
        self.run = run
        self.members = members


def collective(run: Run, members: int | None = None) -> Collective:
    return Collective(run, members)


Decoded = Run | Control | Collective
Decoder = Callable[[Instruction, "Binder"], Decoded]
_DECODERS: dict[str, Decoder] = {}
_LANEWISE: set[str] = set()
_NOT_LANEWISE = frozenset(("cc", "b128"))  # the carry flag is shared, wide registers are no plain arrays


def instruction(*opcodes: str, lanewise: bool = False) -> Callable[[Decoder], Decoder]:
    """Registers a decoder for opcodes (the part before the first dot).

    `lanewise` says what its closures promise: they write their first operand and read the others, every lane by
    itself, through NumPy operations that work on arrays of any shape; of the mask they use `where` and `compute` alone,
    of the CTA nothing; and they raise no fault. Such instructions can be executed together (`machine.fusion`).
    """

    def register(decoder: Decoder) -> Decoder:
        for opcode in opcodes:
            if opcode in _DECODERS:
                raise ValueError(f"{opcode} has two decoders: {_DECODERS[opcode].__module__} and {decoder.__module__}")
            _DECODERS[opcode] = decoder
        if lanewise:
            _LANEWISE.update(opcodes)
        return decoder

    return register


def decoder_of(inst: Instruction) -> Decoder:
    """Raises UnsupportedInstruction for an opcode nobody registered."""
    try:
        return _DECODERS[inst.opcode]
    except KeyError:
        raise UnsupportedInstruction(f"the emulator does not execute `{inst.opcode}`") from None


def is_lanewise(inst: Instruction) -> bool:
    """Whether the instruction's closure keeps the promise of `instruction(lanewise=True)`."""
    return inst.opcode in _LANEWISE and _NOT_LANEWISE.isdisjoint(inst.modifiers)
