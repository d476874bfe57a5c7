"""A progress bar that says which phase of an iteration is at work."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from typing_extensions import override

from verl_lightning.modules.base import PostTrainingModule

PHASE_NAMES = {
    "update_weights": "weight sync",
    "gen": "rollout",
    "reward": "reward",
    "old_log_prob": "log-probs",
    "ref": "reference",
    "values": "values",
    "adv": "advantages",
    "teacher": "teacher",
    "update_critic": "critic update",
    "update_actor": "actor update",
    "forward_backward": "forward and backward",
    "save_checkpoint": "checkpoint",
}


def is_live() -> bool:
    """Tell whether what is shown can be drawn anew: a terminal or a notebook, not a file or a pipe."""
    return sys.stdout.isatty() or "ipykernel" in sys.modules


class PhaseProgressBar(TQDMProgressBar):
    """Lightning's text progress bar with the phase in front: rollout, reward, log-probs, update.

    In a file or a pipe, where a bar would be drawn again and again, each step and each validation is one plain line.

    Args:
        refresh_rate: Batches between two redraws of the numbers; 0 switches the bar off.
        leave: Leave finished bars on the screen.
    """

    def __init__(self, refresh_rate: int = 1, leave: bool = False) -> None:
        super().__init__(refresh_rate=refresh_rate, leave=leave)
        self._is_drawn = False  # whether there is a bar for training
        self._is_counted = False  # whether the bar knows how many batches are to come
        self._told_step = 0  # the newest step that a plain line has told of

    @property
    @override
    def is_disabled(self) -> bool:
        return super().is_disabled or not is_live()

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._is_drawn = True
        self._is_counted = False
        self._told_step = trainer.global_step

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if self._is_counted or self.is_disabled:
            return
        self._is_counted = True
        if trainer.max_epochs == -1 and trainer.max_steps > 0:  # Lightning's total leaves out what an earlier run did
            to_come = batch_idx + trainer.max_steps - trainer.global_step
            self.train_progress_bar.total = min(trainer.num_training_batches, to_come)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self._tells(trainer) and trainer.global_step > self._told_step:
            self._told_step = trainer.global_step
            total = "" if trainer.max_steps == -1 else f"/{trainer.max_steps}"
            self._tell(f"step {trainer.global_step}{total}", self.get_metrics(trainer, pl_module))

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_validation_end(trainer, pl_module)
        if self._tells(trainer) and not trainer.sanity_checking:
            found = {name: value for name, value in trainer.callback_metrics.items() if name.startswith("val/")}
            self._tell(f"validation after step {trainer.global_step}", found)

    @override
    def print(self, *args: Any, sep: str = " ", **kwargs: Any) -> None:
        if not self.is_disabled:
            super().print(*args, sep=sep, **kwargs)
        elif self.is_enabled:  # Lightning would write above a bar, of which there is none
            sys.stdout.write(sep.join(map(str, args)) + "\n")

    def _tells(self, trainer: Trainer) -> bool:
        return self.is_enabled and not is_live() and trainer.is_global_zero

    def _tell(self, what: str, metrics: Mapping[str, Any]) -> None:
        values = {name: value if isinstance(value, str) else f"{float(value):.4g}" for name, value in metrics.items()}
        sys.stdout.write(" ".join([f"{what}:", *(f"{name}={value}" for name, value in values.items())]) + "\n")
        sys.stdout.flush()

    def on_phase_start(self, module: PostTrainingModule, phase: str) -> None:
        """Show the phase that begins."""
        if not self.is_enabled or self.is_disabled:
            return
        trainer = module.trainer
        name = PHASE_NAMES.get(phase, phase)
        if trainer.training and self._is_drawn:  # a checkpoint may be saved before training starts
            self.train_progress_bar.set_description(f"Step {trainer.global_step} {name}")
        elif trainer.testing:
            self.test_progress_bar.set_description(f"Testing {name}")
        elif trainer.validating:
            self.val_progress_bar.set_description(f"Validation {name}")

    @override
    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        metrics: dict[str, Any] = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)  # says where the files are, which does not change
        if trainer.training and (loss := trainer.callback_metrics.get("train/loss")) is not None:
            metrics["train/loss"] = float(loss)  # waits for the device, only when the bar is drawn
        return metrics
