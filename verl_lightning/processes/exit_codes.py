"""How a run can end: exit codes for schedulers and scripts, and the words of its files."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class ExitCode(IntEnum):
    """What `verl-fit` ends with. docs/ending.md explains each."""

    FINISHED = 0
    FAILED = 1
    USAGE = 2
    STOPPED = 3
    UNHEALTHY = 4
    PREEMPTED = 75  # `EX_TEMPFAIL` of BSD's sysexits: to be tried again
    INTERRUPTED = 130  # as a shell tells of SIGINT


class Ending(NamedTuple):
    """Why a run has ended."""

    words: str
    """For people, such as ``finished``, ``stopped by EarlyStopping`` or ``ValueError: enough``."""

    code: ExitCode
    """For scripts."""


FINISHED = Ending("finished", ExitCode.FINISHED)
