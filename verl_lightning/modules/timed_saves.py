"""Checkpoints by the clock under manual optimization, where Lightning's own never come."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from verl_lightning.compat.lightning_checkpoint import save_when_due, saves_by_time


class TimedSaves(Callback):
    """Has each ``ModelCheckpoint(train_time_interval=...)`` save after the iteration in which its time is over."""

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and saves_by_time(callback):
                save_when_due(callback, trainer)
