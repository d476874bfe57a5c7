"""Iterations of several batches, counted as one step by Lightning's loggers and validations."""

from __future__ import annotations

import sys

from lightning.pytorch import Trainer

from verl_lightning.compat.lightning import log_under_step


class IterationCount:
    """Has Lightning log and validate once an iteration, where it would after each batch.

    While an iteration gathers batches nothing is logged: its metrics would be those of the iteration before. An integer
    ``val_check_interval`` counts iterations. A share of an epoch still counts batches, but weights that have been
    validated are not validated again. Intervals of time are left alone.
    """

    def __init__(self) -> None:
        self.validated_step = 0  # `global_step` when a validation was last due
        self._log_every_n_steps: int | None = None  # the trainer's own, while training lasts

    def start(self, trainer: Trainer, *, gathers: bool) -> None:
        """Begin to count, at the start of training.

        Args:
            trainer: Trainer whose training starts.
            gathers: True if training goes on within an iteration.
        """
        self._log_every_n_steps = trainer.log_every_n_steps  # type: ignore[attr-defined]
        self._log(trainer, gathers=gathers)
        self._plan_validation(trainer, gathers=gathers, validated_step=0)

    def after_batch(self, trainer: Trainer, *, gathers: bool) -> None:
        """Tell Lightning where it stands, before its callbacks and loggers look at the batch.

        Args:
            trainer: Trainer in a training step.
            gathers: True if the iteration needs more batches.
        """
        self._log(trainer, gathers=gathers)
        log_under_step(trainer, trainer.global_step - 1)  # Lightning adds 1 after the batch
        if self._plan_validation(trainer, gathers=gathers, validated_step=self.validated_step):
            self.validated_step = trainer.global_step

    def stop(self, trainer: Trainer) -> None:
        """Leave the trainer as it was."""
        self._log(trainer, gathers=False)
        self._log_every_n_steps = None

    def _log(self, trainer: Trainer, *, gathers: bool) -> None:
        if self._log_every_n_steps is not None:
            trainer.log_every_n_steps = 0 if gathers else self._log_every_n_steps  # type: ignore[attr-defined]

    def _plan_validation(self, trainer: Trainer, *, gathers: bool, validated_step: int) -> bool:
        """Have Lightning validate after this batch, or not."""
        loop, interval, step = trainer.fit_loop.epoch_loop, trainer.val_check_interval, trainer.global_step
        if trainer.val_check_batch in (None, float("inf")):  # by time, or once an epoch of unknown length
            return False
        batches = 1 + (loop.total_batch_idx if trainer.check_val_every_n_epoch is None else loop.batch_idx)
        if isinstance(interval, int):
            is_due = not gathers and step % interval == 0
        else:
            is_due = batches % max(1, int(trainer.num_training_batches * interval)) == 0
        is_due = is_due and step > validated_step
        trainer.val_check_batch = batches if is_due else sys.maxsize  # by which Lightning divides `batches`
        return is_due
