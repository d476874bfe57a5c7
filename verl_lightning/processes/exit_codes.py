"""Endings of a run: exit codes for schedulers and scripts, and the words in the run's files."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple


class ExitCode(IntEnum):
    """Exit codes of `verl-fit`. docs/ending.md explains each."""

    FINISHED = 0
    FAILED = 1
    USAGE = 2
    STOPPED = 3
    UNHEALTHY = 4
    PREEMPTED = 75  # `EX_TEMPFAIL` of BSD's sysexits: to be tried again
    INTERRUPTED = 130  # as a shell tells of SIGINT


class Ending(NamedTuple):
    """Ending of a run: its reason in words, and its exit code."""

    words: str
    """Reason for people to read, such as ``finished``, ``stopped by EarlyStopping`` or ``ValueError: enough``."""

    code: ExitCode
    """Exit code for scripts to read."""


FINISHED = Ending("finished", ExitCode.FINISHED)
