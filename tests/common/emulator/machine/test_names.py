"""What a place in shared memory is called."""

import pytest

from common.emulator.machine.names import SharedArray, SharedNames

ARRAYS = [
    SharedArray("full", offset=0, size=24, count=3),
    SharedArray("ring", offset=1024, size=65536, count=2),
    SharedArray("scratch", offset=1024, size=512, count=4),  # over the start of the ring
]


@pytest.mark.parametrize(
    ("offset", "name"),
    [
        (0x400, "full[0] (0x400)"),
        (0x410, "full[2] (0x410)"),
        (0x418, "0x418"),
        (0x3F8, "0x3f8"),
        (0x800, "scratch[0] (0x800)"),
        (0x890, "scratch[1] + 16 (0x890)"),
        (0xA00, "ring[0] + 512 (0xa00)"),
        (0x8800, "ring[1] (0x8800)"),
        (0x10800, "0x10800"),
    ],
)
def test_the_smallest_array_names_a_place(offset: int, name: str) -> None:
    assert SharedNames(ARRAYS, start=0x400).describe(offset) == name


def test_without_names_there_are_addresses() -> None:
    assert SharedNames().describe(0x408) == "0x408"
