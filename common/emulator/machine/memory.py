"""State spaces and addresses.

Generic addresses are 64 bits wide. Global allocations lie far apart, so that running off the end of one is seen; the
shared windows of a cluster and the local window have ranges of their own:

    SHARED_WINDOW + (cluster CTA rank << 24) + offset        .shared, the low 32 bits are the shared::cluster address
    LOCAL_WINDOW + offset                                    .local, per thread
    PARAMETER_BASE ...                                       kernel parameters, which `mov.b32` can name
    0x7000_0000_0000 ...                                     .global and .const

Bit 24 of a shared address is the lowest bit of %cluster_ctarank, as on the hardware (CUTLASS `Sm100MmaPeerBitMask`).
The first 1024 bytes of a CTA's shared window belong to the system (%reserved_smem_offset_*), so a null pointer faults.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from common.emulator.faults import InvalidAddress, LaunchError, Misaligned, OutOfBounds

if TYPE_CHECKING:
    from common.emulator.machine.generic_writes import GenericWrites

SHARED_WINDOW = 0x0100_0000_0000
LOCAL_WINDOW = 0x0200_0000_0000
PARAMETER_BASE = 0x4000_0000
GLOBAL_BASE = 0x7000_0000_0000
GUARD = 1 << 26  # between allocations: also for tensor maps that start before theirs
FUNCTION_BASE = 0x100  # function number n has address FUNCTION_BASE + its entry segment
RANK_SHIFT = 24
RANK_MASK = (1 << RANK_SHIFT) - 1
RESERVED_SHARED = 1024
POISON = 0xFF  # every float format reads it as NaN, every pointer as out of bounds

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class Region:
    """Contiguous bytes with typed views: a global allocation, shared memory, or the local memory of a CTA's threads."""

    __slots__ = ("name", "base", "size", "data", "read_only", "owner", "generic_writes", "_views")

    def __init__(self, name: str, base: int, data: np.ndarray, *, read_only: bool = False, owner: Any = None) -> None:
        self.name = name
        self.base = base
        self.size = data.size
        self.data = data
        self.read_only = read_only
        self.owner = owner
        self.generic_writes: GenericWrites | None = None  # of shared memory
        self._views: dict[tuple[int, int], np.ndarray] = {}

    def view(self, element: int, count: int = 1) -> np.ndarray:
        """The bytes as unsigned integers of `element` bytes; with `count` > 1 as rows of that many."""
        key = (element, count)
        if key not in self._views:
            width = element * count
            typed = self.data[: self.size // width * width].view(_UNSIGNED[element])
            self._views[key] = typed if count == 1 else typed.reshape(-1, count)
        return self._views[key]

    def __str__(self) -> str:
        return f"{self.name} [{self.base:#x}, {self.base + self.size:#x})"


class Piece(NamedTuple):
    """Part of an access: `offsets` are bytes into `region`; `chosen` selects those lanes among the accessing ones."""

    region: Region
    offsets: np.ndarray
    chosen: slice | np.ndarray


class GlobalMemory:
    """All global allocations of a launch: argument tensors, module variables, constants and parameters."""

    def __init__(self) -> None:
        self._regions: list[Region] = []
        self._starts: list[int] = []
        self._next = GLOBAL_BASE
        self._launches = 0  # whose parameters have an address
        self._last: Region | None = None

    def map(self, name: str, data: np.ndarray, *, read_only: bool = False, owner: Any = None) -> Region:
        """Gives `data` (flat uint8, used in place) an address with guard space on both sides."""
        region = Region(name, self._next, data, read_only=read_only, owner=owner)
        self._next += -(-(data.size + GUARD) // GUARD) * GUARD
        return self._add(region, len(self._regions))

    def map_parameters(self, data: np.ndarray) -> Region:
        """Gives the parameters of one launch (flat uint8, used in place) an address."""
        region = Region("kernel parameters", PARAMETER_BASE + self._launches * GUARD, data, read_only=True)
        self._launches += 1
        return self._add(region, self._launches - 1)

    def _add(self, region: Region, place: int) -> Region:
        self._regions.insert(place, region)
        self._starts.insert(place, region.base)
        self._last = region
        return region

    def region_at(self, address: int) -> Region | None:
        """The allocation that holds `address`, if any."""
        place = bisect_right(self._starts, address) - 1
        if place >= 0 and address < self._regions[place].base + max(self._regions[place].size, 1):
            return self._regions[place]
        return None

    def locate(self, addresses: np.ndarray, width: int, lanes: np.ndarray) -> list[Piece]:
        """Splits an access of `width` bytes at int64 `addresses` by allocation.

        Raises OutOfBounds, with the nearest allocation, where an address lies in none.
        """
        region = self._last
        if region is not None:
            offsets = addresses - region.base
            if int(offsets.view(np.uint64).max()) <= region.size - width:
                return [Piece(region, offsets, slice(None))]
        places = np.searchsorted(np.array(self._starts), addresses, side="right") - 1
        pieces = []
        for place in np.unique(places):
            chosen = places == place
            region = self._regions[max(int(place), 0)]
            offsets = addresses[chosen] - region.base
            bad = (offsets < 0) | (offsets > region.size - width)
            if bad.any():
                raise self._out_of_bounds(addresses[chosen][bad], width, lanes[chosen][bad], region)
            pieces.append(Piece(region, offsets, chosen))
        self._last = pieces[0].region
        if len(pieces) == 1:
            return [Piece(pieces[0].region, pieces[0].offsets, slice(None))]
        return pieces

    def _out_of_bounds(self, addresses: np.ndarray, width: int, lanes: np.ndarray, below: Region) -> OutOfBounds:
        """The fault for an address outside every allocation, told from the nearest one."""
        address = int(addresses[0])
        above = next((region for region in self._regions if region.base > address), below)
        past = address - (below.base + below.size)
        near = above if 0 < above.base - address < past else below
        if address < near.base:
            where = f"{near.base - address} bytes before"
        elif past >= 0:
            where = f"{past} bytes past the end of"
        else:
            where = "across the end of"
        shown = address & 0xFFFF_FFFF_FFFF_FFFF
        return OutOfBounds(
            f"global access of {width} bytes at {shown:#x} is outside every allocation: "
            f"{where} {near} ({near.size} bytes)",
            lanes=lanes,
            address=shown,
        )


def host_bytes(value: Any) -> np.ndarray:
    """The memory of a NumPy array or torch CPU tensor as a flat uint8 array, without a copy.

    Of a view it is what lies between its first and its last element, in the order of the memory: as on a GPU the kernel
    has to know the strides. torch is not imported: its tensors are known by `data_ptr`. Raises LaunchError for what is
    not on the CPU, and for negative strides.
    """
    if isinstance(value, np.ndarray):
        if min(value.strides, default=0) < 0:
            raise LaunchError("an array argument has a negative stride: pass numpy.ascontiguousarray(x)")
        memory = _memory(value.ctypes.data, value.shape, value.strides, value.itemsize)
        memory.flags.writeable = value.flags.writeable
        return memory
    if hasattr(value, "data_ptr"):
        if getattr(value.device, "type", "cpu") != "cpu":
            raise LaunchError(f"the emulator needs CPU tensors, not one on {value.device}: pass x.cpu()")
        size = value.element_size()
        return _memory(value.data_ptr(), value.shape, [stride * size for stride in value.stride()], size)
    raise LaunchError(f"cannot pass a {type(value).__name__} as memory: use a NumPy array or a torch CPU tensor")


def _memory(address: int, shape: Sequence[int], strides: Sequence[int], element: int) -> np.ndarray:
    """What an array at `address` spans; `strides` and `element` in bytes."""
    if 0 in shape:
        return np.empty(0, np.uint8)
    size = element + sum((extent - 1) * stride for extent, stride in zip(shape, strides))
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)


def check_alignment(addresses: np.ndarray, alignment: int, lanes: np.ndarray, what: str) -> None:
    """Raises Misaligned naming the first address that is not a multiple of `alignment` (a power of two)."""
    if int(np.bitwise_or.reduce(addresses)) & (alignment - 1):
        bad = (addresses & (alignment - 1)) != 0
        address = int(addresses[bad][0]) & 0xFFFF_FFFF_FFFF_FFFF
        raise Misaligned(
            f"{what} at {address:#x} must be aligned to {alignment} bytes", lanes=lanes[bad], address=address
        )


def shared_offsets(addresses: np.ndarray, width: int, size: int, lanes: np.ndarray) -> np.ndarray:
    """Offsets into a CTA's shared memory of `size` bytes (the reserved first KB included); raises OutOfBounds."""
    offsets = addresses & RANK_MASK
    if int(offsets.max()) > size - width or int(offsets.min()) < RESERVED_SHARED:
        bad = (offsets > size - width) | (offsets < RESERVED_SHARED)
        offset = int(offsets[bad][0])
        raise OutOfBounds(
            f"shared access of {width} bytes at offset {offset:#x}: the CTA has "
            f"[{RESERVED_SHARED:#x}, {size:#x}) ({size - RESERVED_SHARED} bytes)",
            lanes=lanes[bad],
            address=offset,
        )
    return offsets


def refuse_write(region: Region, lanes: np.ndarray, address: int) -> None:
    if region.read_only:
        raise InvalidAddress(f"store to read-only memory: {region}", lanes=lanes, address=address)
