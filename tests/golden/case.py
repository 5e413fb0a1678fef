"""What a golden case is: a PTX program, its launch, its memory, and which bytes of that memory are its results."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

HEADER = ".version 8.7\n.target sm_90a\n.address_size 64\n"
_GOLDEN_RATIO, _MIX_A, _MIX_B = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def random_bits(seed: int, size: int) -> np.ndarray:
    """uint64 (size,): SplitMix64 of the seed, the same on every version of NumPy."""
    first = np.uint64(seed * 0xD1342543DE82EF95 & (1 << 64) - 1)
    z = first + np.arange(1, size + 1, dtype=np.uint64) * np.uint64(_GOLDEN_RATIO)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX_A)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX_B)
    return z ^ (z >> np.uint64(31))


class Dice:
    """Small random integers for whoever builds cases, one after the other."""

    def __init__(self, seed: int) -> None:
        self._bits = (bits for block in count() for bits in random_bits(seed << 32 | block, 1 << 12).tolist())

    def below(self, bound: int) -> int:
        """0 to `bound` - 1."""
        return next(self._bits) % bound

    def between(self, low: int, high: int) -> int:
        """`low` to `high`, both included."""
        return low + self.below(high - low + 1)

    def chance(self, percent: int) -> bool:
        return self.below(100) < percent

    def pick(self, values: Sequence):
        return values[self.below(len(values))]


@dataclass(frozen=True)
class Buffer:
    """Global memory that the kernel gets the address of: uint8 bytes that it starts with."""

    initial: np.ndarray


@dataclass(frozen=True)
class Map:
    """A tensor map of the buffer that is argument number `buffer`; the rest as in `cuTensorMapEncodeTiled`.

    `offset` (bytes) is where in the buffer the tensor begins. Dimensions are innermost first.
    """

    buffer: int
    dtype: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    offset: int = 0
    interleave: int = 0
    swizzle: int = 0
    oob_fill: int = 0


@dataclass(frozen=True)
class ColumnMap:
    """A tensor map for im2col of the buffer that is argument number `buffer`; the rest as in `cuTensorMapEncodeIm2col`.

    `offset` (bytes) is where in the buffer the tensor begins. Dimensions and corners are innermost first.
    """

    buffer: int
    dtype: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    lower: tuple[int, ...]
    upper: tuple[int, ...]
    channels: int
    pixels: int
    element_strides: tuple[int, ...]
    offset: int = 0
    interleave: int = 0
    swizzle: int = 0
    oob_fill: int = 0


@dataclass(frozen=True)
class Result:
    """`size` bytes from `start` of the buffer that is argument number `buffer`."""

    name: str
    buffer: int
    start: int
    size: int


@dataclass(frozen=True)
class Case:
    """One launch. An argument that is an int is a .u32 parameter. Results in `opaque` are recorded, not compared."""

    name: str
    ptx: str
    kernel: str
    args: tuple[Buffer | Map | ColumnMap | int, ...]
    results: tuple[Result, ...]
    grid: int = 1
    block: int = 1
    cluster: int = 1
    shared_bytes: int = 0
    opaque: tuple[Result, ...] = ()

    def fingerprint(self) -> int:
        """CRC-32 of everything that goes in, so that a recorded result of another program is never compared."""
        shape = (self.kernel, self.grid, self.block, self.cluster, self.shared_bytes, self.results)
        sum_ = zlib.crc32(repr(shape).encode(), zlib.crc32(self.ptx.encode()))
        for argument in self.args:
            data = argument.initial.tobytes() if isinstance(argument, Buffer) else repr(argument).encode()
            sum_ = zlib.crc32(data, sum_)
        return sum_

    def initial_memory(self) -> list[np.ndarray | None]:
        """A fresh copy of each buffer, by argument number."""
        return [argument.initial.copy() if isinstance(argument, Buffer) else None for argument in self.args]

    def cut(self, memory: Sequence[np.ndarray | None], results: Sequence[Result]) -> dict[str, np.ndarray]:
        """The results, by name, from the buffers after the launch."""
        return {r.name: memory[r.buffer][r.start : r.start + r.size] for r in results}
