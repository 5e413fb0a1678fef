"""Shared by the kernels of tensor copies, in boxes and in columns: their parameters, and the kernel of a store."""

from __future__ import annotations

from tests.golden.copy_kernels import READ_SOURCE, START

ORIGIN = 1 << 16  # where in global memory a tensor begins, about
SPANS = {0: 256, 1: 32, 2: 64, 3: 128}  # of a swizzle, bytes
TYPES = (0, 1, 2, 4, 6, 7, 8, 9)
TENSOR = "mov.b64 %map, map; cvta.param.u64 %map, %map;"


def parameters(rank: int, *more: str) -> str:
    coordinates = [f".param .u32 c{place}" for place in range(rank)]
    return ", ".join((".param .align 64 .b8 map[128]", *coordinates, ".param .u32 offset", *more))


def coordinates_of(rank: int) -> tuple[str, str]:
    """Instructions that load them, and the operand."""
    loads = "".join(f"ld.param.u32 %c{place}, [c{place}];" for place in range(rank))
    return loads, "{" + ", ".join(f"%c{place}" for place in range(rank)) + "}"


def store_kernel(name: str, rank: int, instruction: str) -> str:
    loads, coordinates = coordinates_of(rank)
    return f"""
.visible .entry {name}({parameters(rank, ".param .u64 tensor", ".param .u64 source")})
{{{START} {TENSOR}
{READ_SOURCE}
fence.proxy.async; bar.sync 0;
@!%first ret;
{loads} {instruction} [%map, {coordinates}], [%offset];
cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; ret; }}
"""
