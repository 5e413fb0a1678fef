"""Turns what was built, verified, timed and counted into one table and one JSON document."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tabulate import tabulate

from common.bench import Timing
from common.verify import Verification

if TYPE_CHECKING:
    from common.build import Kernel
    from common.emulator.machine.counters import Counters
    from common.launch_spec import LaunchShape

# Where a figure comes from: a GPU, the emulator, or the compiler's report.
MEASURED, EMULATED, COMPILED = "measured", "emulated", "compiled"


@dataclass(frozen=True)
class Row:
    """One figure: the part of the table it belongs to, its name, its value as text, and where the value comes from."""

    part: str
    name: str
    value: str
    source: str


def _count(extents: Sequence[int], unit: str) -> str:
    kept = list(extents)
    while len(kept) > 1 and kept[-1] == 1:
        kept.pop()
    return f"{' x '.join(map(str, kept))} {unit}{'' if kept == [1] else 's'}"


def built_rows(kernel: Kernel, shape: LaunchShape) -> list[Row]:
    """Registers, spills, shared memory and launch shape of a kernel."""
    resources = kernel.resources
    figures = {
        "kernel": f"{kernel.launch_spec.kernel} for {kernel.arch}, {kernel.compilation.compiler}",
        "registers": f"{resources.registers} per thread, {resources.stack_bytes} B of stack",
        "spills": f"{resources.spill_store_bytes} B stored, {resources.spill_load_bytes} B loaded",
        "SMEM": f"{shape.shared_bytes} B dynamic, {resources.static_shared_bytes} B static",
        "grid": _count(shape.grid, "CTA"),
        "block": _count(shape.block, "thread"),
        "cluster": _count(shape.cluster, "CTA"),
    }
    return [Row("built", name, value, COMPILED) for name, value in figures.items()]


def verified_rows(verifications: Iterable[Verification], source: str) -> list[Row]:
    """One row per run and output: relative error of the whole output, and the worst element against its bound."""
    rows = []
    for verification in verifications:
        label = f" schedule {verification.schedule}," if verification.schedule else ""
        for c in verification.comparisons:
            norm = f"error {c.relative_error:.2e} of {c.allowed_error:.0e} allowed"
            name = f"{c.output} against torch {c.reference_dtype},{label} seed {verification.seed}"
            rows.append(Row("verified", name, f"{norm}, worst element at {c.worst:.0%} of its bound", source))
    return rows


def timed_rows(timings: Iterable[Timing], source: str) -> list[Row]:
    """One row per kernel: median, 10th to 90th percentile, rates."""
    rows = []
    for t in timings:
        ms = t.milliseconds
        parts = [f"{ms.median:.4g} ms ({ms.p10:.4g} to {ms.p90:.4g}, {ms.runs} runs)"]
        if t.gigabytes_per_second is not None:
            parts.append(f"{t.gigabytes_per_second:.0f} GB/s")
        if t.teraflops is not None:
            parts.append(f"{t.teraflops:.1f} TFLOP/s")
        if t.of_copy is not None:
            parts.append(f"{t.of_copy:.1%} of the device's copy")
        rows.append(Row("timed", t.name, ", ".join(parts), source))
    return rows


def counts(counters: Counters) -> dict[str, dict[str, int]]:
    """Counters of an emulator run as plain numbers: warp-instructions by opcode, bytes by path, other events."""
    return {
        "warp_instructions": {"total": counters.warp_instructions, **dict(counters.by_opcode().most_common())},
        "bytes": dict(counters.bytes),
        "events": dict(counters.events),
    }


def counted_rows(counters: Counters) -> list[Row]:
    """Warp-instructions, bytes by path, events: one row each. Opcodes are left to the JSON document."""
    figures = {"warp instructions": f"{counters.warp_instructions:,}"}
    figures |= {f"bytes, {path}": f"{number:,}" for path, number in counters.bytes.items()}
    figures |= {name: f"{number:,}" for name, number in counters.events.items()}
    return [Row("counted", name, value, EMULATED) for name, value in figures.items()]


def table(rows: Iterable[Row]) -> str:
    """All rows in one table, the name of each part on its first row only."""
    lines, previous = [], None
    for row in rows:
        lines.append((row.part if row.part != previous else "", row.name, row.value, row.source))
        previous = row.part
    return tabulate(lines, headers=("", "what", "value", "source"), tablefmt="simple", disable_numparse=True)
