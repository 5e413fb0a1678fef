"""One instruction without a launch: as many lanes as a test has values, registers in and out as arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from common.emulator.isa import load_families
from common.emulator.isa.binder import Binder, FrameLayout, constant_array
from common.emulator.isa.registry import Run, decoder_of, is_lanewise
from common.emulator.machine.frames import Frame
from common.emulator.machine.mask import WARP, Mask
from common.emulator.ptx.module import Instruction, Register, Vector
from common.emulator.ptx.parser import parse


def execute(text: str, result: str, /, *, mask: np.ndarray | None = None, **sources: tuple[str, Any]) -> np.ndarray:
    """Runs `text` in the lanes of `mask` (all by default) and returns its register `%d`, declared as `.reg .{result}`.

    `sources` maps register names (`a` is `%a`) to their declared type and an array (lanes,) of elements of that width,
    taken bit by bit. The result has the declared type. Lanes outside the mask keep the poison of a fresh register.
    Lane-wise instructions are executed a second time, in windows of the even and of the odd warps: the result must be
    the same.
    """
    kinds = {"d": result, **{name: kind for name, (kind, _) in sources.items()}}
    run, layout, slots, lanewise = _decode(text, kinds)
    count = len(next(iter(sources.values()))[1])
    lanes = -(-count // WARP) * WARP
    active = np.zeros(lanes, np.bool_)
    active[:count] = True if mask is None else mask

    def fresh() -> Frame:
        frame = Frame(layout, lanes, _constants(layout, lanes))
        for name, (_, values) in sources.items():
            register = frame.arrays[slots[name]]
            register[:count] = np.ascontiguousarray(values).view(register.dtype)
        return frame

    frame = fresh()
    with np.errstate(all="ignore"):
        run(frame.arrays, Mask(active), None)
    if mask is None and lanewise:
        _check_windows(run, fresh(), frame.arrays[slots["d"]], slots["d"], count)
    return frame.arrays[slots["d"]][:count].copy()


def _check_windows(run: Run, frame: Frame, expected: np.ndarray, d: int, count: int) -> None:
    warp = np.arange(expected.size) // WARP
    for parity in (0, 1):
        lanes = warp % 2 == parity
        if lanes.any():
            window = frame.window(Mask(lanes))
            with np.errstate(all="ignore"):
                run(window, window.every, None)
    result = frame.arrays[d]
    assert result[:count].tobytes() == expected[:count].tobytes(), "an instruction gives other results in a window"


def _decode(text: str, kinds: dict[str, str]) -> tuple[Run, FrameLayout, dict[str, int], bool]:
    """The closure, its frame's layout, the slots of whole registers by name without the percent sign, and whether the
    instruction is lane-wise."""
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
    slots = {name: binder.read(register, register.type) for name, register in registers.items()}
    return run, layout, slots, is_lanewise(inst)


def _registers(inst: Instruction) -> list[Register]:
    found = []
    for operand in inst.operands:
        items = operand.items if isinstance(operand, Vector) else (operand,)
        found += [item for item in items if isinstance(item, Register)]
    return found


def _constants(layout: FrameLayout, lanes: int) -> list[np.ndarray | None]:
    return [constant_array(slot.key, slot.kind, lanes) if slot.source == "constant" else None for slot in layout.slots]
