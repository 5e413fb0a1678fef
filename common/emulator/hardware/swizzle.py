"""Shared memory swizzles of the tensor copy engine and of matrix descriptors (PTX ISA 5.5.7).

A swizzle permutes pieces of a 128-byte shared memory line, depending on the line's number. The hardware applies it to
*absolute* shared memory addresses: a bit field of the address is XORed with a higher bit field. The same function maps
an address both ways, because the higher bits never change.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

LINE_BYTES = 128


class Swizzle(IntEnum):
    """Swizzle modes, numbered as the driver's `CUtensorMapSwizzle`."""

    NONE = 0
    B32 = 1
    B64 = 2
    B128 = 3
    B128_ATOM_32B = 4
    B128_ATOM_32B_FLIP_8B = 5
    B128_ATOM_64B = 6


@dataclass(frozen=True)
class SwizzlePattern:
    """Geometry of one mode, in bytes.

    `span`: pieces move within an aligned block of this size. `atom`: pieces of this size move as one. `repeat`: the
    pattern starts again at every multiple of this address. `granule`: the largest block up to 16 bytes that keeps its
    byte order, 8 for the mode that also swaps the halves of 16-byte chunks.
    """

    span: int
    atom: int
    repeat: int
    granule: int

    @property
    def mask(self) -> int:
        """Address bits that the XOR may change."""
        return self.span - self.atom


_PATTERNS = {
    Swizzle.NONE: SwizzlePattern(span=16, atom=16, repeat=16, granule=16),
    Swizzle.B32: SwizzlePattern(span=32, atom=16, repeat=256, granule=16),
    Swizzle.B64: SwizzlePattern(span=64, atom=16, repeat=512, granule=16),
    Swizzle.B128: SwizzlePattern(span=128, atom=16, repeat=1024, granule=16),
    Swizzle.B128_ATOM_32B: SwizzlePattern(span=128, atom=32, repeat=512, granule=16),
    Swizzle.B128_ATOM_32B_FLIP_8B: SwizzlePattern(span=128, atom=32, repeat=512, granule=8),
    Swizzle.B128_ATOM_64B: SwizzlePattern(span=128, atom=64, repeat=256, granule=16),
}


def swizzle_pattern(mode: int) -> SwizzlePattern:
    """Return the geometry of a swizzle mode.

    Raises `ValueError` for a code that is no mode of sm_90 or sm_100. The 96-byte mode exists on sm_103a alone, has no
    driver code, and PTX ISA 5.5.7 gives the pitch of its 96-byte rows only in a figure, so it is refused.
    """
    try:
        return _PATTERNS[Swizzle(mode)]
    except ValueError:
        raise ValueError(
            f"swizzle mode {mode!r} is not supported: use a CUtensorMapSwizzle code from 0 to 6 "
            "(the 96-byte mode exists on sm_103a alone)"
        ) from None


def swizzle_addresses(mode: int, addresses):
    """Map absolute shared memory byte addresses through a swizzle.

    `addresses` is an int or an integer array of any shape; the result has the same type and shape. Source: tables of
    PTX ISA 5.5.7. The 8-byte flip takes the odd lines as the "alternate" ones, which the text leaves to a figure.
    """
    pattern = swizzle_pattern(mode)
    if pattern.mask == 0:
        return addresses
    shift = LINE_BYTES.bit_length() - pattern.atom.bit_length()
    swizzled = addresses ^ ((addresses >> shift) & pattern.mask)
    if pattern.granule == 8:
        swizzled = swizzled ^ ((addresses >> 4) & 8)
    return swizzled


def swizzle_chunks(mode: int, address: int, offsets: np.ndarray) -> np.ndarray:
    """Return where the bytes at linear `offsets` from `address` land, again as offsets from `address` (int64).

    `address` must be a multiple of 128, so that the result never points below it.
    """
    if address % LINE_BYTES:
        raise ValueError(f"address {address:#x} is not a multiple of {LINE_BYTES}")
    return swizzle_addresses(mode, np.asarray(offsets, np.int64) + address) - address
