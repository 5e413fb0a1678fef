"""Kernels that CuTe DSL compiled, under every schedule, against torch. `cute_kernels.py` has their sources."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

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


FLOAT4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def scaled_operand(rows: int, k: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """NVFP4: packed elements uint8 (rows, k / 2), scale factors as the kernel wants them, and the values.

    Scale factors lie in blocks of 128 rows by 4, of 512 bytes each: row r, factor c at 16 (r % 32) + 4 (r / 32) + c.
    """
    rng = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (rows, k), generator=rng)
    factors = (torch.rand(rows, k // 16, generator=rng) * 4).to(torch.float8_e4m3fn)
    values = torch.where(codes < 8, 1.0, -1.0) * FLOAT4[codes % 8] * factors.float().repeat_interleave(16, 1)
    blocks = factors.view(torch.uint8).reshape(rows // 128, 4, 32, k // 64, 4).permute(0, 3, 2, 1, 4).contiguous()
    return (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8), blocks, values


def scale_map(blocks: torch.Tensor) -> TensorMap:
    """A block as 256 pairs of factors; a load takes the four blocks of one K step."""
    rows, steps = blocks.shape[:2]
    dims, strides, box = (256, steps, rows), (512, 512 * steps), (256, 4, 1)
    rank = 3 if rows > 1 else 2
    return TensorMap("uint16", blocks, dims[:rank], strides[: rank - 1], box[:rank])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_block_scaled_gemm(schedule):
    (a, sa, left), (b, sb, right) = scaled_operand(256, 768, seed=5), scaled_operand(128, 768, seed=6)
    d = torch.full((256, 128), float("nan"))
    maps = [TensorMap("float4_e2m1fn", x, (768, x.shape[0]), (384,), (256, 128), swizzle="128B") for x in (a, b)]
    scales = [scale_map(sa), scale_map(sb)]
    launch("scaled", schedule, [*maps, *scales, d], grid=(2, 1), block=192, shared_bytes=76 << 10)
    assert relative_error(d, left.double() @ right.double().T) < 1e-6


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_attention(schedule):
    q, k, v = random(256, 64, seed=7), random(384, 64, seed=8), random(384, 64, seed=9)
    d = torch.full((256, 64), float("nan"))
    maps = [rows_map(x, 128) for x in (q, k, v)]
    launch("attention", schedule, [*maps, d], grid=2, block=160, shared_bytes=116 << 10)
    weights = (q.double() @ k.double().T / 8).softmax(1)
    assert relative_error(d, weights @ v.double()) < 4e-3
