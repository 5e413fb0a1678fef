"""What the tests of tensor copies share: where things are, and the swizzle as the manual's tables define it."""

from __future__ import annotations

BASE = 1 << 32
SHARED = 48 * 1024
SIZES = {"uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
SPANS = (16, 32, 64, 128, 128, 128, 128)


def reference_swizzle(mode: int, address: int) -> int:
    line = address >> 7
    chunk = (address >> 4) & 7
    if mode in (1, 2, 3):
        chunk ^= line & (1, 3, 7)[mode - 1]
    elif mode in (4, 5):
        chunk ^= 2 * (line & 3)
    elif mode == 6:
        chunk ^= 4 * (line & 1)
    low = address & 15
    if mode == 5 and line & 1:
        low ^= 8
    return line << 7 | chunk << 4 | low


def simple(**changes) -> dict:
    """Arguments of a `TensorMap` of a 32 x 64 matrix, in boxes of 8 rows."""
    arguments = dict(dtype="float16", tensor=BASE, dims=[64, 32], strides=[128], box=[64, 8])
    return {**arguments, **changes}
