"""Runs of Megatron in processes of their own, two ranks mostly, made when a test first asks for them."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import seed_everything

from tests.processes import on_ranks
from tests.strategies.conformance import SCENARIOS, Bench
from tests.strategies.megatron.checks import CHECKS
from tests.strategies.megatron.cpu import pretend_cuda
from tests.strategies.megatron.layouts import LAYOUTS, MORE

TIMEOUT = {"timeout": 600.0}
"""Of collectives, in seconds: a rank whose other one has hung ends too."""


class Runs:
    """Results by name, of one launch each.

    A launch that fails or hangs fails the tests that ask for it: the first by its error, all others by its name.

    Args:
        make: Launches a run and gives its result.
        needs: What must be there before a run, by its name.
    """

    def __init__(self, make: Callable[[str], Any], needs: Mapping[str, Callable[[], Any]] | None = None) -> None:
        self._make = make
        self._needs = needs or {}
        self._results: dict[str, Any] = {}
        self._failed: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        if name in self._failed:
            pytest.fail(f"`{name}` has failed in an earlier test")
        if name not in self._results:
            self._failed.add(name)
            if name in self._needs:
                self._needs[name]()
            self._results[name] = self._make(name)
            self._failed.remove(name)
        return self._results[name]


def launch(function: Callable[..., Any], *args: Any) -> Any:
    """What the first of two ranks returned."""
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # or those that Megatron gives would be errors on the ranks
        return on_ranks(2, function, *args)[0]


def run_layout(name: str, folder: Path) -> dict[str, Any]:
    """A layout's results by scenario, and the threads that there were after the first and after the last."""
    pretend_cuda()
    layout = LAYOUTS[name]
    bench = Bench(strategy="megatron", devices=2, folder=folder / layout.kind, options=TIMEOUT | layout.options)
    results: dict[str, Any] = {"threads": []}
    for scenario in layout.scenarios:
        seed_everything(0, verbose=False)
        results[scenario] = SCENARIOS[scenario](bench)
        results["threads"].append(count_threads())
        collect_groups()
    results["threads"].append(count_threads())
    return results


def run_more(name: str, folder: Path) -> Any:
    """What else runs in a layout."""
    pretend_cuda()
    layout, run = MORE[name]
    return run(Bench(strategy="megatron", devices=2, folder=folder / layout.kind, options=TIMEOUT | layout.options))


def run_check(name: str, folder: Path, options: dict[str, Any]) -> Any:
    """What a check returned."""
    pretend_cuda()
    seed_everything(0, verbose=False)
    return CHECKS[name](Bench(strategy="megatron", devices=2, folder=folder, options=TIMEOUT | options))


def count_threads() -> int:
    """Of this process."""
    return len(os.listdir("/proc/self/task"))


def collect_groups() -> None:
    """Frees the process groups of trainings that are over, which models and groups that refer to each other hold.

    There are twenty of them in a training, and gloo looks after each of them a hundred times a second.
    """
    for _ in range(2):  # what the first round frees held more
        gc.collect()
