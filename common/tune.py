"""`--tune`: the configurations of a GEMM stage that are legal for a problem, what each takes, and which is best.

A stage marks the options that may be tried (`Option(tune=True)`). SMEM, TMEM, registers, ring depth, cluster and tiles
are read from the built kernels. Waves and bytes per clock follow from them, and so does the modelled share of the
tensor cores' rate. On a GPU every configuration is verified and measured, and the best is remembered for this GPU and
problem: later runs of the stage that do not choose take it.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from tabulate import tabulate

from common.build import Kernel, build
from common.compiler import keep_headers
from common.device import Device
from common.stage import Config, Stage

MMA_ROWS = 128  # of D, that one SM sums up with one instruction
MMA_STEPS = 4  # instructions of K = 16 per stage of the ring
L2_BYTES_PER_CLOCK = 76  # that L2 gives one of 148 SMs: 22 TB/s at 1.965 GHz (TileSight, QuickRunCUDA: 20 to 26 TB/s)


@dataclass(frozen=True)
class Candidate:
    """One configuration of a stage and what it takes. SMEM and TMEM are those of one CTA, registers of one thread.

    `units` clusters run at a time. `bytes_per_clock` must reach every SM for its tensor core never to wait: an
    instruction of N columns takes N / 2 clocks (SemiAnalysis, microbench-blackwell). `milliseconds` is measured.
    """

    options: dict[str, str]
    stages: int
    cluster: int
    shared_bytes: int
    tmem_columns: int
    registers: int
    spill_bytes: int
    tiles: int
    units: int
    bytes_per_clock: float
    milliseconds: float | None = None

    @property
    def waves(self) -> int:
        return ceil(self.tiles / self.units)

    @property
    def modelled_share(self) -> float:
        """Of the tensor cores' peak: what L2 can feed, times how full the waves are. Nothing else is modelled."""
        fed = min(1.0, L2_BYTES_PER_CLOCK / self.bytes_per_clock)
        return fed * self.tiles / (self.units * self.waves)


def tunable(stage: Stage) -> bool:
    """Has this stage anything to tune?"""
    return any(option.tune for option in stage.options)


def _choices(stage: Stage, given: dict[str, Any]) -> Iterator[dict[str, str]]:
    names = [option.name for option in stage.options if option.tune]
    axes = [[given[o.name]] if o.name in given else o.choices for o in stage.options if o.tune]
    for values in itertools.product(*axes):
        yield dict(zip(names, values, strict=True))


def _tmem_columns(kernel: Kernel) -> int:
    """Columns that the kernel allocates, from its source."""
    call = re.search(r"tcgen05_alloc\w*\(.*\(uint\)(\d+)\);", kernel.cuda_source)
    if call is None:
        raise ValueError(f"{kernel.launch_spec.kernel} allocates no tensor memory: only the GEMM stages can be tuned")
    return int(call.group(1))


def _ring(stage: Stage, config: Config, all_of_them: int) -> tuple[int, int]:
    """Depth of the ring and bytes of one stage of it: what a third stage adds to the SMEM of two.

    `all_of_them`: the bytes of SMEM that the kernel of `config` takes.
    """

    def shared_bytes(stages: int) -> int:
        values = config.values | {"stages": stages}
        return build(stage.kernel(replace(config, values=values))).launch_spec.shared_bytes

    two, three = shared_bytes(2), shared_bytes(3)
    if three == two:
        raise ValueError(f"{config.tile}: SMEM holds two stages only, so their size cannot be read from the build")
    return 2 + (all_of_them - two) // (three - two), three - two


def candidate(stage: Stage, config: Config, kernel: Kernel, ring: tuple[int, int]) -> Candidate:
    """What a built kernel of a GEMM stage takes; `config.tile` is the rows x columns of D that a cluster sums up."""
    spec, resources = kernel.launch_spec, kernel.resources
    cluster = spec.cluster[0]
    rows, columns = map(int, config.tile.split("x"))
    tiles = ceil(config.m / rows) * ceil(config.n / columns)
    products = rows // (MMA_ROWS * cluster)  # of each block of K, one after the other
    return Candidate(
        options={option.name: config.values[option.name] for option in stage.options if option.tune},
        stages=ring[0],
        cluster=cluster,
        shared_bytes=spec.shared_bytes,
        tmem_columns=_tmem_columns(kernel),
        registers=resources.registers,
        spill_bytes=resources.spill_store_bytes + resources.spill_load_bytes,
        tiles=tiles,
        units=max(1, config.sms // cluster),
        bytes_per_clock=ring[1] / (products * MMA_STEPS * columns / 2),
    )


def candidates(
    stage: Stage, make_config: Callable[..., Config], given: dict[str, Any], arch: str
) -> Iterator[tuple[Candidate, Config, Kernel]]:
    """Every legal configuration: its record, config and kernel. `make_config(**values)` fills in the rest."""
    keep_headers()
    rings: dict[str, tuple[int, int]] = {}
    for chosen in _choices(stage, given):
        config = make_config(**{**given, **chosen})
        kernel = build(stage.kernel(config), arch=arch)
        if config.tile not in rings:
            rings[config.tile] = _ring(stage, config, kernel.launch_spec.shared_bytes)
        yield candidate(stage, config, kernel, rings[config.tile]), config, kernel


def table(found: list[Candidate], flops: int, label: str) -> str:
    """The configurations, best first: by measured time where there is one, else by the modelled share of the peak."""

    def row(c: Candidate) -> list[Any]:
        time = [] if c.milliseconds is None else [f"{c.milliseconds:.4f}", f"{flops / c.milliseconds / 1e9:.0f}"]
        fill = c.tiles / c.units
        return [
            *c.options.values(), c.stages, c.cluster, f"{c.shared_bytes:,}", c.tmem_columns, c.registers,
            c.spill_bytes, f"{fill:.2f} in {c.waves}", f"{c.bytes_per_clock:.0f}", f"{c.modelled_share:.0%}", *time,
        ]  # fmt: skip

    best_first = sorted(found, key=lambda c: (c.milliseconds or 0.0, -c.modelled_share))
    measured = ["ms", "TFLOP/s"] if best_first[0].milliseconds is not None else []
    headers = [
        *best_first[0].options, "stages", "cluster", "SMEM, B", "TMEM columns", "registers", "spills, B", "waves",
        "B/clk/SM", "of peak, modelled", *measured,
    ]  # fmt: skip
    lines = [
        tabulate([row(c) for c in best_first], headers=headers, disable_numparse=True),
        "",
        "stages to spills: compiled. waves: tiles over what runs at a time. B/clk/SM: what an SM must be fed at the",
        f"full rate of its tensor core; L2 gives about {L2_BYTES_PER_CLOCK} (cited). of peak: what these two leave,",
        "nothing else is modelled." + (f" ms: {label}." if measured else ""),
    ]
    return "\n".join(lines)


# -- what was best -----------------------------------------------------------------------------------------------------


def _store() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "blackwell-in-nine-stages" / "tuned.json"


def _key(stage: Stage, config: Config, device: Device) -> str:
    fixed = [option.name for option in stage.options if not option.tune]
    parts = [config.m, config.n, config.k, config.dtype, *(config.values[name] for name in fixed)]
    return f"stage {stage.number:02d} on {device.name}: " + " ".join(map(str, parts))


def remember(stage: Stage, config: Config, device: Device, best: Candidate) -> Path:
    """Keep the best options for this problem on this GPU. Returns the file."""
    path = _store()
    path.parent.mkdir(parents=True, exist_ok=True)
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    known[_key(stage, config, device)] = best.options
    path.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")
    return path


def remembered(stage: Stage, config: Config, device: Device) -> dict[str, str]:
    """The options that were best for this problem on this GPU; empty when it was never tuned."""
    path = _store()
    if not (tunable(stage) and path.exists()):
        return {}
    return json.loads(path.read_text(encoding="utf-8")).get(_key(stage, config, device), {})
