"""Places a sweep over one knob of a stage, and every other stage, on the roofline of the device that runs them.

On a GPU everything is timed there, with the ceilings of the same run. On the emulator the FLOPs of the sweep are
counted as they happen, those of other stages come from their formulas at the size that a GPU would run, and the
ceilings are the B200's, cited.
"""

from __future__ import annotations

import runpy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from common.device import can_run, find_gpu
from common.roofline import (
    B200,
    B200_TENSOR,
    COMPUTE,
    COUNTED,
    FP32,
    MEASURED,
    MEMORY,
    MODELLED,
    TENSOR,
    Ceiling,
    Point,
    Roofline,
)
from common.series import stage_scripts
from common.stage import Config, Stage
from common.verify import make_arguments, verify_once

if TYPE_CHECKING:
    from common.harness import Outcome

RUNS = 20  # timed, of each point


def survey(outcome: Outcome, knob: str, values: Sequence[int], folder: Path) -> str:
    """Verify, count or time the stage of `outcome` at each value of its size `knob`, which its kernel takes when it
    runs; draw `roofline.png` and `roofline.json` into `folder`; return the table and where the files are.

    Raises Mismatch when a point's result is wrong.
    """
    configs = [replace(outcome.config, values={**outcome.config.values, knob: value}) for value in values]
    points, ceilings, device = (_measured if outcome.device.kind == "cuda" else _counted)(outcome, configs)
    points = [replace(point, name=f"{knob} {value}") for point, value in zip(points, values)] + points[len(values) :]
    roofline = Roofline(device, ceilings, points)
    files = roofline.write(folder)
    return "\n".join((_table(roofline), "", f"Written: {', '.join(map(str, files))}"))


def _counted(outcome: Outcome, configs: Sequence[Config]) -> tuple[list[Point], Sequence[Ceiling], str]:
    points = []
    for config in configs:
        run = _verified(outcome, config, "cpu", schedule="early").run
        flops = sum(n for unit, n in run.counters.flops.items() if not unit.endswith("special"))
        points.append(_point(outcome.stage, config, flops=flops, source=COUNTED))
    for stage in _others(outcome.stage):
        points.append(_point(stage, stage.config(scale="gpu"), source=MODELLED))
    return points, B200, "a B200"


def _measured(outcome: Outcome, configs: Sequence[Config]) -> tuple[list[Point], Sequence[Ceiling], str]:
    from common.bench import CudaClock, measure_copy
    from common.fma_peak import measure_fma

    device, clock = outcome.device, CudaClock()
    copy = measure_copy(clock, RUNS)
    fma = measure_fma(device.sms, device.arch, clock, RUNS)
    ceilings = (
        Ceiling("memory", MEMORY, copy.gigabytes_per_second * 1e9, MEASURED, "device-to-device copy of this run"),
        Ceiling(FP32, COMPUTE, fma, MEASURED, "kernel of FMAs alone, in this run"),
        replace(B200_TENSOR, origin=f"of a B200: {B200_TENSOR.origin}"),
    )
    points = []
    for config in configs:
        _verified(outcome, config, "cuda")
        points.append(_timed(outcome.stage, config, outcome.kernel, clock))
    capability = find_gpu().capability
    for stage in _others(outcome.stage):
        if can_run(stage.arch, capability):
            config = stage.config(scale="gpu", sms=device.sms)
            points.append(_timed(stage, config, stage.build(scale="gpu", arch=device.arch, sms=device.sms), clock))
    return points, ceilings, device.name


def _others(stage: Stage) -> list[Stage]:
    """The stages of the repository but `stage`, those whose FLOPs and bytes are known by formula."""
    loaded = [
        runpy.run_path(str(script))["STAGE"] for number, script in stage_scripts().items() if number != stage.number
    ]
    return [other for other in loaded if other.flops and other.bytes_moved]


def _verified(outcome: Outcome, config: Config, device: str, **options: Any) -> Any:
    def run(*arguments: Any) -> Any:
        return outcome.kernel(*arguments, **options)

    return verify_once(outcome.stage, config, run, seed=0, device=device, **options)


def _timed(stage: Stage, config: Config, kernel: Any, clock: Any) -> Point:
    from common.bench import measure

    inputs, outputs = make_arguments(stage, config, 0, "cuda")
    milliseconds = measure(lambda: kernel(*inputs, *outputs), clock, runs=RUNS).median
    return replace(_point(stage, config, source=MEASURED), seconds=milliseconds / 1e3)


def _point(stage: Stage, config: Config, *, source: str, flops: int | None = None) -> Point:
    return Point(
        name=f"stage {stage.number:02d}",
        stage=stage.number,
        flops=stage.flops(config) if flops is None else flops,
        moved=stage.bytes_moved(config),
        source=source,
        unit=TENSOR if stage.arch == "sm_100a" else FP32,
    )


def _table(roofline: Roofline) -> str:
    """Every point with the limit it meets first."""
    ridge = {unit: roofline.ridge(roofline.memories[0], unit) for unit in (FP32, TENSOR)}
    rows = []
    for point in roofline.points:
        rate, reached = point.rate, roofline.reached(point)
        rows.append(
            (
                f"stage {point.stage:02d}" + (f", {point.name}" if not point.name.startswith("stage") else ""),
                f"{point.flops:,}", f"{point.moved:,}", f"{point.intensity:.2f}",
                roofline.memories[0].name if point.intensity < ridge[point.unit] else point.unit,
                f"{roofline.bound(point) / 1e12:.1f}",
                "-" if rate is None else f"{rate / 1e12:.1f}", "-" if reached is None else f"{reached:.1%}",
                point.source,
            )
        )  # fmt: skip
    headers = ("point", "FLOPs", "bytes", "FLOP/B", "limit", "roof TFLOP/s", "TFLOP/s", "of roof", "source")
    aligned = ("left", "right", "right", "right", "left", "right", "right", "right", "left")
    ceilings = [(c.name, f"{c.value / 1e12:.4g} {'TB/s' if c.kind == MEMORY else 'TFLOP/s'}", c.source, c.origin)
                for c in roofline.ceilings]  # fmt: skip
    return "\n\n".join(
        (
            tabulate(ceilings, headers=("ceiling", "value", "source", "origin"), tablefmt="simple"),
            tabulate(rows, headers=headers, tablefmt="simple", disable_numparse=True, colalign=aligned),
        )
    )
