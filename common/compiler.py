"""CUDA C++ -> PTX, cubin and SASS with the compiler that pip installs: NVRTC, nvdisasm. No nvcc, no GPU.

Options are the ones TVM gives NVRTC by default (`tvm.support.nvcc`), so that a kernel built here is the kernel that
any TIRx user runs. The one that changes numbers is `--use_fast_math`: float32 denormals flush to zero (`.ftz`),
division and square root are approximate. `--generate-line-info` is added: it changes no instruction and gives the PTX
its `.loc` lines.

A complete toolkit from pip (`nvidia/cu13` in site-packages) always comes first. Only where pip's is incomplete do the
headers of `CUDA_PATH` or of a system toolkit serve, and `Compilation.compiler` then says which.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

SOURCE_NAME = "kernel.cu"

# NVRTC has neither cuda.h nor math.h, which nvcc includes by itself.
_PREAMBLE_NAME = "preamble.h"
_PREAMBLE = """\
struct alignas(64) CUtensorMap_st { unsigned long long opaque[16]; };
typedef struct CUtensorMap_st CUtensorMap;
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
"""

_LARGEST_HEADER = "#include <cooperative_groups.h>"  # of those that TVM's kernels begin with
_HEADERS_HEAP_BYTES = 512 << 20  # they take 350 MB as the compiler keeps them


class CompileError(RuntimeError):
    """NVRTC refused the source, or a tool of the CUDA toolkit is missing; the message holds the compiler's log."""


@dataclass(frozen=True)
class Resources:
    """What one CTA's thread needs, as ptxas reports it. Bytes, except `registers` (32-bit registers per thread)."""

    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    static_shared_bytes: int


@dataclass(frozen=True)
class Compilation:
    """Output of one NVRTC run: `ptx` text, `cubin` bytes, `log` with ptxas's report, `compiler` in words."""

    ptx: str
    cubin: bytes
    log: str
    compiler: str

    def resources(self, kernel: str) -> Resources:
        """Registers, spills and memory of entry point `kernel`. Raises CompileError if the log lacks it."""
        return parse_resources(self.log, kernel)


def parse_resources(log: str, kernel: str) -> Resources:
    """Read one entry point's figures from a `ptxas -v` log."""
    block = re.search(rf"Compiling entry function '{re.escape(kernel)}'(.*?)(?=Compiling entry function|\Z)", log, re.S)
    text = block.group(1) if block else ""
    frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text)
    registers = re.search(r"Used (\d+) registers", text)
    if not frame or not registers:
        raise CompileError(f"ptxas reported no registers for kernel {kernel!r}; its log:\n{log}")
    shared = re.search(r"(\d+) bytes smem", text)
    stack, stores, loads = map(int, frame.groups())
    return Resources(int(registers.group(1)), stores, loads, stack, int(shared.group(1)) if shared else 0)


def pip_toolkit() -> Path | None:
    """`nvidia/cu13` of the running Python when pip has put a complete toolkit there, else None."""
    spec = importlib.util.find_spec("nvidia")
    for parent in spec.submodule_search_locations or () if spec else ():
        root = Path(parent) / "cu13"
        if include_paths(root):
            return root
    return None


def include_paths(root: Path) -> list[Path]:
    """Header folders of a toolkit, empty when the CUDA runtime's or libcu++'s are not there."""
    bases = [root / "include", *sorted(root.glob("targets/*-linux/include"))]
    folders = [folder for base in bases for folder in (base, base / "cccl") if folder.is_dir()]
    needed = ("cuda_runtime.h", "crt/host_config.h", "cuda_fp16.h", "cuda/std/cstdint")
    return folders if all(any((f / name).is_file() for f in folders) for name in needed) else []


@lru_cache(maxsize=1)
def toolkit() -> tuple[Path, bool]:
    """Root of the CUDA headers to compile with, and whether pip installed it. Raises CompileError if there is none."""
    pip = pip_toolkit()
    if pip:
        return pip, True
    system = [os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    for root in filter(None, system):
        if include_paths(Path(root)):
            return Path(root), False
    raise CompileError(
        "no CUDA headers: run `make setup`, or install nvidia-cuda-nvrtc, nvidia-cuda-runtime, nvidia-cuda-crt and "
        "nvidia-cuda-cccl as requirements.txt pins them"
    )


_keeps_headers = False


def keep_headers() -> None:
    """From now on, read TVM's headers once per process and not for each kernel. That is half the time of a compilation.

    For those who compile many: the first pays 0.5 s more, and NVRTC has 350 MB in the folder for temporary files until
    the process ends. The code is the same. (NVRTC's precompiled headers.)
    """
    from cuda.bindings import nvrtc

    global _keeps_headers
    (status,) = nvrtc.nvrtcSetPCHHeapSize(_HEADERS_HEAP_BYTES)
    _check(nvrtc, status, "reserve memory for precompiled headers")
    _keeps_headers = True


def _options(arch: str, root: Path) -> list[str]:
    level = os.environ.get("TVM_CUDA_PTXAS_REG_LEVEL", "10")
    return [
        f"--gpu-architecture={arch}",
        "-default-device",
        "--device-int128",
        *(f"-I{path}" for path in include_paths(root)),
        "-D__NV_SILENCE_DEPRECATION_BEGIN=",
        "-D__NV_SILENCE_DEPRECATION_END=",
        "-D__NV_SILENCE_HOST_DEPRECATION_BEGIN=",
        "-D__NV_SILENCE_HOST_DEPRECATION_END=",
        "--use_fast_math",
        "--generate-line-info",
        "--diag-suppress=174,177,550",  # what TVM generates has expressions without effect and unused variables
        "--ptxas-options=-v",
        f"--ptxas-options=--register-usage-level={level}",
        "--ptxas-options=--warn-on-local-memory-usage",
        f"--pre-include={_PREAMBLE_NAME}",
    ]


def _check(nvrtc, status, what: str) -> None:
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"NVRTC failed to {what}: {nvrtc.nvrtcGetErrorString(status)[1].decode()}")


def _fetch(nvrtc, program, size_of, read) -> bytes:
    status, size = size_of(program)
    _check(nvrtc, status, "size its output")
    buffer = bytearray(size)
    _check(nvrtc, read(program, buffer)[0], "return its output")
    return bytes(buffer)


@lru_cache(maxsize=256)
def compile_cuda(source: str, arch: str) -> Compilation:
    """Compile CUDA C++ for `arch` (`sm_90a`, `sm_100a`): one NVRTC run gives the PTX and, from it, the cubin.

    Raises CompileError with the compiler's log. Results are kept for the life of the process.
    """
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise CompileError("the cuda-bindings package is missing: run `make setup`") from error

    root, from_pip = toolkit()
    device_source = "\n".join("" if line.strip() == "#include <cuda.h>" else line for line in source.splitlines())
    status, program = nvrtc.nvrtcCreateProgram(
        device_source.encode(), SOURCE_NAME.encode(), 1, [_PREAMBLE.encode()], [_PREAMBLE_NAME.encode()]
    )
    _check(nvrtc, status, "create a program")
    try:
        options = [option.encode() for option in _options(arch, root)]
        if _keeps_headers and _LARGEST_HEADER in source:
            options += [b"--pch", b"--pch-messages=false"]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        log = _fetch(nvrtc, program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).decode().rstrip("\0 \n")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"NVRTC could not compile the kernel for {arch}:\n{log}")
        ptx = _fetch(nvrtc, program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX).decode().rstrip("\0")
        # NVRTC puts the working directory before the source's name: the same kernel should give the same text anywhere.
        ptx = re.sub(rf'(\.file\s+\d+\s+)"[^"]*/{re.escape(SOURCE_NAME)}"', rf'\1"{SOURCE_NAME}"', ptx)
        cubin = _fetch(nvrtc, program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    status, major, minor = nvrtc.nvrtcVersion()
    _check(nvrtc, status, "say its version")
    return Compilation(ptx, cubin, log, f"NVRTC {major}.{minor}, headers from {'pip' if from_pip else root}")


def _disassembler() -> str:
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(p) / "cu13" / "bin" for p in (spec.submodule_search_locations or () if spec else ())]
    for folder in folders:
        if (folder / "nvdisasm").is_file():
            return str(folder / "nvdisasm")
    system = shutil.which("nvdisasm")
    if system is None:
        raise CompileError("nvdisasm is missing: run `make setup`, or install nvidia-cuda-nvdisasm")
    return system


def disassemble(cubin: bytes) -> str:
    """SASS text of a cubin, without encodings. Raises CompileError when nvdisasm is missing or refuses the file."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([_disassembler(), "--print-code", file.name], capture_output=True, text=True)
    if done.returncode != 0:
        raise CompileError(f"nvdisasm failed: {done.stderr.strip()}")
    return done.stdout
