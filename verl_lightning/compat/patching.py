"""Puts a function of ours in the place of one of another package's, for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def replaced(module: ModuleType, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Have a module call our function by the name of one of its own.

    Raises:
        AttributeError: If the module has no such name.
    """
    own = getattr(module, name)
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, own)
