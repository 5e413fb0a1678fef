"""Builds the virtual environment that the Makefile's targets run in. Standard library only.

torch comes first, by itself: its CUDA build pins an older NVRTC, and installing requirements.txt after it puts the
pinned compiler in place (pip says that torch would have liked another; torch works with it). On a machine without an
NVIDIA GPU the CPU build is taken, a tenth of the download.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OLDEST = (3, 10)
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def fail(message: str) -> None:
    """Print what is wrong and what to do, and exit with status 1."""
    sys.exit(f"setup: {message}")


def check_python() -> None:
    """Exit when this Python is too old or cannot make virtual environments."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < OLDEST:
        fail(f"Python 3.10 or newer is needed, this is {version}: make PYTHON=/path/to/python3 ...")
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        major, minor = sys.version_info[:2]
        fail(
            f"Python {version} has no venv module. On Debian and Ubuntu: sudo apt install python{major}.{minor}-venv "
            "(or python3-venv), then run make again"
        )


def has_nvidia_gpu() -> bool:
    """Is there an NVIDIA driver on this machine?"""
    return os.path.exists("/dev/nvidiactl") or shutil.which("nvidia-smi") is not None


def reachable(url: str, seconds: float = 5) -> bool:
    """Does a web server answer at `url`?"""
    try:
        with urllib.request.urlopen(f"{url}/torch/", timeout=seconds):
            return True
    except (urllib.error.URLError, OSError):
        return False


def torch_source(index_url: str | None) -> list[str]:
    """pip's flags for where torch comes from: the index given, PyTorch's CPU index without a GPU, else pip's own."""
    if index_url:
        return ["--index-url", index_url]
    if not has_nvidia_gpu() and reachable(CPU_INDEX):
        return ["--extra-index-url", CPU_INDEX]
    return []


def pip(python: Path, *arguments: str) -> None:
    """Run `pip install`. Exits when it fails."""
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet", *arguments]
    if subprocess.run(command, cwd=ROOT).returncode != 0:
        fail(f"pip failed: {' '.join(command)}")


def torch_version(python: Path) -> str | None:
    """Version of the torch that the environment sees, without its build label, or None."""
    code = "import importlib.metadata as m; print(m.version('torch'))"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True)
    return done.stdout.strip().split("+")[0] if done.returncode == 0 else None


def needs_torch(installed: str | None, pins: str, any_version: bool) -> bool:
    """Must torch be installed? Not when the pinned version is there, nor any version where the user brings their own.

    Installing it again would put torch's older NVRTC back in place of the pinned one.
    """
    return installed is None or (not any_version and f"torch=={installed}" not in pins.split())


def create(venv: Path, system_site_packages: bool, index_url: str | None) -> None:
    """Create or complete the environment in `venv`."""
    python = venv / "bin" / "python"
    if not python.exists():
        print(f"setup: creating {venv} with {sys.executable}", flush=True)
        flags = ["--system-site-packages"] if system_site_packages else []
        if subprocess.run([sys.executable, "-m", "venv", *flags, str(venv)]).returncode != 0:
            fail(f"could not create {venv}; on Debian and Ubuntu: sudo apt install python3-venv")
    pins = (ROOT / "requirements-torch.txt").read_text(encoding="utf-8")
    if needs_torch(torch_version(python), pins, any_version=system_site_packages):
        print("setup: installing torch (the longest download; see README.md for how to use one you have)", flush=True)
        pip(python, "-r", "requirements-torch.txt", *torch_source(index_url))
    print("setup: installing TVM, the CUDA compiler and the tools", flush=True)
    pip(python, "-r", "requirements.txt", "-r", "requirements-dev.txt")


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the virtual environment of this repository.")
    parser.add_argument("--venv", type=Path, required=True, help="folder of the environment")
    parser.add_argument("--stamp", type=Path, required=True, help="file to write when everything is installed")
    parser.add_argument("--system-site-packages", action="store_true", help="use packages that this Python has")
    parser.add_argument("--torch-index-url", help="package index to take torch from")
    args = parser.parse_args()
    check_python()
    create(args.venv, args.system_site_packages, args.torch_index_url)
    for old in args.venv.glob(".ready-*"):
        old.unlink()
    args.stamp.touch()
    print("setup: done", flush=True)


if __name__ == "__main__":
    main()
