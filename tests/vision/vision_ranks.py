"""Runs with images that are the same on one process and on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import seed_everything

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
from verl_lightning.strategies import STRATEGIES


def learn(strategy: str, devices: int, folder: Path, rows: Path) -> dict[str, list[float]]:
    """Losses and norms of three steps, in each of which a rank of two has one row with an image and one without."""
    seed_everything(0, verbose=False)
    recorder, found = Recorder(), STRATEGIES[strategy]() if strategy in STRATEGIES else strategy
    module = make_sft(folder, actor=make_model_config(folder, train_vision_tower=True))
    trainer = make_trainer(folder, recorder, strategy=found, devices=devices)
    trainer.fit(module, datamodule=make_chats(rows, batch_size=2 // devices, max_length=48))
    return {name: recorder.column(name) for name in ("train/loss", "train/grad_norm")}


def sample(strategy: str, devices: int, folder: Path, rows: Path) -> dict[str, list[float]]:
    """Scores and norms of two steps of GRPO, in each of which a rank of two has an image and the other none."""
    seed_everything(0, verbose=False)
    recorder, found = Recorder(), STRATEGIES[strategy]() if strategy in STRATEGIES else strategy
    module = make_ppo(folder, actor=make_model_config(folder, train_vision_tower=True))
    trainer = make_trainer(
        folder, make_rollout(canary_limit=1e-4), recorder, strategy=found, devices=devices, max_steps=2
    )
    trainer.fit(module, datamodule=make_prompts(rows, prompts_per_step=2, max_prompt_length=40))
    return {name: recorder.column(name) for name in ("critic/score/mean", "actor/grad_norm", "response_length/mean")}


def learn_on_two(folder: Path, rows: Path) -> dict[str, Any]:
    """What two ranks learn under each of our strategies."""
    return {
        strategy: learn(strategy, 2, folder, rows) | sample(strategy, 2, folder, rows) for strategy in ("ddp", "fsdp")
    }
