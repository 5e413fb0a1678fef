"""What the parts of a kernel are called in messages, as far as whoever launches it knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SharedArray:
    """An array in dynamic shared memory: `offset` from its start, and `size`, of `count` equal items, in bytes."""

    name: str
    offset: int
    size: int
    count: int


@dataclass(frozen=True)
class Names:
    """Of a kernel's arguments, in the order of its parameters, and of what it keeps in dynamic shared memory."""

    arguments: Sequence[str] = ()
    shared: Sequence[SharedArray] = ()

    def argument(self, index: int) -> str:
        return self.arguments[index] if index < len(self.arguments) else f"argument {index}"


class SharedNames:
    """What lies where. `start`: the first byte of dynamic shared memory."""

    def __init__(self, arrays: Sequence[SharedArray] = (), start: int = 0) -> None:
        self._arrays = sorted(arrays, key=lambda array: array.size)
        self._start = start

    def describe(self, offset: int) -> str:
        """`full[1] (0x408)`, or the address alone. Where arrays overlap, the smallest tells most."""
        place = offset - self._start
        for array in self._arrays:
            item, within = divmod(place - array.offset, array.size // array.count)
            if 0 <= item < array.count:
                inside = f" + {within}" if within else ""
                return f"{array.name}[{item}]{inside} ({offset:#x})"
        return f"{offset:#x}"
