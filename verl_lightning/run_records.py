"""Records of runs: the small file in which each tells how far it is and how it ended, and the list of all."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path

from verl_lightning.processes.exit_codes import ExitCode
from verl_lightning.processes.folder_lock import is_held

CONFIG_FILE = "config.yaml"
"""File in a run's folder that tells a training run from an evaluation."""

RECORD_FILE = "run.json"
"""File in a run's folder that holds its `RunRecord`."""

METRICS_FILE = "metrics.csv"
"""File in a run's folder that holds its curves."""

NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]*")
"""Pattern of a run's name: a folder's, and no number for YAML."""

TIME = re.compile(r"-\d{8}-\d{6}(-\d+)?$")
"""Pattern of the end of a name that was made of a configuration's and the time."""

REWARDS = ("val/reward", "critic/score/mean")
"""Metrics that tell how well a policy does; the first one that a run has counts."""

LOSSES = ("val/loss", "train/loss", "loss")
"""Metrics that tell how well a run without rewards does; the first one that it has counts."""

RUNNING, KILLED, UNKNOWN = "running", "killed", "unknown"
"""States of a run that has not told its end: it is at work, or it was killed, or it has no record."""

TAIL = 2**18
"""Bytes at the end of a metrics file that are searched for newer values than the record's."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Record of a run, as its folder keeps it."""

    name: str
    """Name of the run and of its folder."""

    started: str = ""
    """Time at which the run first began, in UTC."""

    updated: str = ""
    """Time of this record, in UTC."""

    state: str = RUNNING
    """State of the run: ``running``, or the kind of its end, such as ``finished``, ``preempted`` or ``failed``."""

    ended_by: str = ""
    """Reason for its end in words; empty while it runs."""

    exit_code: int | None = None
    """Exit code of its end; None while it runs."""

    step: int = 0
    """Number of finished steps."""

    max_steps: int = -1
    """Number of steps after which it ends; -1 where something else ends it."""

    metrics: dict[str, float] = field(default_factory=dict)
    """Newest values of a few metrics by name."""

    host: str = ""
    """Machine of its first process."""

    pid: int = 0
    """Number of its first process there."""

    command: list[str] = field(default_factory=list)
    """Words that started it the last time."""

    environment: dict[str, str] = field(default_factory=dict)
    """Versions of packages, and devices."""

    @property
    def quality(self) -> tuple[str, float] | None:
        """Name and newest value of the metric that tells how well the run does; None where it has none."""
        return next(((name, self.metrics[name]) for name in (*REWARDS, *LOSSES) if name in self.metrics), None)


RUNS = "runs"
"""Folder of all runs, unless another one is chosen."""


def now() -> str:
    """The time in UTC, as records have it; later ones sort behind earlier ones."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def moment(time: str) -> str:
    """A time of a record as people read it, to the second."""
    return time[:19].replace("T", " ")


def timed_name(stem: str) -> str:
    """Makes a run's name of a configuration's and the time."""
    clean = re.sub(r"[^A-Za-z0-9.-]+", "-", stem).strip("-.")
    return f"{clean if clean[:1].isalpha() else f'run-{clean}'.strip('-')}-{datetime.now():%Y%m%d-%H%M%S}"


def stem_of(config: Path) -> str:
    """The name of a configuration file; of one that a run has left, what that run was named after."""
    is_left = config.name == CONFIG_FILE and config.parent.name
    return TIME.sub("", config.absolute().parent.name) if is_left else config.stem


def wrong_name(name: str) -> str | None:
    """Says why a run can't have a name; None if it can."""
    if NAME.fullmatch(name):
        return None
    return f"`--name {name}`: expected a letter, then letters, digits, dots, dashes or underscores, such as `grpo-7b`."


def read_record(folder: Path) -> RunRecord | None:
    """The record in a run's folder; None where there is none that can be read."""
    try:
        found = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    known = {each.name for each in fields(RunRecord)}
    return RunRecord(**{"name": folder.name} | {key: value for key, value in found.items() if key in known})


def write_record(folder: Path, record: RunRecord) -> RunRecord:
    """Writes a run's record, and returns it with the time of this; a kill leaves the one before."""
    record = replace(record, updated=now())
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".{RECORD_FILE}.tmp"
    draft.write_text(json.dumps(asdict(record), indent=2), encoding="utf-8")
    draft.replace(folder / RECORD_FILE)
    return record


def runs_in(folder: Path) -> list[tuple[Path, RunRecord]]:
    """The runs in a folder and the folders below it, the newest last, each with its record as it is now."""
    found = {path.parent for name in (RECORD_FILE, CONFIG_FILE) for path in _files(folder, name)}
    runs = [(path, current_record(path)) for path in found]
    return sorted(runs, key=lambda run: (age(*run), str(run[0])))


def _files(folder: Path, name: str) -> Iterator[Path]:
    """Files of a name in a folder, and in those at most three levels below it."""
    yield from (path for level in range(4) for path in folder.glob("*/" * level + name))


def version_of(name: str) -> int | str:
    """Returns the version of a run's folder, as a logger gives it: N for ``version_N``, else the folder's name."""
    match = re.fullmatch(r"version_(\d+)", name)
    return name if match is None else int(match[1])


def age(folder: Path, record: RunRecord | None) -> tuple[str, int]:
    """Returns a sort key by which runs that began later come after others, and runs without a record first.

    Args:
        folder: Folder of the run.
        record: Its record; None if it has none.
    """
    version = version_of(folder.name)
    return "" if record is None else record.started, version if isinstance(version, int) else -1


def current_record(folder: Path) -> RunRecord:
    """What is known of a run: its record, whether it is still at work, and what it has logged since.

    A run of an older version has no record; how it ended stands in its `final_validation.json`, if it has one.
    """
    record = read_record(folder) or _older_record(folder)
    if record.state in (RUNNING, UNKNOWN):
        record = replace(record, state=_state(folder, record))
    values = newest_values(folder / METRICS_FILE, (*REWARDS, *LOSSES, "training/global_step", "step"))
    steps = [int(values.pop("step", -1)) + 1, int(values.pop("training/global_step", 0)), record.step]
    return replace(record, step=max(steps), metrics=record.metrics | values)


def _state(folder: Path, record: RunRecord) -> str:
    """The state of a run that has not told its end."""
    held = is_held(folder)
    if held:
        return RUNNING
    if record.state == UNKNOWN:
        return UNKNOWN
    if held is None and record.host == socket.gethostname():  # a file system without locks
        return RUNNING if _is_alive(record.pid) else KILLED
    return KILLED


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _older_record(folder: Path) -> RunRecord:
    try:
        ending = json.loads((folder / "final_validation.json").read_text(encoding="utf-8"))
        state = ExitCode(ending["exit_code"]).name.lower()
        return RunRecord(name=folder.name, state=state, ended_by=str(ending["ended_by"]), step=int(ending["step"]))
    except (OSError, ValueError, KeyError):
        return RunRecord(name=folder.name, state=UNKNOWN)


def read_rows(path: Path) -> list[dict[str, str]]:
    """Whole rows of a metrics file, without one that a kill has torn; none if there is no file."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    return [row for row in csv.DictReader(whole) if None not in row.values()]


def newest_values(file: Path, names: tuple[str, ...]) -> dict[str, float]:
    """The newest value of each metric that stands near the end of a metrics file."""
    try:
        with file.open("rb") as content:
            columns = next(csv.reader([content.readline().decode()]), [])
            start = content.tell()
            content.seek(max(start, file.stat().st_size - TAIL))
            is_cut = content.tell() > start
            lines = content.read().decode(errors="replace").split("\n")
    except OSError:
        return {}
    rows = csv.reader(lines[is_cut:-1])  # the last line may be torn
    found: dict[str, float] = {}
    for row in rows:
        values = dict(zip(columns, row, strict=False)) if len(row) == len(columns) else {}
        numbers = {name: finite_number(values.get(name, "")) for name in names}
        found |= {name: number for name, number in numbers.items() if number is not None}
    return found


def finite_number(text: str) -> float | None:
    """The number that a text says; None if it says none, or one that is not finite."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
