"""Loads a stage's script for its tests, as it is or with a mistake put into it."""

from __future__ import annotations

import importlib.util
import tempfile
from functools import cache
from pathlib import Path

import torch

from common.series import stage_script
from common.stage import Config, Stage


@cache
def load_stage(number: int, *mistakes: tuple[str, str]) -> Stage:
    """The `STAGE` of a stage's script, after replacing each (text, replacement).

    A text that is not in the script exactly once is an error: the exercise it stands for no longer fits the script.
    """
    script = stage_script(number)
    text = script.read_text(encoding="utf-8")
    for old, new in mistakes:
        assert text.count(old) == 1, f"{script.name} has {text.count(old)} times:\n{old}"
        text = text.replace(old, new)
    # TIRx reads the source of a kernel again, so a changed script needs a file too.
    folder = Path(tempfile.mkdtemp(prefix="stage-")) if mistakes else script.parent
    path = folder / script.name
    if mistakes:
        path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"{script.stem}_{len(mistakes)}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.STAGE


def small_integer_operands(config: Config, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A (m, k) and B (n, k) of a GEMM stage, of -1, 0 and 1, as int64: every sum of products is exact in float32."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(-1, 2, (rows, config.k), generator=generator) for rows in (config.m, config.n))
