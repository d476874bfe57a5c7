"""Moments at which a run is killed: between two of its actions, within one, and between two changes of its files."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.profilers import Profiler

CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"}
"""Python's audit events of what changes a folder, beside `open`."""

HALF_A_CHECKPOINT = 30_000
"""Bytes that are written of it; no other file of a test's run is as long."""

HALF_A_ROW = 20
"""Bytes that are written of a row of metrics."""

SIGNALS = {signal.SIGKILL, signal.SIGPROF, signal.SIGXFSZ}
"""What may end a process that is killed here, by Linux or by itself."""


@dataclass(frozen=True, kw_only=True)
class Kill:
    """When an attempt to run is killed."""

    action: str
    """Parts of the name by which profilers hear of what the trainer or the module does, such as ``]gen``."""

    how: Literal["start", "stop", "within", "change", "half", "torn"] = "start"
    """As the action starts or stops. Or from its start on: after some of the process's time, before a change of the
    run's files, with half of a checkpoint's file written, or with half of a row of metrics."""

    count: int = 1
    """For ``within`` the milliseconds of the process's time, for ``change`` the number of the change."""

    nth: int = 1
    """How often the action must have started, since the attempt did."""

    rank: int = 0
    """Which process dies."""

    def words(self) -> list[str]:
        """For the command line of `verl-fit`."""
        profiler = {"class_path": f"{__name__}.Killer", "init_args": {"kill": asdict(self)}}
        return ["--trainer.profiler", json.dumps(profiler)]


class Killer(Profiler):
    """Hears of each action of the trainer and of the module's phases, and kills this process at one of them.

    Args:
        kill: At which, and how.
    """

    def __init__(self, kill: Kill) -> None:
        super().__init__()
        self.kill = kill
        self._started = 0

    def start(self, action_name: str) -> None:
        """Called as an action starts."""
        if self._is_it(action_name):
            self._started += 1
            if self._started == self.kill.nth:
                prepare(self.kill)

    def stop(self, action_name: str) -> None:
        """Called as it stops."""
        if self.kill.how == "stop" and self._started == self.kill.nth and self._is_it(action_name):
            die()

    def _is_it(self, action_name: str) -> bool:
        is_here = int(os.environ.get("RANK", "0")) == self.kill.rank
        return is_here and all(part in action_name for part in self.kill.action.split())


def prepare(kill: Kill) -> None:
    """Kills this process, or has Linux or Python do so later."""
    if kill.how == "start":
        die()
    elif kill.how == "within":
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, kill.count / 1000)
    elif kill.how == "change":
        die_before_change(kill.count)
    elif kill.how == "half":
        die_beyond(HALF_A_CHECKPOINT)
    elif kill.how == "torn":
        die_beyond(max(file.stat().st_size for file in Path("runs").glob("*/metrics.csv")) + HALF_A_ROW)


def die() -> None:
    """What kill -9 does."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_beyond(size: int) -> None:
    """Has Linux kill this process where a file would grow beyond a size, when the bytes up to there are written."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def die_before_change(number: int) -> None:
    """Kills this process before it changes the run's files for the n-th time from now on, in whatever thread."""
    met = 0

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal met
        writes = event == "open" and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        if (writes or event in CHANGES) and "runs" in str(arguments[0]):
            met += 1
            if met == number:
                die()

    sys.addaudithook(hear)
