"""The table of tcgen05 operations (PTX ISA 9.7.16), one decoder per first modifier: `tcgen05.mma`, `tcgen05.ld`, ..."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from common.emulator.faults import InvalidAddress, TensorMemoryFault, UnsupportedInstruction
from common.emulator.isa.async_issue import bind_pointer
from common.emulator.isa.binder import Binder, Modifiers
from common.emulator.isa.registry import Decoded, Decoder, instruction
from common.emulator.machine.memory import SHARED_WINDOW
from common.emulator.ptx.module import Instruction, Operand

_OPERATIONS: dict[str, Decoder] = {}


def tcgen05_operation(*names: str) -> Callable[[Decoder], Decoder]:
    """Registers the decoder of `tcgen05.<name>`."""

    def register(decoder: Decoder) -> Decoder:
        _OPERATIONS.update(dict.fromkeys(names, decoder))
        return decoder

    return register


@instruction("tcgen05")
def decode_tcgen05(inst: Instruction, b: Binder) -> Decoded:
    name = inst.modifiers[0] if inst.modifiers else ""
    if name not in _OPERATIONS:
        raise UnsupportedInstruction(f"the emulator does not execute `tcgen05.{name}`")
    return _OPERATIONS[name](inst, b)


def take_cta_group(mods: Modifiers) -> int:
    """Consumes `.cta_group::1` or `::2`; 1 or 2."""
    return int(mods.one_of("cta_group::1", "cta_group::2")[-1])


def bind_shared_pointer(b: Binder, operand: Operand, space: str | None) -> Callable[[list, int], int]:
    """A reader of one lane's 32-bit shared address; `space` None stands for a generic address.

    The reader raises InvalidAddress for a generic address outside shared memory.
    """
    if space is not None:
        return bind_pointer(b, operand, space)
    generic = bind_pointer(b, operand, "generic")

    def pointer(f: list, lane: int) -> int:
        address = generic(f, lane)
        if address >> 40 != SHARED_WINDOW >> 40:
            raise InvalidAddress(f"the generic address {address:#x} is not in shared memory", lanes=[lane])
        return address - SHARED_WINDOW

    return pointer


def common_value(values: np.ndarray, what: str, lanes: Sequence[int]) -> int:
    """The one value that all lanes of a warp give. Raises TensorMemoryFault when they differ."""
    first = int(values[0])
    if (values != values[0]).any():
        raise TensorMemoryFault(f"the threads of a warp give different values for {what}", lanes=lanes)
    return first
