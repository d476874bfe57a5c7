"""The former name of `tests.processes.on_ranks`, for branches that are on their way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests import processes


def on_ranks(world_size: int, function: Callable[..., Any], *args: Any, timeout: float = 0.0) -> list[Any]:
    """See there; pytest's limit alone ends what hangs."""
    return processes.on_ranks(world_size, function, *args)
