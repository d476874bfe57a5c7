"""Folders in which runs keep their files, and the checkpoint that ``ckpt_path: last`` means."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger

from verl_lightning.compat.lightning import chosen_version
from verl_lightning.run_records import CONFIG_FILE, age, read_record

CHECKPOINTS = "checkpoints"
"""Folder in a run's, by Lightning, for the checkpoints of a `ModelCheckpoint` without ``dirpath``."""


PHASES = "phases"
"""Folder in a run's, with one for each phase of a run that has several."""


def run_folder(trainer: Trainer) -> str:
    """The folder in which a run's checkpoints lie; for W&B it differs from ``trainer.log_dir``."""
    logger = trainer.logger
    return trainer.default_root_dir if logger is None else os.path.join(runs_folder(trainer), name_of(logger.version))


def shared_run_folder(trainer: Trainer) -> Path:
    """Returns the run's folder on all ranks; rank 0 alone knows what a logger has called it. Collective."""
    return Path(trainer.strategy.broadcast(run_folder(trainer)))


def runs_folder(trainer: Trainer) -> str:
    """The folder in which the first logger makes one for each run; without a logger, the folder of the only run."""
    logger = trainer.logger
    return trainer.default_root_dir if logger is None else _parent(trainer, logger)


def _parent(trainer: Trainer, logger: Logger) -> str:
    """The folder in which a logger makes one for each run."""
    return os.path.join(logger.save_dir or trainer.default_root_dir, str(logger.name))


@dataclass(frozen=True, kw_only=True)
class LastCheckpoint:
    """The checkpoint that ``ckpt_path: last`` means, and the run that wrote it."""

    path: Path
    """The checkpoint."""

    run: Path | None
    """The folder of the run that wrote it; None where it lies in a ``dirpath`` and does not tell, or that is gone."""

    passed_over: list[Path] = field(default_factory=list)
    """Folders of newer training runs, which have no checkpoint."""

    of_others: list[Path] = field(default_factory=list)
    """Newer checkpoints in a ``dirpath`` that runs in other folders have written."""


def newest_run(trainer: Trainer, name: str | None = None) -> LastCheckpoint | None:
    """Finds the newest checkpoint of the newest run that has one, or of the run of a name; None if there is none."""
    runs = list(known_runs(trainer, name))
    with_checkpoint = {run: max(found, key=rank) for run in runs if (found := checkpoints_of(run))}
    if not with_checkpoint:
        return None
    ages = {run: age(run, read_record(run)) for run in runs}
    newest = max(with_checkpoint, key=lambda run: (ages[run], rank(with_checkpoint[run])))
    passed_over = [run for run in runs if ages[run] > ages[newest] and (run / CONFIG_FILE).exists()]
    passed_over.sort(key=lambda run: ages[run])
    return LastCheckpoint(path=with_checkpoint[newest], run=newest, passed_over=passed_over)


def known_runs(trainer: Trainer, name: str | None) -> Iterator[Path]:
    """Folders where the runs of a trainer's loggers lie; without a logger, the folder of the only run.

    Args:
        trainer: Trainer of the run that is to go on.
        name: Name of the run that is meant; None takes those that the loggers are set to, or else all.
    """
    if not trainer.loggers:
        yield Path(trainer.default_root_dir)
    for logger in trainer.loggers:
        parent, version = Path(_parent(trainer, logger)), chosen_version(logger)
        if name is not None or version is not None:
            yield parent / (name_of(version) if name is None else name)
        else:
            yield from (path for path in parent.glob("*") if path.is_dir())


def checkpoints_of(run: Path) -> list[Path]:
    """Checkpoints of a run, and of the phases of one that has several."""
    folders = (run / CHECKPOINTS, *run.glob(f"{PHASES}/*/{CHECKPOINTS}"))
    return [path for folder in folders for path in checkpoints_in(folder)]


def checkpoints_in(folder: Path) -> list[Path]:
    """Checkpoints in a folder: those whose names begin with ``last``, or else all."""
    return sorted(folder.glob("last*.ckpt")) or sorted(folder.glob("[!.]*.ckpt"))


def name_of(version: int | str | None) -> str:
    """Returns the name of a run's folder from a logger's version."""
    return version if isinstance(version, str) else f"version_{version}"


def rank(checkpoint: Path) -> tuple[bool, float]:
    """Returns a sort key: checkpoints named ``last*`` come after all others, and newer ones after older ones."""
    return checkpoint.name.startswith("last"), checkpoint.stat().st_mtime
