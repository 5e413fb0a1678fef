import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from common import environment
from common.series import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(*arguments: str, folder: Path = ROOT, **environ: str) -> subprocess.CompletedProcess:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", *arguments], cwd=folder, capture_output=True, text=True, env={**clean, **environ})


@pytest.fixture
def checkout(tmp_path):
    """The files that set-up reads, in a folder of their own, with an environment that looks ready."""
    for name in ("Makefile", "requirements.txt", "requirements-torch.txt", "requirements-dev.txt"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "common", tmp_path / "common", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def stamp_of(checkout: Path, venv: Path) -> Path:
    listing = make("-n", "setup", f"VENV={venv}", folder=checkout).stdout
    return Path(next(word.strip('"') for word in listing.split() if ".ready-" in word))


def test_make_alone_lists_the_targets():
    done = make()
    assert done.returncode == 0
    for target in (
        "setup",
        "stage-NN",
        "diff-NN",
        "ptx-NN",
        "sass-NN",
        "test",
        "lint",
        "bench",
        "bench-emulator",
        "clean",
    ):
        assert target in done.stdout


def test_a_ready_environment_installs_nothing(checkout):
    venv = checkout / "venv"
    stamp = stamp_of(checkout, venv)
    venv.mkdir()
    stamp.touch()
    done = make("setup", f"VENV={venv}", "PYTHON=/bin/false", folder=checkout)
    assert done.returncode == 0 and "setup:" not in done.stdout


def test_new_pins_need_a_new_set_up(checkout):
    venv = checkout / "venv"
    before = stamp_of(checkout, venv)
    (checkout / "requirements.txt").write_text("numpy==2.2.0\n")
    assert stamp_of(checkout, venv) != before


def test_without_python_the_message_says_what_to_do(checkout):
    done = make("stage-01", "PYTHON=", f"VENV={checkout / 'venv'}", folder=checkout)
    assert done.returncode != 0
    assert "Python 3.10 or newer is needed" in done.stderr and "PYTHON=/path/to/python3 stage-01" in done.stderr


def test_a_stage_to_come_says_so(checkout):
    venv = checkout / "venv"
    stamp = stamp_of(checkout, venv)
    (venv / "bin").mkdir(parents=True)
    stamp.touch()
    (venv / "bin" / "python").symlink_to(sys.executable)
    for target in ("stage-09", "ptx-09", "diff-09"):
        done = make(target, f"VENV={venv}", folder=checkout, PYTHONPATH=os.pathsep.join(sys.path))
        assert done.returncode != 0
        assert "is not in this checkout yet" in done.stderr


def test_an_old_python_is_refused(monkeypatch):
    monkeypatch.setattr(environment.sys, "version_info", (3, 8, 10))
    with pytest.raises(SystemExit, match="Python 3.10 or newer is needed, this is 3.8.10"):
        environment.check_python()


def test_a_missing_venv_module_names_the_package(monkeypatch):
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match=r"sudo apt install python3\.\d+-venv"):
        environment.check_python()


@pytest.mark.parametrize(
    ("given", "gpu", "answers", "flags"),
    [
        ("https://mirror/simple", True, True, ["--index-url", "https://mirror/simple"]),
        (None, True, True, []),
        (None, False, True, ["--extra-index-url", environment.CPU_INDEX]),
        (None, False, False, []),
    ],
)
def test_where_torch_comes_from(monkeypatch, given, gpu, answers, flags):
    monkeypatch.setattr(environment, "has_nvidia_gpu", lambda: gpu)
    monkeypatch.setattr(environment, "reachable", lambda url: answers)
    assert environment.torch_source(given) == flags


@pytest.mark.parametrize(
    ("installed", "own", "needed"),
    [
        (None, False, True),
        (None, True, True),
        ("2.13.0", False, False),
        ("2.12.1", False, True),
        ("2.11.0", True, False),
    ],
)
def test_when_torch_is_installed(installed, own, needed):
    pins = (ROOT / "requirements-torch.txt").read_text()
    assert environment.needs_torch(installed, pins, any_version=own) is needed


def test_the_version_of_torch_that_an_environment_sees():
    assert environment.torch_version(Path(sys.executable)) == torch.__version__.split("+")[0]


def test_continuous_integration_is_executable():
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
