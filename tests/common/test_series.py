import subprocess
import sys

import pytest

from common.__main__ import main
from common.series import ROOT, StageNotFound, stage_diff, stage_script, stage_scripts


@pytest.fixture
def tree(tmp_path):
    for folder, text in (("01_first", "a\nb\nc\n"), ("02_second", "a\nB\nc\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{folder[3:]}.py").write_text(text)
    (tmp_path / "03_empty").mkdir()
    return tmp_path


def test_finds_the_scripts_named_after_their_folders(tree):
    assert [(n, p.name) for n, p in stage_scripts(tree).items()] == [(1, "first.py"), (2, "second.py")]


def test_a_missing_stage_says_which_there_are(tree):
    with pytest.raises(StageNotFound, match="stage 03 is not in this checkout yet; stages here: 01, 02"):
        stage_script(3, tree)


def test_diff_has_stable_headers(tree):
    assert stage_diff(2, tree).splitlines() == [
        "--- 01_first/first.py",
        "+++ 02_second/second.py",
        "@@ -1,3 +1,3 @@",
        " a",
        "-b",
        "+B",
        " c",
    ]


def test_the_first_stage_has_no_diff(tree):
    with pytest.raises(StageNotFound, match="the first"):
        stage_diff(1, tree)


@pytest.mark.parametrize("arguments", [[], ["run"], ["run", "x"], ["paint", "01"], ["run", "77"], ["diff", "78"]])
def test_bad_commands_exit_with_2(arguments, capsys):
    assert main(arguments) == 2
    assert capsys.readouterr().err


def test_runs_from_any_folder(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "common", "run", "99"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "stage 99 is not in this checkout yet" in done.stderr
