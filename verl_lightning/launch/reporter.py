"""The callback through which a worker's run speaks with the driver."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from verl_lightning.launch.board import RunFolder
from verl_lightning.loggers import ResumableCSVLogger
from verl_lightning.modules.base import PostTrainingModule
from verl_lightning.modules.preemption import Preemption, last_checkpoint_callbacks, preemption_of


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
        """The run's `Board`."""
        self.notice = ""
        """Sentence about nodes that Ray will take away from the run; empty if it has announced nothing."""

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
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._ask(trainer)
        self._preemption(trainer).end_if_told(trainer)  # before engines are started

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        import ray

        self._ask(trainer)
        notice = ray.train.get_preemption_info()  # collective
        if notice is not None and self._preemption(trainer).reason is None:
            self.notice = f"Ray takes nodes away from ranks {notice.preempted_ranks}"
            self._preemption(trainer).tell(self.notice)

    @override
    def on_validation_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self._ask(trainer)

    def _ask(self, trainer: Trainer) -> None:
        """Passes on what the driver wants, to be done when all callbacks have seen this batch."""
        import ray

        preemption = self._preemption(trainer)
        if trainer.is_global_zero and preemption.reason is None:
            reason = ray.get(self.board.stop_reason.remote())
            if reason is not None:
                preemption.tell(reason)

    def _preemption(self, trainer: Trainer) -> Preemption:
        found = preemption_of(trainer)
        assert found is not None  # every run has one
        return found


def newest_checkpoint(folder: RunFolder) -> Path | None:
    """Finds the newest committed `last` checkpoint of a run; None if there is none."""
    found = [path for name in folder.checkpoint_folders for path in Path(name).glob("last*")]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)
