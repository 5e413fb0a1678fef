"""From the bytes of a multiplicand of `tcgen05.mma` or `wgmma` to numbers (PTX ISA 9.7.16.10.4, 9.7.16.10.8, 9.7.15).

The kinds f8f6f4 and mxf8f6f4 give elements of 4 and 6 bits the room of bytes: in shared memory 16 neighbours are
packed and padded to 16 bytes, in tensor memory each has a byte of its own, e2m1 in bits 2 to 5 and the 6-bit types in
bits 0 to 5. The kinds mxf4 and mxf4nvf4 pack two elements in a byte, the first one in the low half, everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from common.emulator.faults import Fault
from common.emulator.numerics import formats

Decoder = Callable[[np.ndarray], np.ndarray]
ELEMENT_BYTES = {"f16": 2, "bf16": 2, "tf32": 4}  # other types take a byte, but for two e2m1 in the 4-bit kinds
_CHUNK = 16
_TF32_MASK = np.uint32(0xFFFF_E000)
TCGEN05_PAIRS = (0b0100, 0b1000, 0b1100, 0b1001, 0b1101, 0b0110, 0b1110)
WGMMA_PAIRS = tuple(index for index in range(16) if index >> 2 != index & 3)


@cache
def smem_decoder(kind: str, packed: bool) -> Decoder:
    """Rows of whole 16-byte chunks (R, any dtype, contiguous) to float32 (R, elements).

    `packed`: the 4-bit kinds. Elements narrower than a byte come in chunks of 16 otherwise.
    """
    if packed:
        return _nibbles(_CHUNK)
    if kind == "e2m1":
        return _nibbles(_CHUNK // 2)
    if kind in ("e2m3", "e3m2"):
        return _six_bits(formats.FORMATS[kind])
    return _whole_bytes(kind)


@cache
def tmem_decoder(kind: str, packed: bool) -> Decoder:
    """Rows of tensor memory cells (R, uint32, contiguous) to float32 (R, elements)."""
    if packed:
        return _nibbles(_CHUNK)
    if kind == "e2m1":
        table = _table(formats.E2M1)[np.arange(256) >> 2 & 0xF]
        return lambda cells: table.take(cells.view(np.uint8))
    return _whole_bytes(kind)


def _whole_bytes(kind: str) -> Decoder:
    if kind == "f16":
        return lambda rows: _halves(rows.view(np.int16))
    if kind == "bf16":
        return lambda rows: formats.f32_from_bf16(rows.view(np.uint16))
    if kind == "tf32":
        return lambda rows: (rows.view(np.uint32) & _TF32_MASK).view(np.float32)
    if kind in ("s8", "u8"):
        integers = np.int8 if kind == "s8" else np.uint8
        return lambda rows: rows.view(integers).astype(np.float32)
    if kind == "b1":
        return lambda rows: np.unpackbits(rows.view(np.uint8), axis=1, bitorder="little").astype(np.float32)
    table = _table(formats.FORMATS[kind])
    return lambda rows: table.take(rows.view(np.uint8))


_HALF_TABLE = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
_HALF_BITS = np.int32(-0x7000_2000)  # where sign, exponent and mantissa lie once they have been moved up by 13
_HALF_SCALE = np.float32(2.0**112)  # makes up for the different exponent bias
_HALF_LIMIT = np.float32(2.0**16)


def _halves(bits: np.ndarray) -> np.ndarray:
    """float32 of f16 bits (int16). Shifting bits is faster than NumPy's cast; infinity and NaN need the table."""
    wide = bits.astype(np.int32)
    wide <<= np.int32(13)
    wide &= _HALF_BITS
    values = wide.view(np.float32)
    values *= _HALF_SCALE
    if values.max() < _HALF_LIMIT and values.min() > -_HALF_LIMIT:
        return values
    return _HALF_TABLE.take(bits.view(np.uint16))


def _table(fmt: formats.FloatFormat) -> np.ndarray:
    """float32 values of all bytes; bits above the format do not count."""
    codes = np.arange(256) & ((1 << fmt.width) - 1)
    return formats.decode(fmt, codes.astype(np.uint8)).astype(np.float32)


def _nibbles(used: int) -> Decoder:
    """Two e2m1 in each of the first `used` bytes of a chunk."""
    values = _table(formats.E2M1)
    pairs = np.stack((values[np.arange(256) & 0xF], values[np.arange(256) >> 4]), axis=1)

    def decode(rows: np.ndarray) -> np.ndarray:
        chunks = rows.view(np.uint8).reshape(rows.shape[0], -1, _CHUNK)[:, :, :used]
        return pairs.take(chunks, axis=0).reshape(rows.shape[0], -1)

    return decode


def _six_bits(fmt: formats.FloatFormat) -> Decoder:
    """Sixteen elements in the first 12 bytes of a chunk, from the lowest bit up."""
    table = _table(fmt)
    shifts = np.arange(0, 24, 6, dtype=np.uint32)

    def decode(rows: np.ndarray) -> np.ndarray:
        chunks = rows.view(np.uint8).reshape(rows.shape[0], -1, _CHUNK)[:, :, :12]
        triples = chunks.reshape(rows.shape[0], -1, 3).astype(np.uint32)
        words = triples[..., 0] | triples[..., 1] << np.uint32(8) | triples[..., 2] << np.uint32(16)
        return table.take(words[..., None] >> shifts & np.uint32(0x3F)).reshape(rows.shape[0], -1)

    return decode


def expand(values: np.ndarray, metadata: np.ndarray, kind: str, pairs: tuple[int, ...] = TCGEN05_PAIRS) -> np.ndarray:
    """A sparse A in full: stored values (R, K / 2) to (R, K), zeros where nothing is stored.

    `metadata` holds 4-bit indices (R, chunks), one per chunk of 2 (tf32), 4, or 8 elements (the 4-bit kinds, in pairs).
    `pairs`: the indices that mean something for types other than tf32. Raises Fault for any other index.
    """
    rows, chunks = metadata.shape
    if kind == "tf32":
        _check_indices(metadata, (0b0100, 0b1110))
        full = np.zeros((rows, chunks, 2), np.float32)
        np.put_along_axis(full, (metadata >> 3)[..., None].astype(np.intp), values[..., None], axis=2)
        return full.reshape(rows, -1)
    _check_indices(metadata, pairs)
    unit = values.shape[1] // (2 * chunks)
    full = np.zeros((rows, chunks, 4, unit), np.float32)
    places = np.stack((metadata & 3, metadata >> 2), axis=-1).astype(np.intp)
    np.put_along_axis(full, places[..., None], values.reshape(rows, chunks, 2, unit), axis=2)
    return full.reshape(rows, -1)


def _check_indices(metadata: np.ndarray, meaningful: tuple[int, ...]) -> None:
    bad = ~np.isin(metadata, meaningful)
    if bad.any():
        row, chunk = np.argwhere(bad)[0]
        raise Fault(
            f"sparsity metadata: index {int(metadata[row, chunk]):#06b} of row {row}, chunk {chunk} is undefined: "
            f"use one of {', '.join(f'{index:#06b}' for index in meaningful)}"
        )


def nibbles_of(words: np.ndarray) -> np.ndarray:
    """Unsigned words (R, C) as 4-bit numbers (R, C * digits), lowest first, uint8."""
    packed = np.ascontiguousarray(words).view(np.uint8)
    return np.stack((packed & 0xF, packed >> 4), axis=-1).reshape(words.shape[0], -1)
