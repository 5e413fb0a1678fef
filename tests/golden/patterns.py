"""The numbers that single instructions are tried on: edge cases first, then random bits, the same on every machine."""

from __future__ import annotations

from functools import cache

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


# Bits of 0, 1/2, 1, 3/2, 2, 3, and of -1, by type; the register holds as many as fit into 32 bits.
_EXACT = {
    "f16x2": (16, (0, 0x3800, 0x3C00, 0x3E00, 0x4000, 0x4200, 0xBC00)),
    "bf16x2": (16, (0, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0xBF80)),
    "tf32": (32, (0, 0x3F000000, 0x3F800000, 0x3FC00000, 0x40000000, 0x40400000, 0xBF800000)),
    "e4m3x4": (8, (0, 0x30, 0x38, 0x3C, 0x40, 0x44, 0xB8)),
    "e5m2x4": (8, (0, 0x38, 0x3C, 0x3E, 0x40, 0x42, 0xBC)),
}
_MODERATE = {
    "f16x2": (16, 10, 15),
    "bf16x2": (16, 7, 127),
    "tf32": (32, 23, 127),
    "e4m3x4": (8, 3, 7),
    "e5m2x4": (8, 2, 15),
}


def _exact(kind: str, seed: int) -> np.ndarray:
    if kind == "f64":
        return (random_bits(seed, COUNT) % np.uint64(13)).astype(np.float64).view(np.uint64)
    width, codes = _EXACT[kind]
    per_register = 32 // width
    chosen = random_bits(seed, COUNT * per_register) % np.uint64(len(codes))
    return np.array(codes, f"u{width // 8}")[chosen.astype(np.intp)].view(np.uint32)


# Bits of infinities, where there are any, and NaNs.
_SPECIAL = {
    "f16x2": (0x7C00, 0xFC00, 0x7E00, 0xFC01),
    "bf16x2": (0x7F80, 0xFF80, 0x7FC0, 0xFF81),
    "tf32": (0x7F800000, 0xFF800000, 0x7FC00000, 0xFFA00000),
    "e4m3x4": (0x7F, 0xFF, 0x7F, 0xFF),
    "e5m2x4": (0x7C, 0xFC, 0x7E, 0xFD),
}


def _special(kind: str, seed: int) -> np.ndarray:
    width, word = _EXACT[kind][0], f"u{_EXACT[kind][0] // 8}"
    values = _exact(kind, seed).view(word)
    bits = random_bits(seed + 77, values.size)
    chosen = np.array(_SPECIAL[kind], word)[(bits & np.uint64(3)).astype(np.intp)]
    return np.where(bits >> np.uint64(58 if width == 32 else 57) == 0, chosen, values).view(np.uint32)


def _nans(kind: str, seed: int) -> np.ndarray:
    if kind.endswith("x2"):
        low, high = _nans(kind[:-2], seed), _nans(kind[:-2], seed + 500)
        return low | high.astype(np.uint32) << np.uint32(16)
    width, mantissa = _FIELDS[kind]
    edges = np.array([0, 1 << width - 1, *_float_edges(kind)[-12:]], np.uint64)
    random = edges[(random_bits(seed, COUNT) % np.uint64(edges.size)).astype(np.intp)]
    payload = random_bits(seed + 9, COUNT) & np.uint64((1 << mantissa) - 1)
    infinite = random & np.uint64((1 << width - 1) - (1 << mantissa)) != 0
    return np.where(infinite & (payload & np.uint64(1) == 1), random | payload, random).astype(_WORDS[width])


def _near_one(kind: str, seed: int) -> np.ndarray:
    width, mantissa = _FIELDS[kind]
    bits = random_bits(seed, 3 * COUNT)
    exponent = np.uint64((1 << width - mantissa - 2) - 13) + (bits >> np.uint64(55)) % np.uint64(20)
    sign = bits >> np.uint64(54) & np.uint64(1)
    values = sign << np.uint64(width - 1) | exponent << np.uint64(mantissa) | bits & np.uint64((1 << mantissa) - 1)
    return np.concatenate([_floats(kind, seed), values.astype(_WORDS[width])])


def _moderate(kind: str, seed: int) -> np.ndarray:
    """Random signs and fractions, exponents -4 to 2."""
    width, mantissa, bias = _MODERATE[kind]
    bits = random_bits(seed, COUNT * 32 // width)
    sign = bits >> np.uint64(63) << np.uint64(width - 1)
    exponent = (np.uint64(bias - 4) + (bits >> np.uint64(40)) % np.uint64(7)) << np.uint64(mantissa)
    fraction = bits & np.uint64((1 << mantissa) - 1)
    return (sign | exponent | fraction).astype(f"u{width // 8}").view(np.uint32)


@cache
def pattern(name: str) -> np.ndarray:
    """Unsigned integers (n,), by name:

    - "all16": every 16-bit pattern; "all16x2": every 16-bit pattern twice in a register, paired up at random;
    - "f32:2": floats (f16, bf16, f32, f64), or "f16x2:2" two in a register; the number is the seed;
    - "u32:2": integers (u16, u32, u64); "small32:2": mostly 0 to 63; "seen32:2": 0 to 7;
    - "lane32:2": one random word for each group of 32;
    - "nan f32:2": NaNs, infinities, zeros and one;
    - "near f32:2": floats as above, then three times as many of both signs between 2^-12 and 2^8;
    - "exact f16x2:2": small multiples of 1/2 in registers of a matrix fragment (`_EXACT` has the types): their products
      and sums are exact in every accumulator; "special f16x2:2": likewise, with infinities and NaNs here and there;
      "moderate f16x2:2": numbers of normal distribution, more or less.
    """
    if name == EXHAUSTIVE:
        return np.arange(1 << 16, dtype=np.uint16)
    if name == "all16x2":
        order = np.argsort(random_bits(5, 1 << 16), kind="stable").astype(np.uint32)
        return np.arange(1 << 16, dtype=np.uint32) | order << np.uint32(16)
    kind, number = name.split(":")
    seed = 1000 + int(number)
    if kind.startswith("exact "):
        return _exact(kind.split()[1], seed)
    if kind.startswith("special "):
        return _special(kind.split()[1], seed)
    if kind.startswith("near "):
        return _near_one(kind.split()[1], seed)
    if kind.startswith("nan "):
        return _nans(kind.split()[1], seed)
    if kind.startswith("moderate "):
        return _moderate(kind.split()[1], seed)
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
