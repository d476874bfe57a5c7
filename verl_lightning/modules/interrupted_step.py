"""Finishes the step that a kill cut short after its checkpoint was written."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from verl_lightning.compat.lightning import is_within_step, metrics_to_log, send_metrics, validates_next

STEP_KEY = "interrupted_step"


class FinishInterruptedStep(Callback):
    """Logs and validates what a resumed run would leave out.

    Lightning writes a checkpoint of ``every_n_train_steps`` before it logs that step's metrics and before the
    validation that is due after it, and a resumed run goes on with the next step. So each such checkpoint keeps the
    metrics, and a run that resumes from it logs them again and validates first. Loggers get equal values for the same
    step twice if the first run was killed later.
    """

    def __init__(self) -> None:
        self._step: dict[str, Any] | None = None
        self._has_optimizers = False
        self._max_steps: int | None = None  # the trainer's, while ours is in its place

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if not is_within_step(trainer):
            return  # nothing is outstanding
        checkpoint[STEP_KEY] = {
            "metrics": metrics_to_log(trainer),
            "global_step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "validates": validates_next(trainer),
        }

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._step = checkpoint.get(STEP_KEY)
        if self._has_optimizers:  # sharded weights are loaded late
            self._keep_open(trainer)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._has_optimizers = True  # and their schedules have read `max_steps`
        self._keep_open(trainer)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        if self._max_steps is not None:
            trainer.fit_loop.epoch_loop.max_steps = self._max_steps
        loop, epochs = trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_progress.current
        resumed_epoch, epochs.completed = epochs.completed, step["epoch"]  # the step may have been its epoch's last
        if step["metrics"]:
            send_metrics(trainer, step["metrics"])
        if step["validates"]:
            trainer.validating = True
            loop.val_loop.restarting = False  # else it would skip the batches of its last pass
            loop.val_loop.run()
            trainer.training = True
        epochs.completed = resumed_epoch

    def _keep_open(self, trainer: Trainer) -> None:
        """Lets a run that was killed in its last step begin: Lightning would say that it is over, and call no hook."""
        loop = trainer.fit_loop.epoch_loop
        if self._step is not None and loop.max_steps == self._step["global_step"]:
            self._max_steps = loop.max_steps
            loop.max_steps += 1
