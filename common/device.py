"""Which device runs a stage: a GPU that can, else the emulator."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

from common.stage import B200_SMS, EMULATED_ARCH


class DeviceError(RuntimeError):
    """The device that was asked for cannot run the stage."""


@dataclass(frozen=True)
class Gpu:
    """The current CUDA device: name, compute capability, number of SMs, driver version."""

    name: str
    capability: tuple[int, int]
    sms: int
    driver: str

    @property
    def arch(self) -> str:
        return f"sm_{self.capability[0]}{self.capability[1]}"


@dataclass(frozen=True)
class Device:
    """Where a stage runs. `kind` is "cuda" or "emulator", `arch` what kernels are built for, `reason` why."""

    kind: str
    name: str
    arch: str
    sms: int
    reason: str
    driver: str | None = None


def find_gpu() -> Gpu | None:
    """The current CUDA device as torch sees it, or None."""
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    capability = (properties.major, properties.minor)
    return Gpu(properties.name, capability, properties.multi_processor_count, _driver_version())


def _driver_version() -> str:
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True).stdout.split()
    return lines[0] if lines else "unknown"


def no_gpu_reason() -> str:
    """Why torch sees no GPU, in words."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a CPU build"
    return f"torch {torch.__version__} finds no usable CUDA GPU"


def can_run(arch: str, capability: tuple[int, int]) -> bool:
    """Can a GPU of this compute capability run a stage that needs `arch`?

    `sm_90a` stages are rebuilt for newer GPUs from the same source; `sm_100a` stages use tcgen05, which data-centre
    Blackwell (10.x) alone has.
    """
    if arch == "sm_90a":
        return capability >= (9, 0)
    if arch == "sm_100a":
        return capability[0] == 10
    raise ValueError(f"no rule for arch {arch!r}: a stage needs sm_90a or sm_100a")


def _emulator(reason: str) -> Device:
    return Device("emulator", "emulator", EMULATED_ARCH, B200_SMS, reason)


def choose_device(request: str, stage_number: int, stage_arch: str) -> Device:
    """Resolve `--device auto|cuda|emulator`. Raises DeviceError when "cuda" is asked for and cannot run the stage."""
    if request == "emulator":
        return _emulator("asked for")
    gpu = find_gpu()
    if gpu is None:
        if request == "cuda":
            raise DeviceError(f"--device cuda: {no_gpu_reason()}: use --device emulator")
        return _emulator(no_gpu_reason())
    if can_run(stage_arch, gpu.capability):
        reason = "asked for" if request == "cuda" else f"it can run stage {stage_number:02d}, which needs {stage_arch}"
        return Device("cuda", gpu.name, f"{gpu.arch}a", gpu.sms, reason, gpu.driver)
    obstacle = f"stage {stage_number:02d} needs {stage_arch}; this is an {gpu.name} ({gpu.arch})"
    if request == "cuda":
        raise DeviceError(f"{obstacle}: use --device emulator")
    return _emulator(obstacle)
