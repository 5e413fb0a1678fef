"""The roofline: how fast a kernel may be, given its FLOPs per byte, and where measured kernels stand under that.

A kernel that does F FLOPs on B bytes takes at least F / peak seconds and at least B / bandwidth seconds. So its rate is
at most min(peak, bandwidth * F / B), which on logarithmic axes is a slope and a flat roof. They meet at the ridge.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.stage import B200_SMS

MEASURED, COUNTED, MODELLED, CITED = "measured", "counted", "modelled", "cited"
MEMORY, COMPUTE = "memory", "compute"
FP32, TENSOR = "fp32", "tensor"

CLOCK = 1.965e9  # Hz, the B200's highest SM clock
SMS = B200_SMS


@dataclass(frozen=True)
class Ceiling:
    """A limit of the machine: of `kind` "memory" in bytes/s, or "compute" in FLOP/s of the unit `name`.

    `source` is "measured", "modelled" or "cited"; `origin` says by what, from what, or where.
    """

    name: str
    kind: str
    value: float
    source: str
    origin: str


@dataclass(frozen=True)
class Point:
    """One kernel at one size: its FLOPs, done by `unit` ("fp32" or "tensor"), and the bytes that must cross memory.

    `source` says where `flops` come from ("counted" or "modelled", that is by formula) or, with `seconds`, "measured".
    """

    name: str
    stage: int
    flops: int
    moved: int
    source: str
    unit: str = FP32
    seconds: float | None = None

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.moved

    @property
    def rate(self) -> float | None:
        """FLOP/s, None without a time."""
        return None if self.seconds is None else self.flops / self.seconds


# Sources: SemiAnalysisAI/microbench-blackwell (raw measurements of a B200 at 1.965 GHz), the NVIDIA Blackwell tuning
# guide and DGX B200 datasheet. L2: estimates from 20 to 26 TB/s are in circulation, measured directly by none.
B200_TENSOR = Ceiling(
    TENSOR, COMPUTE, SMS * 8192 * CLOCK, CITED, "bf16, 8192 FLOP/clk/SM (SemiAnalysis; datasheet: 2.25 PFLOP/s)"
)
B200 = (
    Ceiling("HBM", MEMORY, 7.2e12, CITED, "best read rate, SemiAnalysis microbench-blackwell; nominal 8 TB/s"),
    Ceiling("L2", MEMORY, 22e12, CITED, "between TileSight's 20.2 and QuickRunCUDA's 26 TB/s"),
    Ceiling("SMEM", MEMORY, SMS * 128 * CLOCK, CITED, "128 B/clk/SM (TileSight, QuickRunCUDA, SemiAnalysis)"),
    Ceiling(FP32, COMPUTE, SMS * 128 * 2 * CLOCK, CITED, "128 FMA/clk/SM (Blackwell tuning guide)"),
    B200_TENSOR,
)


@dataclass(frozen=True)
class Roofline:
    """The ceilings of `device`, and kernels under them. The first memory ceiling is the one that `Point.moved` crosses.

    Raises ValueError when a compute ceiling that a point needs, or any memory ceiling, is missing.
    """

    device: str
    ceilings: Sequence[Ceiling]
    points: Sequence[Point]

    def __post_init__(self) -> None:
        for name in {point.unit for point in self.points}:
            self.compute(name)
        if not self.memories:
            raise ValueError("a roofline needs a memory ceiling")

    @property
    def memories(self) -> list[Ceiling]:
        return [ceiling for ceiling in self.ceilings if ceiling.kind == MEMORY]

    @property
    def computes(self) -> list[Ceiling]:
        return [ceiling for ceiling in self.ceilings if ceiling.kind == COMPUTE]

    def compute(self, unit: str) -> Ceiling:
        """The roof of a unit."""
        for ceiling in self.computes:
            if ceiling.name == unit:
                return ceiling
        raise ValueError(f"no compute ceiling named {unit!r}")

    def ridge(self, memory: Ceiling, unit: str) -> float:
        """FLOPs per byte from which on `unit`, not `memory`, is the limit."""
        return self.compute(unit).value / memory.value

    def bound(self, point: Point) -> float:
        """FLOP/s that the roofs allow a point."""
        return min(self.memories[0].value * point.intensity, self.compute(point.unit).value)

    def reached(self, point: Point) -> float | None:
        """Fraction of what the roofs allow; for a point without FLOPs, of the memory's rate. None without a time."""
        if point.seconds is None:
            return None
        least = max(point.moved / self.memories[0].value, point.flops / self.compute(point.unit).value)
        return least / point.seconds

    def document(self) -> dict[str, Any]:
        """Everything as JSON-ready values: bytes, seconds, FLOP/s, bytes/s, FLOPs per byte."""
        return {
            "device": self.device,
            "ceilings": [asdict(ceiling) for ceiling in self.ceilings],
            "ridges": [
                {"memory": memory.name, "compute": compute.name, "intensity": self.ridge(memory, compute.name)}
                for memory in self.memories
                for compute in self.computes
            ],
            "points": [
                {
                    **asdict(point),
                    "intensity": point.intensity,
                    "bound": self.bound(point),
                    "rate": point.rate,
                    "of_bound": self.reached(point),
                }
                for point in self.points
            ],
        }

    def write(self, folder: Path) -> list[Path]:
        """Write `roofline.png` and `roofline.json` into `folder`, made where it is missing; returns both paths."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / "roofline.png", folder / "roofline.json"]
        draw(self, paths[0])
        paths[1].write_text(json.dumps(self.document(), indent=2) + "\n", encoding="utf-8")
        return paths


_LEFT, _RIGHT, _BOTTOM, _TOP = 0.25, 4096, 0.5, 6000  # FLOP/B and TFLOP/s
_MEMORY_STYLES = (("-", "#1f4e9c"), ("--", "#4f8fd0"), (":", "#8ab6dd"))
_COMPUTE_STYLES = {FP32: ("-", "#b3471b"), TENSOR: ("--", "#7a3fa0")}
_MARKERS = "osD^vP*Xp"  # by stage
_GREY = "#444444"
_BACKED = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.8}


def draw(roofline: Roofline, path: Path) -> None:
    """Draw as PNG. A filled marker is a measured rate; a hollow one stands where the roofs are, for want of a time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    axes.set(xlim=(_LEFT, _RIGHT), ylim=(_BOTTOM, _TOP), ylabel="TFLOP/s")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([2.0**k for k in range(-2, 13)], [f"{2.0**k:g}" for k in range(-2, 13)])
    axes.set_yticks([1, 10, 100, 1000], ["1", "10", "100", "1000"])
    axes.set_xlabel("arithmetic intensity, FLOPs per byte of memory traffic")
    axes.grid(which="major", color="#dddddd", linewidth=0.6)
    timed = any(point.seconds is not None for point in roofline.points)
    what = "filled markers are measured" if timed else "hollow markers show what the roofs allow; nothing is measured"
    axes.set_title(f"Roofline of {roofline.device}: {what}", fontsize=11)
    _draw_sides(axes, roofline)
    _draw_roofs(axes, roofline)
    _draw_points(axes, roofline)
    axes.legend(loc="lower right", fontsize=8.5, framealpha=0.95)
    figure.savefig(path)


def _draw_sides(axes: Any, roofline: Roofline) -> None:
    """Memory-bound to the left of the first ridge of the fp32 roof, compute-bound to the right."""
    ridge = roofline.ridge(roofline.memories[0], FP32)
    axes.axvspan(_LEFT, ridge, color="#1f4e9c", alpha=0.05, linewidth=0)
    axes.axvspan(ridge, _RIGHT, color="#b3471b", alpha=0.05, linewidth=0)
    for text, side, offset in (("bound by memory", "right", -8), ("bound by fp32", "left", 8)):
        axes.annotate(
            text, (ridge, 1.3), (offset, 0), textcoords="offset points", ha=side, fontsize=10, color=_GREY
        )  # fmt: skip


def _draw_roofs(axes: Any, roofline: Roofline) -> None:
    highest = max(ceiling.value for ceiling in roofline.computes)
    for memory, (style, colour) in zip(roofline.memories, _MEMORY_STYLES):
        end = highest / memory.value
        label = f"{memory.name}, {memory.value / 1e12:.3g} TB/s ({memory.source})"
        axes.plot([_LEFT, end], [_LEFT * memory.value / 1e12, highest / 1e12], style, color=colour, label=label)
    for compute in roofline.computes:
        style, colour = _COMPUTE_STYLES[compute.name]
        height = compute.value / 1e12
        ridges = {memory.name: roofline.ridge(memory, compute.name) for memory in roofline.memories}
        label = f"{compute.name}, {height:.4g} TFLOP/s ({compute.source})"
        axes.plot([min(ridges.values()), _RIGHT], [height, height], style, color=colour, label=label)
        for name, ridge in ridges.items():
            axes.plot([ridge], [height], "|", color=colour, markersize=14)
            axes.annotate(
                f"{name}\n{ridge:.3g}", (ridge, height), (0, 10), textcoords="offset points", ha="center",
                fontsize=8, color=colour, bbox=_BACKED,
            )  # fmt: skip


def _draw_points(axes: Any, roofline: Roofline) -> None:
    for stage in sorted({point.stage for point in roofline.points if point.flops}):
        points = [point for point in roofline.points if point.stage == stage and point.flops]
        heights = [(point.rate or roofline.bound(point)) / 1e12 for point in points]
        swept = len(points) > 1
        axes.plot(
            [point.intensity for point in points],
            heights,
            _MARKERS[(stage - 1) % len(_MARKERS)],
            color=f"C{stage - 1}",
            markersize=7 if swept else 11,
            fillstyle="none" if points[0].seconds is None else "full",
            zorder=3,
            label=f"stage {stage:02d} ({points[0].source})",
        )
        for point, height in zip(points, heights) if swept else ():
            axes.annotate(
                point.name, (point.intensity, height), (7, -13), textcoords="offset points", fontsize=8, color=_GREY
            )  # fmt: skip
    for line, point in enumerate(point for point in roofline.points if not point.flops):
        rate = "" if point.seconds is None else f", {point.moved / point.seconds / 1e12:.2f} TB/s"
        text = f"stage {point.stage:02d}: no FLOPs, so intensity 0, left of any scale{rate}"
        axes.text(0.01, 0.015 + 0.03 * line, text, transform=axes.transAxes, fontsize=8.5, color=_GREY)
