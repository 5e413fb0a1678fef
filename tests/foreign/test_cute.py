"""Kernels that CuTe DSL compiled, under every schedule, against torch. `cute_kernels.py` has their sources."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.emulator import Emulator, TensorMap
from common.emulator.machine.events import SCHEDULES

HERE = Path(__file__).parent


def launch(name: str, schedule: str, args: list[Any], **shape: int | tuple[int, ...]) -> None:
    """Runs the only kernel of `cute_<name>.ptx`."""
    text = (HERE / f"cute_{name}.ptx").read_text()
    (kernel,) = re.findall(r"\.entry (\w+)", text)
    Emulator(schedule, seed=3).launch(text, kernel, args=args, **shape)


def rows_map(matrix: torch.Tensor, box_rows: int, box_columns: int = 64) -> TensorMap:
    """Boxes of a row-major matrix, as rows of 128 bytes under the 128-byte swizzle."""
    rows, columns = matrix.shape
    stride = columns * matrix.element_size()
    return TensorMap(matrix.dtype, matrix, (columns, rows), (stride,), (box_columns, box_rows), swizzle="128B")


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.isfinite().all()
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_dense_gemm(schedule):
    a, b = random(256, 320, seed=1), random(192, 320, seed=2)
    d = torch.full((256, 192), float("nan"))
    launch("dense", schedule, [rows_map(a, 128), rows_map(b, 64), d], grid=(2, 3), block=192, shared_bytes=80 << 10)
    assert relative_error(d, a.double() @ b.double().T) < 1e-6


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_persistent_gemm_by_pairs_of_ctas(schedule):
    """Six tiles for two pairs, ragged in every dimension."""
    a, b = random(500, 200, dtype=torch.float16, seed=3), random(376, 200, dtype=torch.float16, seed=4)
    d = torch.full((500, 376), float("nan"), dtype=torch.float16)
    maps = [rows_map(a, 128), rows_map(b, 64), rows_map(d, 128)]
    launch("pair", schedule, maps, grid=4, cluster=2, block=192, shared_bytes=72 << 10)
    assert relative_error(d, a.double() @ b.double().T) < 1e-3
