"""Validates before the first step, so that curves begin with what the model could do before."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from verl_lightning.compat.lightning import log_under_step, validate_now


class BaselineValidation(Callback):
    """Validates once before the first step of a run that begins; a resumed run has done so already.

    Loggers get its metrics one step before those of the first step. All callbacks see it as any other validation.
    """

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step or trainer.fit_loop.total_batch_idx >= 0 or not trainer.enable_validation:
            return
        log_under_step(trainer, -1)
        validate_now(trainer)
        log_under_step(trainer, 0)
