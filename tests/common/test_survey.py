from types import SimpleNamespace

import numpy as np
import torch

from common import bench, fma_peak, survey
from common.build import build
from common.device import Device, Gpu
from common.stage import B200_SMS
from tests.common.test_bench import FakeClock
from tests.stages import load_stage


def test_the_fma_kernel_does_the_fmas_it_is_timed_for() -> None:
    kernel = build(fma_peak.fma_kernel(2))
    y = torch.full((2 * fma_peak.THREADS,), torch.nan)
    run = kernel(3, y)
    assert run.counters.flops["fp32 fma"] == fma_peak.flops(2, 3)
    x = np.arange(fma_peak.THREADS, dtype=np.float64) * 0.5 / fma_peak.THREADS
    a = np.tile(np.arange(fma_peak.CHAINS, dtype=np.float64)[:, None], x.size)
    for _ in range(3 * fma_peak.UNROLL):
        a = a * x + x
    np.testing.assert_allclose(y.numpy(), np.tile(a.sum(axis=0), 2), rtol=1e-5)


def test_the_loop_of_the_fma_kernel_is_fmas() -> None:
    kernel = build(fma_peak.fma_kernel(2))
    assert kernel.sass().count("FFMA") == fma_peak.CHAINS * fma_peak.UNROLL
    assert kernel.resources.spill_store_bytes == 0


def test_on_a_gpu_every_point_is_timed_against_roofs_of_the_same_run(tmp_path, monkeypatch) -> None:
    """The GPU is the emulator here; clock and ceilings are made up."""
    stage = load_stage(3)
    on_cpu = survey.make_arguments
    monkeypatch.setattr(survey, "make_arguments", lambda stage, config, seed, device: on_cpu(stage, config, seed))
    verify_once = survey.verify_once
    monkeypatch.setattr(survey, "verify_once", lambda *a, device, **options: verify_once(*a, device="cpu", **options))
    monkeypatch.setattr(survey, "find_gpu", lambda: Gpu("GPU", (9, 0), 1, "580"))
    monkeypatch.setattr(survey, "_others", lambda stage: [])
    monkeypatch.setattr(bench, "CudaClock", lambda: FakeClock([1e-3] * 1000))
    monkeypatch.setattr(bench, "measure_copy", lambda clock, runs: SimpleNamespace(gigabytes_per_second=4000))
    monkeypatch.setattr(fma_peak, "measure_fma", lambda sms, arch, clock, runs: 50e12)
    device = Device("cuda", "GPU", "sm_90a", B200_SMS, "asked for")
    outcome = SimpleNamespace(stage=stage, config=stage.config(), device=device, kernel=stage.build())
    text = survey.survey(outcome, "degree", [0, 4], tmp_path)
    assert text.count("measured") == 4 and "cited" in text
    seconds, moved = 1e-6, stage.bytes_moved(outcome.config)
    assert f"{moved / 4e12 / seconds:.1%}" in text
