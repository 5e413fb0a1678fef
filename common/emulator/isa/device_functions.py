"""Functions that the CUDA device runtime provides and PTX only declares: printf and assert."""

from __future__ import annotations

import re
import struct

from common.emulator.faults import ProgramTrap
from common.emulator.isa.registry import Control
from common.emulator.machine.memory import LOCAL_WINDOW, SHARED_WINDOW
from common.emulator.ptx.module import Function

_CONVERSION = re.compile(r"%([-+ #0]*)(\d+|\*)?(?:\.(\d*))?(hh|h|ll|l|j|z|t)?([diuoxXcsfFeEgGaAp%])")


class BuiltIn(Control):
    """A call of a runtime function. `action(cta, lane, arguments)` runs once per active lane, in lane order."""

    def __init__(self, caller: Function, arguments: list[str], results: list[str], action) -> None:
        super().__init__()
        self.caller, self.arguments, self.action = caller, arguments, action
        self.results = results

    def run(self, cta, path) -> None:
        offsets = cta.program.local_offsets
        rows = cta.local.data.reshape(cta.lanes, -1)
        for lane in path.mask.numbers:
            values = []
            for name in self.arguments:
                start, size = offsets[self.caller.name, name], self.caller.variables[name].size
                values.append(int.from_bytes(rows[lane, start : start + size].tobytes(), "little"))
            result = self.action(cta, int(lane), values)
            for name in self.results:
                start, size = offsets[self.caller.name, name], self.caller.variables[name].size
                rows[lane, start : start + size] = list(result.to_bytes(size, "little", signed=True))
        cta.advance(path)


def _printf(cta, lane: int, arguments: list[int]) -> int:
    """`vprintf(format, arguments)`: the arguments lie in memory, each at its own size and alignment."""
    text, place, count = _string(cta, lane, arguments[0]), arguments[1], 0

    def value(size: int) -> bytes:
        nonlocal place
        place = -(-place // size) * size
        data = _bytes(cta, lane, place, size)
        place += size
        return data

    def convert(match: re.Match) -> str:
        nonlocal count
        flags, width, precision, length, kind = match.groups()
        if kind == "%":
            return "%"
        count += 1
        if width == "*":
            width = int.from_bytes(value(4), "little", signed=True)  # a negative one means the flag `-`
        shape = f"%{flags}{width or ''}" + ("" if precision is None else f".{precision or 0}")
        if kind in "fFeEgGaA":
            number = struct.unpack("<d", value(8))[0]
            return number.hex() if kind in "aA" else (shape + kind) % number
        if kind == "s":
            return (shape + "s") % _string(cta, lane, int.from_bytes(value(8), "little"))
        if kind == "p":
            return (shape + "s") % hex(int.from_bytes(value(8), "little"))
        number = int.from_bytes(value(8 if length in ("l", "ll", "j", "z", "t") else 4), "little", signed=kind in "dic")
        return (shape + ("c" if kind == "c" else "d" if kind == "u" else kind)) % number

    cta.machine.printed.append(_CONVERSION.sub(convert, text))
    return count


def _assert_failed(cta, lane: int, arguments: list[int]) -> int:
    """`__assertfail(message, file, line, function, charsize)`"""
    message, file, function = (_string(cta, lane, arguments[i]) for i in (0, 1, 3))
    raise ProgramTrap(f"assertion failed: {message} ({file}:{arguments[2]}, {function})", lanes=[lane])


def _bytes(cta, lane: int, address: int, size: int) -> bytes:
    """`size` bytes at a generic address as `lane` sees it."""
    if LOCAL_WINDOW <= address < LOCAL_WINDOW << 1:
        start = lane * cta.program.local_bytes + address - LOCAL_WINDOW
        return cta.local.data[start : start + size].tobytes()
    if SHARED_WINDOW <= address < SHARED_WINDOW << 1:
        start = address & 0xFF_FFFF
        return cta.shared.data[start : start + size].tobytes()
    region = cta.machine.memory.region_at(address)
    if region is None:
        raise ProgramTrap(f"printf reads {address:#x}, which lies in no allocation", lanes=[lane], address=address)
    return region.data[address - region.base : address - region.base + size].tobytes()


def _string(cta, lane: int, address: int) -> str:
    text = bytearray()
    while (byte := _bytes(cta, lane, address + len(text), 1)) not in (b"\0", b""):
        text += byte
    return text.decode(errors="replace")


def _builtin(action):
    def make(caller: Function, arguments: list[str], results: list[str]) -> Control:
        return BuiltIn(caller, arguments, results, action)

    return make


BUILTINS = {"vprintf": _builtin(_printf), "__assertfail": _builtin(_assert_failed)}
