"""An element-by-element model of `tcgen05.mma` operands, written apart from the emulator, for its tests.

Element types are decoded by formula, shared memory layouts are the canonical CuTe layouts of PTX ISA 9.7.16.3.3 with
`Swizzle<B, M, S>` applied to byte addresses, tensor memory layouts go cell by cell.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

FLOATS = {  # exponent bits, mantissa bits, bias
    "f16": (5, 10, 15), "bf16": (8, 7, 127), "tf32": (8, 10, 127), "e4m3": (4, 3, 7), "e5m2": (5, 2, 15),
    "e2m3": (2, 3, 1), "e3m2": (3, 2, 3), "e2m1": (2, 1, 1),
}  # fmt: skip
BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e4m3": 8, "e5m2": 8, "e2m3": 6, "e3m2": 6, "e2m1": 4, "u8": 8, "s8": 8}
SWIZZLES = {"none": (0, 4, 3), "32B": (1, 4, 3), "64B": (2, 4, 3), "128B": (3, 4, 3), "128B-32B": (2, 5, 2)}
SPANS = {"none": 1, "32B": 2, "64B": 4, "128B": 8, "128B-32B": 8}  # in chunks of 16 bytes


def value_of(kind: str, codes: np.ndarray) -> np.ndarray:
    """float64 values of codes; no infinities or NaNs are expected."""
    codes = np.asarray(codes, np.int64)
    if kind == "u8":
        return codes.astype(np.float64)
    if kind == "s8":
        return np.where(codes > 127, codes - 256, codes).astype(np.float64)
    if kind == "tf32":
        codes = codes >> 13
    exponent_bits, mantissa_bits, bias = FLOATS[kind]
    mantissa = codes & ((1 << mantissa_bits) - 1)
    exponent = codes >> mantissa_bits & ((1 << exponent_bits) - 1)
    sign = 1 - 2 * (codes >> (mantissa_bits + exponent_bits) & 1)
    hidden = np.where(exponent > 0, 1 << mantissa_bits, 0)
    return sign * (hidden + mantissa) * 2.0 ** (np.maximum(exponent, 1) - bias - mantissa_bits)


def random_codes(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Codes of modest finite values, int64."""
    if kind in ("u8", "s8"):
        return rng.integers(0, 256, shape)
    exponent_bits, mantissa_bits, bias = FLOATS[kind]
    top = (1 << exponent_bits) - 1
    low, high = max(bias - 4, 0), min(bias + 3, top if kind in ("e2m1", "e2m3", "e3m2") else top - 1)
    codes = rng.integers(low, high + 1, shape) << mantissa_bits | rng.integers(0, 1 << mantissa_bits, shape)
    codes |= rng.integers(0, 2, shape) << (exponent_bits + mantissa_bits)
    return codes << 13 | rng.integers(0, 1 << 13, shape) if kind == "tf32" else codes


# -- shared memory -------------------------------------------------------------------------------------------------


def swizzle(name: str, address: int) -> int:
    bits, base, shift = SWIZZLES[name]
    return address ^ ((address >> (base + shift) & ((1 << bits) - 1)) << base)


def canonical(name: str, mn_major: bool, per_chunk: int, lbo: int, sbo: int) -> Callable[[int, int], int]:
    """(row, k) to a byte offset before swizzling; `per_chunk` is T, the elements in 16 bytes; strides in bytes."""
    size = 16 // per_chunk
    span = SPANS[name]

    def k_major(row: int, k: int) -> int:
        inner, chunk = k % per_chunk, k // per_chunk
        along = lbo if name == "none" else 16
        return row % 8 * span * 16 + row // 8 * sbo + inner * size + chunk * along

    def mn_plain(row: int, k: int) -> int:
        return row % per_chunk * size + row // per_chunk * sbo + k % 8 * 16 + k // 8 * lbo

    def mn_swizzled(row: int, k: int) -> int:
        deep = 4 if name == "128B-32B" else 8
        inner, chunk, block = row % per_chunk, row // per_chunk % span, row // per_chunk // span
        return inner * size + chunk * 16 + block * lbo + k % deep * span * 16 + k // deep * sbo

    if not mn_major:
        return k_major
    return mn_plain if name == "none" else mn_swizzled


def write_matrix(
    image: np.ndarray, start: int, codes: np.ndarray, kind: str, name: str, mn_major: bool, lbo: int, sbo: int
) -> None:
    """Stores codes (rows, K) of elements of 8, 16 or 32 bits; `image` (bytes,) begins at a multiple of 1024."""
    size = BITS[kind] // 8
    offset = canonical(name, mn_major, 16 // size, lbo, sbo)
    for (row, k), code in np.ndenumerate(codes):
        place = swizzle(name, start + offset(row, k))
        image[place : place + size] = np.frombuffer(int(code).to_bytes(size, "little"), np.uint8)


def packed_chunk(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes of `bits` bits, the first one lowest, in 16 bytes; ones fill the rest, which nobody should read."""
    number = 0
    for place, code in enumerate(codes):
        number |= int(code) << (bits * place)
    used = bits * len(codes)
    number |= ((1 << 128) - 1) >> used << used if used < 128 else 0
    return np.frombuffer(number.to_bytes(16, "little"), np.uint8)


def write_packed(
    image: np.ndarray, start: int, codes: np.ndarray, kind: str, per_chunk: int, sbo: int, lbo: int
) -> None:
    """K-major without swizzle: `per_chunk` elements of 4 or 6 bits in each chunk of 16 bytes."""
    offset = canonical("none", False, 16, lbo, sbo)
    for row in range(codes.shape[0]):
        for chunk in range(codes.shape[1] // per_chunk):
            place = start + offset(row, 16 * chunk)
            part = codes[row, chunk * per_chunk : (chunk + 1) * per_chunk]
            image[place : place + 16] = packed_chunk(part, BITS[kind])


# -- tensor memory -------------------------------------------------------------------------------------------------


def accumulator_cell(m: int, n: int, shape: tuple[int, int], layout: str, start: int = 0) -> tuple[int, int, int]:
    """(CTA, lane, column) of element (m, n) of D for a data path layout A to G (PTX ISA 9.7.16.10.5)."""
    width = shape[1]
    if layout == "A":
        return m // 128, m % 128, n
    if layout == "D":
        return 0, m, n
    if layout == "B":
        return m // 64, m % 64 + (64 if n >= width // 2 else 0), n % (width // 2)
    if layout == "C":
        return m // 64, start + m % 64 // 16 * 32 + m % 16, n
    if layout == "E":
        return 0, m + (64 if n >= width // 2 else 0), n % (width // 2)
    if layout == "F":
        return 0, start + m // 16 * 32 + m % 16, n
    return 0, m + 32 * (n // (width // 4)), n % (width // 4)


@cache
def _places(shape: tuple[int, int], layout: str, start: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    cells = [accumulator_cell(m, n, shape, layout, start) for m, n in np.ndindex(shape)]
    return tuple(part.reshape(shape) for part in np.array(cells).T)


def accumulator(memory: np.ndarray, shape: tuple[int, int], layout: str, address: int = 0) -> np.ndarray:
    """D (M, N) of uint32 cells gathered from tensor memory (CTAs, 128, 512)."""
    cta, lane, column = _places(shape, layout, address >> 16)
    return memory[cta, lane, column + (address & 0xFFFF)]


def put_accumulator(memory: np.ndarray, cells: np.ndarray, layout: str, address: int = 0) -> None:
    cta, lane, column = _places(cells.shape, layout, address >> 16)
    memory[cta, lane, column + (address & 0xFFFF)] = cells


def row_lanes(m: int, layout: str, start: int = 0) -> tuple[int, list[int]]:
    """(CTA, lanes) that must hold row m of an A operand, its metadata: every lane whose cells are computed from it."""
    if layout in ("A", "D"):
        return m // 128, [m % 128]
    if layout in ("B", "E"):
        return m // 64, [m % 64, m % 64 + 64]
    if layout in ("C", "F"):
        return m // 64, [start + m % 64 // 16 * 32 + m % 16]
    return 0, [m, m + 32, m + 64, m + 96]
