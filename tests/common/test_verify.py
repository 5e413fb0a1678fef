import pytest
import torch

from common.verify import Mismatch, Tolerance, compare, poisoned, verify_once, verify_stage
from tests.common.kernels import toy_stage

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", FLOATS)
def test_poison_is_nan_in_every_float_type(dtype):
    assert poisoned((3, 5), dtype).float().isnan().all()


def test_poison_of_integers_is_minus_one():
    assert (poisoned((2, 2), torch.int32) == -1).all()


def test_a_correctly_rounded_output_passes():
    reference = torch.randn(64, 64, dtype=torch.float64)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        result = compare("y", reference.to(dtype), reference, Tolerance())
        assert result.worst <= 1 and result.relative_error <= result.allowed_error


def test_the_first_wrong_index_is_shown_with_both_values():
    reference = torch.ones(4, 8, dtype=torch.float64)
    got = torch.ones(4, 8)
    got[2, 5], got[3, 1] = 1.25, 7
    with pytest.raises(
        Mismatch, match=r"y\[2, 5\] is 1.25, expected 1 .*2 of 32 elements are wrong, all in y\[2:4, 1:6\]"
    ):
        compare("y", got, reference, Tolerance())


def test_an_unwritten_element_is_called_that():
    got = torch.ones(2, 2, dtype=torch.float16)
    got[1, 0] = poisoned((1,), torch.float16)[0]
    with pytest.raises(Mismatch, match=r"y\[1, 0\] is nan \(never written"):
        compare("y", got, torch.ones(2, 2), Tolerance())


def test_nan_does_not_match_nan():
    nan = torch.full((3,), float("nan"))
    with pytest.raises(Mismatch, match=r"y\[0\] is nan"):
        compare("y", nan, nan.double(), Tolerance())


def test_infinities_match_only_themselves():
    infinite = torch.tensor([float("inf"), 1.0])
    compare("y", infinite, infinite.double(), Tolerance())
    with pytest.raises(Mismatch):
        compare("y", -infinite, infinite.double(), Tolerance())


def test_one_rounding_of_the_output_is_the_limit():
    reference = torch.full((1000,), 1.0, dtype=torch.float64)
    off = torch.full((1000,), 1.0, dtype=torch.float16)
    off[3] += 2**-10
    with pytest.raises(Mismatch, match=r"y\[3\]"):
        compare("y", off, reference, Tolerance())
    compare("y", off, reference, Tolerance(roundings=2.1))


def test_terms_allow_for_accumulation():
    reference = torch.ones(100, dtype=torch.float64)
    got = (reference + 1000 * 2.0**-24).float()
    with pytest.raises(Mismatch):
        compare("y", got, reference, Tolerance(terms=1, norm=1.0))
    compare("y", got, reference, Tolerance(terms=1000, norm=1.0))


def test_rows_of_different_size_are_each_their_own_scale():
    """A zero among elements of 1 is a sum that cancels; among elements of 0.001 it is a smaller one."""
    reference = torch.tensor([[0.0, 1.0, 1.0, 1.0], [0.0, 1e-3, 1e-3, 1e-3]], dtype=torch.float64)
    got = (reference + torch.tensor([[1e-4, 0, 0, 0], [1e-4, 0, 0, 0]])).float()
    compare("y", got, reference, Tolerance(terms=3000, norm=1.0))
    with pytest.raises(Mismatch, match=r"y\[1, 0\].* 1 of 8 elements"):
        compare("y", got, reference, Tolerance(terms=3000, norm=1.0, by_row=True))


def test_a_small_error_everywhere_fails_in_norm():
    reference = torch.ones(100, dtype=torch.float64)
    with pytest.raises(Mismatch, match="‖out"):
        compare("y", (reference * 1.0001).float(), reference, Tolerance(terms=10**6))


def test_integers_match_bit_for_bit():
    compare("y", torch.arange(4), torch.arange(4), Tolerance())
    with pytest.raises(Mismatch, match=r"y\[2\] is 9, expected 2; 1 of 4 elements are wrong, all in y\[2:3\]"):
        compare("y", torch.tensor([0, 1, 9, 3]), torch.arange(4), Tolerance())


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="shape"):
        compare("y", torch.ones(2), torch.ones(3), Tolerance())


def test_a_kernel_that_writes_its_input_is_caught():
    stage = toy_stage()

    def run(x, w, s, n, y):
        y.copy_((x.double() * w.double() * s + n).float())
        x[0, 0] += 1

    with pytest.raises(Mismatch, match="input at position 0"):
        verify_once(stage, stage.config(), run, seed=0)


def test_every_schedule_gets_new_inputs(fake_emulator):
    stage = toy_stage()
    done = verify_stage(stage, stage.config(), seed=5)
    assert [(v.schedule, v.seed) for v in done] == [("late", 5), ("early", 6), ("random", 7)]
    first, second, _ = (launch["args"][0] for launch in fake_emulator.launches)
    assert not torch.equal(first, second)


def test_a_mismatch_names_its_schedule(fake_emulator):
    fake_emulator.break_result = lambda x, y: y[1, 3].fill_(100)
    stage = toy_stage()
    with pytest.raises(Mismatch, match=r"schedule early, seed 0: output\[1, 3\] is 100"):
        verify_stage(stage, stage.config(), ["early"])
