"""Is the result right? Poisoned outputs, fresh random inputs, references in higher precision, scaled tolerances.

An element may differ from its reference by what explains itself: rounding to the output type, plus float32
accumulation over `terms` products (each step at most 2^-24 of the running magnitude). The whole output must also
match in norm, which catches a small error made everywhere. Finiteness comes first: NaN equals nothing here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from common.emulator.machine.events import SCHEDULES

if TYPE_CHECKING:
    from common.stage import Config, Stage

_NORM = {torch.float16: 1e-3, torch.bfloat16: 5e-3, torch.float32: 1e-5, torch.float64: 1e-12}
_FLOAT32_STEP = 2.0**-24
# Roundings of a few float32 operations after the accumulation: a scale, an approximate reciprocal or square root.
_EPILOGUE_STEPS = 8


class Mismatch(AssertionError):
    """A kernel's output differs from its reference; the message has the first wrong index and both values."""


@dataclass(frozen=True)
class Tolerance:
    """How far an output may be from its reference.

    `terms`: float32 additions behind one element (the length of its dot product or sum). `roundings`: how many times
    the value is rounded to the output's type. `norm`: bound of ‖out - ref‖ / ‖ref‖; None takes 1e-3 for float16, 5e-3
    for bfloat16, 1e-5 for float32. An element much smaller than the others is a sum in which large terms cancel, so the
    additions may be off by as much as for an element of root mean square: of the output, or with `by_row` of the
    element's own row (the last dimension), where rows differ in size.
    """

    terms: int = 1
    roundings: float = 1.0
    norm: float | None = None
    by_row: bool = False

    def norm_for(self, dtype: torch.dtype) -> float:
        """Bound of the relative norm for this output type. Raises ValueError when it must be given and is not."""
        if self.norm is not None:
            return self.norm
        if dtype not in _NORM:
            raise ValueError(f"no default norm for {dtype} outputs: give Tolerance(norm=...)")
        return _NORM[dtype]


@dataclass(frozen=True)
class Comparison:
    """One output against its reference.

    `relative_error` is ‖out - ref‖ / ‖ref‖, `allowed_error` its bound, `worst` the largest element error over what that
    element was allowed (1 is the limit).
    """

    output: str
    reference_dtype: str
    relative_error: float
    allowed_error: float
    worst: float


@dataclass(frozen=True)
class Verification:
    """One run that matched: each output's comparison, the seed of its inputs, and on the emulator schedule and run."""

    comparisons: tuple[Comparison, ...]
    seed: int
    schedule: str | None = None
    run: Any = None


def poisoned(shape: Sequence[int], dtype: torch.dtype, device: str | torch.device = "cpu") -> torch.Tensor:
    """A tensor whose every byte is 0xFF: NaN in each float format, -1 in signed integers. Unwritten elements show."""
    count = dtype.itemsize
    for extent in shape:
        count *= extent
    return torch.full((count,), 0xFF, dtype=torch.uint8, device=device).view(dtype).reshape(tuple(shape))


def _is_poison(value: torch.Tensor) -> bool:
    return bool((value.reshape(1).contiguous().view(torch.uint8) == 0xFF).all())


def _index_text(flat: int, shape: Sequence[int]) -> str:
    index = []
    for extent in reversed(shape):
        index.append(flat % extent)
        flat //= extent
    return ", ".join(map(str, reversed(index)))


def _extent(wrong: torch.Tensor) -> str:
    """The smallest box that holds all wrong elements, as slices: often it is a tile, or a part of one."""
    spans = []
    for axis, extent in enumerate(wrong.shape):
        places = wrong.movedim(axis, 0).reshape(extent, -1).any(1).nonzero()
        spans.append(f"{int(places[0])}:{int(places[-1]) + 1}")
    return ", ".join(spans)


def _mismatch(name: str, got: torch.Tensor, expected: torch.Tensor, wrong: torch.Tensor, allowed: str) -> Mismatch:
    flat = int(wrong.reshape(-1).to(torch.uint8).argmax())
    value, reference = got.reshape(-1)[flat], expected.reshape(-1)[flat]
    unwritten = " (never written: still the poison it started with)" if _is_poison(value) else ""
    return Mismatch(
        f"{name}[{_index_text(flat, got.shape)}] is {value.item():.9g}{unwritten}, expected {reference.item():.9g}"
        f"{allowed}; {int(wrong.sum())} of {wrong.numel()} elements are wrong, all in {name}[{_extent(wrong)}]"
    )


def compare(name: str, got: torch.Tensor, reference: torch.Tensor, tolerance: Tolerance) -> Comparison:
    """Compare one output with its reference (float32, float64, or an integer type: then bit for bit).

    Raises Mismatch at the first element (row-major) that is not finite where the reference is, or is off by more than
    the tolerance allows, or when the norm of the error is too large; ValueError when the shapes differ.
    """
    if got.shape != reference.shape:
        raise ValueError(f"{name} has shape {tuple(got.shape)}, its reference {tuple(reference.shape)}")
    label = str(reference.dtype).removeprefix("torch.")
    if not got.dtype.is_floating_point:
        wrong = got != reference
        if wrong.any():
            raise _mismatch(name, got, reference, wrong, "")
        return Comparison(name, label, 0.0, 0.0, 0.0)
    return _compare_floats(name, got, reference, tolerance, label)


def _compare_floats(name: str, got: torch.Tensor, ref: torch.Tensor, tolerance: Tolerance, label: str) -> Comparison:
    out = got.to(torch.float64)
    expected = ref.to(torch.float64)
    finite = expected.isfinite()
    wrong = torch.where(finite, ~out.isfinite(), out != expected)
    if wrong.any():
        raise _mismatch(name, got, ref, wrong, "")
    error = torch.where(finite, (out - expected).abs(), 0.0)
    magnitude = torch.where(finite, expected.abs(), 0.0)
    allowed = _allowed(magnitude, got.dtype, tolerance)
    wrong = error > allowed
    if wrong.any():
        bound = allowed.reshape(-1)[int(wrong.reshape(-1).to(torch.uint8).argmax())].item()
        raise _mismatch(name, got, ref, wrong, f" (may be off by {bound:.3g})")
    norm = magnitude.norm().item()
    relative = error.norm().item() / norm if norm else 0.0
    limit = tolerance.norm_for(got.dtype)
    if relative > limit:
        raise Mismatch(
            f"{name}: every element is within its bound, but ‖out - ref‖/‖ref‖ is {relative:.3g} > {limit:.3g}"
        )
    worst = (error / allowed.clamp_min(torch.finfo(torch.float64).tiny)).max().item() if error.numel() else 0.0
    return Comparison(name, label, relative, limit, worst)


def _allowed(magnitude: torch.Tensor, dtype: torch.dtype, tolerance: Tolerance) -> torch.Tensor:
    info = torch.finfo(dtype)
    rounding = info.eps / 2 * magnitude.clamp_min(info.tiny)
    squares = magnitude.square()
    mean = squares.mean(-1, keepdim=True) if tolerance.by_row else squares.mean()
    scale = magnitude.maximum(mean.sqrt()) if magnitude.numel() else magnitude
    return tolerance.roundings * rounding + (tolerance.terms + _EPILOGUE_STEPS) * _FLOAT32_STEP * scale


def _tolerance(stage: Stage, config: Config) -> Tolerance:
    chosen = stage.tolerance
    if chosen is None:
        return Tolerance()
    return chosen(config) if callable(chosen) else chosen


def _as_tuple(value: Any) -> tuple:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _to_device(value: Any, device: str) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


def make_arguments(stage: Stage, config: Config, seed: int, device: str = "cpu") -> tuple[tuple, tuple]:
    """Fresh random inputs from `seed`, and poisoned outputs, on `device` ("cpu" or "cuda")."""
    generator = torch.Generator(device=device).manual_seed(seed)
    inputs = tuple(_to_device(value, device) for value in _as_tuple(stage.inputs(config, generator)))
    outputs = tuple(poisoned(shape, dtype, device) for shape, dtype in stage.outputs(config))
    return inputs, outputs


def check_outputs(stage: Stage, config: Config, inputs: tuple, outputs: tuple) -> tuple[Comparison, ...]:
    """Compare every output with the stage's reference. Raises Mismatch."""
    references = _as_tuple(stage.reference(config, *inputs))
    if len(references) != len(outputs):
        raise ValueError(f"the stage has {len(outputs)} outputs and {len(references)} references")
    names = [f"output {i}" for i in range(len(outputs))] if len(outputs) > 1 else ["output"]
    tolerance = _tolerance(stage, config)
    return tuple(compare(n, o, r, tolerance) for n, o, r in zip(names, outputs, references, strict=True))


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def _check_inputs_kept(before: Sequence[Any], after: Sequence[Any]) -> None:
    for position, (old, new) in enumerate(zip(before, after, strict=True)):
        if isinstance(old, torch.Tensor) and not _same_bytes(old, new):
            raise Mismatch(f"the kernel wrote to its input at position {position}")


def verify_once(
    stage: Stage,
    config: Config,
    run: Callable[..., Any],
    *,
    seed: int,
    device: str = "cpu",
    schedule: str | None = None,
) -> Verification:
    """Call `run(*inputs, *outputs)` on fresh arguments and compare. Raises Mismatch."""
    inputs, outputs = make_arguments(stage, config, seed, device)
    before = [value.clone() if isinstance(value, torch.Tensor) else value for value in inputs]
    result = run(*inputs, *outputs)
    if device == "cuda":
        torch.cuda.synchronize()
    _check_inputs_kept(before, inputs)
    return Verification(check_outputs(stage, config, inputs, outputs), seed, schedule, result)


def verify_stage(
    stage: Stage,
    config: Config,
    schedules: Sequence[str] = SCHEDULES,
    *,
    seed: int = 0,
    kernel: Any = None,
    on_step: Callable[[str], None] = lambda step: None,
) -> list[Verification]:
    """Run a stage on the emulator under each schedule, with new inputs for each, and compare with its reference.

    `kernel` defaults to the stage built for `config`. Raises Mismatch with the schedule in its message, and whatever
    the emulator raises.
    """
    from common.build import build

    kernel = kernel or build(stage.kernel(config))
    done = []
    for offset, schedule in enumerate(schedules):
        on_step(schedule)

        def run(*arguments: Any, schedule: str = schedule) -> Any:
            return kernel(*arguments, schedule=schedule, seed=seed)

        try:
            done.append(verify_once(stage, config, run, seed=seed + offset, schedule=schedule))
        except Mismatch as error:
            raise Mismatch(f"schedule {schedule}, seed {seed + offset}: {error}") from None
    return done
