"""CUDA C++ that uses NVIDIA's device libraries, compiled by NVRTC, on every schedule."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.emulator import Emulator, TensorMap
from tests.common.emulator.cuda import compile_ptx

FOLDER = Path(__file__).parent / "cuda"
SCHEDULES = [("early", 0), ("late", 0), ("random", 1)]
every_schedule = pytest.mark.parametrize(("schedule", "seed"), SCHEDULES, ids=[schedule for schedule, _ in SCHEDULES])


@cache
def ptx(file: str) -> str:
    return compile_ptx((FOLDER / file).read_text())


def launch(
    file: str, kernel: str, grid: int, block: int, arguments: list[Any], schedule: str, seed: int, shared: int = 0
) -> None:
    Emulator(schedule, seed).launch(ptx(file), kernel, grid=grid, block=block, args=arguments, shared_bytes=shared)


def integers(*shape: int, below: int = 1000) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(0, below, shape).astype(np.int32)


@every_schedule
def test_cub(schedule, seed):
    x = integers(512, below=10**6)
    total, scanned, ordered = np.zeros(1, np.int32), np.zeros(512, np.int32), np.zeros(512, np.uint32)
    launch("block_algorithms.cu", "block_algorithms", 1, 128, [x, total, scanned, ordered], schedule, seed)
    assert total[0] == x.sum(dtype=np.int32)
    np.testing.assert_array_equal(scanned, x.cumsum(dtype=np.int32))
    np.testing.assert_array_equal(ordered, np.sort(x))


@every_schedule
def test_cooperative_groups(schedule, seed):
    x = integers(128)
    out, classes = np.zeros((128, 4), np.int32), np.zeros(3, np.int32)
    launch("block_algorithms.cu", "groups", 1, 128, [x, out, classes], schedule, seed)
    warps, tiles = x.reshape(4, 32), x.reshape(16, 8)
    odd = warps & 1
    np.testing.assert_array_equal(out[:, 0], warps.sum(1).repeat(32))
    np.testing.assert_array_equal(out[:, 1], tiles.max(1).repeat(8))
    np.testing.assert_array_equal(out[:, 2], tiles.cumsum(1).ravel())
    np.testing.assert_array_equal(out[:, 3], np.where(odd, odd.cumsum(1) - 1, -1).ravel())
    np.testing.assert_array_equal(classes, np.bincount(x % 3))


@every_schedule
def test_distributed_shared_memory(schedule, seed):
    x = integers(512)
    neighbour, sums = np.zeros(512, np.int32), np.zeros((2, 16), np.int32)
    launch("block_algorithms.cu", "distributed", 8, 64, [x, neighbour, sums], schedule, seed)
    clusters = x.reshape(2, 4, 64)
    np.testing.assert_array_equal(neighbour.reshape(2, 4, 64), np.roll(clusters, -1, axis=1))
    np.testing.assert_array_equal(sums, clusters.reshape(2, 4, 4, 16).sum(axis=(1, 2)))


@every_schedule
def test_barrier_that_counts_bytes(schedule, seed):
    x = np.random.default_rng(1).normal(size=(5, 128, 4)).astype(np.float32)
    out = np.zeros_like(x)
    launch("pipelines.cu", "bulk_copies", 1, 128, [x, out, 5], schedule, seed)
    np.testing.assert_array_equal(out, x[:, np.arange(128) ^ 1])


@every_schedule
def test_pipeline_of_two_stages(schedule, seed):
    x = integers(5, 128)
    out = np.zeros_like(x)
    launch("pipelines.cu", "staged_copies", 1, 128, [x, out, 5], schedule, seed)
    np.testing.assert_array_equal(out, x[:, ::-1])


@every_schedule
def test_tensor_map_of_the_library(schedule, seed):
    """A box that leaves the tensor on two sides."""
    x = integers(40, 72)
    out = np.zeros_like(x)
    maps = [TensorMap("int32", tensor, (72, 40), (288,), (32, 16)) for tensor in (x, out)]
    launch("pipelines.cu", "tensor_copies", 1, 64, [*maps, 56, 32], schedule, seed)
    expected = np.zeros_like(x)
    expected[32:, 56:] = x[32:, 56:] + 1
    np.testing.assert_array_equal(out, expected)


@every_schedule
def test_locks_and_meetings_of_blocks(schedule, seed):
    x, out = integers(6 * 256), np.zeros(8, np.int32)
    launch("synchronisation.cu", "meetings", 6, 256, [x, out, np.zeros(6, np.int32)], schedule, seed)
    np.testing.assert_array_equal(out, [x.sum(), 6 * 4, *[32] * 6])


@every_schedule
def test_named_barriers(schedule, seed):
    x = integers(7, 32)
    out = np.zeros_like(x)
    launch("synchronisation.cu", "named_barriers", 1, 64, [x, out, 7], schedule, seed)
    np.testing.assert_array_equal(out, x[:, ::-1])


@every_schedule
def test_attention_that_hands_statistics_over_in_tensor_memory(schedule, seed):
    rng = np.random.default_rng(2)
    q, k, v = (rng.normal(size=(rows, 64)).astype(np.float16) for rows in (128, 192, 192))
    out = np.full((128, 64), np.nan, np.float32)
    maps = [TensorMap("float16", x, (64, len(x)), (128,), (64, len(x)), swizzle="128B") for x in (q, k, v)]
    arguments = [*maps, out, np.float32(np.log2(np.e) / 8)]
    launch("attention.cu", "attention", 1, 288, arguments, schedule, seed, shared=64 << 10)
    scores = np.exp(q.astype(float) @ k.T.astype(float) / 8)
    np.testing.assert_allclose(out, scores / scores.sum(1, keepdims=True) @ v.astype(float), atol=2e-3)
