"""The emulator against what a GPU recorded for the same programs: see `capture.py`."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from tests.golden import approximations, cases_matrix, cases_wgmma_types
from tests.golden.case import Case
from tests.golden.emulated import run_emulated
from tests.golden.families import EXACT, FAMILIES, TOLERANT, Golden, Recorded
from tests.golden.known_differences import KNOWN

ASYNCHRONOUS = ("wgmma", "wgmma_types", "bulk", "tma", "im2col", "tensormap", "mbarrier")


@cache
def golden(family: str) -> Golden:
    """What was recorded; skips the test where that is still to be done."""
    try:
        return Golden.load(family)
    except FileNotFoundError:
        pytest.skip(f"{family} has not been captured yet: run python -m tests.golden.capture {family} on a Hopper GPU")


@cache
def _tolerant(family: str) -> list[tuple[Case, dict[str, np.ndarray]]]:
    """The cases and what the emulator makes of them."""
    return [(case, case.cut(run_emulated(case, "early"), case.results)) for case in TOLERANT[family]()]


def _chunks(family: str) -> list[tuple[str, int]]:
    return [(family, part) for part in range(8 if family == "tma" else 4)]


def _recorded(family: str, case: Case) -> dict[str, Recorded]:
    record = golden(family)
    assert case.name in record.results, f"{case.name} was never captured: run python -m tests.golden.capture {family}"
    assert record.fingerprints[case.name] == case.fingerprint(), (
        f"{case.name} is not the program that was captured: run python -m tests.golden.capture {family} on a Hopper GPU"
    )
    return record.results[case.name]


def _complaint(family: str, case: Case, name: str, found: np.ndarray, recorded: Recorded) -> str:
    """Where the first of the kept bytes differs, if they do."""
    kept = np.frombuffer(recorded.first, np.uint8)
    differs = np.flatnonzero(found[: kept.size] != kept)
    if not differs.size:
        return f"{family} / {case.name} / {name}: differs after the first {kept.size} bytes, which are kept"
    place = int(differs[0]) // 4 * 4
    shown = [data[place : place + 8].tobytes().hex() for data in (kept, found)]
    return f"{family} / {case.name} / {name}: from byte {place} on the GPU has {shown[0]}, this {shown[1]}"


def _compare(family: str, case: Case, found: dict[str, np.ndarray]) -> list[str]:
    """What is wrong."""
    recorded = _recorded(family, case)
    return [
        _complaint(family, case, name, data, recorded[name])
        for name, data in found.items()
        if Recorded.of(data, 0).crc != recorded[name].crc
    ]


@pytest.mark.parametrize(("family", "part"), [chunk for family in EXACT for chunk in _chunks(family)])
def test_bit_for_bit(family: str, part: int) -> None:
    schedule = "late" if family in ASYNCHRONOUS else "early"
    wrong = []
    for case in list(EXACT[family]())[part :: len(_chunks(family))]:
        wrong += _compare(family, case, case.cut(run_emulated(case, schedule), case.results))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_case_was_recorded_as_it_is(family: str) -> None:
    recorded = golden(family)
    assert recorded.fingerprints == {case.name: case.fingerprint() for case in FAMILIES[family]()}


@pytest.mark.parametrize("family", TOLERANT)
def test_differences_are_the_known_ones(family: str) -> None:
    entries = {part for of, part in KNOWN if of == family}
    seen = set()
    for case, found in _tolerant(family):
        for name, data in found.items():
            if Recorded.of(data, 0).crc != _recorded(family, case)[name].crc:
                explaining = {part for part in entries if part in name}
                assert explaining, f"{family} / {name} differs, and known_differences.py does not say why"
                seen |= explaining
    assert seen == entries, f"no longer different: {entries - seen}"


def test_rounded_matrix_products() -> None:
    """Sums of random products: the GPU aligns and cuts them off, the emulator rounds; they stay close."""
    for case, found in _tolerant("rounded"):
        recorded = _recorded("rounded", case)
        for name, data in found.items():
            accumulator = name.split()[0].split(".")[-1]
            dtype = np.float16 if accumulator == "f16" else np.float32
            gpu = np.frombuffer(recorded[name].first, dtype).astype(np.float64)
            difference = np.abs(gpu - data.view(dtype)[: gpu.size]).max()
            assert difference <= cases_matrix.TOLERANCE[accumulator], f"{case.name} / {name}: off by {difference}"


def test_rounded_wgmma_products() -> None:
    """The same for wgmma, by what is added up: D and the product, or the largest of a product of random matrices."""
    for case, found in _tolerant("wgmma_rounded"):
        recorded = _recorded("wgmma_rounded", case)["accumulators"]
        dtype = cases_wgmma_types.accumulator(case.name)
        gpu = np.frombuffer(recorded.first, dtype).astype(np.float64)
        before = case.args[1].initial  # D, which the product is added to
        cpu, d = (data.view(dtype)[: gpu.size].astype(np.float64) for data in (found["accumulators"], before))
        finite = np.isfinite(gpu)
        assert np.array_equal(gpu[~finite], cpu[~finite], equal_nan=True), case.name
        gpu, cpu, d = gpu[finite], cpu[finite], d[finite]
        scale = np.maximum(np.abs(d), np.abs(cpu - d))
        if case.name.startswith("rounded"):
            scale[:] = scale.max()
        worst = (np.abs(gpu - cpu) / np.maximum(scale, 1e-30)).max()
        assert worst <= cases_wgmma_types.tolerance(case.name), f"{case.name}: off by {worst} of what is added up"


def test_approximate_functions() -> None:
    """The emulator's worst errors are those of the table; infinities, zeros and NaNs are where the GPU has them."""
    table = approximations.load()
    for case, found in _tolerant("approximate"):
        recorded = _recorded("approximate", case)
        for name, (error, unit, _) in approximations.worst_errors(case, found).items():
            assert error <= table[name].emulator * 1.01, f"{name}: {error} {unit}, the table has {table[name].emulator}"
            first = np.frombuffer(recorded[name].first, np.uint8)
            gpu, cpu = (approximations.classes(data, name) for data in (first, found[name][: first.size]))
            assert np.array_equal(gpu, cpu), f"{name}: element {np.flatnonzero(gpu != cpu)[0]} is of another class"
