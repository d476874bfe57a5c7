"""A folder with a whole configuration, and commands run in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.toy import BASE, ParsedCLI
from verl_lightning.cli.lightning_cli import CLI


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with ``base.yaml``."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(BASE)
    return tmp_path


@pytest.fixture
def parse() -> Callable[..., ParsedCLI]:
    """Builds what ``verl-fit --config base.yaml ...`` would run."""
    return lambda *words: ParsedCLI(["--config", "base.yaml", *words])


@pytest.fixture
def run() -> Callable[..., CLI]:
    """Runs ``verl-fit ... --config base.yaml``."""
    return lambda *words: CLI([*words, "--config", "base.yaml"])


@pytest.fixture
def refuse(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that must fail while it is read; returns what it says."""

    def run_and_read(*words: str) -> str:
        with pytest.raises(SystemExit) as stop:
            ParsedCLI(list(words))
        assert stop.value.code == 2
        return capsys.readouterr().err.removeprefix("verl-fit: error: ").strip()

    return run_and_read
