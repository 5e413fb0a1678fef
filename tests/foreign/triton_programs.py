"""Launches the programs that `triton_kernels` compiled, the way Triton's launcher does."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from common.emulator import Emulator, Run, TensorMap
from common.emulator.machine.scheduler import Limits

FOLDER = Path(__file__).parent / "triton"
LARGEST_SHARED = 227 * 1024
_TMA_TYPES = {torch.float8_e4m3fn: "uint8", torch.float8_e5m2: "uint8"}


@dataclass(frozen=True)
class Descriptor:
    """A tensor that the kernel accesses through a tensor map; the program says with which box and swizzle."""

    tensor: torch.Tensor

    def arguments(self, box: list[int], swizzle: int) -> list[Any]:
        """What Triton passes: the map, the shape, the strides in elements."""
        tensor = self.tensor
        strides = [stride * tensor.element_size() for stride in tensor.stride()]
        dtype = _TMA_TYPES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
        tensor_map = TensorMap(dtype, tensor, tensor.shape[::-1], strides[-2::-1], box[::-1], swizzle=swizzle)
        return [tensor_map, *tensor.shape, *tensor.stride()]


def launch(
    name: str, grid: tuple[int, ...], arguments: list[Any], schedule: str, *, seed: int = 0, sm_count: int = 148
) -> Run:
    """Runs a program on `grid` clusters (x, y, z); tensors are updated in place.

    Behind the kernel's own arguments stand two pointers to scratch memory: the first is where a kernel makes tensor
    maps, the second is for profilers alone.
    """
    program = programs()[name]
    assert program["shared"] <= LARGEST_SHARED
    maps = iter(program["maps"])
    values = []
    for argument in arguments:
        if isinstance(argument, Descriptor):
            values += argument.arguments(**next(maps))
        else:
            values.append(argument)
    x, *rest = grid
    ctas = program["ctas"]
    scratch = torch.full((math.prod(grid) * ctas * program["scratch"],), 0xFF, dtype=torch.uint8)
    return Emulator(schedule, seed, Limits(sm_count=sm_count)).launch(
        text(name),
        program["kernel"],
        grid=(x * ctas, *rest),
        block=program["threads"],
        cluster=(ctas, 1, 1) if ctas > 1 else None,
        shared_bytes=program["shared"],
        args=[*values, scratch if program["scratch"] else 0, 0],
    )


@cache
def programs() -> dict[str, Any]:
    return json.loads((FOLDER / "programs.json").read_text())["programs"]


@cache
def text(name: str) -> str:
    return gzip.decompress((FOLDER / f"{name}.ptx.gz").read_bytes()).decode()
