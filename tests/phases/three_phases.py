"""A short run of three phases that dies where it is told to."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger

from tests.resume.experiment import read_metrics
from tests.runs import (
    make_chats,
    make_model_config,
    make_pairs,
    make_ppo,
    make_prompts,
    make_rollout,
    make_sft,
    make_trainer,
)
from verl_lightning import Phases, RewardConfig, RewardModelConfig, RewardModule

STEPS = {"sft": 3, "rm": 2, "grpo": 2}
KILLS = {
    "before the border": ("sft", "on_train_end", 3),
    "on the border": ("sft", "on_fit_end", 3),
    "behind the border": ("rm", "on_fit_start", 0),
    "within the second": ("rm", "on_train_batch_start", 1),
    "as the last begins": ("grpo", "setup", 0),
    "within the last": ("grpo", "on_train_batch_start", 1),
}
"""Phase, hook and step at which a run dies."""


class Killed(BaseException):
    """What ends a run here; nothing catches it."""


class Kill(Callback):
    """Ends a run as a hook begins, after a number of steps of its phase."""

    def __init__(self, hook: str, step: int) -> None:
        self.step = step
        setattr(self, hook, self.die)

    def die(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Called in the place of the hook."""
        if trainer.global_step == self.step:
            raise Killed


def run_phases(
    folder: Path,
    model: Path,
    files: dict[str, Path],
    kill: tuple[str, str, int] | None = None,
    loggers: Sequence[Logger] = (),
    **options: Any,
) -> tuple[Any, list[dict[str, str]]]:
    """Runs SFT, a reward model and GRPO in a folder, or what is left of them; returns the last module and the metrics.

    Args:
        folder: Folder of the run.
        model: Folder of the model.
        files: Chats, pairs and prompts by these names.
        kill: Phase, hook and step at which the run dies.
        loggers: Further loggers.
        options: Further options of all trainers.
    """

    def trainer(name: str, *callbacks: Callback) -> Trainer:
        saves = ModelCheckpoint(save_top_k=0, save_last=True, every_n_train_steps=1)
        kills = [Kill(*kill[1:])] if kill is not None and kill[0] == name else []
        own = {"max_steps": STEPS[name], "enable_checkpointing": True, "log_every_n_steps": 1}
        return make_trainer(folder.parent, *callbacks, saves, *kills, **own | options)

    seed_everything(7)
    phases = Phases(folder, loggers)
    sft = phases.fit("sft", trainer("sft"), make_sft(model), datamodule=make_chats(files["chats"]))
    judge = RewardModule(make_model_config(Path(sft)))
    judge_path = phases.fit("rm", trainer("rm"), judge, datamodule=make_pairs(files["pairs"]))
    reward = RewardConfig(function=None, model=RewardModelConfig(path=judge_path))
    module = make_ppo(Path(sft), reward=reward)
    phases.fit("grpo", trainer("grpo", make_rollout()), module, datamodule=make_prompts(files["prompts"]))
    return module, read_metrics(folder)


def whole_and_killed(
    folder: Path, model: Path, files: dict[str, Path], strategy: str, devices: int
) -> list[list[dict[str, str]]]:
    """Metrics of a whole run, and of one that died on a border."""
    options = {"strategy": strategy, "devices": devices}
    _, rows = run_phases(folder / "whole", model, files, **options)
    with suppress(Killed):
        run_phases(folder / "killed", model, files, KILLS["on the border"], **options)
    if dist.is_initialized():  # one that starts again finds what all had written when they died
        dist.barrier()
    _, killed = run_phases(folder / "killed", model, files, **options)
    return [rows, killed]
