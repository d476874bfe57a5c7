"""A progress bar that says which phase of an iteration is at work."""

from __future__ import annotations

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
    "update_critic": "critic update",
    "update_actor": "actor update",
    "forward_backward": "forward and backward",
    "save_checkpoint": "checkpoint",
}


class PhaseProgressBar(TQDMProgressBar):
    """Lightning's text progress bar with the phase in front: rollout, reward, log-probs, update.

    Args:
        refresh_rate: Batches between two redraws of the numbers; 0 switches the bar off.
        leave: Leave finished bars on the screen.
    """

    def __init__(self, refresh_rate: int = 1, leave: bool = False) -> None:
        super().__init__(refresh_rate=refresh_rate, leave=leave)
        self._is_drawn = False  # whether there is a bar for training

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._is_drawn = True

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
    def get_metrics(self, trainer, pl_module):  # type: ignore[no-untyped-def]
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)  # says where the files are, which does not change
        if trainer.training and (loss := trainer.callback_metrics.get("train/loss")) is not None:
            metrics["train/loss"] = float(loss)  # waits for the device, only when the bar is drawn
        return metrics
