"""``verl-fit runs``: the runs in a folder, how far they are and how they ended."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from verl_lightning.run_records import RUNS, RunRecord, moment, runs_in

DESCRIPTION = """\
Lists the runs in a folder and the folders below it, the newest last: their state, step, newest reward (or loss), when
they began, and how they ended. A run that was killed is one that has told no end and holds its folder no more.
"""

COLUMNS = ("run", "state", "step", "reward", "began (UTC)", "ended by")


def main(argv: Sequence[str]) -> None:
    """Prints the list.

    Args:
        argv: Words after ``runs``.

    Raises:
        ValueError: If there is no such folder.
    """
    parser = argparse.ArgumentParser(
        prog="verl-fit runs", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", default=RUNS, type=Path, help="folder of the runs; `runs` if left out")
    parser.add_argument("--json", action="store_true", help="write each run's record as a line of JSON")
    options = parser.parse_args(argv)
    if not options.folder.is_dir():
        raise ValueError(f"`{options.folder}` is no folder. Give the one with the runs: `verl-fit runs FOLDER`.")
    runs = runs_in(options.folder)
    if options.json:
        lines = [json.dumps({"folder": str(path)} | asdict(record)) for path, record in runs]
    elif runs:
        lines = align([COLUMNS, *(cells(path, record, options.folder) for path, record in runs)])
    else:
        lines = [f"There are no runs in `{options.folder}`."]
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def cells(path: Path, record: RunRecord, folder: Path) -> tuple[str, ...]:
    """The cells of a run's line."""
    total = "" if record.max_steps == -1 else f"/{record.max_steps}"
    quality = "" if record.quality is None else f"{record.quality[1]:.4g} ({record.quality[0]})"
    name = str(path.relative_to(folder)) if path != folder else path.absolute().name
    reason = "" if record.ended_by == record.state else record.ended_by
    return name, record.state, f"{record.step}{total}", quality, moment(record.started), reason


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table whose columns stand below one another."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
