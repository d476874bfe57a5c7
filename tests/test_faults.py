"""Errors that are the user's to mend are one sentence; faults of ours keep their traceback."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import wandb
import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from tests.processes import run_verl_fit, start_ranks
from tests.runs import make_reward, make_settings
from verl_lightning.cli import show_error
from verl_lightning.cli.deprecation import find_renamed
from verl_lightning.data.files import read_rows
from verl_lightning.metrics import Metric
from verl_lightning.processes.messages import has_another_failed, say_once
from verl_lightning.rewards.pool import RewardPool
from verl_lightning.rollout.dispatcher import Dispatcher


def read_nothing() -> None:
    read_rows("nowhere.jsonl", columns=[])


def fail_to_stop() -> None:
    try:
        read_nothing()
    finally:
        torch.zeros(2)[5]


def raise_(error: BaseException) -> None:
    raise error


USERS: dict[str, Callable[[], object]] = {
    "a bad value": read_nothing,
    "parts that do not fit": lambda: raise_(MisconfigurationException("a and b")),
    "a service that refuses": lambda: raise_(wandb.errors.CommError("no such project")),
    "a service without a key": lambda: raise_(wandb.errors.AuthenticationError("log in first")),
}
FAULTS: dict[str, Callable[[], object]] = {
    "a library's error": lambda: torch.zeros(2).reshape(3),
    "an error of the user's own code": lambda: raise_(ValueError("mine")),
    "a wrong call of ours": lambda: find_renamed(None),
    "parts used in the wrong order": lambda: RewardPool(make_reward()).score([]),
    "a wrong value of ours": lambda: Metric("sum", 1.0).merge(Metric("max", 1.0)),
    "please report this": lambda: asyncio.run(Dispatcher.generate(SimpleNamespace(_version=2), 1, None, None)),
}


def shown(work: Callable[[], object], capsys: pytest.CaptureFixture[str]) -> str:
    """What `verl-fit` writes when this raises."""
    with pytest.raises(Exception) as failure:  # noqa: PT011 - each kind of it
        work()
    show_error(failure.type, failure.value, failure.tb)
    return capsys.readouterr().err


@pytest.mark.parametrize("name", USERS)
def test_what_a_user_can_mend_is_one_sentence(name, capsys):
    said = shown(USERS[name], capsys)
    assert said.startswith("verl-fit: error: ")
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_keeps_its_traceback(name, capsys):
    assert shown(FAULTS[name], capsys).startswith("Traceback (most recent call last):")


def test_a_fault_while_a_run_is_torn_down_does_not_bury_the_sentence(capsys):
    said = shown(fail_to_stop, capsys)
    assert "IndexError" in said
    assert said.splitlines()[-1].startswith("verl-fit: error: The data file `nowhere.jsonl` does not exist")


def test_what_all_processes_of_a_run_say_is_said_once(tmp_path):
    """Lightning's first process and the one that it has started, then torchrun's two."""
    say = "from verl_lightning.processes.messages import say_once; say_once('both\\n'); say_once(f'{rank}\\n')"
    environment = "import os, sys; rank = os.environ['LOCAL_RANK']; os.environ['TMPDIR'] = sys.argv[1]"
    second = f"subprocess.run([sys.executable, '-c', {f'{environment}; {say}'!r}, sys.argv[1]], env=env)"
    first = f"import subprocess; {environment}; {say}; env = os.environ | {{'LOCAL_RANK': '1'}}; {second}"

    words, names = [sys.executable, "-c", first, str(tmp_path)], {"LOCAL_RANK": "0", "MASTER_PORT": "1"}
    run = subprocess.run(words, env=names, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True)

    assert run.stderr.splitlines() == ["both", "0", "1"]


def test_a_process_that_makes_a_mistake_twice_is_told_twice(tmp_path, monkeypatch, capsys):
    """As in a notebook, where Lightning has left `LOCAL_RANK` after the first run."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    say_once("twice\n")
    say_once("twice\n")

    assert capsys.readouterr().err == "twice\n" * 2
    assert not has_another_failed()


class FailsOnRankOne(Callback):
    """Fails as a data file does that one machine lacks."""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_rank == 1:
            read_nothing()


@pytest.mark.slow
def test_an_error_of_one_rank_is_readable_in_what_all_say(tmp_path, tiny_folder, prompt_file):
    settings = make_settings(tiny_folder, prompt_file, strategy="ddp", devices=2, max_steps=1, logger=False)
    settings["trainer"]["callbacks"] = [f"{__name__}.FailsOnRankOne"]
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))

    first, second = start_ranks(2, run_verl_fit, "--config", "run.yaml", folder=tmp_path)

    (sentence,) = [line for line in second.wait(code=1).splitlines() if "nowhere" in line]
    assert sentence.startswith("[rank1]: verl-fit: error: The data file `nowhere.jsonl` does not exist")  # by torch
    said = first.wait(code=1)
    assert "Traceback" not in said
    assert "verl-fit: error: another process of this run has failed; its message says why." in said
