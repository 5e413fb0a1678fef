"""The 64-bit descriptor of a matrix in shared memory, in the two formats that there are.

`tcgen05.mma` and `tcgen05.cp` have one (PTX ISA 9.7.16.4.1), `wgmma` another (PTX ISA 9.7.15.5.1.2.2). They say the
same, but for the codes of the swizzle.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from common.emulator.faults import DescriptorFault, UnsupportedInstruction
from common.emulator.hardware.swizzle import Swizzle

VERSION = 0b001
MODES = {0: Swizzle.NONE, 1: Swizzle.B128_ATOM_32B, 2: Swizzle.B128, 4: Swizzle.B64, 6: Swizzle.B32}
CODES = {mode: code for code, mode in MODES.items()}
WGMMA_MODES = (Swizzle.NONE, Swizzle.B128, Swizzle.B64, Swizzle.B32)  # by bits 62-63


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

    @staticmethod
    def from_wgmma_bits(bits: int) -> SmemDescriptor:
        """The same from the format of `wgmma`. Raises DescriptorFault naming bits that must be 0."""
        return _decode_wgmma(int(bits))

    def __str__(self) -> str:
        return (
            f"leading dimension offset {self.lbo:#x}, stride dimension offset {self.sbo:#x}, "
            f"base offset {self.base_offset}, swizzle {self.swizzle.name}"
        )

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


def _field(bits: int, low: int, width: int) -> int:
    return bits >> low & ((1 << width) - 1)


def _refused(bits: int, name: str, why: str) -> DescriptorFault:
    return DescriptorFault(f"shared memory descriptor {bits:#018x}: {name}: {why}")


@lru_cache(maxsize=4096)
def _decode(bits: int) -> SmemDescriptor:
    if _field(bits, 46, 3) != VERSION:
        raise _refused(bits, "bits 46-48", f"{_field(bits, 46, 3):#05b} must be 0b001, the format of sm_100")
    if _field(bits, 53, 8):
        raise _refused(bits, "bits 53-60", f"{_field(bits, 53, 8):#x} must be 0")
    if _field(bits, 61, 3) not in MODES:
        raise _refused(bits, "swizzle mode (bits 61-63)", f"{_field(bits, 61, 3)} is none of 0, 1, 2, 4, 6")
    if _field(bits, 52, 1):
        raise UnsupportedInstruction(
            f"shared memory descriptor {bits:#018x}: leading dimension stride mode (bit 52) 1, the absolute "
            "address mode, exists on sm_103a alone: use a relative byte offset"
        )
    return _common(bits, MODES[_field(bits, 61, 3)])


@lru_cache(maxsize=4096)
def _decode_wgmma(bits: int) -> SmemDescriptor:
    if _field(bits, 46, 3):
        raise _refused(bits, "bits 46-48", f"{_field(bits, 46, 3):#05b} must be 0 for wgmma: sm_100 has another format")
    if _field(bits, 52, 10):
        raise _refused(bits, "bits 52-61", f"{_field(bits, 52, 10):#x} must be 0")
    return _common(bits, WGMMA_MODES[_field(bits, 62, 2)])


def _common(bits: int, swizzle: Swizzle) -> SmemDescriptor:
    """The fields that both formats have in the same place."""
    # Without a swizzle there is no pattern to start anywhere: Triton fills the field from the address all the same.
    base_offset = 0 if swizzle is Swizzle.NONE else _field(bits, 49, 3)
    # Bits 14-15 and 30-31 belong to no field, and CUTLASS calls them unused.
    address, lbo, sbo = (_field(bits, low, 14) << 4 for low in (0, 16, 32))
    return SmemDescriptor(address, lbo, sbo, base_offset, swizzle)
