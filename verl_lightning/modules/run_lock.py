"""Keeps two runs out of one folder, where each would overwrite the other's checkpoints and metrics."""

from __future__ import annotations

import errno
import os
import socket
import sys
import time
from pathlib import Path

from lightning.fabric.utilities import rank_zero_warn
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from typing_extensions import override

from verl_lightning.faults import RunError
from verl_lightning.run_folders import CHECKPOINTS, run_folder

if sys.platform != "win32":
    import fcntl

ADVICE = (
    "Wait for its end, or stop it. To train beside it, leave out what names the folder: `--ckpt_path last`, a logger's"
    " `version`, a `dirpath`."
)
HELD = (errno.EACCES, errno.EAGAIN)
"""Error codes by which a system tells that another process has a lock."""


class FolderInUseError(RunError):
    """Another process writes to a folder."""


class FolderLock:
    """A lock on a folder, by the file ``.NAME.lock`` beside it; the system takes it back however the process ends.

    It is a record lock of ``fcntl``, which works over NFS too, and which the processes that this one starts do not
    hold: those that outlive a killed run would keep its successor out.

    Args:
        folder: Folder to lock; it need not exist.

    Raises:
        FolderInUseError: If another process has the lock.
        OSError: If the file system knows no locks, or the file can't be made.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder.with_name(f".{folder.name}.lock")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = -1
        while not self._try_to_lock(folder):  # the holder has taken the file away
            pass
        os.ftruncate(self._descriptor, 0)
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        os.pwrite(self._descriptor, f"process {os.getpid()} on `{socket.gethostname()}` since {since}".encode(), 0)

    def release(self) -> None:
        """Give the lock back and leave no file."""
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)

    def _try_to_lock(self, folder: Path) -> bool:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._path.exists() and os.path.samestat(os.fstat(descriptor), self._path.stat()):
                self._descriptor = descriptor
                return True
        except OSError as error:
            if error.errno in HELD:
                holder = os.pread(descriptor, 1000, 0).decode() or "a process that has just begun"
                raise FolderInUseError(f"`{folder}` is in use by another run: {holder}.") from None
            raise
        finally:
            if self._descriptor != descriptor:
                os.close(descriptor)
        return False


class LockRunFolders(Callback):
    """Keeps other runs out of the folders that a run writes to, while it lasts.

    Training holds the run's folder and each ``dirpath`` of a checkpoint callback, an evaluation the folder of a
    `CSVLogger`. The first rank holds them for all.

    Raises:
        FolderInUseError: In ``setup``, on all ranks, if another run holds one of them.
    """

    def __init__(self) -> None:
        self._locks: list[FolderLock] = []

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        writes = trainer.is_global_zero and not trainer.fast_dev_run  # type: ignore[attr-defined] # by a connector
        problem = self._lock(trainer, stage) if writes and sys.platform != "win32" else None
        problem = trainer.strategy.broadcast(problem)
        if problem is not None:
            raise FolderInUseError(problem)

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
