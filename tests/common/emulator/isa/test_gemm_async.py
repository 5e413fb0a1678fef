"""TIRx's own dispatch of `Tx.gemm_async` to tcgen05.mma, over what it supports, against float64.

TIRx encodes every descriptor here. One of its layouts is left out: MN-major operands without swizzle, for which it
writes LBO and SBO in each other's place (PTX ISA 9.7.16.3.3, CUTLASS and silicon agree on the other order).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.build import build
from tests.common.emulator.isa.gemm_kernels import gemm, gemm_from_tensor_memory, scaled_gemm
from tests.common.emulator.isa.mma_reference import accumulator, random_codes, value_of

LAYOUTS = {(1, 64): "F", (1, 128): "D", (2, 64): "B", (2, 128): "A"}
TORCH_TYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}


def operands(dtype: str, group: int, m: int, n: int, k: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A (group, m, k) and B (group, n / group, k); float32 values are tf32 values already."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (group, m, k), (group, n // group, k)
    a, b = (torch.randn(shape, generator=generator) for shape in shapes)
    if dtype == "float32":
        a, b = ((x.view(torch.int32) & -8192).view(torch.float32) for x in (a, b))
    return a.to(TORCH_TYPES[dtype]), b.to(TORCH_TYPES[dtype])


def check(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, layout: str) -> None:
    """The raw tensor memory (group, 128, 512) holds A B^T where the data path has it."""
    a, b = (x.double().reshape(-1, x.shape[-1]).numpy() for x in (a, b))
    cells = accumulator(out.numpy().view(np.uint32), (a.shape[0], b.shape[0]), layout)
    np.testing.assert_array_less(np.abs(cells.view(np.float32) - a @ b.T), 2e-6 * (np.abs(a) @ np.abs(b).T) + 1e-12)


def stored(x: torch.Tensor, transposed: bool) -> torch.Tensor:
    return x.transpose(1, 2).contiguous() if transposed else x


def run_all_schedules(kernel, arguments: list[torch.Tensor], group: int) -> list[torch.Tensor]:
    results = []
    for schedule in ("late", "early", "random"):
        out = torch.full((group, 128, 512), float("nan"))
        kernel(*arguments, out, schedule=schedule)
        results.append(out)
    return results


CASES = [
    # dtype, m per CTA, n, k, options
    ("float16", 128, 64, 64, {}),
    ("bfloat16", 128, 256, 128, {}),
    ("float16", 128, 16, 64, {}),
    ("float16", 128, 208, 64, {}),
    ("float16", 64, 64, 64, {}),
    ("bfloat16", 64, 144, 64, {}),
    ("float16", 128, 64, 32, {"swizzle_a": "64B", "swizzle_b": "32B"}),
    ("bfloat16", 128, 48, 64, {"swizzle_a": "32B", "swizzle_b": "none"}),
    ("float16", 128, 48, 16, {"swizzle_a": "none", "swizzle_b": "32B"}),
    ("float16", 128, 64, 64, {"trans_b": True}),
    ("float16", 128, 64, 64, {"trans_a": True}),
    ("bfloat16", 128, 128, 32, {"trans_a": True, "trans_b": True, "swizzle_a": "64B", "swizzle_b": "128B"}),
    ("float16", 64, 32, 32, {"trans_a": True, "trans_b": True, "swizzle_a": "32B", "swizzle_b": "64B"}),
    ("float32", 128, 64, 32, {"tf32": True}),
    ("float32", 64, 48, 64, {"tf32": True, "swizzle_a": "64B", "swizzle_b": "32B"}),
    ("float8_e4m3fn", 128, 64, 128, {}),
    ("float8_e5m2", 128, 96, 128, {"swizzle_a": "64B", "swizzle_b": "32B"}),
    ("float8_e5m2", 128, 128, 64, {"trans_a": True, "trans_b": True}),
    ("float16", 128, 128, 64, {"group": 2}),
    ("bfloat16", 128, 256, 64, {"group": 2}),
    ("float16", 64, 64, 64, {"group": 2}),
    ("float16", 128, 128, 64, {"group": 2, "trans_a": True, "trans_b": True}),
    ("float8_e4m3fn", 128, 64, 128, {"group": 2}),
    ("float8_e4m3fn", 64, 128, 128, {"group": 2}),
    ("float32", 128, 64, 32, {"group": 2, "tf32": True}),
]


def name_of(value) -> str | None:
    return "-".join(f"{k}={v}" for k, v in value.items()) or "plain" if isinstance(value, dict) else None


@pytest.mark.parametrize("dtype,m,n,k,options", CASES, ids=name_of)
def test_dense(dtype, m, n, k, options):
    group = options.get("group", 1)
    kernel = build(gemm(dtype, m, n, k, **options))
    a, b = operands(dtype, group, m, n, k, seed=n + k)
    arguments = [stored(a, options.get("trans_a", False)), stored(b, options.get("trans_b", False))]
    for out in run_all_schedules(kernel, arguments, group):
        check(out, a, b, LAYOUTS[group, m])


@pytest.mark.parametrize(
    "dtype,n,k,options",
    [("float16", 64, 64, {}), ("bfloat16", 128, 128, {"trans_b": True}), ("float16", 128, 64, {"group": 2})],
    ids=name_of,
)
def test_a_in_tensor_memory(dtype, n, k, options):
    group = options.get("group", 1)
    kernel = build(gemm_from_tensor_memory(dtype, 128, n, k, **options))
    a, b = operands(dtype, group, 128, n, k, seed=n + k)
    for out in run_all_schedules(kernel, [a, stored(b, options.get("trans_b", False))], group):
        check(out, a, b, LAYOUTS[group, 128])


@pytest.mark.parametrize(
    "element,scale,group,n,k,vector,per_mma",
    [
        ("e4m3", "ue8m0", 1, 128, 128, 32, 1),
        ("e2m1", "ue8m0", 1, 128, 256, 32, 2),
        ("e2m1", "ue4m3", 1, 128, 256, 16, 4),
        ("e4m3", "ue8m0", 2, 256, 128, 32, 1),
        ("e2m1", "ue4m3", 2, 256, 256, 16, 4),
    ],
)
def test_block_scaled(element, scale, group, n, k, vector, per_mma):
    dtype = {"e4m3": "float8_e4m3fn", "e2m1": "float4_e2m1fn"}[element]
    scale_dtype = {"ue8m0": "float8_e8m0fnu", "ue4m3": "float8_e4m3fn"}[scale]
    kernel = build(scaled_gemm(dtype, scale_dtype, n, k, group=group, vector=vector, per_mma=per_mma))
    rng = np.random.default_rng(k)
    a, b = random_codes(rng, element, (group * 128, k)), random_codes(rng, element, (n, k))
    low, high = (120, 134) if scale == "ue8m0" else (0x20, 0x50)
    sa, sb = (rng.integers(low, high, (rows, k // vector)) for rows in (group * 128, n))

    def bytes_of(codes: np.ndarray, *shape: int) -> torch.Tensor:
        return torch.from_numpy(codes.astype(np.uint8).reshape(*shape, -1))

    def packed(codes: np.ndarray) -> np.ndarray:
        return codes[:, ::2] | codes[:, 1::2] << 4 if element == "e2m1" else codes

    arguments = [
        bytes_of(packed(a), group, 128), bytes_of(packed(b), group, n // group),
        bytes_of(sa, group, 128), bytes_of(sb, n),
    ]  # fmt: skip
    factor = {"ue8m0": lambda codes: 2.0 ** (codes - 127.0), "ue4m3": lambda codes: value_of("e4m3", codes)}[scale]
    scaled_a = value_of(element, a) * np.repeat(factor(sa), vector, axis=1)
    scaled_b = value_of(element, b) * np.repeat(factor(sb), vector, axis=1)
    for out in run_all_schedules(kernel, arguments, group):
        check(out, torch.from_numpy(scaled_a), torch.from_numpy(scaled_b), LAYOUTS[group, 128])
