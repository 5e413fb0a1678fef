"""The numbers that single instructions are tried on: edge cases first, then random bits, the same on every machine."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from tests.golden.case import random_bits

COUNT = 8192  # values of every pattern but the exhaustive one
EXHAUSTIVE = "all16"

_WORDS = {16: np.uint16, 32: np.uint32, 64: np.uint64}
_FIELDS = {"f16": (16, 10), "bf16": (16, 7), "f32": (32, 23), "f64": (64, 52)}  # width, bits of the mantissa


def _float_edges(kind: str) -> list[int]:
    """Both signs of zeros, subnormals, powers of two, halves and their neighbours, the largest, infinity and NaNs."""
    width, mantissa = _FIELDS[kind]
    bias = (1 << width - mantissa - 2) - 1
    one, unit = bias << mantissa, 1 << mantissa
    infinity = (2 * bias + 1) << mantissa
    base = [0, 1, 3, unit - 1, unit, 2 * unit, infinity - 1, infinity - unit, unit >> 1, 10 * unit, 24 * unit + 1]
    for exponent in (-2, -1, 0, 1, 2, 3, 6, 7, 8, 10, 14, 15, 16, 23, 24, 30, 31, 32, 62, 63, 64, -14, -15, -24, -25):
        if 0 < exponent + bias < 2 * bias + 1:
            start = one + exponent * unit
            base += [start - 1, start, start + 1, start + unit // 2, start + unit // 4 * 3, start + unit - 1]
    quiet = infinity + unit // 2
    base += [infinity, quiet, infinity + 1, quiet - 1, infinity + unit - 1, quiet + unit // 8 + 5]
    return [bits | sign << width - 1 for bits in base for sign in (0, 1)]


def _floats(kind: str, seed: int) -> np.ndarray:
    """Edges in a random order; random bits; and numbers of moderate size, many of them halfway between shorter ones."""
    width, mantissa = _FIELDS[kind]
    word, bias = _WORDS[width], (1 << width - mantissa - 2) - 1
    edges = np.array(_float_edges(kind), np.uint64)
    bits = random_bits(seed, 4 * COUNT).reshape(4, COUNT)
    span = np.uint64(min(2 * bias - 2, 64))
    moderate = (np.uint64(bias) - span // np.uint64(2) + bits[0] % span) << np.uint64(mantissa)
    fraction = bits[1] & np.uint64((1 << mantissa) - 1)
    drop = (bits[2] % np.uint64(mantissa + 1)) * (bits[2] >> np.uint64(63))
    fraction = fraction >> drop << drop
    halfway = (bits[2] >> np.uint64(62) & np.uint64(1)) << drop >> np.uint64(1)
    moderate = (moderate | fraction | halfway) + (bits[3] % np.uint64(3)) - np.uint64(1)
    moderate |= bits[3] >> np.uint64(63) << np.uint64(width - 1)
    choice = bits[3] >> np.uint64(32) & np.uint64(3)
    values = np.where(choice == 0, bits[0] >> np.uint64(64 - width), moderate)
    values = np.where(choice == 1, edges[bits[1] % np.uint64(len(edges))], values)
    return values.astype(word)


def _integers(width: int, seed: int) -> np.ndarray:
    """Powers of two and their neighbours at random places among random bits of every length."""
    edges = [0, *(((1 << bit) + near) & (1 << width) - 1 for bit in range(width + 1) for near in (-1, 0, 1))]
    bits = random_bits(seed, 3 * COUNT).reshape(3, COUNT)
    values = bits[0] >> np.uint64(64 - width) >> bits[1] % np.uint64(width)
    values ^= np.uint64(0) - (bits[1] >> np.uint64(63))  # half of them: ones in front
    picked = np.array(edges, np.uint64)[bits[2] % np.uint64(len(edges))]
    return np.where(bits[1] >> np.uint64(61) & np.uint64(1), picked, values).astype(_WORDS[width])


@lru_cache(maxsize=None)
def pattern(name: str) -> np.ndarray:
    """Unsigned integers (n,), by name:

    - "all16": every 16-bit pattern; "all16x2": every 16-bit pattern twice in a register, paired up at random;
    - "f32:2": floats (f16, bf16, f32, f64), or "f16x2:2" two in a register; the number is the seed;
    - "u32:2": integers (u16, u32, u64); "small32:2": mostly 0 to 63; "seen32:2": 0 to 7;
    - "lane32:2": one random word for each group of 32.
    """
    if name == EXHAUSTIVE:
        return np.arange(1 << 16, dtype=np.uint16)
    if name == "all16x2":
        order = np.argsort(random_bits(5, 1 << 16), kind="stable").astype(np.uint32)
        return np.arange(1 << 16, dtype=np.uint32) | order << np.uint32(16)
    kind, number = name.split(":")
    seed = 1000 + int(number)
    if kind in _FIELDS:
        return _floats(kind, seed)
    if kind in ("f16x2", "bf16x2"):
        low, high = _floats(kind[:-2], seed), _floats(kind[:-2], seed + 500)
        return low | high.astype(np.uint32) << np.uint32(16)
    if kind.startswith("u"):
        return _integers(int(kind[1:]), seed)
    bits = random_bits(seed, COUNT)
    if kind == "small32":
        return np.where(bits >> np.uint64(60) == 0, bits, bits & np.uint64(63)).astype(np.uint32)
    if kind == "seen32":
        return (bits & np.uint64(7)).astype(np.uint32)
    if kind == "lane32":
        return np.repeat(bits[: COUNT // 32], 32).astype(np.uint32)
    raise KeyError(name)
