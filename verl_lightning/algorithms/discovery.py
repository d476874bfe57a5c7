"""Finds the methods of a room, so that a new one needs its own file and nothing else."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from types import ModuleType
from typing import Any


def methods_in(room: ModuleType, base: type) -> dict[str, type[Any]]:
    """Imports the files of a folder and collects the methods that users can name.

    Args:
        room: The folder as a package.
        base: Class that all methods have in common.

    Returns:
        Classes by name, in the order of their files' names; bases that several methods share are left out.
    """
    files = [importlib.import_module(f"{room.__name__}.{file.name}") for file in pkgutil.iter_modules(room.__path__)]
    members = [member for file in files for member in vars(file).values() if inspect.isclass(member)]
    own = [cls for cls in members if issubclass(cls, base) and cls.__module__.startswith(f"{room.__name__}.")]
    return {cls.__name__: cls for cls in own if not inspect.isabstract(cls) and not cls.__name__.startswith("_")}
