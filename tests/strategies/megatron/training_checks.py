"""Longer runs for `checks.py`, which `auto` repeats: that they learn, and that SFT keeps Lightning's features."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from typing_extensions import override

from tests.resume.experiment import read_metrics
from tests.runs import (
    Recorder,
    make_chats,
    make_dpo,
    make_model_config,
    make_pairs,
    make_ppo,
    make_prompts,
    make_rollout,
    make_trainer,
)
from tests.strategies.conformance import Bench, WeightChange
from verl_lightning.algorithms.preferences.kto import KTO
from verl_lightning.models.config import LoraConfig, OptimConfig
from verl_lightning.modules import SFTModule
from verl_lightning.strategies import STRATEGIES

STEPS = {"grpo": 12, "sft": 16, "kto": 6}
"""In which the tiny model learns visibly."""


def trainer_of(bench: Bench, *callbacks: Callback, **options: Any) -> Trainer:
    """A trainer under the bench's strategy, from the same seed."""
    seed_everything(0, verbose=False)
    strategy = STRATEGIES[bench.strategy](**bench.options) if bench.strategy in STRATEGIES else bench.strategy
    return make_trainer(bench.folder, *callbacks, strategy=strategy, devices=bench.devices, **options)


def learn(bench: Bench) -> dict[str, list[float]]:
    """Curves of the reward under GRPO and of the loss under SFT, and of the margin under KTO with adapters."""
    actor = make_model_config(bench.folder / "model", optim=OptimConfig(lr=1e-2, eps=1e-5))
    recorders = {name: Recorder() for name in STEPS}
    trainer = trainer_of(bench, make_rollout(), recorders["grpo"], max_steps=STEPS["grpo"])
    trainer.fit(make_ppo(bench.folder / "model", actor=actor), datamodule=make_prompts(bench.folder / "prompts.jsonl"))
    trainer = trainer_of(bench, recorders["sft"], max_steps=STEPS["sft"])
    trainer.fit(SFTModule(actor), datamodule=bench.chats(8 // bench.replicas))
    trainer = trainer_of(bench, recorders["kto"], max_steps=STEPS["kto"])
    pairs = make_pairs(bench.folder / "pairs.jsonl", batch_size=8 // bench.replicas)
    trainer.fit(make_dpo(actor.path, actor=replace(actor, lora=LoraConfig(rank=4)), loss=KTO()), datamodule=pairs)
    columns = {"grpo": "critic/score/mean", "sft": "train/loss", "kto": "rewards/margins"}
    return {name: recorders[name].column(column) for name, column in columns.items()}


class ExplodingSFT(SFTModule):
    """Its loss is infinite in the second step on the first rank."""

    @override
    def _share(self, scores: Any, batch: Any) -> Any:
        loss, metrics = super()._share(scores, batch)
        is_bad = self.trainer.global_step == 1 and self.contract.data_parallel_rank == 0
        return loss * (float("inf") if is_bad else 1.0), metrics


class Hooks(Callback):
    """How often Lightning called what surrounds a gradient and a step."""

    def __init__(self) -> None:
        self.called: Counter[str] = Counter()

    def on_before_backward(self, trainer: Trainer, pl_module: Any, loss: Tensor) -> None:
        self.called["on_before_backward"] += 1

    def on_after_backward(self, trainer: Trainer, pl_module: Any) -> None:
        self.called["on_after_backward"] += 1

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        self.called["on_before_optimizer_step"] += 1

    def on_before_zero_grad(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        self.called["on_before_zero_grad"] += 1


def fit_sft(bench: Bench, *callbacks: Callback, ckpt_path: Path | None = None, **options: Any) -> dict[str, Any]:
    """Eight chats a step in two batches, a sharp clip, a schedule that decays, validation after each step."""
    recorder, hooks, weights = Recorder(), Hooks(), WeightChange()
    optim = OptimConfig(lr=1e-3, eps=1e-5, warmup_steps=1, schedule="linear")
    defaults: dict[str, Any] = {"max_steps": 4, "accumulate_grad_batches": 2, "gradient_clip_val": 1e-3}
    options = defaults | {"val_check_interval": 2, "limit_val_batches": 2, "log_every_n_steps": 1} | options
    trainer = trainer_of(bench, recorder, hooks, weights, *callbacks, **options)
    chats, size = bench.folder / "chats.jsonl", 8 // bench.replicas // options["accumulate_grad_batches"]
    module = ExplodingSFT(make_model_config(bench.folder / "model", optim=optim))
    data = make_chats(chats, chats, batch_size=size)
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=True)
    names = ("train/loss", "train/grad_norm", "train/lr", "train/skipped_updates", "train/global_tokens")
    return {
        "steps": [[step.get(name, math.nan) for name in names] for step in recorder.steps],
        "validations": [validation["val/loss"] for validation in recorder.validations],
        "hooks": dict(hooks.called),
        "global_step": trainer.global_step,
        "scheduler": trainer.lr_scheduler_configs[0].scheduler.last_epoch,
        "change": weights.change(),
        "end": weights.snapshots[-1],
    }


def sft_features(bench: Bench) -> dict[str, Any]:
    """All of automatic optimization's features at once, a resumed half, an early end, and a dry run."""
    folder = bench.folder / f"features of {bench.strategy}"
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    logger = CSVLogger(folder, name="", version="")
    whole = fit_sft(bench, saver, LearningRateMonitor(), logger=logger, enable_checkpointing=True)
    stopping = EarlyStopping("val/loss", min_delta=10, patience=1)
    return {
        "whole": whole,
        "rates": [float(row["lr/actor/pg1"]) for row in read_metrics(folder) if row.get("lr/actor/pg1")],
        "resumed": fit_sft(bench, ckpt_path=folder / "step=2.ckpt"),
        "stopped": fit_sft(bench, stopping)["global_step"],
        "dry": fit_sft(bench, fast_dev_run=2, accumulate_grad_batches=1, max_steps=-1),
    }
