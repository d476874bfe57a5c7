"""The root folders reach users as parts of one package, and tools meet each file once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINKS = ("strategies", "callbacks", "configs")


def tracked_files() -> list[Path]:
    """What git knows, links among it; relative. A tree from an archive has no git to ask."""
    if not (ROOT / ".git").exists():
        pytest.skip("this tree is no clone")
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [Path(name) for name in listing.split("\0") if name]


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tracked files as in a ZIP or a clone with ``core.symlinks=false``: links are files that hold their target."""
    source = tmp_path_factory.mktemp("source")
    for file in tracked_files():
        if (ROOT / file).exists() and file.parts[0] not in {"tests", "docs", "benchmarks", "examples"}:
            (source / file).parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / file).is_symlink():
                (source / file).write_text(str((ROOT / file).readlink()))
            else:
                shutil.copy(ROOT / file, source / file)
    return source


@pytest.fixture(scope="module")
def built(archive: Path) -> Path:
    """A folder with the wheel, the sdist and the editable wheel that are built from the archive, all in one process."""
    out = archive.with_name("built")
    for folder in (out, out / "editable"):
        folder.mkdir()
    code = (
        "from setuptools import build_meta\n"
        f"build_meta.build_wheel({str(out)!r}); build_meta.build_sdist({str(out)!r})\n"
        f"build_meta.build_editable({str(out / 'editable')!r})"
    )
    subprocess.run([sys.executable, "-c", code], cwd=archive, check=True, capture_output=True)
    return out


def packaged_files() -> set[Path]:
    """What an installation must hold, with its path in the package."""
    ours = [file for file in tracked_files() if file.parts[0] in {"verl_lightning", *LINKS} and (ROOT / file).is_file()]
    wanted = [file for file in ours if file.suffix in {".py", ".yaml", ".typed"}]
    return {file if file.parts[0] == "verl_lightning" else Path("verl_lightning", file) for file in wanted}


def test_the_wheel_of_an_archive_without_links_is_one_whole_package(built):
    (file,) = built.glob("*.whl")
    held = {Path(name) for name in zipfile.ZipFile(file).namelist()}

    assert {path.parts[0] for path in held if not path.parts[0].endswith(".dist-info")} == {"verl_lightning"}
    assert len(packaged_files()) > 50
    assert packaged_files() - held == set()


def test_the_sdist_of_an_archive_without_links_holds_what_the_wheel_is_built_from(built):
    (file,) = built.glob("*.tar.gz")
    with tarfile.open(file) as sdist:
        held = {Path(*Path(name).parts[1:]) for name in sdist.getnames()}

    roots = {path if path.parts[1] not in LINKS else Path(*path.parts[1:]) for path in packaged_files()}
    assert (roots | {Path(name) for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE")}) - held == set()


def test_an_editable_installation_of_a_clone_without_links_runs(built, archive, tmp_path):
    (file,) = (built / "editable").glob("*.whl")
    zipfile.ZipFile(file).extractall(tmp_path)
    code = (
        f"import site, sys; site.addsitedir({str(tmp_path)!r})\n"
        "from importlib.util import find_spec; from verl_lightning.cli import main, shipped_configs\n"
        f"print(*[find_spec('verl_lightning.' + name).origin for name in {LINKS}], *shipped_configs())"
    )
    shown = subprocess.run(
        [sys.executable, "-IS", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )

    assert shown.stdout.split()[:3] == [str(archive / name / "__init__.py") for name in LINKS]
    assert {"grpo", "hardware/one_gpu"} <= set(shown.stdout.split())


@pytest.mark.parametrize("name", LINKS)
def test_package_folders_are_relative_links_to_root_folders(name):
    link = ROOT / "verl_lightning" / name
    target = link.readlink() if link.is_symlink() else Path(link.read_text())  # without links it is a file
    assert target == Path("..", name)
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


def test_make_lets_python_keep_byte_code():
    """Images often forbid it; then each of many processes compiles all that it imports."""
    words = [
        "make",
        "--silent",
        "--no-print-directory",
        "--eval",
        'shown: ; @echo "[$$PYTHONDONTWRITEBYTECODE]"',
        "shown",
    ]
    shown = subprocess.run(
        words, cwd=ROOT, env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}, capture_output=True, text=True, check=True
    )
    assert shown.stdout == "[]\n"
