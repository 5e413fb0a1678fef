"""Turns what was built, verified, timed and counted into one table and one JSON document."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from common.bench import Timing
from common.verify import Verification

if TYPE_CHECKING:
    from common.build import Kernel
    from common.emulator.machine.counters import Counters, Figures, Role
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


def counts(counters: Counters) -> dict[str, Any]:
    """Counters of an emulator run as plain numbers.

    `warp_instructions` by opcode, `bytes` by path, `events`, `flops` by unit, `roles` (instruction mix of warps that
    run the same code), `total` and, worst first, `lines` and `instructions`: the figures of the launch, of each source
    line and of each PTX instruction.
    """
    return {
        "warp_instructions": {"total": counters.warp_instructions, **dict(counters.by_opcode().most_common())},
        "bytes": dict(counters.bytes),
        "events": dict(counters.events),
        "flops": dict(counters.flops),
        "roles": [
            {"warps": [role.first, role.last], "opcodes": dict(role.opcodes.most_common())} for role in counters.roles()
        ],
        "total": _figures(counters.total()),
        "lines": [{"source": source, **_figures(figures)} for source, figures in counters.by_source().items()],
        "instructions": [
            {"ptx_line": inst.line, "source": inst.source, "text": inst.text, **_figures(figures)}
            for inst, figures in counters.by_instruction()
        ],
    }


def _figures(figures: Figures) -> dict[str, int]:
    return {**dataclasses.asdict(figures), "conflicts": figures.conflicts}


def counted_rows(counters: Counters) -> list[Row]:
    """Warp-instructions, bytes by path, memory traffic, FLOPs by unit, waits. Details are left to the JSON document."""
    total = counters.total()
    figures = {"warp instructions": f"{counters.warp_instructions:,}"}
    figures |= {f"bytes, {path}": f"{number:,}" for path, number in counters.bytes.items()}
    if total.shared_requests:
        figures["SMEM wavefronts"] = (
            f"{total.wavefronts:,} in {total.shared_requests:,} requests, {total.conflicts:,} of them bank conflicts"
        )
    if total.global_requests:
        figures["GMEM sectors"] = (
            f"{total.sectors:,} in {total.global_requests:,} requests, {total.ideal_sectors:,} if packed densely"
        )
    figures |= _role_figures(counters.roles())
    figures |= {f"operations, {unit}": f"{number:,}" for unit, number in counters.flops.items()}
    figures |= {name: f"{number:,}" for name, number in counters.events.items()}
    return [Row("counted", name, value, EMULATED) for name, value in figures.items()]


def _role_figures(roles: Sequence[Role]) -> dict[str, str]:
    """What warps do that run different code, with the opcodes that they execute most."""
    figures = {}
    for role in roles if len(roles) > 1 else ():
        total = role.opcodes.total()
        most = ", ".join(f"{opcode} {count / total:.0%}" for opcode, count in role.opcodes.most_common(5))
        name = f"warp {role.first}" if role.first == role.last else f"warps {role.first} to {role.last}"
        figures[f"{name}, instructions"] = f"{total:,}: {most}"
    return figures


def source_table(counters: Counters, sources: Mapping[str, str], shown: int = 30) -> str:
    """Where a launch spends wavefronts, sectors and instructions: the `shown` worst source lines, worst first.

    `sources` maps file names to text ("kernel.cu": what TVM generated); lines of other files are named only.
    """
    texts = {name: text.splitlines() for name, text in sources.items()}
    lines = counters.by_source()
    rows = []
    for source, figures in list(lines.items())[:shown]:
        file, _, number = source.rpartition(":")
        text = texts[file][int(number) - 1].strip() if file in texts else ""
        rows.append(
            (
                source, f"{figures.wavefronts:,}", f"{figures.ideal_wavefronts:,}", f"{figures.conflicts:,}",
                f"{figures.sectors:,}", f"{figures.ideal_sectors:,}", f"{figures.instructions:,}", _shorten(text),
            )
        )  # fmt: skip
    headers = ("line", "wavefronts", "ideal", "conflicts", "sectors", "ideal", "instructions", "text")
    left = f"\nand {len(lines) - shown} more lines: see --json" if len(lines) > shown else ""
    aligned = ("left", *["right"] * 6, "left")
    return tabulate(rows, headers=headers, tablefmt="simple", disable_numparse=True, colalign=aligned) + left


def _shorten(text: str, width: int = 72) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def table(rows: Iterable[Row]) -> str:
    """All rows in one table, the name of each part on its first row only."""
    lines, previous = [], None
    for row in rows:
        lines.append((row.part if row.part != previous else "", row.name, row.value, row.source))
        previous = row.part
    return tabulate(lines, headers=("", "what", "value", "source"), tablefmt="simple", disable_numparse=True)
