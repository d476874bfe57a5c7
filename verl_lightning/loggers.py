"""The logger that `verl-fit` uses when no other is given."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.core.saving import save_hparams_to_yaml
from lightning.pytorch.loggers import Logger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from torch import Tensor
from typing_extensions import override

from verl_lightning.compat.lightning import (
    KeepingWriter,
    OwnWriterLogger,
    choose_folder,
    choose_version,
    chosen_version,
    next_version,
)
from verl_lightning.run_folders import name_of
from verl_lightning.run_records import RUNS, read_rows


class ResumableCSVLogger(OwnWriterLogger):
    """Writes ``save_dir/name/RUN/metrics.csv``, and goes on with that file when a run is resumed.

    Lightning's logger starts each run in a new folder, where ``ckpt_path: last`` finds nothing, and empties the file of
    a folder that it is told to reuse. This one keeps the rows from before the checkpoint and replaces those that the
    resumed run computes anew.

    Args:
        save_dir: Folder of all runs, a local one; null takes ``trainer.default_root_dir`` under `verl-fit`, and
            ``runs`` in Python.
        name: Folder in it for runs that belong together; empty for none.
        version: The run's folder; a number N is ``version_N``. Null makes a new one, under `verl-fit` of ``--name`` or
            of the configuration's name and the time, in Python of the next free number.
        prefix: Text before each metric's name.
        flush_logs_every_n_steps: Steps between writes; 1 loses nothing when the run is killed.
    """

    def __init__(
        self,
        save_dir: str | None = None,
        name: str = "",
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 1,
    ) -> None:
        super().__init__(save_dir or RUNS, name, version, prefix, flush_logs_every_n_steps)
        self._has_folder = save_dir is not None
        self._old_rows: list[dict[str, Any]] = []
        self._new_name = ""  # of the run that is to begin; empty for the next number

    def keep_in(self, folder: str) -> None:
        """Logs below this folder, unless ``save_dir`` has chosen another."""
        if not self._has_folder:
            choose_folder(self, folder)

    def continue_run(self, version: int | str | None) -> None:
        """Logs into the folder of this run, whatever it holds."""
        choose_version(self, version)

    def begin_run(self, name: str) -> None:
        """Logs into a new folder of this name; where there is one, a number is put behind it."""
        self._new_name = name

    @property
    @override
    def version(self) -> int | str:
        """The run's folder; where none was chosen, a new one, which is made at once."""
        self._take_folder()
        return super().version

    @override
    def make_writer(self) -> ExperimentWriter:
        writer = WholeFileWriter(self.log_dir)
        self._old_rows = read_rows(Path(writer.metrics_file_path))
        writer.metrics_keys = sorted({name for row in self._old_rows for name in row})
        return writer

    @rank_zero_only
    def _take_folder(self) -> None:
        """Make the next free folder this run's own, also while other runs look for one."""
        attempts = count(1)
        while chosen_version(self) is None:
            attempt, number = next(attempts), next_version(self)
            named = self._new_name if attempt == 1 else f"{self._new_name}-{attempt}"
            version = named if self._new_name else number
            Path(self.root_dir).mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):  # another run was faster
                Path(self.root_dir, name_of(version)).mkdir()
                choose_version(self, version)

    @override
    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Tensor | float], step: int | None = None) -> None:
        writer = self.experiment
        if self._old_rows and step is not None:
            kept = rows_before(self._old_rows, metrics, step)
            write_rows(Path(writer.metrics_file_path), kept, writer.metrics_keys)
            self._old_rows = []
        super().log_metrics(dict(metrics), step)


def count_steps_from(logger: Logger, first_step: int) -> None:
    """Has a logger count steps from another one than 0: those of a trainer that goes on where others have ended.

    Args:
        logger: Logger of any kind.
        first_step: Number that is added to the step of what is logged from now on.
    """
    own = type(logger).log_metrics

    def log_metrics(metrics: dict[str, float], step: int | None = None) -> None:
        own(logger, metrics, None if step is None else step + first_step)

    vars(logger)["log_metrics"] = log_metrics


class WholeFileWriter(KeepingWriter):
    """Lightning's writer, but a kill at any moment leaves whole files; and it empties no folder that it is told to use.

    Args:
        log_dir: Folder of the files.
    """

    @override
    def rewrite(self, names: list[str]) -> None:
        path = Path(self.metrics_file_path)
        write_rows(path, read_rows(path), names)

    @override
    def log_hparams(self, params: dict[str, Any]) -> None:
        self.hparams.update(params)
        final = Path(self.log_dir, self.NAME_HPARAMS_FILE)
        draft = final.with_name(f".{final.name}.tmp")
        save_hparams_to_yaml(draft, self.hparams)
        draft.replace(final)


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


def write_rows(path: Path, rows: Sequence[Mapping[str, str]], names: Sequence[str]) -> None:
    """Writes a metrics file with these columns in one atomic move, so that a kill leaves the rows that were there."""
    draft = path.with_name(f".{path.name}.tmp")
    with draft.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=names)
        writer.writeheader()
        writer.writerows(rows)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
