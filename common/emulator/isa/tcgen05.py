"""The table of tcgen05 operations (PTX ISA 9.7.16), one decoder per first modifier: `tcgen05.mma`, `tcgen05.ld`, ..."""

from __future__ import annotations

from collections.abc import Callable

from common.emulator.faults import TensorMemoryFault, UnsupportedInstruction
from common.emulator.isa.binder import Binder, Modifiers
from common.emulator.isa.registry import Decoded, Decoder, instruction
from common.emulator.ptx.module import Instruction

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


def common_value(values, what: str, lanes) -> int:
    """The one value that all lanes of a warp give. Raises TensorMemoryFault when they differ."""
    first = int(values[0])
    if (values != values[0]).any():
        raise TensorMemoryFault(f"the threads of a warp give different values for {what}", lanes=lanes)
    return first
