"""How many float32 FMAs per second does this GPU do? A kernel that does nothing else, timed."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

THREADS = 256
CTAS_PER_SM = 8  # 64 warps: as many as an SM holds
CHAINS = 8  # independent FMAs of a thread, so that none waits for the one before
UNROLL = 16  # FMAs of each chain between two branches
STEPS = 4096  # blocks of UNROLL: milliseconds on any GPU


def fma_kernel(ctas: int) -> Any:
    """The TIRx function fma(steps, Y): Y (ctas * THREADS,) float32 is the sum of CHAINS values a, each a = a * x + x
    done steps * UNROLL times from a = chain, with x = thread of the CTA / (2 * THREADS)."""

    @T.prim_func
    def fma(steps: T.int32, Y: T.Buffer((ctas * THREADS,), "float32")):
        T.device_entry()
        cta = T.cta_id([ctas])
        thread = T.thread_id([THREADS])
        a = T.alloc_local((CHAINS,), "float32")
        x: T.float32 = T.cast(thread, "float32") * T.float32(0.5 / THREADS)
        total: T.float32 = T.float32(0)
        for chain in T.unroll(CHAINS):
            a[chain] = T.float32(chain)
        for _ in T.serial(steps, unroll=False):
            for _ in T.unroll(UNROLL):
                for chain in T.unroll(CHAINS):
                    a[chain] = a[chain] * x + x
        for chain in T.unroll(CHAINS):
            total = total + a[chain]
        Y[cta * THREADS + thread] = total

    return fma


def flops(ctas: int, steps: int) -> int:
    """Of one launch, two for each FMA."""
    return 2 * ctas * THREADS * CHAINS * UNROLL * steps


def measure_fma(sms: int, arch: str, clock: Any, runs: int) -> float:
    """FLOP/s of the current GPU with `sms` SMs at the clock it takes, median of `runs`."""
    import torch

    from common.bench import measure
    from common.build import build

    ctas = sms * CTAS_PER_SM
    kernel = build(fma_kernel(ctas), arch=arch)
    y = torch.empty(ctas * THREADS, device="cuda")
    milliseconds = measure(lambda: kernel(STEPS, y), clock, runs=runs).median
    return flops(ctas, STEPS) / milliseconds * 1e3
