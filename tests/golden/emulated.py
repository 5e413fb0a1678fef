"""Runs a case on the emulator."""

from __future__ import annotations

import numpy as np

from common.emulator import Emulator, TensorMap
from common.emulator.emulator import Run
from tests.golden.case import Case, ColumnMap, Map


def run_emulated(case: Case, schedule: str = "late") -> list[np.ndarray | None]:
    """The buffers, by argument number, after the launch."""
    return launch_emulated(case, schedule)[0]


def launch_emulated(case: Case, schedule: str) -> tuple[list[np.ndarray | None], Run]:
    """The buffers, by argument number, after the launch, and the run with its counters."""
    memory = case.initial_memory()
    args = [
        _tensor_map(argument, memory) if isinstance(argument, (Map, ColumnMap)) else argument if held is None else held
        for argument, held in zip(case.args, memory)
    ]
    run = Emulator(schedule).launch(
        case.ptx,
        case.kernel,
        grid=case.grid,
        block=case.block,
        cluster=case.cluster if case.cluster > 1 else None,
        shared_bytes=case.shared_bytes,
        args=args,
    )
    return memory, run


def _tensor_map(m: Map | ColumnMap, memory: list[np.ndarray | None]) -> TensorMap:
    make, box = (
        (TensorMap, (m.box,)) if isinstance(m, Map) else (TensorMap.im2col, (m.lower, m.upper, m.channels, m.pixels))
    )
    options = {"interleave": m.interleave, "swizzle": m.swizzle, "oob_fill": m.oob_fill}
    return make(m.dtype, memory[m.buffer], m.dims, m.strides, *box, m.element_strides, m.offset, **options)
