"""Samples and pools for the reward tests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from verl_lightning.rewards import RewardSample
from verl_lightning.rewards.pool import RewardConfig, RewardPool

FOLDER = Path(__file__).parent


@pytest.fixture
def make_sample() -> Callable[..., RewardSample]:
    def make(response: str = "", **changes: Any) -> RewardSample:
        fields = {"ground_truth": "72", "data_source": "test", "prompt": [], "extra_info": {}, "is_truncated": False}
        return RewardSample(response=response, **fields | changes)

    return make


@pytest.fixture
def start_pool() -> Iterator[Callable[..., RewardPool]]:
    """Starts a pool, of one worker unless told; a relative file is taken from this folder."""
    pools = []

    def start(function: str, **options: Any) -> RewardPool:
        is_ours = ".py:" in function and not function.startswith("/")
        name = f"{FOLDER}/{function}" if is_ours else function
        pools.append(RewardPool(RewardConfig(function=name, **{"num_workers": 1} | options)))
        pools[-1].start()
        return pools[-1]

    yield start
    for pool in pools:
        pool.stop()


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], float]], None]:
    """Gives pools another clock, in seconds, so that no sample is late because the machine is busy."""

    def set_clock(monotonic: Callable[[], float]) -> None:
        for module in ("pool", "process"):
            monkeypatch.setattr(f"verl_lightning.rewards.{module}.time", SimpleNamespace(monotonic=monotonic))

    return set_clock


def ticks_while_only(pool: RewardPool, hanging: set[int]) -> Callable[[], float]:
    """A clock that goes on, by a second each time it is read, while all samples that workers are at hang."""
    seconds = itertools.count(1.0)
    now = 0.0

    def monotonic() -> float:
        nonlocal now
        at_work = {worker.queue[0].unit for worker in pool._workers if worker.queue}
        if at_work and at_work <= hanging:
            now = next(seconds)
        return now

    return monotonic
