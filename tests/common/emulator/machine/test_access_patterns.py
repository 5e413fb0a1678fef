"""Wavefronts and sectors against definitions that go byte by byte, lane by lane."""

import numpy as np
import pytest

from common.emulator.machine.access_patterns import INACTIVE, PatternCosts, SectorPattern, SharedPattern

WIDTHS = (1, 2, 4, 8, 16)
LANES = np.arange(32)


def wavefronts(offsets, width, kind):
    """(wavefronts, phases with an active lane) of one warp; INACTIVE lanes take no part."""
    lanes_of_phase = len(offsets) if width < 8 else 128 // width
    if kind == "load" and width >= 8 and (paired(offsets, 1) or paired(offsets, 2)):
        lanes_of_phase *= 2
    total = busy = 0
    for first in range(0, len(offsets), lanes_of_phase):
        banks = {}
        for lane in range(first, first + lanes_of_phase):
            if offsets[lane] == INACTIVE:
                continue
            for word in {(int(offsets[lane]) + byte) // 4 for byte in range(width)}:
                banks.setdefault(word % 32, []).append(word)
        passes = [len(words) if kind == "atomic" else len(set(words)) for words in banks.values()]
        total += max(passes, default=0)
        busy += bool(passes)
    return total, busy


def paired(offsets, distance):
    pairs = [(int(offsets[lane]), int(offsets[lane ^ distance])) for lane in range(32)]
    return all(a == b or INACTIVE in (a, b) for a, b in pairs)


def sectors(offsets, width, kind):
    bytes_touched = {int(o) + byte for o in offsets if o != INACTIVE for byte in range(width)}
    taken, touched = {}, set()
    for offset in offsets[offsets != INACTIVE].tolist():
        taken[offset] = taken.get(offset, 0) + 1
        touched.add((offset // 32, taken[offset] if kind == "atomic" else 0))
    return len(touched), -(-len(bytes_touched) // 32)


def shared_cost(rows, width, kind="load"):
    rows = np.atleast_2d(np.asarray(rows, np.int64))
    return tuple(PatternCosts(SharedPattern(width, kind, rows.shape[1])).total(rows))


def sector_cost(rows, width, kind="load"):
    return tuple(PatternCosts(SectorPattern(width, kind)).total(np.atleast_2d(np.asarray(rows, np.int64))))


@pytest.mark.parametrize("ways", [1, 2, 4, 8, 16, 32])
def test_a_power_of_two_stride_conflicts_as_many_ways(ways):
    assert shared_cost(LANES * 4 * ways, 4) == (ways, 1)


@pytest.mark.parametrize("stride", [3, 5, 7, 17, 31, 33])
def test_odd_strides_and_padded_columns_are_free_of_conflicts(stride):
    assert shared_cost(LANES * 4 * stride, 4) == (1, 1)


def test_lanes_that_want_one_word_share_a_wavefront():
    assert shared_cost(np.full(32, 1024), 4) == (1, 1)
    assert shared_cost(LANES, 1) == (1, 1)  # four lanes in a word
    assert shared_cost(LANES // 16 * 128, 4) == (2, 1)  # two words of one bank


@pytest.mark.parametrize("width, phases", [(4, 1), (8, 2), (16, 4)])
def test_wide_accesses_take_a_wavefront_for_each_128_bytes(width, phases):
    assert shared_cost(LANES * width, width) == (phases, phases)
    assert shared_cost(LANES * width, width, "store") == (phases, phases)


@pytest.mark.parametrize("width, phases", [(8, 1), (16, 2)])
@pytest.mark.parametrize("distance", [1, 2])
def test_loads_by_pairs_of_lanes_take_half_the_phases(width, phases, distance):
    offsets = (LANES & ~distance) * width
    free = {1: LANES // 2, 2: LANES // 4 * 2 + LANES % 2}[distance] * width
    assert shared_cost(free, width) == (phases, phases)
    assert shared_cost(free, width, "store") == (2 * phases, 2 * phases)
    assert shared_cost(offsets, width) == (2 * phases, phases)


def test_a_row_major_tile_read_by_columns_conflicts_unless_it_is_swizzled():
    rows = LANES % 8
    plain = rows * 128
    assert shared_cost(plain[None, :8], 16, "matrix") == (8, 1)
    swizzled = rows * 128 + (rows * 16)
    assert shared_cost(swizzled[None, :8], 16, "matrix") == (1, 1)
    assert shared_cost(np.concatenate([plain[:8] + 16 * column for column in range(4)]), 16, "matrix") == (32, 4)


def test_atomics_serve_the_lanes_of_one_word_one_after_the_other():
    assert shared_cost(np.zeros(32), 4, "atomic") == (32, 1)
    assert shared_cost(LANES * 4, 4, "atomic") == (1, 1)
    assert shared_cost(LANES // 2 * 4, 4, "atomic") == (2, 1)


@pytest.mark.parametrize("width", [*WIDTHS, 32])
def test_coalesced_accesses_touch_no_more_sectors_than_their_bytes_fill(width):
    assert sector_cost(LANES * width, width) == (width, width)


@pytest.mark.parametrize("stride, expected", [(1, 4), (2, 8), (4, 16), (8, 32), (1000, 32)])
def test_strided_floats_touch_more_sectors(stride, expected):
    assert sector_cost(LANES * 4 * stride, 4) == (expected, 4)


@pytest.mark.parametrize("shift, expected", [(0, 4), (4, 5), (16, 5), (28, 5), (32, 4), (96, 4)])
def test_a_segment_off_the_sector_boundary_touches_one_more(shift, expected):
    assert sector_cost(LANES * 4 + shift, 4) == (expected, 4)


def test_lanes_that_read_one_element_need_one_sector():
    assert sector_cost(np.full(32, 4096), 4) == (1, 1)


def test_global_atomics_of_lanes_at_one_address_take_turns():
    assert sector_cost(np.zeros(32), 4, "atomic") == (32, 1)
    assert sector_cost(LANES * 4, 4, "atomic") == (4, 4)
    assert sector_cost(LANES % 16 * 4, 4, "atomic") == (4, 2)


def test_far_apart_addresses_do_not_wrap():
    assert sector_cost(LANES * (1 << 36), 4) == (32, 4)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", ["load", "store", "atomic"])
def test_random_patterns_against_the_definition(kind, width, seed):
    rows = random_rows(np.random.default_rng(seed), width)
    expected = np.sum([(*wavefronts(row, width, kind), *sectors(row, width, kind)) for row in rows], axis=0)
    assert (*shared_cost(rows, width, kind), *sector_cost(rows, width, kind)) == tuple(expected)


def random_rows(random, width):
    """Warps with random, strided, repeated and paired addresses, some with inactive lanes, in random order."""
    rows = []
    for span in (4, 40, 400, 4000):
        rows.append(random.integers(0, span, 32))
        rows.append(random.integers(0, span) + LANES * random.integers(0, span))
        rows.append(np.repeat(random.integers(0, span, 16), 2))
        rows.append(np.tile(random.integers(0, span, (8, 1, 2)), (1, 2, 1)).reshape(32))
    rows = np.array(rows) * width
    thinned = np.where(random.random(rows.shape) < random.choice([0.1, 0.5, 0.9], (len(rows), 1)), INACTIVE, rows)
    kept = thinned[(thinned != INACTIVE).any(axis=1)]
    everything = np.concatenate((rows, rows, kept, rows + 128 * width))
    return random.permutation(everything)


def test_costs_stay_right_when_more_patterns_come_than_are_remembered():
    costs, random = PatternCosts(SharedPattern(4, "load")), np.random.default_rng(0)
    for _ in range(4):
        rows = random.integers(0, 256, (600, 32)) * 4
        assert costs.total(rows) == (sum(wavefronts(row, 4, "load")[0] for row in rows), 600)
        assert costs.total(rows[:50]).actual == sum(wavefronts(row, 4, "load")[0] for row in rows[:50])
