"""The checkpoint that ``ckpt_path: last`` means."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from verl_lightning.modules.run_lock import run_of
from verl_lightning.run_folders import LastCheckpoint, known_runs, newest_run, rank


def last_checkpoint(trainer: Trainer, run: str | None = None) -> LastCheckpoint | None:
    """The checkpoint of the newest run that has one, of those that the trainer's `ModelCheckpoint` callbacks write.

    The newest run is the one that began last, by its record; of runs without one it is that of the highest version,
    where folders are called ``version_N``, or else that with the newest checkpoint. Of a run, it is the newest
    checkpoint whose name begins with ``last``; where there is none, the newest of all. Callbacks with a ``dirpath``
    may share it with runs of other folders or names, whose checkpoints are left out.

    Args:
        trainer: Trainer of the run that is to go on.
        run: Name of the run that is meant; None takes the newest.
    """
    found = []
    callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    for callback in callbacks:
        newest = None if callback.dirpath is None else newest_of(set(known_runs(trainer, run)), Path(callback.dirpath))
        found += [] if newest is None else [newest]
    if not callbacks or any(callback.dirpath is None for callback in callbacks):
        newest = newest_run(trainer, run)
        found += [] if newest is None else [newest]
    return max(found, key=lambda each: rank(each.path), default=None)


def newest_of(runs: Collection[Path], folder: Path) -> LastCheckpoint | None:
    """Finds the newest checkpoint in a folder that one of some runs has written; None if there is none.

    Args:
        runs: Folders of the runs.
        folder: Folder that they may share with others. A checkpoint in it whose run's folder is gone counts too: both
            may have been moved.
    """
    ours, of_others = {run.absolute(): run for run in runs}, list[Path]()
    for path in sorted(folder.glob("[!.]*.ckpt"), key=rank, reverse=True):
        run = run_of(path)
        if run is None or run in ours or not run.is_dir():
            return LastCheckpoint(path=path, run=run and ours.get(run), of_others=of_others)
        of_others.append(path)
    return None
