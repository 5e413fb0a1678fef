"""CUDA C++ to PTX for tests, with the NVRTC that pip installs."""

from __future__ import annotations

import textwrap
from functools import cache

from cuda.bindings import nvrtc

from common.compiler import include_paths, toolkit


@cache
def compile_ptx(source: str, arch: str = "sm_100a", options: tuple[str, ...] = ()) -> str:
    """PTX of CUDA C++ `source`, with line information. Fails with NVRTC's log when it does not compile."""
    root, _ = toolkit()
    flags = [
        f"--gpu-architecture={arch.replace('sm_', 'compute_')}",
        *(f"-I{path}" for path in include_paths(root)),
        "--std=c++17",
        "-lineinfo",
        *options,
    ]
    text = textwrap.dedent(source).encode()
    _, program = nvrtc.nvrtcCreateProgram(text, b"test.cu", 0, [], [])
    (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = bytearray(size)
    nvrtc.nvrtcGetProgramLog(program, log)
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, log.decode()
    _, size = nvrtc.nvrtcGetPTXSize(program)
    ptx = bytearray(size)
    nvrtc.nvrtcGetPTX(program, ptx)
    nvrtc.nvrtcDestroyProgram(program)
    return ptx.decode().rstrip("\0")
