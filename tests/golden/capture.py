"""Runs every case on a Hopper GPU and records the results: `python -m tests.golden.capture [family ...]`.

Needs an NVIDIA driver that takes PTX 8.7, NumPy, and nothing else. Each result is also compared with the emulator's;
what differs is printed with the first few elements, since the files keep digests and a few bytes only.
"""

from __future__ import annotations

import datetime
import subprocess
import sys
from pathlib import Path

import numpy as np

from tests.golden import approximations
from tests.golden.case import Case, Result
from tests.golden.cuda_driver import Gpu
from tests.golden.emulated import run_emulated
from tests.golden.families import FAMILIES, Golden, Recorded, kept_bytes

SHOWN = 6


def capture(family: str, gpu: Gpu) -> None:
    """Writes the family's file."""
    provenance = gpu.describe() | {"driver": _driver_version(), "date": datetime.date.today().isoformat()}
    fingerprints, results = {}, {}
    worst: tuple[dict, dict] = ({}, {})
    for case in FAMILIES[family]():
        memory = gpu.run(case)
        found = case.cut(memory, (*case.results, *case.opaque))
        fingerprints[case.name] = case.fingerprint()
        results[case.name] = {name: Recorded.of(data, kept_bytes(family)) for name, data in found.items()}
        reference = case.cut(run_emulated(case), case.results)
        if family == "approximate":
            for errors, values in zip(worst, (found, reference)):
                errors.update(approximations.worst_errors(case, values))
        else:
            compare(case, found, reference)
    if family == "approximate":
        approximations.write(*worst, provenance["device"])
    Golden(provenance, fingerprints, results).save(family)
    print(f"{family}: {len(results)} launches, {sum(map(len, results.values()))} results", flush=True)


def _driver_version() -> str:
    version = Path("/proc/driver/nvidia/version")
    if version.exists():
        return next(word for word in version.read_text().split() if word[0].isdigit() and "." in word)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]


def compare(case: Case, found: dict[str, np.ndarray], reference: dict[str, np.ndarray]) -> None:
    """Prints how the emulator differs."""
    for result in case.results:
        gpu, cpu = found[result.name], reference[result.name]
        if not np.array_equal(gpu, cpu):
            print(f"DIFFERS {case.name} / {result.name}: {_difference(case, result, gpu, cpu)}", flush=True)


def _difference(case: Case, result: Result, gpu: np.ndarray, cpu: np.ndarray) -> str:
    threads = case.grid * case.block
    width = result.size // threads if result.size in (2 * threads, 4 * threads, 8 * threads) else 4
    a, b = gpu.view(f"u{width}"), cpu.view(f"u{width}")
    places = np.flatnonzero(a != b)
    shown = [places[len(places) * part // SHOWN] for part in range(min(SHOWN, len(places)))]
    lines = [f"{places.size} of {a.size}"]
    for place in dict.fromkeys(shown):
        inputs = [
            argument.initial.view(f"u{argument.initial.size // threads}")[place]
            for argument in case.args[: result.buffer]
            if hasattr(argument, "initial") and argument.initial.size // threads in (2, 4, 8) and a.size == threads
        ]
        operands = " ".join(f"{int(value):#x}" for value in inputs)
        lines.append(f"[{place}] ({operands}) gpu {int(a[place]):#x} emulator {int(b[place]):#x}")
    return "; ".join(lines)


def main() -> None:
    gpu = Gpu()
    for family in sys.argv[1:] or FAMILIES:
        capture(family, gpu)


if __name__ == "__main__":
    main()
