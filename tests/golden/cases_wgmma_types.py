"""wgmma of every type and width, A in both places, sparse, signs, saturation, special values.

`cases()` has sums that are exact, `rounded_cases()` others, to be compared within a tolerance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from math import prod

import numpy as np

from tests.common.emulator.isa.mma_reference import BITS, random_codes
from tests.common.emulator.isa.wgmma_programs import (
    COMMIT,
    DTYPES,
    FENCE,
    FINISH,
    IMAGE,
    K_OF,
    ORDERED,
    SPARSE_TYPES,
    TYPES,
    WARPGROUP,
    M,
    Product,
    inputs_of,
    product,
    program,
    random_d,
    registers_of_d,
    scale_d,
)
from tests.golden.case import Buffer, Case, Result, random_bits

_WIDTHS = (8, 24, 64, 256)
_FLOATS = [types for types in TYPES if types[0] != "s32"]
_UNORDERED = (0b0001, 0b0010, 0b0011, 0b0110, 0b0111, 0b1011)


class Draw:
    """Random integers, the same on every version of NumPy."""

    def __init__(self, seed: int) -> None:
        self._seed = seed << 32

    def integers(self, low: int, high: int, size: tuple[int, ...]) -> np.ndarray:
        self._seed += 1
        bits = random_bits(self._seed, prod(size)) >> np.uint64(16)
        return (bits % np.uint64(high - low)).astype(np.int64).reshape(size) + low


def _case(name: str, p: Product, d: np.ndarray, keep: bool, metadata: np.ndarray | int = 0, body: str = "") -> Case:
    before = registers_of_d(d)
    text = scale_d(keep) + FENCE + (body or p.text) + FINISH
    arrays = (p.image(), before, inputs_of(p, metadata), np.zeros_like(before))
    buffers = tuple(Buffer(np.ascontiguousarray(array).view(np.uint8).reshape(-1)) for array in arrays)
    result = Result("accumulators", 3, 0, before.nbytes)
    return Case(name, program(text, len(before)), "k", buffers, (result,), block=WARPGROUP, shared_bytes=IMAGE)


def cases() -> Iterator[Case]:
    return (case for case in _drawn() if not _rounds(case.name))


def rounded_cases() -> Iterator[Case]:
    yield from (case for case in _drawn() if _rounds(case.name))
    yield from _random_products(Draw(31))


@cache
def _drawn() -> tuple[Case, ...]:
    draw = Draw(29)
    parts = (_types, _widths, _layouts, _signs, _saturated, _sparse, _special_values, _sequences)
    return tuple(case for part in parts for case in part(draw))


def _rounds(name: str) -> bool:
    """Whether a product meets a D that is too large for it, or FP8 a D with more bits than its f32 sums have."""
    full = name.startswith("any value") and name.endswith("keep True")
    return full or name.startswith(("special D f32 e4m3", "special D f32 e5m2"))


def accumulator(name: str) -> type:
    """NumPy type of D of a rounded case."""
    return DTYPES[_types_in(name)[0]]


def tolerance(name: str) -> float:
    """Largest difference of a rounded case, as a part of what is added up. The f32 sums of FP8 have 14 bits."""
    d, a, _ = _types_in(name)
    return 2.0**-9 if d == "f16" else 2.0**-12 if a in ("e4m3", "e5m2") else 2.0**-21


def _types_in(name: str) -> tuple[str, str, str]:
    return next(types for types in _FLOATS if f" {' '.join(types)}" in name)


def _types(draw: Draw) -> Iterator[Case]:
    for place, (d, a, b) in enumerate(TYPES):
        for in_registers in (False, True):
            for keep in (False, True):
                n = _WIDTHS[(place + 2 * in_registers + keep) % 4]
                p = product(d, a, b, n, a_in_registers=in_registers, rng=draw)
                where = "registers" if in_registers else "shared"
                yield _case(f"{d} {a} {b} n{n} A in {where} keep {keep}", p, random_d(draw, d, n), keep)


def _widths(draw: Draw) -> Iterator[Case]:
    for n in range(8, 257, 8):
        yield _case(f"width {n} f16", product("f32", n=n, rng=draw), random_d(draw, "f32", n), True)
        if n <= 32 or n % 16 == 0:
            yield _case(f"width {n} s8", product("s32", "s8", "s8", n, rng=draw), random_d(draw, "s32", n), True)


def _layouts(draw: Draw) -> Iterator[Case]:
    for swizzle in ("none", "32B", "64B", "128B"):
        for n in (64, 128, 192):
            p = product("f32", "bf16", "bf16", n, b_layout=(swizzle, True), a_in_registers=True, rng=draw)
            yield _case(f"MN-major B {swizzle} n{n}, A in registers", p, random_d(draw, "f32", n), False)


def _signs(draw: Draw) -> Iterator[Case]:
    for d, a, b in _FLOATS:
        for signs in ("-1, 1", "1, -1", "-1, -1"):
            p = product(d, a, b, 16, constants=signs + (", 0, 0" if a in ("f16", "bf16") else ""), rng=draw)
            yield _case(f"signs {signs} {d} {a} {b}", p, random_d(draw, d, 16), True)


def _saturated(draw: Draw) -> Iterator[Case]:
    for _, a, b in TYPES:
        if a in ("s8", "u8"):
            extremes = np.array([-(1 << 31), (1 << 31) - 1, 0, 7], np.int32)[draw.integers(0, 4, (M, 16))]
            p = product("s32", a, b, 16, rng=draw)
            yield _case(f"saturated {a} {b}", replace(p, opcode=f"{p.opcode}.satfinite"), extremes, True)


def _sparse(draw: Draw) -> Iterator[Case]:
    for place, (d, a, b) in enumerate(SPARSE_TYPES):
        for in_registers in (False, True):
            for selector in (0, 1) if K_OF[a] < 32 else (0,):
                n = _WIDTHS[(place + in_registers) % 4]
                p = product(
                    d, a, b, n, a_in_registers=in_registers, b_layout=("64B", False), sparse=f", %meta, {selector}",
                    rng=draw,
                )  # fmt: skip
                name = f"sparse {d} {a} {b} n{n} A in {'registers' if in_registers else 'shared'} selector {selector}"
                yield _case(name, p, random_d(draw, d, n), True, _metadata(draw, p, ORDERED))
    for a in ("f16", "e4m3"):
        p = product("f32", a, a, 16, b_layout=("64B", False), sparse=", %meta, 0", rng=draw)
        d = random_d(draw, "f32", 16)
        yield _case(f"sparse {a}, higher index first", p, d, True, _metadata(draw, p, _UNORDERED))


def _metadata(draw: Draw, p: Product, pairs: tuple[int, ...]) -> np.ndarray:
    """Registers (128,) full of legal indices. Lanes that the selector does not choose hold anything."""
    chunks = 8 if K_OF[p.a.kind] < 32 else 16
    legal = (0b0100, 0b1110) if p.a.kind == "tf32" else pairs
    indices = np.array(legal)[draw.integers(0, len(legal), (M, chunks))]
    halves = draw.integers(0, 1 << 32, (WARPGROUP,)).astype(np.uint32).view(np.uint16).reshape(4, 8, 4, 2)
    first = 2 * int(p.sparse[-1])
    parts = (indices.reshape(4, 2, 8, chunks // 4, 4) << 4 * np.arange(4)).sum(axis=-1)
    halves[:, :, first : first + chunks // 4] = parts.transpose(0, 2, 3, 1)
    return halves.reshape(-1).view(np.uint32)


def _special_values(draw: Draw) -> Iterator[Case]:
    """One element of each row of A is any code at all, the others are zeros."""
    for d, a, b in _FLOATS:
        p = product(d, a, b, 64, rng=draw)
        codes = np.zeros_like(p.a.codes)
        codes[np.arange(M), draw.integers(0, K_OF[a], (M,))] = draw.integers(0, 1 << BITS[a], (M,))
        p = replace(p, a=replace(p.a, codes=codes))
        for keep in (False, True):
            yield _case(f"any value {d} {a} {b} keep {keep}", p, random_d(draw, d, 64), keep)
        d_values = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-7, 65504.0])[draw.integers(0, 7, (M, 64))]
        p = product(d, a, b, 64, rng=draw)
        p = replace(p, a=replace(p.a, codes=np.zeros_like(p.a.codes)))
        yield _case(f"special D {d} {a} {b}", p, d_values.astype(DTYPES[d]), True)


def _sequences(draw: Draw) -> Iterator[Case]:
    for d, a, b in TYPES:
        p = product(d, a, b, 16, rng=draw)
        second = replace(p, first=p.registers)
        wait = "wgmma.wait_group.sync.aligned 1;"
        body = p.text + second.text + COMMIT + p.text + COMMIT + wait + second.text
        both = np.concatenate((random_d(draw, d, 16), random_d(draw, d, 16)), axis=1)
        yield _case(f"sequence {d} {a} {b}", p, both, True, body=body)


def _random_products(draw: Draw) -> Iterator[Case]:
    for d, a, b in _FLOATS:
        p = product(d, a, b, 64, rng=draw)
        p = replace(p, a=replace(p.a, codes=random_codes(draw, a, p.a.codes.shape)))
        p = replace(p, b=replace(p.b, codes=random_codes(draw, b, p.b.codes.shape)))
        old = draw.integers(-(1 << 20), 1 << 20, (M, 64)) / float(1 << 16)
        yield _case(f"rounded {d} {a} {b}", p, old.astype(DTYPES[d]), True)
