"""`python -m common run|diff|ptx|sass NN`: what the Makefile's stage targets call."""

from __future__ import annotations

import runpy
import sys

from common.series import StageNotFound, stage_diff, stage_script, stage_scripts

USAGE = "usage: python -m common run|diff|ptx|sass|bench [NN] [flags of the stage]"


def _run(number: int, flags: list[str]) -> None:
    script = stage_script(number)
    sys.argv = [str(script), *flags]
    runpy.run_path(str(script), run_name="__main__")


def _bench(flags: list[str]) -> int:
    """Every stage on the GPU, each in turn; a stage that the GPU cannot run says so and fails the whole."""
    failed = 0
    for number, script in stage_scripts().items():
        print(f"== stage {number:02d}: {script.parent.name}")
        try:
            _run(number, ["--device", "cuda", *flags])
        except SystemExit as stop:
            failed += bool(stop.code)
    return 1 if failed else 0


def main(arguments: list[str]) -> int:
    """Returns the exit status: 2 for a stage that does not exist or an unknown command."""
    command, *rest = arguments or [""]
    if command == "bench":
        return _bench(rest)
    if command not in ("run", "diff", "ptx", "sass") or not rest or not rest[0].isdigit():
        print(USAGE, file=sys.stderr)
        return 2
    number, flags = int(rest[0]), rest[1:]
    try:
        if command == "diff":
            print(stage_diff(number), end="")
        else:
            _run(number, flags if command == "run" else ["--dump", command, *flags])
    except StageNotFound as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
