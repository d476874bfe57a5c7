"""Goes on with the same Weights & Biases run when training resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.fabric.utilities import rank_zero_warn
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import WandbLogger
from typing_extensions import override

from verl_lightning.faults import RunError
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
            trainer: Whose logger has not logged yet.
            ckpt_path: The checkpoint, or ``last`` for the newest that the trainer's `ModelCheckpoint` finds.
        """
        logger = next((logger for logger in trainer.loggers if isinstance(logger, WandbLogger)), None)
        path = last_checkpoint(trainer) if str(ckpt_path) == "last" else Path(ckpt_path)
        if logger is None or logger.version is not None or path is None:
            return
        if run_id := saved_callback_state(path, self.state_key).get("run_id"):
            continue_run(logger, run_id)

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
    """What `ckpt_path: last` will find; None if there is nothing.

    Calls a private method of Lightning 2.6's `ModelCheckpoint`, as Lightning does for `last`.
    """
    callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    found = [Path(path) for callback in callbacks for path in callback._find_last_checkpoints(trainer)]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def saved_callback_state(path: Path, key: str) -> dict[str, Any]:
    """A callback's state in a checkpoint file or folder, read without loading the weights; empty if it has none."""
    state: dict[str, Any] = read_settings(path).get("callbacks", {}).get(key, {})
    return state


def continue_run(logger: WandbLogger, run_id: str) -> None:
    """Make a logger that has not logged yet go on with an earlier run.

    Reaches into Lightning 2.6's `WandbLogger`, whose id can only be given to its constructor.

    Raises:
        RunError: If Lightning has changed these names.
    """
    if not hasattr(logger, "_wandb_init") or not hasattr(logger, "_id"):
        raise RunError("`WandbLogger` of this Lightning version can't be given a run id; 2.6 is known to work.")
    logger._wandb_init |= {"id": run_id, "resume": "allow"}
    logger._id = run_id
