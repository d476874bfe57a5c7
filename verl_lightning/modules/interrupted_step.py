"""Finishes the step that a kill cut short after its checkpoint was written."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from verl_lightning.compat.lightning import is_within_step, metrics_to_log, send_metrics, validate_now, validates_next

STEP_KEY = "interrupted_step"


class FinishInterruptedStep(Callback):
    """Logs and validates what a resumed run would leave out.

    Lightning writes a checkpoint of ``every_n_train_steps`` before it logs that step's metrics and before the
    validation that is due after it, and a resumed run goes on with the next step. So each such checkpoint keeps the
    metrics, and a run that resumes from it logs them again and validates first. Loggers get equal values for the same
    step twice if the first run was killed later.

    A run that was killed after its last step comes to its end in this way too: Lightning would say that it is over, and
    call none of the hooks in which it ends.
    """

    def __init__(self) -> None:
        self._step: dict[str, Any] | None = None
        self._has_optimizers = False
        self._has_trained = False
        self._resumes_at: tuple[int, int] | None = None  # epoch and step
        self._limits: tuple[int | None, int] | None = None  # the trainer's, while ours are in their place

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # Counters that were restored without another batch look like those within a step.
        if not self._has_trained or not is_within_step(trainer):
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
        self._resumes_at = checkpoint["epoch"], checkpoint["global_step"]
        if self._has_optimizers:  # sharded weights are loaded late
            self._keep_open(trainer)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._has_optimizers = True  # and their schedules have read `max_steps`
        self._keep_open(trainer)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._limits is not None:
            trainer.fit_loop.max_epochs, trainer.fit_loop.epoch_loop.max_steps = self._limits
        step, self._step = self._step, None
        if step is None:
            return
        epochs = trainer.fit_loop.epoch_progress.current
        resumed_epoch, epochs.completed = epochs.completed, step["epoch"]  # the step may have been its epoch's last
        if step["metrics"]:
            send_metrics(trainer, step["metrics"])
        if step["validates"]:
            validate_now(trainer)
        epochs.completed = resumed_epoch

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._has_trained = True

    def _keep_open(self, trainer: Trainer) -> None:
        """Puts the limits of a resumed run beyond where it goes on, so that it begins at all."""
        if self._resumes_at is None:
            return
        loop = trainer.fit_loop
        self._limits = loop.max_epochs, loop.epoch_loop.max_steps
        epoch, step = self._resumes_at
        if loop.max_epochs not in (None, -1):
            loop.max_epochs = max(loop.max_epochs, epoch + 1) + 1  # the step may have been its epoch's last
        if loop.epoch_loop.max_steps != -1:
            loop.epoch_loop.max_steps = max(loop.epoch_loop.max_steps, step) + 1
