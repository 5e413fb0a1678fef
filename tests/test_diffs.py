"""Every GEMM is a small change of the one before."""

import difflib

import pytest

from common.series import stage_script


@pytest.mark.parametrize("number", [6, 7, 8])
def test_a_gemm_changes_fewer_than_150_lines_of_the_one_before(number: int) -> None:
    """Lines that were removed or added; one that replaces another counts once."""
    before, after = (stage_script(n).read_text(encoding="utf-8").splitlines() for n in (number - 1, number))
    edits = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    changed = sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in edits if tag != "equal")
    assert 0 < changed < 150
