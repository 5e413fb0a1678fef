"""Every GEMM is a small change of the one before."""

import pytest

from common.series import stage_diff


@pytest.mark.parametrize("number", [6, 7, 8])
def test_a_gemm_changes_fewer_than_150_lines_of_the_one_before(number: int) -> None:
    """Counted as `make diff-NN` shows them: every line removed, and every line added."""
    lines = stage_diff(number).splitlines()
    assert 0 < sum(line[0] in "+-" for line in lines[2:]) < 150
