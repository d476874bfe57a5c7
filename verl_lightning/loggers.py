"""The logger that `verl-fit` uses when no other is given."""

from __future__ import annotations

import csv
import os
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import rank_zero_experiment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from torch import Tensor
from typing_extensions import override

CONFIG_FILE = "config.yaml"
"""File in a run's folder that tells a training run from an evaluation."""


class ResumableCSVLogger(CSVLogger):
    """Writes ``save_dir/name/version_N/metrics.csv``, and goes on with that file when a run is resumed.

    Lightning's logger starts each run in a new folder, where ``ckpt_path: last`` finds nothing, and empties the file of
    a folder that it is told to reuse. This one keeps the rows from before the checkpoint and replaces those that the
    resumed run computes anew.

    Args:
        save_dir: Folder of all runs; a local one.
        name: Folder in it for runs that belong together; empty for none.
        version: The run's folder; a number N is ``version_N``, null the next free one.
        prefix: Put before each metric's name.
        flush_logs_every_n_steps: Steps between writes; 1 loses nothing when the run is killed.
    """

    def __init__(
        self,
        save_dir: str = "runs",
        name: str = "",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 1,
    ) -> None:
        super().__init__(save_dir, name, version, prefix, flush_logs_every_n_steps)
        self._old_rows: list[dict[str, Any]] = []

    def newest_run(self) -> int | None:
        """Version of the newest training run, None if there is none; evaluations don't count."""
        found = [
            path.parent.name.removeprefix("version_") for path in Path(self.root_dir).glob(f"version_*/{CONFIG_FILE}")
        ]
        return max((int(number) for number in found if number.isdecimal()), default=None)

    def last_checkpoint(self, version: int) -> Path | None:
        """The newest ``last`` checkpoint in a run's folder."""
        found = Path(self.root_dir, f"version_{version}", "checkpoints").glob("last*")
        return max(found, key=lambda path: path.stat().st_mtime, default=None)

    def continue_newest_run(self) -> None:
        """Logs into the newest training run's folder if that has a checkpoint to go on from and no other was chosen."""
        newest = self.newest_run()
        if self._version is None and newest is not None and self.last_checkpoint(newest) is not None:
            self._version = newest

    def continue_run(self, version: int | str | None) -> None:
        """Logs into the folder of this run, whatever it holds."""
        self._version = version

    @property
    @override
    @rank_zero_experiment
    def experiment(self) -> ExperimentWriter:
        if isinstance(self._experiment, ExperimentWriter):
            return self._experiment
        self._take_folder()
        path = Path(self.log_dir, ExperimentWriter.NAME_METRICS_FILE)
        self._old_rows = read_rows(path)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*exists and is not empty.*")
            writer: ExperimentWriter = super().experiment
        if self._old_rows:
            writer.metrics_keys = write_rows(path, self._old_rows)
        return writer

    def _take_folder(self) -> None:
        """Make the next free folder this run's own, also while other runs look for one.

        Calls a private method of Lightning 2.6's `CSVLogger`, which looks for the number.
        """
        while self._version is None:
            number = self._get_next_version()
            folder = Path(self.root_dir, f"version_{number}")
            folder.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):  # another run was faster
                folder.mkdir()
                self._version = number

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Tensor | float], step: int | None = None) -> None:
        writer = self.experiment
        if self._old_rows and step is not None:
            kept = rows_before(self._old_rows, metrics, step)
            writer.metrics_keys = write_rows(Path(writer.metrics_file_path), kept)
            self._old_rows = []
        super().log_metrics(dict(metrics), step)


def newest_checkpoint(trainer: Trainer) -> Path | None:
    """The newest ``last`` checkpoint of any run of the first logger's; None if there is none.

    Beside a logger's files Lightning puts the checkpoints of a `ModelCheckpoint` without ``dirpath``. Each run has a
    new folder there, in which ``ckpt_path: last`` would find nothing and start anew. None, too, where each has a
    ``dirpath``, and for a `ResumableCSVLogger`, which goes on in its folder.
    """
    callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    logger = trainer.logger
    is_elsewhere = all(callback.dirpath is not None for callback in callbacks)
    if logger is None or isinstance(logger, ResumableCSVLogger) or is_elsewhere:
        return None
    folder = Path(logger.save_dir or trainer.default_root_dir, str(logger.name))
    found = folder.glob("*/checkpoints/last*")
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def rows_before(rows: Sequence[Mapping[str, str]], metrics: Mapping[str, object], step: int) -> list[Mapping[str, str]]:
    """The old rows that a run which goes on with these metrics at this step does not compute once more.

    Rows lie in the order in which they were computed, so that all from the first recomputed one on are left out: of
    the same step, a validation follows the training metrics.
    """
    for index, row in enumerate(rows):
        row_step = int(row["step"])
        names = {name for name, value in row.items() if value} - {"epoch", "step"}
        if row_step > step or (row_step == step and not names.isdisjoint(metrics)):
            return list(rows[:index])
    return list(rows)


def read_rows(path: Path) -> list[dict[str, str]]:
    """Whole rows of a metrics file, without one that a kill has torn; none if there is no file."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    return [row for row in csv.DictReader(whole) if None not in row.values()]


def write_rows(path: Path, rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Writes a metrics file in one atomic move; returns its columns."""
    names = sorted({name for row in rows for name in row})
    partial = path.with_suffix(".tmp")
    with partial.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=names)
        writer.writeheader()
        writer.writerows(rows)
    os.replace(partial, path)
    return names
