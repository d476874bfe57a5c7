"""Samples and pools for the reward tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
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
