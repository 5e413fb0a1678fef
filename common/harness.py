"""Command line of every stage: choose a device, build, verify, time or count, report.

`run_stage(STAGE)` gives each script the same flags. Exit status: 0 when everything matched; 1 for a mismatch, a fault
on the emulator or a compiler's refusal; 2 for a size, flag or device that cannot be. See `common.stage` for how to
write one.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm
from tvm.error import DiagnosticError

from common import report, tune
from common.bench import Timing, measure_kernel, measure_stage
from common.build import Kernel, build
from common.compiler import SOURCE_NAME, CompileError
from common.device import Device, DeviceError, choose_device
from common.launch_spec import LaunchShape, launch_shape
from common.stage import BadSize, Config, Option, Size, Stage
from common.verify import SCHEDULES, Mismatch, Tolerance, Verification, verify_once, verify_stage

__all__ = [
    "BadSize", "Config", "Mismatch", "Option", "Size", "Stage", "Tolerance", "run_stage", "verify_stage",
]  # fmt: skip

DUMPS = ("tir", "cuda", "ptx", "sass")
USAGE_ERROR = 2


@dataclass
class Outcome:
    """Everything one run of a stage found out."""

    stage: Stage
    config: Config
    device: Device
    kernel: Kernel
    verifications: list[Verification] = field(default_factory=list)
    timings: list[Timing] = field(default_factory=list)
    shape: LaunchShape | None = None

    def run(self, *arguments: Any, **emulator_options: Any) -> Any:
        """Call the kernel and note the shape it is launched with."""
        self.shape = launch_shape(self.kernel.launch_spec, arguments)
        return self.kernel(*arguments, **emulator_options)

    def rows(self) -> list[report.Row]:
        rows = report.built_rows(self.kernel, self.shape)
        rows += report.verified_rows(self.verifications, self.source)
        rows += report.timed_rows(self.timings, self.source)
        return rows + (report.counted_rows(self.counters) if self.counters is not None else [])

    @property
    def source(self) -> str:
        """Where this run's figures come from, in the words of the table."""
        if self.device.kind == "emulator":
            return report.EMULATED
        return f"{report.MEASURED} ({self.device.name})"

    @property
    def counters(self) -> Any:
        """Counters of the first emulator run, None on a GPU."""
        run = self.verifications[0].run if self.verifications else None
        return None if run is None else run.counters

    def document(self) -> dict[str, Any]:
        """Everything as JSON-ready values."""
        spec = {f.name: getattr(self.kernel.launch_spec, f.name) for f in dataclasses.fields(self.kernel.launch_spec)}
        del spec["host"]
        spec["parameters"] = [{"kind": type(p).__name__, **dataclasses.asdict(p)} for p in spec["parameters"]]
        return {
            "stage": {"number": self.stage.number, "title": self.stage.title, "arch": self.stage.arch},
            "config": {**self.config.values, "dtype": self.config.dtype, "sms": self.config.sms},
            "device": dataclasses.asdict(self.device),
            "environment": _environment(),
            "built": {
                "arch": self.kernel.arch,
                "compiler": self.kernel.compilation.compiler,
                **dataclasses.asdict(self.kernel.resources),
                "launch": spec,
                "shape": dataclasses.asdict(self.shape),
            },
            "verified": [
                {
                    "schedule": v.schedule,
                    "seed": v.seed,
                    "source": self.source,
                    "outputs": [dataclasses.asdict(c) for c in v.comparisons],
                }
                for v in self.verifications
            ],
            "timed": [{**dataclasses.asdict(t), "source": self.source} for t in self.timings],
            "counted": report.counts(self.counters) if self.counters is not None else {},
        }


def _environment() -> dict[str, str]:
    import torch
    import tvm

    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "tvm": tvm.__version__,
    }


def _parser(stage: Stage) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=f"Stage {stage.number:02d}: {stage.title} (needs {stage.arch})")
    for size in stage.sizes:
        gpu = f", {size.gpu} on a GPU" if size.gpu is not None else ""
        quick = f", {size.quick} with --quick" if size.quick is not None else ""
        text = f"{size.help} (default {size.default}{gpu}{quick})".strip()
        parser.add_argument(_flag(size.name), type=int, metavar="N", dest=size.name, help=text)
    for option in stage.options:
        text = f"{option.help} (default {'each in turn' if option.each else option.default})".strip()
        parser.add_argument(_flag(option.name), choices=option.choices, dest=option.name, help=text)
    parser.add_argument(
        "--dtype", choices=stage.dtypes, default=stage.dtypes[0], help="element type (default %(default)s)"
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cuda", "emulator"),
        default="auto",
        help="auto takes a GPU that can run the stage, else the emulator",
    )
    parser.add_argument(
        "--schedule",
        choices=(*SCHEDULES, "all"),
        help="when the emulator lets asynchronous work complete (default late); implies the emulator",
    )
    parser.add_argument(
        "--seed", type=_seed, default=0, help="of the random inputs and of --schedule random (default 0)"
    )
    parser.add_argument("--dump", choices=DUMPS, help="print the kernel in this form and stop")
    parser.add_argument("--json", type=_writable, metavar="FILE", help="also write everything to FILE")
    parser.add_argument(
        "--counters",
        action="store_true",
        help="also print wavefronts, bank conflicts, sectors and instructions by line of the generated CUDA, "
        "worst first; implies the emulator",
    )
    if tune.tunable(stage):
        parser.add_argument(
            "--tune",
            action="store_true",
            help="list every configuration with what it takes of the machine; on a GPU measure them and keep the best",
        )
    parser.add_argument("--quick", action="store_true", help="small sizes and few timed runs")
    if stage.study:
        parser.add_argument(
            "--out", metavar="FOLDER", type=Path, default=Path("."), help="for the files it leaves (default: here)"
        )
    return parser


def _seed(text: str) -> int:
    """A seed as torch takes it. Raises ArgumentTypeError for any other text."""
    if not text.isdecimal() or int(text) >= 1 << 63:
        raise argparse.ArgumentTypeError(f"a seed is a number from 0 to 2^63 - 1, not {text}")
    return int(text)


def _writable(text: str) -> str:
    """The name of a file that can be written; found out before the work, not after it."""
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {text}")
    return text


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _device(stage: Stage, args: argparse.Namespace) -> Device:
    wants = {"--schedule": args.schedule, "--counters": args.counters}
    given = " and ".join(flag for flag, value in wants.items() if value)
    if given and args.device == "cuda":
        raise DeviceError(f"{given}: only the emulator has that. Drop it, or use --device emulator")
    if given and args.device == "auto":
        return dataclasses.replace(choose_device("emulator", stage.number, stage.arch), reason=f"{given} was given")
    return choose_device(args.device, stage.number, stage.arch)


def _given(stage: Stage, args: argparse.Namespace) -> dict[str, Any]:
    """Sizes and options that the command line names."""
    names = [item.name for item in (*stage.sizes, *stage.options)]
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def _configure(stage: Stage, args: argparse.Namespace, device: Device) -> Callable[..., Config]:
    scale = "quick" if args.quick else "gpu" if device.kind == "cuda" or getattr(args, "tune", False) else "default"
    return partial(stage.config, dtype=args.dtype, scale=scale, sms=device.sms)


def _config(stage: Stage, args: argparse.Namespace, device: Device) -> Config:
    """The run's config. On a GPU, options that nobody chose are those that `--tune` found best for the problem."""
    configure, given = _configure(stage, args, device), _given(stage, args)
    config = configure(**given)
    best = tune.remembered(stage, config, device) if device.kind == "cuda" else {}
    unchosen = {name: value for name, value in best.items() if name not in given}
    if unchosen:
        print("tuned earlier on this GPU: " + ", ".join(f"--{name} {value}" for name, value in unchosen.items()))
    return configure(**given, **unchosen)


def _dump(kernel: Kernel, form: str) -> str:
    return {
        "tir": kernel.tir,
        "cuda": lambda: kernel.cuda_source,
        "ptx": lambda: kernel.ptx,
        "sass": kernel.sass,
    }[form]()


def _on_emulator(outcome: Outcome, args: argparse.Namespace, bar: tqdm) -> None:
    schedules = SCHEDULES if args.schedule == "all" else (args.schedule or "late",)

    def step(schedule: str) -> None:
        bar.reset()
        bar.set_description(f"verify, schedule {schedule}")

    def show(finished: int, total: int) -> None:
        bar.total = total
        bar.update(finished - bar.n)

    run = partial(outcome.run, progress=show)
    outcome.verifications = verify_stage(
        outcome.stage, outcome.config, schedules, seed=args.seed, kernel=run, on_step=step
    )


def _on_gpu(outcome: Outcome, args: argparse.Namespace, bar: tqdm) -> None:
    bar.set_description("verify")
    stage, config = outcome.stage, outcome.config
    outcome.verifications = [verify_once(stage, config, outcome.run, seed=args.seed, device="cuda")]
    bar.update()
    bar.set_description("time")
    outcome.timings = measure_stage(stage, config, outcome.kernel, seed=args.seed, runs=10 if args.quick else 50)
    bar.update()


def _tune(stage: Stage, args: argparse.Namespace, device: Device) -> None:
    found, config = [], None
    given = _given(stage, args)
    candidates = tune.candidates(stage, _configure(stage, args, device), given, device.arch)
    for candidate, config, kernel in tqdm(candidates, leave=False, disable=not sys.stderr.isatty(), unit="kernel"):
        if device.kind == "cuda":
            verify_once(stage, config, kernel, seed=args.seed, device="cuda")
            milliseconds = measure_kernel(stage, config, kernel, seed=args.seed, runs=10 if args.quick else 50).median
            candidate = dataclasses.replace(candidate, milliseconds=milliseconds)
        found.append(candidate)
    print(f"stage {stage.number:02d}: {stage.title}; m {config.m}, n {config.n}, k {config.k}, {config.dtype}")
    print(f"device: {device.name}, {device.sms} SMs ({device.reason})")
    print(tune.table(found, stage.flops(config), f"{report.MEASURED} ({device.name})"))
    if device.kind == "cuda":
        best = min(found, key=lambda candidate: candidate.milliseconds)
        print(f"kept for later runs: {best.options}, in {tune.remember(stage, config, device, best)}")


def _runs(stage: Stage, args: argparse.Namespace) -> Iterator[argparse.Namespace]:
    """The arguments of each run: of one, or one per choice of an option that wants each, unless one was chosen.

    What can be written down only once, `--dump` and `--json`, is of the default.
    """
    each = [option for option in stage.options if option.each and getattr(args, option.name) is None]
    once = args.dump or args.json or getattr(args, "tune", False)
    choices = [[option.default] if once else option.choices for option in each]
    for chosen in itertools.product(*choices):
        yield argparse.Namespace(**{**vars(args), **dict(zip((option.name for option in each), chosen, strict=True))})


def _run(stage: Stage, args: argparse.Namespace) -> None:
    device = _device(stage, args)
    if getattr(args, "tune", False):
        return _tune(stage, args, device)
    config = _config(stage, args, device)
    kernel = build(stage.kernel(config), arch=device.arch)
    if args.dump:
        print(_dump(kernel, args.dump))
        return
    sizes = ", ".join(f"{item.name} {config.values[item.name]}" for item in (*stage.sizes, *stage.options))
    print(f"stage {stage.number:02d}: {stage.title}; {sizes}, {config.dtype}")
    driver = f", driver {device.driver}" if device.driver else ""
    print(f"device: {device.name}{driver} ({device.reason})")
    outcome = Outcome(stage, config, device, kernel)
    with tqdm(total=None, leave=False, disable=not sys.stderr.isatty(), unit="CTA") as bar:
        bar.set_description("compile")
        kernel.compilation  # noqa: B018  compiled here, so that a refusal comes before any run
        (_on_gpu if device.kind == "cuda" else _on_emulator)(outcome, args, bar)
    print(report.table(outcome.rows()))
    if args.counters:
        print()
        print(report.source_table(outcome.counters, {SOURCE_NAME: kernel.cuda_source}))
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(outcome.document(), file, indent=2)
            file.write("\n")
    if stage.study:
        print()
        print(stage.study(outcome, args.out))


def _emulator_errors() -> tuple[type[BaseException], ...]:
    """Exceptions of the emulator, whose messages are the lesson: shown without a Python traceback."""
    module = sys.modules.get("common.emulator.faults")
    return (module.EmulatorError,) if module else ()


def main(stage: Stage, argv: list[str] | None = None) -> int:
    """Run a stage's command line and return its exit status."""
    parser = _parser(stage)
    args = parser.parse_args(argv)
    if args.dump and args.json:
        parser.error("--dump prints the kernel and stops: there is nothing for --json to write")
    try:
        for run in _runs(stage, args):
            _run(stage, run)
    except BadSize as error:
        return _fail(f"bad size: {error}", USAGE_ERROR)
    except DeviceError as error:
        return _fail(str(error), USAGE_ERROR)
    except Mismatch as error:
        return _fail(f"wrong result: {error}", 1)
    except (CompileError, DiagnosticError) as error:  # of the compiler, of TVM's parser
        return _fail(str(error), 1)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        if not isinstance(error, _emulator_errors()):
            raise
        return _fail(f"{type(error).__name__}: {error}", 1)
    return 0


def _fail(message: str, status: int) -> int:
    sys.stdout.flush()
    print(message, file=sys.stderr)
    return status


def run_stage(stage: Stage) -> None:
    """Entry point of a stage script: runs the command line and exits with its status."""
    sys.exit(main(stage))
