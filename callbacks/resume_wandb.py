"""Goes on with the same Weights & Biases run when training resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.fabric.utilities import rank_zero_warn
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger
from typing_extensions import override

from verl_lightning.compat.lightning import continue_wandb_run, last_checkpoints
from verl_lightning.strategies.checkpoints import read_settings


class ResumeWandb(Callback):
    """Keeps the run's id in every checkpoint, and gives it to the logger before a resumed run starts to log.

    `verl-fit` goes on with the run by itself. In Python, call `continue_from` before `Trainer.fit`: Lightning opens
    the logger's run before any hook of a callback knows the checkpoint.

    An id that the user sets on the logger wins. Without a `WandbLogger` it does nothing.
    """

    def __init__(self) -> None:
        self._run_id: str | None = None
        self._saved_id: str | None = None  # of the run that the checkpoint belongs to

    def continue_from(self, trainer: Trainer, ckpt_path: str | Path) -> None:
        """Give the logger the id of the run that wrote a checkpoint.

        Args:
            trainer: Trainer whose logger has not logged yet.
            ckpt_path: The checkpoint, or ``last`` for the newest that the trainer's `ModelCheckpoint` finds.
        """
        logger = next((logger for logger in trainer.loggers if isinstance(logger, WandbLogger)), None)
        path = last_checkpoint(trainer) if str(ckpt_path) == "last" else Path(ckpt_path)
        if logger is None or logger.version is not None or path is None:
            return
        if run_id := saved_callback_state(path, self.state_key).get("run_id"):
            continue_wandb_run(logger, run_id)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                run_id = logger.experiment.id if trainer.is_global_zero else None
                self._run_id = trainer.strategy.broadcast(run_id)
        if self._saved_id and self._run_id and self._saved_id != self._run_id:
            rank_zero_warn(
                f"The checkpoint belongs to the W&B run `{self._saved_id}`, but this one logs to `{self._run_id}`."
                " Call `ResumeWandb.continue_from(trainer, ckpt_path)` before `trainer.fit` to go on with the old one."
            )

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved_id = state_dict["run_id"]

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"run_id": self._run_id}


def last_checkpoint(trainer: Trainer) -> Path | None:
    """Returns the checkpoint that `ckpt_path: last` will find; None if there is none."""
    return max(last_checkpoints(trainer), key=lambda path: path.stat().st_mtime, default=None)


def saved_callback_state(path: Path, key: str) -> dict[str, Any]:
    """A callback's state in a checkpoint file or folder, read without loading the weights; empty if it has none."""
    state: dict[str, Any] = read_settings(path).get("callbacks", {}).get(key, {})
    return state
