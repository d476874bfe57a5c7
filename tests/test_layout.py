"""The root folders reach users as parts of one package, and tools meet each file once."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINKS = ("strategies", "callbacks", "configs")


def tracked_files() -> list[Path]:
    """What git knows, links among it; relative."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [Path(name) for name in listing.split("\0") if name]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy of the tracked files."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for file in tracked_files():
        if (ROOT / file).exists() and file.parts[0] not in {"tests", "docs", "benchmarks", "examples"}:
            (source / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, source / file, follow_symlinks=False)
    code = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(out)], cwd=source, check=True, capture_output=True)
    (file,) = out.glob("*.whl")
    return zipfile.ZipFile(file)


def test_the_wheel_installs_one_top_level_name(wheel):
    names = {Path(name).parts[0] for name in wheel.namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"verl_lightning"}


def test_the_wheel_holds_every_module_and_config(wheel):
    held = {Path(name) for name in wheel.namelist()}
    ours = [file for file in tracked_files() if file.parts[0] in {"verl_lightning", *LINKS} and (ROOT / file).is_file()]
    wanted = [file for file in ours if file.suffix in {".py", ".yaml", ".typed"}]
    packaged = {file if file.parts[0] == "verl_lightning" else Path("verl_lightning", file) for file in wanted}
    assert len(packaged) > 50
    assert packaged - held == set()


@pytest.mark.parametrize("name", LINKS)
def test_package_folders_are_relative_links_to_root_folders(name):
    link = ROOT / "verl_lightning" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..", name)
    assert (ROOT / name / "__init__.py").is_file()


def test_ruff_meets_each_file_once():
    shown = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--show-files", "."],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    files = [Path(line) for line in shown.splitlines() if line.endswith(".py")]
    assert len(files) == len({file.resolve() for file in files})
    assert {ROOT / file for file in tracked_files() if file.suffix == ".py" and (ROOT / file).exists()} <= set(files)
