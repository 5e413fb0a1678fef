"""The nine stages on disk: where each script is, and how one differs from the one before."""

from __future__ import annotations

import difflib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


class StageNotFound(LookupError):
    """There is no such stage in this checkout."""


def stage_scripts(root: Path = ROOT) -> dict[int, Path]:
    """Stage number -> script, for every `NN_name/name.py` under `root`, in order."""
    found = {}
    for folder in sorted(root.glob("[0-9][0-9]_*")):
        script = folder / f"{folder.name[3:]}.py"
        if script.is_file():
            found[int(folder.name[:2])] = script
    return found


def stage_script(number: int, root: Path = ROOT) -> Path:
    """The script of a stage. Raises StageNotFound, naming those there are."""
    scripts = stage_scripts(root)
    if number not in scripts:
        there = ", ".join(f"{n:02d}" for n in scripts) or "none"
        raise StageNotFound(f"stage {number:02d} is not in this checkout yet; stages here: {there}")
    return scripts[number]


def stage_diff(number: int, root: Path = ROOT) -> str:
    """Unified diff from the stage before `number` to it, with paths relative to the repository.

    Raises StageNotFound when either is missing, or when `number` is the first.
    """
    if number <= 1:
        raise StageNotFound("stage 01 is the first: there is no stage before it to compare with")
    pair = [stage_script(n, root) for n in (number - 1, number)]
    before, after = (path.read_text(encoding="utf-8").splitlines(keepends=True) for path in pair)
    names = [path.relative_to(root).as_posix() for path in pair]
    return "".join(difflib.unified_diff(before, after, *names))
