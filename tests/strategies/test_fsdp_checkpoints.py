"""Sharded checkpoints: resumed bit by bit, by other numbers of ranks, by other strategies, and whole or not there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.testing import assert_close

from tests.processes import on_ranks
from tests.runs import (
    Recorder,
    make_chats,
    make_model_config,
    make_ppo,
    make_prompts,
    make_rollout,
    make_sft,
    make_trainer,
)
from tests.tolerances import assert_near
from verl_lightning.algorithms.advantages.gae import GAE
from verl_lightning.models.config import LoraConfig
from verl_lightning.modules.ppo_config import CriticConfig, KLConfig
from verl_lightning.strategies import FSDPStrategy
from verl_lightning.strategies.fsdp.checkpoint import read_whole, save_sharded


def train(
    folder: Path,
    data: Path,
    path: Path,
    kind: str,
    ranks: int,
    steps: int,
    resume: str | None = None,
    name: str = "fsdp",
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final weights; a checkpoint of every step is left in ``path``."""
    recorder = Recorder()
    saver = ModelCheckpoint(dirpath=path, filename="{step}", save_top_k=-1, every_n_train_steps=1)
    strategy = FSDPStrategy() if name == "fsdp" else name
    callbacks = [recorder, saver] + ([] if kind == "sft" else [make_rollout()])
    options = {"devices": ranks, "strategy": strategy, "max_steps": steps, "enable_checkpointing": True}
    trainer = make_trainer(path, *callbacks, **options)
    module, batches = make_parts(folder, data, kind, ranks)
    trainer.fit(module, batches, ckpt_path=resume)
    weights = dict(module.contract.named_weights(module.policy))
    return recorder.column("train/loss" if kind == "sft" else "actor/pg_loss"), {
        key: weight.clone() for key, weight in weights.items()
    }


def make_parts(folder: Path, data: Path, kind: str, ranks: int) -> tuple[Any, Any]:
    """A module and its batches: four chats or prompts a step over all ranks."""
    config = make_model_config(folder)
    if kind == "sft":
        return make_sft(folder), make_chats(data, batch_size=4 // ranks)
    if kind == "lora":
        return make_ppo(folder, actor=make_model_config(folder, lora=LoraConfig(rank=4))), make_prompts(data)
    critic = CriticConfig(model=config)
    return make_ppo(folder, advantage=GAE(), critic=critic, kl=KLConfig()), make_prompts(data)


@pytest.fixture(params=["sft", "ppo", "lora"])
def kind(request: pytest.FixtureRequest) -> str:
    """Which run."""
    return str(request.param)


@pytest.fixture
def data(kind: str, chat_file: Path, prompt_file: Path) -> Path:
    """What it reads."""
    return chat_file if kind == "sft" else prompt_file


@pytest.mark.slow
def test_resumed_run_ends_as_if_never_stopped(kind: str, data: Path, tiny_folder: Path, tmp_path: Path) -> None:
    losses, weights = on_ranks(2, train, tiny_folder, data, tmp_path / "whole", kind, 2, 3)[0]

    checkpoint = str(tmp_path / "whole" / "step=1.ckpt")
    resumed = on_ranks(2, train, tiny_folder, data, tmp_path / "whole", kind, 2, 3, checkpoint)[1]

    assert resumed[0] == losses[1:]
    for name, weight in weights.items():
        assert torch.equal(resumed[1][name], weight), name


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "name"), [(1, "fsdp"), (4, "fsdp"), (1, "auto"), (2, "ddp")])
def test_two_ranks_folder_is_resumed_elsewhere(
    ranks: int, name: str, chat_file: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    losses, weights = on_ranks(2, train, tiny_folder, chat_file, tmp_path / "whole", "sft", 2, 3)[0]

    checkpoint = str(tmp_path / "whole" / "step=1.ckpt")
    arguments = (tiny_folder, chat_file, tmp_path / "whole", "sft", ranks, 3, checkpoint, name)
    resumed = on_ranks(ranks, train, *arguments)[0]

    assert_near(resumed, (losses[1:], weights))


@pytest.mark.parametrize("kind", ["sft", "ppo"], indirect=True)
def test_one_process_file_is_resumed_by_two_ranks(kind: str, data: Path, tiny_folder: Path, tmp_path: Path) -> None:
    losses, weights = on_ranks(1, train, tiny_folder, data, tmp_path / "whole", kind, 1, 3, None, "auto")[0]

    checkpoint = str(tmp_path / "whole" / "step=1.ckpt")
    resumed = on_ranks(2, train, tiny_folder, data, tmp_path / "whole", kind, 2, 3, checkpoint)[0]

    assert_near(resumed, (losses[1:], weights), rel=1e-3)  # PPO's losses are sums that cancel


class Killer(dict):
    """Ends the process while it is written."""

    def __reduce__(self) -> Any:
        os._exit(1)


def save_then_die(path: Path) -> None:
    """Save once, then be killed in the middle of saving to the same place."""
    torch.distributed.init_process_group("gloo")
    save_sharded({"state_dict": {"weight": torch.ones(2)}, "which": 1}, path, is_writer=True)
    save_sharded({"state_dict": {"weight": torch.zeros(2)}, "which": Killer()}, path, is_writer=True)


def test_kill_while_saving_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="exit code 1:"):
        on_ranks(1, save_then_die, tmp_path / "last.ckpt")

    whole = read_whole(tmp_path / "last.ckpt", weights_only=True)
    assert whole["which"] == 1
    assert_close(whole["state_dict"]["weight"], torch.ones(2))
