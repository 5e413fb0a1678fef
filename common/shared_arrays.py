"""What a TIRx kernel keeps in shared memory, by the names that its script gives: for the emulator's reports."""

from __future__ import annotations

import math
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from common.emulator.machine.shared_names import SharedArray

_SUFFIX = "_buf"  # TVM calls the memory of a barrier `full` so


def read_shared_arrays(function: tirx.PrimFunc) -> tuple[SharedArray, ...]:
    """The arrays of the kernel's SMEM pool. An item is what one index of the first dimension selects."""
    arrays: list[SharedArray] = []

    def on_buffer(node: Any) -> None:
        buffer = node.buffer
        extents = [int(extent) for extent in buffer.shape if isinstance(extent, tirx.IntImm)]
        if buffer.scope() != "shared.dyn" or not isinstance(buffer.elem_offset, tirx.IntImm) or not extents:
            return
        bits = tvm.DataType(buffer.dtype).bits
        offset, size = (count * bits // 8 for count in (int(buffer.elem_offset), math.prod(extents)))
        arrays.append(SharedArray(buffer.name.removesuffix(_SUFFIX), offset, size, extents[0]))

    tvm_ffi.structural_walk(function.body, [(tirx.DeclBuffer, on_buffer)])
    return tuple(arrays)
