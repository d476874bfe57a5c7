"""Folders in which another process searches for modules, so that it finds those of the user."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable


def module_path() -> list[str]:
    """Returns the folders of this process, and behind them its working directory, where others have the first word."""
    return [*map(str, sys.path), os.getcwd()]


def follow_module_path(folders: Iterable[str]) -> None:
    """Has this process search folders of another one too, after its own."""
    sys.path.extend(folder for folder in folders if folder not in sys.path)
