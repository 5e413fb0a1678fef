"""Swizzles against the tables of PTX ISA 5.5.7, written out here as they stand there."""

import numpy as np
import pytest

from common.emulator.hardware.swizzle import Swizzle, swizzle_addresses, swizzle_chunks, swizzle_pattern

# Row r, cell c: the number of the 16-byte source chunk (within its 128-byte line) that cell c of line r holds.
TABLES = {
    Swizzle.NONE: ["01234567", "01234567"],
    Swizzle.B32: ["01234567", "10325476"],
    Swizzle.B64: ["01234567", "10325476", "23016745", "32107654"],
    Swizzle.B128: [
        "01234567",
        "10325476",
        "23016745",
        "32107654",
        "45670123",
        "54761032",
        "67452301",
        "76543210",
    ],
    Swizzle.B128_ATOM_32B: ["01234567", "23016745", "45670123", "67452301"],
    Swizzle.B128_ATOM_64B: ["01234567", "45670123"],
}


@pytest.mark.parametrize("mode", TABLES)
def test_chunks_follow_the_tables(mode):
    table = TABLES[mode]
    for line in range(24):
        for cell, source in enumerate(table[line % len(table)]):
            linear = line * 128 + int(source) * 16
            for byte in (0, 7, 8, 15):
                assert swizzle_addresses(mode, linear + byte) == line * 128 + cell * 16 + byte


def test_flip_mode_also_swaps_eight_byte_halves_in_odd_lines():
    addresses = np.arange(4096)
    plain = swizzle_addresses(Swizzle.B128_ATOM_32B, addresses)
    flipped = swizzle_addresses(Swizzle.B128_ATOM_32B_FLIP_8B, addresses)
    odd = (addresses // 128) % 2 == 1
    assert np.array_equal(flipped[~odd], plain[~odd])
    assert np.array_equal(flipped[odd], plain[odd] ^ 8)


@pytest.mark.parametrize("mode", Swizzle)
def test_a_swizzle_is_its_own_inverse_and_a_permutation_of_each_span(mode):
    addresses = np.arange(1 << 14, dtype=np.int64)
    swizzled = swizzle_addresses(mode, addresses)
    pattern = swizzle_pattern(mode)
    assert swizzled.dtype == np.int64
    assert np.array_equal(swizzle_addresses(mode, swizzled), addresses)
    assert np.array_equal(swizzled // pattern.span, addresses // pattern.span)


@pytest.mark.parametrize("mode", Swizzle)
def test_pattern_describes_the_function(mode):
    pattern = swizzle_pattern(mode)
    addresses = np.arange(4 * pattern.repeat)
    moved = swizzle_addresses(mode, addresses) - addresses
    assert np.array_equal(moved[: 3 * pattern.repeat], moved[pattern.repeat :])
    if mode != Swizzle.NONE:
        assert not np.array_equal(moved[: pattern.repeat // 2], moved[pattern.repeat // 2 : pattern.repeat])
    granules = swizzle_addresses(mode, addresses).reshape(-1, pattern.granule)
    assert np.array_equal(granules, granules[:, :1] + np.arange(pattern.granule))
    if pattern.granule == 16:
        atoms = swizzle_addresses(mode, addresses).reshape(-1, pattern.atom)
        assert np.array_equal(atoms, atoms[:, :1] + np.arange(pattern.atom))


def test_absolute_addresses_count_not_offsets():
    offsets = np.arange(0, 256, 16)
    assert np.array_equal(swizzle_chunks(Swizzle.B128, 2048, offsets)[:8], offsets[:8])
    assert list(swizzle_chunks(Swizzle.B128, 2048 + 3 * 128, offsets)[:4]) == [48, 32, 16, 0]
    with pytest.raises(ValueError, match="0x40 is not a multiple of 128"):
        swizzle_chunks(Swizzle.B128, 64, offsets)


@pytest.mark.parametrize("mode", [-1, 7, 96])
def test_unknown_modes_are_refused(mode):
    with pytest.raises(ValueError, match="96-byte mode exists on sm_103a alone"):
        swizzle_addresses(mode, 0)
