"""What a model does with a matrix product before it is rounded: bias, activation, residual. Used by stage 08.

    D = act(A B^T + bias) + residual        bias (n,), residual (m, n), of the type of D

`--epilogue` names the parts. A kernel written as `@T.inline gemm(A, B, bias, residual, D)` calls the function of
`make_finish` on the sums of one row, in registers, and `with_operands` gives it the parameters that its epilogue has.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd, log2, pi, sqrt
from typing import Any

import torch
from tvm.script import tirx as T
from tvm.script.tirx import tile as Tx

from common.build import open_if_one
from common.stage import Config, Option

VECTOR_BYTES = 16  # the widest load of one thread
# x times a sigmoid is the tanh form of GELU: x / (1 + 2^(x (GELU_1 + GELU_3 x^2))). Where 1 + tanh would cancel, for
# negative x, the sigmoid keeps its digits.
GELU_1 = -2 * sqrt(2 / pi) * log2(2.718281828459045)
GELU_3 = 0.044715 * GELU_1

EPILOGUE = Option(
    "epilogue",
    ["none", "bias", "bias-gelu", "bias-residual"],
    "none",
    help="what is done to the sums before they are rounded",
)


def _has(config: Config, part: str) -> bool:
    return part in config.epilogue


def make_finish(config: Config, columns: int) -> Callable[..., None]:
    """The device function finish(values, row, col, bias, residual), for the `columns` sums from D[row, col] on.

    `values` are one thread's float32 registers; sums beyond an edge of D are left as they are. Loads are as wide as
    the rows of D allow: each thread reads its own row, and all threads the same bias.
    """
    m, n, dtype = config.m, config.n, config.dtype
    VECTOR = gcd(n, VECTOR_BYTES // config.itemsize)
    ACCESS = f"vec_{8 * VECTOR * config.itemsize}b"
    BIAS, GELU, RESIDUAL = (_has(config, part) for part in ("bias", "gelu", "residual"))

    @T.inline
    def add(values, row, col, source):
        addend = T.alloc_local((VECTOR,), dtype)
        for v in T.unroll(columns // VECTOR):
            if (row < m) & (col + v * VECTOR < n):
                Tx.copy(addend[:], source[row, col + v * VECTOR : col + v * VECTOR + VECTOR], dispatch=ACCESS)
                for e in T.unroll(VECTOR):
                    values[v * VECTOR + e] = values[v * VECTOR + e] + T.cast(addend[e], "float32")

    @T.inline
    def finish(values, row, col, bias, residual):
        if BIAS:
            add(values, 0, col, bias.view(1, n))
        if GELU:
            for i in T.unroll(columns):
                power: T.let = values[i] * (T.float32(GELU_1) + T.float32(GELU_3) * values[i] * values[i])
                values[i] = values[i] / (T.float32(1) + T.exp2(power))
        if RESIDUAL:
            add(values, row, col, residual)

    return finish


def with_operands(config: Config, gemm: Callable[..., None]) -> Any:
    """The TIRx function of `gemm`: (A, B, D), (A, B, bias, D) or (A, B, bias, residual, D), as the epilogue asks."""
    m, n, k, dtype = open_if_one(config.m), open_if_one(config.n), config.k, config.dtype

    # Only the one that is asked for is written down: each would have TIRx read all of `gemm`.
    if _has(config, "residual"):

        @T.prim_func
        def product(
            A: T.Buffer((m, k), dtype),
            B: T.Buffer((n, k), dtype),
            bias: T.Buffer((n,), dtype),
            residual: T.Buffer((m, n), dtype),
            D: T.Buffer((m, n), dtype),
        ):
            gemm(A, B, bias, residual, D)

    elif _has(config, "bias"):

        @T.prim_func
        def product(
            A: T.Buffer((m, k), dtype),
            B: T.Buffer((n, k), dtype),
            bias: T.Buffer((n,), dtype),
            D: T.Buffer((m, n), dtype),
        ):
            gemm(A, B, bias, D, D)

    else:

        @T.prim_func
        def product(A: T.Buffer((m, k), dtype), B: T.Buffer((n, k), dtype), D: T.Buffer((m, n), dtype)):
            gemm(A, B, D, D, D)

    return product


def operands(config: Config, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """bias (n,) and residual (m, n), those that the epilogue has, normally distributed."""
    shapes = {"bias": (config.n,), "residual": (config.m, config.n)}
    return tuple(
        torch.randn(*shape, generator=generator, device=generator.device).to(config.torch_dtype)
        for part, shape in shapes.items()
        if _has(config, part)
    )


def finished_product(config: Config, product: torch.Tensor, *added: torch.Tensor) -> torch.Tensor:
    """The epilogue of a product in torch, in the type of `product`; `added` as `operands` returns them."""
    for position, operand in enumerate(added):
        product = product + operand.to(product.dtype)
        if position == 0 and _has(config, "gelu"):
            product = torch.nn.functional.gelu(product, approximate="tanh")
    return product
