"""The 64-bit descriptor of a matrix in shared memory, for `tcgen05.mma` and `tcgen05.cp` (PTX ISA 9.7.16.4.1)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from common.emulator.faults import DescriptorFault, UnsupportedInstruction
from common.emulator.hardware.swizzle import Swizzle

VERSION = 0b001
MODES = {0: Swizzle.NONE, 1: Swizzle.B128_ATOM_32B, 2: Swizzle.B128, 4: Swizzle.B64, 6: Swizzle.B32}
CODES = {mode: code for code, mode in MODES.items()}


@dataclass(frozen=True)
class SmemDescriptor:
    """A decoded descriptor; `address`, `lbo` and `sbo` are in bytes, multiples of 16 below 2**18.

    `address` is an offset into the shared memory of the CTA that reads it. `lbo` and `sbo` are the leading dimension
    and the stride dimension byte offset. `base_offset` counts 128-byte lines modulo 8: where the swizzle pattern starts
    when that is not on its natural boundary.
    """

    address: int
    lbo: int
    sbo: int
    base_offset: int
    swizzle: Swizzle

    @staticmethod
    def from_bits(bits: int) -> SmemDescriptor:
        """Raises DescriptorFault naming the field that is illegal on sm_100a."""
        return _decode(int(bits))

    @property
    def strides(self) -> tuple[int, int, int, Swizzle]:
        """Everything but the address."""
        return self.lbo, self.sbo, self.base_offset, self.swizzle

    def to_bits(self) -> int:
        """The bits; the inverse of `from_bits`."""
        return (
            self.address >> 4
            | self.lbo >> 4 << 16
            | self.sbo >> 4 << 32
            | VERSION << 46
            | self.base_offset << 49
            | CODES[self.swizzle] << 61
        )


@lru_cache(maxsize=4096)
def _decode(bits: int) -> SmemDescriptor:
    def field(low: int, width: int) -> int:
        return bits >> low & ((1 << width) - 1)

    def refuse(name: str, why: str) -> DescriptorFault:
        return DescriptorFault(f"shared memory descriptor {bits:#018x}: {name}: {why}")

    if field(46, 3) != VERSION:
        raise refuse("bits 46-48", f"{field(46, 3):#05b} must be 0b001, the format of sm_100")
    if field(53, 8):
        raise refuse("bits 53-60", f"{field(53, 8):#x} must be 0")
    if field(61, 3) not in MODES:
        raise refuse("swizzle mode (bits 61-63)", f"{field(61, 3)} is none of 0, 1, 2, 4, 6")
    if field(52, 1):
        raise UnsupportedInstruction(
            f"shared memory descriptor {bits:#018x}: leading dimension stride mode (bit 52) 1, the absolute "
            "address mode, exists on sm_103a alone: use a relative byte offset"
        )
    swizzle = MODES[field(61, 3)]
    # Without a swizzle there is no pattern to start anywhere: Triton fills the field from the address all the same.
    base_offset = 0 if swizzle is Swizzle.NONE else field(49, 3)
    # Bits 14-15 and 30-31 belong to no field, and CUTLASS calls them unused.
    return SmemDescriptor(field(0, 14) << 4, field(16, 14) << 4, field(32, 14) << 4, base_offset, swizzle)
