"""A metrics file that outlives its process."""

from __future__ import annotations

import csv
import multiprocessing
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from verl_lightning.loggers import ResumableCSVLogger, read_rows


def log(logger: ResumableCSVLogger, *entries: tuple[dict[str, float], int]) -> list[dict[str, str]]:
    for metrics, step in entries:
        logger.log_metrics(metrics, step)
    return read_rows(Path(logger.log_dir, "metrics.csv"))


@pytest.fixture
def killed(folder: Path) -> Path:
    """A run of three steps, with a validation at step 1."""
    log(ResumableCSVLogger(version=0), ({"a": 0.5}, 0), ({"a": 1.5}, 1), ({"val": 9.0}, 1), ({"a": 2.5}, 2))
    return folder / "runs/version_0"


def test_rows_reach_the_disk_at_once(killed):
    assert len(read_rows(killed / "metrics.csv")) == 4


def test_resumed_run_replaces_what_it_computes_anew(killed):
    rows = log(ResumableCSVLogger(version=0), ({"a": 7.0}, 1))
    assert rows == [{"a": "0.5", "step": "0", "val": ""}, {"a": "7.0", "step": "1", "val": ""}]


def test_run_resumed_before_a_validation_keeps_the_training_row_of_its_step(killed):
    rows = log(ResumableCSVLogger(version=0), ({"val": 8.0}, 1))
    assert [(row["a"], row["val"]) for row in rows] == [("0.5", ""), ("1.5", ""), ("", "8.0")]


def test_resumed_run_keeps_all_rows_until_it_logs(killed):
    """Killed once more before its first step, it has lost nothing."""
    before = read_rows(killed / "metrics.csv")
    _ = ResumableCSVLogger(version=0).experiment
    assert read_rows(killed / "metrics.csv") == before


def test_resumed_run_may_log_new_metrics(killed):
    rows = log(ResumableCSVLogger(version=0), ({"a": 3.5, "b": 1.0}, 3))
    assert rows[-1] == {"a": "3.5", "b": "1.0", "step": "3", "val": ""}
    assert rows[0] == {"a": "0.5", "b": "", "step": "0", "val": ""}


@pytest.mark.parametrize("torn", ["3.", "3.5,3,9.12"])
def test_torn_row_is_left_out(killed, torn):
    """Even one with all columns may lack the end of its last number."""
    with (killed / "metrics.csv").open("a") as file:
        file.write(torn)
    assert [row["step"] for row in read_rows(killed / "metrics.csv")] == ["0", "1", "1", "2"]


def test_runs_that_start_at_the_same_time_have_folders_of_their_own(folder):
    """Else they would write into each other's metrics and checkpoints; here both see that folder 0 is free."""
    together = Barrier(2)

    class Slow(ResumableCSVLogger):
        def _get_next_version(self) -> int:
            number = super()._get_next_version()
            if number == 0:
                together.wait(10)
            return number

    loggers = [Slow(), Slow()]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda logger: log(logger, ({"a": 1.0}, 0)), loggers))

    assert {logger.version for logger in loggers} == {0, 1}


def test_asking_for_the_folder_makes_it_this_runs_own(folder):
    """Lightning asks long before it logs."""
    loggers = [ResumableCSVLogger(), ResumableCSVLogger()]
    assert [Path(logger.log_dir).name for logger in loggers] == ["version_0", "version_1"]


class Dying(csv.DictWriter):
    """Ends the process while it writes rows."""

    def writerows(self, rows: Iterable[Mapping[str, object]]) -> None:
        self.writerow(next(iter(rows)))
        os._exit(9)


def add_a_column_and_be_killed(folder: Path) -> None:
    """Goes on with a run, and dies while its file gets a new column."""
    os.chdir(folder)
    logger = ResumableCSVLogger(version=0)
    log(logger, ({"a": 3.5}, 3))
    csv.DictWriter = Dying
    logger.log_metrics({"new": 1.0}, 4)


def open_and_be_killed(folder: Path) -> None:
    """Goes on with a run, and dies before it has logged anything."""
    os.chdir(folder)
    _ = ResumableCSVLogger(version=0).experiment
    os._exit(9)


@pytest.mark.parametrize(("die", "steps"), [(add_a_column_and_be_killed, "01123"), (open_and_be_killed, "0112")])
def test_a_kill_while_the_file_changes_leaves_all_rows(killed, die, steps):
    """Lightning's logger empties a file to write it anew, and deletes that of a run which it goes on with."""
    writer = multiprocessing.get_context("fork").Process(target=die, args=(Path.cwd(),))
    writer.start()
    writer.join()

    assert writer.exitcode == 9
    assert [row["step"] for row in read_rows(killed / "metrics.csv")] == list(steps)
