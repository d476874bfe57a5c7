"""Task that the driver of ``verl-fit ray`` gives its workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl_lightning.launch.board import RunFolder


@dataclass(frozen=True, kw_only=True)
class Task:
    """Task of every worker: the command line, and where to run it."""

    words: list[str]
    """The command line of `verl-fit`."""

    folder: str
    """The driver's working directory, which all nodes share."""

    sys_path: list[str]
    """The driver's ``sys.path``, so that classes which a YAML file names are found."""

    board: Any
    """The run's `Board`."""

    restart_of: RunFolder | None = None
    """Folders that an earlier attempt left; None for the first attempt, or if the earlier one left nothing."""
