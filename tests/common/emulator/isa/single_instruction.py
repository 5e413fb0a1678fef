"""One instruction without a launch: as many lanes as a test has values, registers in and out as arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from common.emulator.isa import load_families
from common.emulator.isa.binder import Binder, FrameLayout, constant_array
from common.emulator.isa.registry import Run, decoder_of
from common.emulator.machine.frames import Frame
from common.emulator.machine.mask import WARP, Mask
from common.emulator.ptx.module import Instruction, Register, Vector
from common.emulator.ptx.parser import parse


def execute(text: str, result: str, /, *, mask: np.ndarray | None = None, **sources: tuple[str, Any]) -> np.ndarray:
    """Runs `text` in the lanes of `mask` (all by default) and returns its register `%d`, declared as `.reg .{result}`.

    `sources` maps register names (`a` is `%a`) to their declared type and an array (lanes,) of elements of that width,
    taken bit by bit. The result has the declared type. Lanes outside the mask keep the poison of a fresh register.
    """
    kinds = {"d": result, **{name: kind for name, (kind, _) in sources.items()}}
    run, layout, slots = _decode(text, kinds)
    count = len(next(iter(sources.values()))[1])
    lanes = -(-count // WARP) * WARP
    frame = Frame(layout, lanes, _constants(layout, lanes)).arrays
    for name, (_, values) in sources.items():
        register = frame[slots[name]]
        register[:count] = np.ascontiguousarray(values).view(register.dtype)
    active = np.zeros(lanes, np.bool_)
    active[:count] = True if mask is None else mask
    with np.errstate(all="ignore"):
        run(frame, Mask(active), None)
    return frame[slots["d"]][:count].copy()


def _decode(text: str, kinds: dict[str, str]) -> tuple[Run, FrameLayout, dict[str, int]]:
    """The closure, its frame's layout, and the slots of whole registers by name without the percent sign."""
    load_families()
    declarations = " ".join(f".reg .{kind} %{name};" for name, kind in kinds.items())
    module = parse(
        f".version 9.1\n.target sm_100a\n.address_size 64\n.visible .entry k() {{ {declarations}\n{text}\n}}"
    )
    function = module.functions["k"]
    inst = function.instructions[0]
    layout = FrameLayout()
    binder = Binder(layout, module, function, lambda symbol: "global", lambda name: None)
    run = decoder_of(inst)(inst, binder)
    registers = {register.name.lstrip("%"): register for register in _registers(inst)}
    return run, layout, {name: binder.read(register, register.type) for name, register in registers.items()}


def _registers(inst: Instruction) -> list[Register]:
    found = []
    for operand in inst.operands:
        items = operand.items if isinstance(operand, Vector) else (operand,)
        found += [item for item in items if isinstance(item, Register)]
    return found


def _constants(layout: FrameLayout, lanes: int) -> list[np.ndarray | None]:
    return [constant_array(slot.key, slot.kind, lanes) if slot.source == "constant" else None for slot in layout.slots]
