"""Each command that a page shows is read as the user's shell would read it: wrong keys, files and targets fail here."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import shlex
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.cli.toy import ParsedCLI
from verl_lightning.cli import normalize_arguments
from verl_lightning.cli.evaluation.command import parse
from verl_lightning.cli.phase_settings import split_phases

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("examples/*/README.md"), *ROOT.glob("docs/*.md")]
NAMED_BLOCK = re.compile(r"```python\n# (\w+\.py)\n(.*?)```", re.DOTALL)
CONSOLE = re.compile(r"```console\n(.*?)```", re.DOTALL)
HERE = ("--trainer.accelerator", "cpu")  # some commands are for GPUs
AFTER_A_RUN = {"last": "auto"}
"""Checkpoints that only an earlier run could have left, and what may stand in their place without one."""
OTHER_COMMANDS = ("ray", "slurm", "kubernetes", "migrate", "runs", "doctor")


def commands() -> list[tuple[str, str]]:
    """Page and command of each line that starts with a prompt, continued lines joined, without comments."""
    found = []
    for page in PAGES:
        for block in CONSOLE.findall(page.read_text(encoding="utf-8")):
            lines = block.replace("\\\n", " ").splitlines()
            found += [(page.relative_to(ROOT).as_posix(), line[2:]) for line in lines if line.startswith("$ ")]
    return found


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A checkout's folders, with the files that pages tell the reader to write."""
    (tmp_path / "tasks").mkdir()
    for name in ("examples", "configs", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    for page in PAGES:
        for name, code in NAMED_BLOCK.findall(page.read_text(encoding="utf-8")):
            (tmp_path / name).write_text(code)
            monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def test_no_command_hides_in_a_block_that_is_not_read():
    blocks = [
        block for page in PAGES for block in re.findall(r"```(?:ba|z)?sh(?:ell)?\n", page.read_text(encoding="utf-8"))
    ]
    assert blocks == []


@pytest.mark.parametrize(("page", "command"), commands())
def test_a_command_of_a_page_means_something(page, command):
    words = shlex.split(command, comments=True)
    if words[0] == "nsys":  # it starts the command that follows its own flags
        words = words[words.index("verl-fit") :]
    while "=" in words[0]:  # environment variables
        words.pop(0)
    check = {"verl-fit": check_fit, "make": check_make, "python": check_python, "pip": check_pip}
    if words[0] in check:
        check[words[0]](words[1:])
    else:
        check_help([words[0]], words[1:])


def check_fit(words: list[str]) -> None:
    """Parsed and built, but not run."""
    if words[0] == "evaluate":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("verl_lightning.needs.has_package", lambda module: True)
            _, settings = parse(without_checkpoint(words[1:]))
        ParsedCLI([*settings, *HERE])
    elif words[0] in OTHER_COMMANDS:
        own, _, passed_on = " ".join(words).partition(" -- ")
        check_help(["verl-fit", words[0]], own.split()[1:])
        if passed_on:
            ParsedCLI([*normalize_arguments(shlex.split(passed_on)), *HERE])
    elif words[-1] not in ("--help", "--version"):
        needs_run = words[0] in ("validate", "test")
        own = without_checkpoint(words) if needs_run else [AFTER_A_RUN.get(word, word) for word in words]
        arguments = normalize_arguments(own)
        phases = split_phases(arguments)
        if phases is None:
            ParsedCLI([*arguments, *HERE])
        for phase in phases or ():
            with phase.words() as own:
                ParsedCLI([*own, *HERE])


def without_checkpoint(words: list[str]) -> list[str]:
    """The words of an evaluation without the checkpoint that only an earlier run could have left."""
    return [word for word in words if word not in ("--ckpt_path", *AFTER_A_RUN)]


def check_make(words: list[str]) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert words[0] in targets


def check_python(words: list[str]) -> None:
    if words[0] != "-m":
        check_help(words[:1], words[1:])


def check_pip(words: list[str]) -> None:
    assert words[0] == "install"
    for extra in re.findall(r"\[(\w+)\]", " ".join(words)):
        assert f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text()


def check_help(command: list[str], words: list[str]) -> None:
    """The program's help knows each flag."""
    shown = help_of(command)
    for word in words:
        assert not word.startswith("--") or word.partition("=")[0] in shown


def help_of(command: list[str]) -> str:
    """What a script of the checkout or an installed program says to `--help`, asked in this process: it starts soon."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as shown:
        patch.setattr(sys, "argv", [*command, "--help"])
        patch.syspath_prepend(Path(command[0]).parent)
        with pytest.raises(SystemExit) as end:
            run_here(command[0])
    assert end.value.code in (0, None)
    return shown.getvalue()


def run_here(command: str) -> None:
    """Runs a script or an installed program in this process."""
    if command.endswith(".py"):
        runpy.run_path(command, run_name="__main__")
    else:
        (program,) = entry_points(group="console_scripts", name=command)
        program.load()()
