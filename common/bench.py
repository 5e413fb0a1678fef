"""GPU timing: CUDA events, warm-up, cold L2 before every run, median with 10th and 90th percentile.

Nothing here touches CUDA when it is imported. Every figure is measured on the device at hand, baselines in the same
run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from common.stage import Config, Stage

COPY_BYTES = 1 << 29  # copied once: 1 GiB of traffic, many times any L2


class Clock(Protocol):
    """Times one call on a device."""

    def time(self, call: Callable[[], Any]) -> float:
        """Milliseconds that the device spends in one call, caches cold."""


class CudaClock:
    """Times with a pair of CUDA events on torch's current stream, after overwriting twice the L2's size."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self._flush = torch.empty(2 * l2_bytes, dtype=torch.uint8, device="cuda")
        self._start, self._stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def time(self, call: Callable[[], Any]) -> float:
        self._flush.zero_()
        self._start.record()
        call()
        self._stop.record()
        self._torch.cuda.synchronize()
        return self._start.elapsed_time(self._stop)


@dataclass(frozen=True)
class Statistics:
    """Milliseconds over `runs` runs: median, 10th and 90th percentile."""

    median: float
    p10: float
    p90: float
    runs: int


def summarise(samples: Sequence[float]) -> Statistics:
    """Statistics of samples in milliseconds. Raises ValueError when there are none."""
    if not len(samples):
        raise ValueError("no samples to summarise")
    p10, median, p90 = np.percentile(np.asarray(samples, dtype=np.float64), [10, 50, 90])
    return Statistics(float(median), float(p10), float(p90), len(samples))


def measure(call: Callable[[], Any], clock: Clock, *, warmup: int = 5, runs: int = 50) -> Statistics:
    """Time `call` `runs` times after `warmup` calls whose times are dropped (clocks, caches, lazy initialisation)."""
    for _ in range(warmup):
        clock.time(call)
    return summarise([clock.time(call) for _ in range(runs)])


@dataclass(frozen=True)
class Timing:
    """One measured row. `gigabytes_per_second` and `teraflops` are at the median; `of_copy` is the fraction of the rate
    at which the same device copies memory in the same run. None where the stage gives no byte or flop count."""

    name: str
    milliseconds: Statistics
    gigabytes_per_second: float | None = None
    teraflops: float | None = None
    of_copy: float | None = None


def timing(
    name: str, milliseconds: Statistics, *, moved: int | None, flops: int | None, copy_rate: float | None = None
) -> Timing:
    """Rates from a time: `moved` in bytes, `copy_rate` in GB/s (1e9 bytes per second)."""
    seconds = milliseconds.median / 1e3
    rate = moved / seconds / 1e9 if moved else None
    return Timing(
        name=name,
        milliseconds=milliseconds,
        gigabytes_per_second=rate,
        teraflops=flops / seconds / 1e12 if flops else None,
        of_copy=rate / copy_rate if rate and copy_rate else None,
    )


def measure_copy(clock: Clock, runs: int) -> Timing:
    """torch's own device-to-device copy of 512 MiB: the rate that memory-bound kernels are compared with."""
    import torch

    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return timing(
        "device copy", measure(lambda: target.copy_(source), clock, runs=runs), moved=2 * COPY_BYTES, flops=None
    )


def measure_kernel(stage: Stage, config: Config, kernel: Any, *, seed: int, runs: int = 50) -> Statistics:
    """Time a built stage on the current GPU, without its baselines."""
    from common.verify import make_arguments

    inputs, outputs = make_arguments(stage, config, seed, "cuda")
    return measure(lambda: kernel(*inputs, *outputs), CudaClock(), runs=runs)


def measure_stage(stage: Stage, config: Config, kernel: Any, *, seed: int, runs: int = 50) -> list[Timing]:
    """Time a built stage, its baselines and the device's copy on the current GPU, in one run."""
    from common.verify import make_arguments

    clock = CudaClock()
    copy = measure_copy(clock, runs)
    inputs, outputs = make_arguments(stage, config, seed, "cuda")
    work = {
        "moved": stage.bytes_moved(config) if stage.bytes_moved else None,
        "flops": stage.flops(config) if stage.flops else None,
        "copy_rate": copy.gigabytes_per_second,
    }
    calls: dict[str, Callable[[], Any]] = {"this kernel": lambda: kernel(*inputs, *outputs)}
    for name, function in stage.baselines.items():
        calls[name] = lambda function=function: function(config, *inputs)
    return [timing(name, measure(call, clock, runs=runs), **work) for name, call in calls.items()] + [copy]
