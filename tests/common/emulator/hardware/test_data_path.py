"""Data paths of tensor memory against cell-by-cell formulas and TIRx's layouts."""

import pytest
from tvm.tirx.layout import tmem_datapath_layout

from common.emulator.faults import DescriptorFault
from common.emulator.hardware.data_path import data_path
from common.emulator.hardware.instruction_descriptor import InstructionDescriptor, MmaForm
from tests.common.emulator.isa.mma_programs import instruction_bits
from tests.common.emulator.isa.mma_reference import accumulator_cell

CASES = [  # form, M, layout
    (MmaForm("f16", 2), 256, "A"),
    (MmaForm("f16", 2), 128, "B"),
    (MmaForm("f16", 2, False, True), 128, "C"),
    (MmaForm("f16", 2, False, True), 256, "A"),
    (MmaForm("f16"), 128, "D"),
    (MmaForm("f16", 1, False, True), 128, "D"),
    (MmaForm("f16", 1, True), 128, "D"),
    (MmaForm("f16", 1, True), 64, "E"),
    (MmaForm("f16"), 64, "F"),
    (MmaForm("f16", 1, False, True), 64, "F"),
    (MmaForm("f16", 1, True), 32, "G"),
]


def path_of(form: MmaForm, m: int):
    bits = instruction_bits(m, 64, "f16", "f16", "f32", sparse=form.sparse)
    return data_path(InstructionDescriptor.from_bits(bits, form))


@pytest.mark.parametrize("form,m,layout", CASES, ids=str)
def test_cells_of_the_accumulator(form, m, layout):
    path, n = path_of(form, m), 64
    assert path.name == layout
    for start in (0, 16) if path.half else (0,):
        covered = set()
        for fold in range(path.folds):
            lanes = path.lanes(fold, start)
            for row in range(m // form.group):
                for column in range(n // path.folds):
                    expected = accumulator_cell(row, fold * n // path.folds + column, (m, n), layout, start)
                    assert (0, lanes[row], column) == expected
            covered |= set(lanes.tolist())
        marked = {lane + place for lane, count in path.rectangles(start) for place in range(count)}
        assert covered == marked


@pytest.mark.parametrize("layout,rows", [("D", 128), ("F", 64), ("B", 64)])
def test_cells_are_where_tirx_has_them(layout, rows):
    form, m = {"D": (MmaForm("f16"), 128), "F": (MmaForm("f16"), 64), "B": (MmaForm("f16", 2), 128)}[layout]
    path, n = path_of(form, m), 64
    theirs = tmem_datapath_layout(layout, rows, n)
    width = n // path.folds
    for row in range(rows):
        for column in range(n):
            place = theirs.apply(row, column, shape=(rows, n))
            fold = column // width
            assert int(place["TLane"]) == path.lanes(fold)[row]
            assert int(place["TCol"]) == column % width


def test_lane_alignment():
    with pytest.raises(DescriptorFault, match="lane 8 .* must be 0 or 16 for data path layout F"):
        path_of(MmaForm("f16"), 64).check_start(8, "D")
    with pytest.raises(DescriptorFault, match="lane 16 .* must be 0 for data path layout D"):
        path_of(MmaForm("f16"), 128).check_start(16, "D")
