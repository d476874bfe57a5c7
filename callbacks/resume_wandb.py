"""Goes on with the same Weights & Biases run when training resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger
from typing_extensions import override


class ResumeWandb(Callback):
    """Keeps the run's id in every checkpoint, and gives it to the logger before a resumed run starts to log.

    An id that the user sets on the logger wins. Without a `WandbLogger` it does nothing.
    """

    def __init__(self) -> None:
        self._run_id: str | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        logger = next((logger for logger in trainer.loggers if isinstance(logger, WandbLogger)), None)
        if logger is None or stage != "fit":
            return
        if trainer.ckpt_path is not None and logger.version is None:
            state = saved_callback_state(Path(trainer.ckpt_path), self.state_key)
            if run_id := state.get("run_id"):
                continue_run(logger, run_id)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                run_id = logger.experiment.id if trainer.is_global_zero else None
                self._run_id = trainer.strategy.broadcast(run_id)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"run_id": self._run_id}


def saved_callback_state(path: Path, key: str) -> dict[str, Any]:
    """A callback's state in a checkpoint file or folder, read without loading the weights; empty if it has none."""
    file = path / "meta.pt" if path.is_dir() else path
    checkpoint = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    state: dict[str, Any] = checkpoint.get("callbacks", {}).get(key, {})
    return state


def continue_run(logger: WandbLogger, run_id: str) -> None:
    """Make a logger that has not logged yet go on with an earlier run.

    Reaches into Lightning 2.6's `WandbLogger`, whose id can only be given to its constructor.

    Raises:
        RuntimeError: If Lightning has changed these names.
    """
    if not hasattr(logger, "_wandb_init") or not hasattr(logger, "_id"):
        raise RuntimeError("`WandbLogger` of this Lightning version can't be given a run id; 2.6 is known to work.")
    logger._wandb_init |= {"id": run_id, "resume": "allow"}
    logger._id = run_id
