"""What the driver of ``verl-fit ray`` has its workers do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl_lightning.launch.board import RunFolder


@dataclass(frozen=True, kw_only=True)
class Task:
    """What every worker is to do."""

    words: list[str]
    """The command line of `verl-fit`."""

    folder: str
    """The driver's working directory, which all nodes share."""

    sys_path: list[str]
    """The driver's, so that classes which a YAML file names are found."""

    board: Any
    """The run's `Board`."""

    restart_of: RunFolder | None = None
    """What an earlier attempt left; None for the first one, or if it left nothing."""
