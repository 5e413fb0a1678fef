"""The emulator's counters against a GPU's: see `counters.py`."""

from __future__ import annotations

import pytest

from tests.golden.counters import (
    OF_ACCESSES,
    OF_STAGES,
    STAGES,
    UNEXPLAINED,
    StageCase,
    counts_of_accesses,
    counts_of_stage,
    load,
)


def test_wavefronts_and_sectors_of_single_accesses() -> None:
    recorded = load()
    wrong = [
        f"{name}: {what}: {found[what]}, on the GPU {recorded[name][what]}"
        for name, found in counts_of_accesses()
        for what in OF_ACCESSES
        if found[what] != recorded[name][what] and name not in UNEXPLAINED
    ]
    assert not wrong, "\n".join(wrong)


def test_what_is_not_explained_is_a_sector_or_two() -> None:
    recorded = load()
    found = {name: counts for name, counts in counts_of_accesses() if name in UNEXPLAINED}
    more = [recorded[name]["sectors of atomics"] - found[name]["sectors of atomics"] for name in UNEXPLAINED]
    assert all(0 < difference <= 2 for difference in more)


@pytest.mark.parametrize("case", STAGES, ids=lambda case: case.name)
def test_wavefronts_and_sectors_of_a_stage(case: StageCase) -> None:
    found, recorded = counts_of_stage(case), load()[case.name]
    assert {what: found[what] for what in OF_STAGES} == {what: recorded[what] for what in OF_STAGES}
