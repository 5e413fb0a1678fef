"""Bias, activation and residual of stage 08: in torch, and in the kernel."""

from functools import cache, partial

import pytest
import torch

from common.build import build
from common.emulator.machine.scheduler import Limits
from common.epilogue import finished_product, operands
from common.verify import make_arguments, verify_stage
from tests.stages import load_stage

STAGE = load_stage(8)


@cache
def built(epilogue: str, n: int, dtype: str = "float16"):
    config = STAGE.config(m=300, n=n, k=72, tile="256x128", dtype=dtype, epilogue=epilogue)
    return config, build(STAGE.kernel(config))


@pytest.mark.parametrize(
    ("epilogue", "n", "dtype"),
    [
        ("bias", 129, "float16"),  # loads of one element, and a tile with one column
        ("bias-gelu", 136, "bfloat16"),
        ("bias-residual", 140, "float16"),  # loads of four elements, rows that TMA cannot store
    ],
)
def test_verifies_under_every_schedule(epilogue: str, n: int, dtype: str) -> None:
    config, kernel = built(epilogue, n, dtype)
    verify_stage(STAGE, config, kernel=partial(kernel, limits=Limits(sm_count=2)))


def test_operands_are_those_that_the_epilogue_names() -> None:
    shapes = {
        epilogue: [tuple(o.shape) for o in operands(STAGE.config(m=3, n=5, k=8, epilogue=epilogue), torch.Generator())]
        for epilogue in ("none", "bias", "bias-gelu", "bias-residual")
    }
    assert shapes == {"none": [], "bias": [(5,)], "bias-gelu": [(5,)], "bias-residual": [(5,), (3, 5)]}


def test_the_reference_is_what_torch_says() -> None:
    product, bias = torch.linspace(-8, 8, 20).reshape(4, 5).double(), torch.arange(5).half()
    residual = torch.full((4, 5), 3.0).half()

    def finished(epilogue: str, *added: torch.Tensor) -> torch.Tensor:
        return finished_product(STAGE.config(m=4, n=5, k=8, epilogue=epilogue), product, *added)

    gelu = torch.nn.functional.gelu(product + bias.double(), approximate="tanh")
    assert torch.equal(finished("none"), product)
    assert torch.equal(finished("bias", bias), product + bias.double())
    assert torch.equal(finished("bias-gelu", bias), gelu)
    assert torch.equal(finished("bias-residual", bias, residual), product + bias.double() + 3)


def test_gelu_has_neither_overflow_nor_cancellation() -> None:
    """A and B make D run from -1000 to 1000, where 2^power overflows; small negative results keep their digits."""
    config, kernel = built("bias-gelu", 136, "bfloat16")
    a, b = torch.zeros(config.m, config.k).bfloat16(), torch.zeros(config.n, config.k).bfloat16()
    a[:, 0], b[:, 0] = torch.linspace(-1000, 1000, config.m).bfloat16(), 1
    b[1:, 0] = torch.linspace(0.001, 0.01, config.n - 1).bfloat16()
    bias, d = torch.zeros(config.n).bfloat16(), torch.empty(config.m, config.n).bfloat16()
    kernel(a, b, bias, d)
    expected = torch.nn.functional.gelu(a.double() @ b.double().t(), approximate="tanh")
    assert d.isfinite().all()
    torch.testing.assert_close(d.double(), expected, rtol=2.0**-7, atol=1e-6)


def test_bias_is_read_as_wide_as_its_rows_allow() -> None:
    config, kernel = built("bias-gelu", 136, "bfloat16")
    inputs, outputs = make_arguments(STAGE, config, seed=0)
    total = kernel(*inputs, *outputs, schedule="early").counters.total()
    # All lanes of a warp read the same 16 bytes: one sector. 12 warps hold rows of D, and 17 vectors are a row of bias.
    assert total.global_requests == total.sectors
