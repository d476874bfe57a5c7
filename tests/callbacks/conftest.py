"""Short PPO runs with any callbacks, loggers and trainer options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer, seed_everything

from tests.runs import Recorder, make_model_config, make_ppo, make_prompts, make_reward, make_rollout, make_trainer
from verl_lightning.algorithms.advantages.gae import GAE
from verl_lightning.models.config import OptimConfig
from verl_lightning.modules import PPOModule
from verl_lightning.modules.ppo_config import CriticConfig
from verl_lightning.rewards.pool import RewardConfig

EACH_STEP = {"val_check_interval": 1, "check_val_every_n_epoch": None}
"""Validate after each iteration."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A run that is over."""

    trainer: Trainer
    module: PPOModule
    recorder: Recorder


@pytest.fixture
def fit(tmp_path: Path, tiny_folder: Path, prompt_file: Path) -> Callable[..., Fit]:
    """Trains PPO with a critic for three iterations, with callbacks and options of the trainer."""

    def run(
        *callbacks: Callback, ckpt_path: Path | None = None, reward: RewardConfig | None = None, **options: Any
    ) -> Fit:
        seed_everything(1)
        optim = OptimConfig(lr=1e-3, warmup_steps=2)
        model = make_model_config(tiny_folder, optim=optim)
        parts = {"actor": model, "advantage": GAE(), "critic": CriticConfig(model=model)}
        module = make_ppo(tiny_folder, **parts, reward=reward or make_reward())
        recorder = Recorder()
        options = {"log_every_n_steps": 1} | options
        trainer = make_trainer(tmp_path, make_rollout(), *callbacks, recorder, **options)
        trainer.fit(module, datamodule=make_prompts(prompt_file, prompt_file), ckpt_path=ckpt_path)
        return Fit(trainer=trainer, module=module, recorder=recorder)

    return run
