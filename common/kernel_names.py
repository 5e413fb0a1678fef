"""What a script calls the arguments of a TIRx kernel and what the kernel keeps in SMEM: for the emulator's messages."""

from __future__ import annotations

import math
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from common.emulator.machine.names import Names, SharedArray
from common.launch_spec import LaunchSpec

# What TVM appends: to a buffer, to its tensor map, to the memory of a barrier.
_SUFFIXES = ("_ptr", "_tensormap", "_buf")


def read_names(function: tirx.PrimFunc, spec: LaunchSpec) -> Names:
    """Of the kernel's arguments and shared arrays."""
    return Names([_plain(parameter.name) for parameter in spec.parameters], _read_shared_arrays(function))


def _plain(name: str) -> str:
    return next((name.removesuffix(suffix) for suffix in _SUFFIXES if name.endswith(suffix)), name)


def _read_shared_arrays(function: tirx.PrimFunc) -> tuple[SharedArray, ...]:
    """The arrays of the kernel's SMEM pool. An item is what one index of the first dimension selects."""
    arrays: list[SharedArray] = []

    def on_buffer(node: Any) -> None:
        buffer = node.buffer
        extents = [int(extent) for extent in buffer.shape if isinstance(extent, tirx.IntImm)]
        if buffer.scope() != "shared.dyn" or not isinstance(buffer.elem_offset, tirx.IntImm) or not extents:
            return
        bits = tvm.DataType(buffer.dtype).bits
        offset, size = (count * bits // 8 for count in (int(buffer.elem_offset), math.prod(extents)))
        count = 1 if size % extents[0] else extents[0]  # items of less than a byte are not told apart
        arrays.append(SharedArray(_plain(buffer.name), offset, size, count))

    tvm_ffi.structural_walk(function.body, [(tirx.DeclBuffer, on_buffer)])
    return tuple(arrays)
