"""Keeps two runs out of one folder, where each would overwrite the other's checkpoints and metrics."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from lightning.fabric.utilities import rank_zero_warn
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from typing_extensions import override

from verl_lightning.models.digests import DamagedFileError
from verl_lightning.processes.folder_lock import FolderInUseError, FolderLock
from verl_lightning.run_folders import CHECKPOINTS, run_folder, shared_run_folder
from verl_lightning.strategies.checkpoints import NoCheckpointError, read_settings

ADVICE = (
    "Wait for its end, or stop it. To train beside it, leave out what names the folder: `--ckpt_path last`, `--name`, a"
    " logger's `version`, a `dirpath`."
)


class LockRunFolders(Callback):
    """Keeps other runs out of the folders that a run writes to, while it lasts.

    Training holds the run's folder and each ``dirpath`` of a checkpoint callback, an evaluation the folder of a
    `CSVLogger`. The first rank holds them for all.

    Raises:
        FolderInUseError: In ``setup``, on all ranks, if another run holds one of them.
    """

    def __init__(self) -> None:
        self._locks: list[FolderLock] = []
        self._run: str | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        writes = trainer.is_global_zero and not trainer.fast_dev_run  # type: ignore[attr-defined] # by a connector
        problem = self._lock(trainer, stage) if writes and sys.platform != "win32" else None
        problem = trainer.strategy.broadcast(problem)
        if problem is not None:
            raise FolderInUseError(problem)
        self._run = str(shared_run_folder(trainer).absolute())

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"run": self._run}

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._release()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._release()

    def _lock(self, trainer: Trainer, stage: str) -> str | None:
        """Lock all folders; returns who holds one of them, if anybody does."""
        for folder in folders_of(trainer, stage):
            try:
                self._locks.append(FolderLock(folder))
            except FolderInUseError as error:
                self._release()
                return f"{error} {ADVICE}"
            except OSError as error:
                rank_zero_warn(
                    f"`{folder}` can't be locked ({error}), so that nothing keeps another run out of it: see to it"
                    " that none writes there."
                )
        return None

    def _release(self) -> None:
        while self._locks:
            self._locks.pop().release()


def run_of(checkpoint: Path) -> Path | None:
    """Reads from a checkpoint the folder of the run that wrote it; None if it does not tell, or can't be read."""
    try:
        callbacks = read_settings(checkpoint).get("callbacks", {})
    except (DamagedFileError, NoCheckpointError):  # told by whoever loads it
        return None
    run = callbacks.get(LockRunFolders.__qualname__, {}).get("run")
    return None if run is None else Path(run)


def folders_of(trainer: Trainer, stage: str) -> list[Path]:
    """The local folders that a run writes to and has for itself, none of them within another one."""
    folders = [logger.log_dir for logger in trainer.loggers if isinstance(logger, CSVLogger)]
    if stage == "fit":
        dirpaths = [getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks]
        folders += [str(dirpath) for dirpath in dirpaths if dirpath is not None]
        if trainer.loggers:
            folders.append(run_folder(trainer))
        elif None in dirpaths:
            folders.append(str(Path(run_folder(trainer), CHECKPOINTS)))
    found = {Path(folder).resolve() for folder in folders if "://" not in folder}
    return sorted(folder for folder in found if found.isdisjoint(folder.parents))


def lock_first(trainer: Trainer) -> None:
    """Have a run's folders locked before any other callback writes to them."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined] # set by a connector
    if not any(isinstance(callback, LockRunFolders) for callback in callbacks):
        callbacks.insert(0, LockRunFolders())
