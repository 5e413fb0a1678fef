"""Sets of lanes: what narrowing returns, and which sets are ranges."""

from __future__ import annotations

import numpy as np
import pytest

from common.emulator.machine.mask import LaneRange, Mask


def lanes_of(*numbers: int, lanes: int = 128) -> np.ndarray:
    chosen = np.zeros(lanes, bool)
    chosen[list(numbers)] = True
    return chosen


@pytest.mark.parametrize("numbers", ((5,), (5, 6), tuple(range(128))))
@pytest.mark.parametrize("negated", (False, True))
def test_narrowing_to_all_of_its_lanes_returns_the_mask_itself(numbers: tuple[int, ...], negated: bool) -> None:
    """Callers tell by identity whether lanes are left over."""
    mask = Mask(lanes_of(*numbers))
    assert mask.narrow(lanes_of(*numbers) ^ negated, negated) is mask
    assert mask.narrow(~lanes_of(*numbers) ^ negated, negated) is None


def test_narrowing_to_one_lane() -> None:
    for mask in (Mask(np.ones(128, bool)), Mask(lanes_of(3, 70, 71))):
        one = mask.narrow(lanes_of(70, 90) if mask.count == 3 else lanes_of(70))
        assert one.numbers.tolist() == [70] and one.count == 1


@pytest.mark.parametrize(
    "numbers, expected",
    (
        ((17,), LaneRange(17, 18, 1)),
        ((30, 31, 32, 33), LaneRange(30, 34, 1)),
        ((30, 32), None),
        ((*range(32, 64), *range(96, 128)), LaneRange(32, 128, 2)),
        ((*range(0, 32), *range(96, 128)), LaneRange(0, 128, 3)),
        ((*range(0, 31), *range(64, 96)), None),
    ),
)
def test_ranges(numbers: tuple[int, ...], expected: LaneRange | None) -> None:
    assert Mask(lanes_of(*numbers)).range == expected


def test_the_value_that_lanes_have_in_common() -> None:
    values = np.arange(128) // 64
    assert Mask(lanes_of(1, 2, 63)).common(values) == 0
    assert Mask(lanes_of(63, 64)).common(values) is None
    assert Mask(lanes_of(64)).common(values) == 1
