"""Where the elements of a multiplicand lie in shared memory (PTX ISA 9.7.16.3 and 9.7.16.10.6).

Shared memory is seen in chunks of 16 bytes. K-major operands have chunks of one row (of A; a column of B counts as a
row of B^T) and several neighbours along K, MN-major ones chunks of one K and several neighbouring rows. The descriptor
says how chunks are strided, the swizzle then XORs bits of the *absolute* address, so that a start address inside a
swizzle atom (a K step) needs nothing special.

With S the span of the swizzle in bytes and n = S / 16 the chunk at (row, chunk c) of a K-major operand starts at
    no swizzle   16 (row % 8) + SBO (row / 8) + LBO c
    swizzle       S (row % 8) + SBO (row / 8) + 16 (c % n) + LBO (c / n)
and the chunk at (k, chunk c) of an MN-major one at
    no swizzle   16 (k % 8) + LBO (k / 8) + SBO c
    swizzle       S (k % 8) + SBO (k / 8) + 16 (c % n) + LBO (c / n)      (k % 4 and k / 4 with 32-byte atoms)
before swizzling. The canonical layouts of CUTLASS (`mma_sm100_desc.hpp`) say the same, and `wgmma` on an H200 does the
same for 16-byte atoms: the base offset, start addresses anywhere, and a row of a sparse operand's B (64 bytes) under
32-byte swizzling, the one case where LBO counts in a swizzled K-major operand, were measured there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from common.emulator.faults import DescriptorFault
from common.emulator.hardware.smem_descriptor import SmemDescriptor
from common.emulator.hardware.swizzle import LINE_BYTES, Swizzle, swizzle_addresses, swizzle_pattern

CHUNK = 16
PERIOD = 1024  # every swizzle pattern starts again at multiples of this address
_PERIOD_CHUNKS = PERIOD // CHUNK
_GROUP = 8  # rows (K-major) or Ks (MN-major) of a swizzle atom


@dataclass(frozen=True)
class OperandShape:
    """What the instruction says about a multiplicand: rows (its M or N), bytes of its K extent, bytes of an element.

    Elements narrower than a byte count with the size of their container: K-major only, where only `k_bytes` matters.
    """

    rows: int
    k_bytes: int
    element: int
    mn_major: bool

    @property
    def chunks(self) -> tuple[int, int]:
        """Shape of the chunk map: (rows, chunks along K), or (K, chunks along the rows) for an MN-major operand."""
        if self.mn_major:
            return self.k_bytes // self.element, -(-self.rows * self.element // CHUNK)
        return self.rows, self.k_bytes // CHUNK


@dataclass(frozen=True)
class ChunkMap:
    """Places of an operand's chunks, counted in chunks from `base`, a multiple of PERIOD bytes at or below the start.

    `places` is an intp array of shape `OperandShape.chunks`; `first` and `last` are its extremes.
    """

    places: np.ndarray
    first: int
    last: int


def chunk_map(descriptor: SmemDescriptor, shape: OperandShape) -> ChunkMap:
    """The map for a descriptor; add `descriptor.address // PERIOD * PERIOD` to get addresses. Cached.

    Raises DescriptorFault for a swizzle that the operand cannot have.
    """
    d = descriptor
    return _chunk_map(d.address % PERIOD, d.lbo, d.sbo, d.base_offset, d.swizzle, shape)


def step_map(descriptor: SmemDescriptor, addresses: tuple[int, ...], shape: OperandShape) -> ChunkMap:
    """The maps of several instructions that differ in the start address alone, joined along K. Cached.

    `addresses` are relative to a multiple of PERIOD at or below all of them, from which the places count.
    """
    d = descriptor
    return _step_map(addresses, d.lbo, d.sbo, d.base_offset, d.swizzle, shape)


def element_addresses(descriptor: SmemDescriptor, shape: OperandShape) -> np.ndarray:
    """Byte addresses of all elements, int64 (rows, K): the map spelled out, for elements of whole bytes."""
    places = chunk_map(descriptor, shape).places * CHUNK + descriptor.address // PERIOD * PERIOD
    within = np.arange(0, CHUNK, shape.element)
    spread = (places[..., None] + within).reshape(places.shape[0], -1)
    return spread[:, : shape.rows].T if shape.mn_major else spread


@lru_cache(maxsize=1024)
def _step_map(
    addresses: tuple[int, ...], lbo: int, sbo: int, base_offset: int, swizzle: Swizzle, shape: OperandShape
) -> ChunkMap:
    parts = [
        _chunk_map(address % PERIOD, lbo, sbo, base_offset, swizzle, shape).places + address // PERIOD * _PERIOD_CHUNKS
        for address in addresses
    ]
    return _made(np.concatenate(parts, axis=0 if shape.mn_major else 1))


def _made(places: np.ndarray) -> ChunkMap:
    places.setflags(write=False)
    return ChunkMap(places, int(places.min()), int(places.max()))


@lru_cache(maxsize=1024)
def _chunk_map(phase: int, lbo: int, sbo: int, base_offset: int, swizzle: Swizzle, shape: OperandShape) -> ChunkMap:
    _check(swizzle, shape)
    lines, chunks = (np.arange(extent, dtype=np.int64) for extent in shape.chunks)
    offsets = (_mn_major if shape.mn_major else _k_major)(lines[:, None], chunks, lbo, sbo, swizzle)
    # A pattern that starts `base_offset` lines late is the natural one for addresses that many lines lower.
    shift = base_offset * LINE_BYTES
    addresses = swizzle_addresses(swizzle, offsets + phase + PERIOD - shift) + shift - PERIOD
    return _made((addresses // CHUNK).astype(np.intp))


def _k_major(rows: np.ndarray, chunks: np.ndarray, lbo: int, sbo: int, swizzle: Swizzle) -> np.ndarray:
    span = swizzle_pattern(swizzle).span
    wide = span // CHUNK
    return rows % _GROUP * span + rows // _GROUP * sbo + chunks % wide * CHUNK + chunks // wide * lbo


def _mn_major(ks: np.ndarray, chunks: np.ndarray, lbo: int, sbo: int, swizzle: Swizzle) -> np.ndarray:
    if swizzle is Swizzle.NONE:
        return ks % _GROUP * CHUNK + ks // _GROUP * lbo + chunks * sbo
    pattern = swizzle_pattern(swizzle)
    deep = 4 if swizzle is Swizzle.B128_ATOM_32B else _GROUP
    wide = pattern.span // CHUNK
    return ks % deep * pattern.span + ks // deep * sbo + chunks % wide * CHUNK + chunks // wide * lbo


def _check(swizzle: Swizzle, shape: OperandShape) -> None:
    words = shape.element == 4
    if shape.mn_major and (swizzle is Swizzle.B128_ATOM_32B) != words:
        raise DescriptorFault(
            f"swizzle mode (bits 61-63 of the shared memory descriptor): MN-major {8 * shape.element}-bit elements "
            f"{'need' if words else 'cannot have'} 128-byte swizzling with 32-byte atoms (mode 1)"
        )
