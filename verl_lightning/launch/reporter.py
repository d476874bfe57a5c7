"""The callback through which a worker's run speaks with the driver."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from verl_lightning.launch.board import RunFolder
from verl_lightning.loggers import ResumableCSVLogger
from verl_lightning.modules.base import PostTrainingModule
from verl_lightning.strategies.base import as_contract


class StoppedOnRequest(Exception):
    """The run has saved and ends, as the driver asked."""


class NodeLeavingError(Exception):
    """The run has saved and ends, for one of its nodes is about to be taken away; others may go on with it."""


class Reporter(Callback):
    """Tells the driver each phase, and the run's folder; saves and ends the run when the driver asks for it.

    It does so too when Ray announces that a node of the run will be taken away, such as a spot instance, so that the
    driver can start the run again elsewhere before the time is over.

    Args:
        board: The run's `Board`.
    """

    def __init__(self, board: Any) -> None:
        self.board = board
        """Whom this tells."""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        import ray

        # Not in `setup`, before which a `ModelCheckpoint` need not have found its folder.
        folders = [callback.dirpath for callback in last_checkpoint_callbacks(trainer)]
        logger = trainer.logger
        version = logger.version if isinstance(logger, ResumableCSVLogger) else None
        if trainer.is_global_zero:
            paths = tuple(str(Path(folder).absolute()) for folder in folders if folder is not None)
            ray.get(self.board.keep_folder.remote(RunFolder(log_version=version, checkpoint_folders=paths)))

    def on_phase_start(self, module: PostTrainingModule, phase: str) -> None:
        """Called as each phase begins; the step does not wait until the board has heard."""
        self.board.enter.remote(module.trainer.global_rank, module.trainer.global_step, phase)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        import ray

        reason = ray.get(self.board.stop_reason.remote()) if trainer.is_global_zero else None
        is_asked = as_contract(trainer.strategy).largest_over_ranks(int(reason is not None))
        notice = ray.train.get_preemption_info()  # collective, as the line above
        if not is_asked and notice is None:
            return
        saved = save_last(trainer)
        if not is_asked:
            raise NodeLeavingError(f"Ray takes nodes away from ranks {notice.preempted_ranks}; {saved}.")
        if trainer.is_global_zero:
            ray.get(self.board.keep_saved.remote(saved))
        raise StoppedOnRequest(saved)


def save_last(trainer: Trainer) -> str:
    """Writes all `last` checkpoints, and says where. Collective."""
    paths = [last_path(callback) for callback in last_checkpoint_callbacks(trainer)]
    for path in paths:
        trainer.save_checkpoint(path)
    where = f"saved in `{paths[0]}`" if paths else "nothing saved, for no `ModelCheckpoint` has `save_last`"
    return f"stopped after step {trainer.global_step}, {where}"


def last_checkpoint_callbacks(trainer: Trainer) -> list[ModelCheckpoint]:
    """The callbacks that keep a `last` checkpoint."""
    callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    return [callback for callback in callbacks if callback.save_last]


def last_path(callback: ModelCheckpoint) -> str:
    """Where a callback keeps its `last` checkpoint."""
    assert callback.dirpath is not None
    return os.path.join(callback.dirpath, callback.CHECKPOINT_NAME_LAST + callback.FILE_EXTENSION)


def newest_checkpoint(folder: RunFolder) -> Path | None:
    """The newest committed `last` checkpoint of a run."""
    found = [path for name in folder.checkpoint_folders for path in Path(name).glob("last*")]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)
