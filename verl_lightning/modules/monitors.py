"""Refuses callbacks that wait for a metric which no validation will log."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback

from verl_lightning.faults import closest

if TYPE_CHECKING:
    from verl_lightning.modules.base import PostTrainingModule

KNOWN = ("lightning", "pytorch_lightning", "verl_lightning")
"""Packages whose classes log nothing below ``val/`` but what our modules say; others may."""


@runtime_checkable
class SourceLogger(Protocol):
    """A callback that logs metrics of validation, below the name of a data source too."""

    @property
    def logged(self) -> Collection[str]:
        """Last parts of the metrics' names."""


def check_monitors(callbacks: Sequence[Callback], module: PostTrainingModule) -> None:
    """Checks what each callback monitors before the run begins; Lightning does after the first validation.

    Raises:
        MisconfigurationException: If nothing logs what a callback monitors; with the closest name.
    """
    names = module.validation_metrics
    parts = [*map(type, callbacks), type(module)]
    if names is None or any(part.__module__.partition(".")[0] not in KNOWN for part in parts):
        return
    of_sources = {name for callback in callbacks if isinstance(callback, SourceLogger) for name in callback.logged}
    for callback in callbacks:
        monitor = getattr(callback, "monitor", None)
        if not isinstance(monitor, str) or not monitor.startswith("val/") or is_logged(monitor, names):
            continue
        if monitor.rpartition("/")[2] not in of_sources:
            raise MisconfigurationException(unknown_monitor(callback, monitor, names))


def is_logged(monitor: str, names: Collection[str]) -> bool:
    """Tells whether a metric is logged, or may be: only a reward function knows what it returns beside its reward."""
    return monitor in names or ("val/reward" in names and monitor.startswith("val/reward/"))


def unknown_monitor(callback: Callback, monitor: str, names: Collection[str]) -> str:
    """Says that nothing logs what a callback monitors, and what comes closest.

    Args:
        callback: Callback that monitors the metric.
        monitor: Name of the metric.
        names: Names of the metrics that are logged.
    """
    hint = closest(monitor, names) or f" There are {', '.join(f'`{name}`' for name in sorted(names))}."
    return f"`{type(callback).__name__}` has `monitor: {monitor}`, which nothing logs.{hint}"
