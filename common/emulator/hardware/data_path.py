"""Which lane and column of tensor memory holds which element: the data paths A to G (PTX ISA 9.7.16.10.5).

The manual gives the organisations in figures; the formulas here are those that CUTLASS (`mma_traits_sm100_frag.hpp`)
and TIRx (`tmem_datapath_layout`) agree on, for the rows of one CTA:

    A, D  row m in lane m, column n in column n
    F, C  row m in lane m % 16 + 32 (m / 16) (+ 16), column n in column n: 16 of the 32 lanes of each warp are used
    B, E  row m in lane m + 64 h, column n in column n - h N/2, with h the half of N that n is in
    G     row m in lane m + 32 q, column n in column n - q N/4, with q the quarter of N that n is in

Where N is folded over lanes, each part of the lanes multiplies with its own copy of A, metadata and scale factors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from common.emulator.faults import DescriptorFault
from common.emulator.hardware.instruction_descriptor import InstructionDescriptor

LANES = 128
PARTITION = 32  # lanes that belong to one warp of a warpgroup
HALF_PARTITION = 16


@dataclass(frozen=True)
class DataPath:
    """One organisation: `rows` of a CTA, and `folds` parts of N that lie in different lanes.

    `half`: only 16 lanes of each partition are used, from lane 0 or 16 on.
    """

    name: str
    rows: int
    folds: int = 1
    half: bool = False

    @property
    def extent(self) -> int:
        """Lanes from the first to the last row of a fold."""
        return PARTITION * (self.rows // HALF_PARTITION) - HALF_PARTITION if self.half else self.rows

    @cached_property
    def within(self) -> slice | np.ndarray:
        """The rows' lanes among the `extent` lanes of a fold: all of them, or an index array."""
        if not self.half:
            return slice(None)
        row = np.arange(self.rows)
        return row % HALF_PARTITION + PARTITION * (row // HALF_PARTITION)

    def first_lane(self, fold: int, start: int) -> int:
        """First lane of a fold; `start` is the lane of the operand's address."""
        return start + fold * self.rows

    def lanes(self, fold: int = 0, start: int = 0) -> np.ndarray:
        """Lanes of the rows of a fold, in order (rows,)."""
        return self.first_lane(fold, start) + np.arange(self.extent)[self.within]

    def rectangles(self, start: int) -> list[tuple[int, int]]:
        """(first lane, lanes) of the contiguous parts of all folds."""
        if not self.half:
            return [(start, self.folds * self.rows)]
        return [(start + PARTITION * part, HALF_PARTITION) for part in range(self.rows // HALF_PARTITION)]

    def check_start(self, lane: int, what: str) -> None:
        """Raises DescriptorFault unless an operand's address may have this lane."""
        allowed = (0, HALF_PARTITION) if self.half else (0,)
        if lane not in allowed:
            raise DescriptorFault(
                f"{what}: lane {lane} of its tensor memory address must be {' or '.join(map(str, allowed))} "
                f"for data path layout {self.name}"
            )


_A, _D = DataPath("A", 128), DataPath("D", 128)
_B, _E = DataPath("B", 64, 2), DataPath("E", 64, 2)
_C, _F = DataPath("C", 64, half=True), DataPath("F", 64, half=True)
_G = DataPath("G", 32, 4)


def data_path(descriptor: InstructionDescriptor) -> DataPath:
    """The organisation an instruction uses in each CTA that takes part."""
    form = descriptor.form
    if form.group == 2:
        if descriptor.m == 256:
            return _A
        return _C if form.sparse else _B
    if descriptor.m == 128:
        return _D
    if descriptor.m == 32:
        return _G
    return _E if form.weight_stationary else _F
