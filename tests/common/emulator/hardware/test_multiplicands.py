"""Bits of multiplicands to numbers: float16 takes a short way that leaves infinities and NaN to a table."""

from __future__ import annotations

import numpy as np
import pytest

from common.emulator.hardware.multiplicands import smem_decoder

ALL = np.arange(1 << 16, dtype=np.uint16)
FINITE = ALL[ALL & 0x7C00 != 0x7C00]
SPECIAL = ALL[ALL & 0x7C00 == 0x7C00]


def bits_of(halves: np.ndarray) -> np.ndarray:
    return smem_decoder("f16", packed=False)(halves.reshape(-1, 8)).view(np.uint32).reshape(-1)


def expected(halves: np.ndarray) -> np.ndarray:
    return halves.view(np.float16).astype(np.float32).view(np.uint32)


@pytest.mark.parametrize("halves", (FINITE, ALL), ids=("finite", "all"))
def test_every_half(halves: np.ndarray) -> None:
    np.testing.assert_array_equal(bits_of(halves), expected(halves))


def test_one_special_value_among_numbers() -> None:
    for special in SPECIAL[::31]:
        halves = np.array([0x3C00, 0xBC00, 0, 0x8000, 1, 0x8001, 0x7BFF, special], np.uint16)
        np.testing.assert_array_equal(bits_of(halves), expected(halves))
