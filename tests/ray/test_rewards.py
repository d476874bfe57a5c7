"""Reward functions in Ray actors give what local processes give, and outlive the death of an actor."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.processes import wait_until
from verl_lightning.ray.cluster import PlacementError
from verl_lightning.rewards import RewardSample
from verl_lightning.rewards.pool import RewardConfig, RewardPool, make_pool
from verl_lightning.rewards.ray_pool import RayRewardPool, merge_results
from verl_lightning.rewards.scoring import RewardResults

NAMES = ("PATH", "RAY_RAYLET_PID")
"""A basic variable, and one that Ray gives its workers."""

FUNCTIONS = Path(__file__).with_name("reward_functions.py")
starts_ray = pytest.mark.skipif(sys.platform != "linux", reason="starts a Ray cluster")


def make_samples(count: int) -> list[RewardSample]:
    fields = {"data_source": "test", "prompt": [], "extra_info": {}, "is_truncated": False}
    return [RewardSample(response=str(index), ground_truth=None, **fields) for index in range(count)]


def config_of(function: str, folder: Path = FUNCTIONS.parent, **changes: object) -> RewardConfig:
    return RewardConfig(function=f"{folder / FUNCTIONS.name}:{function}", backend="ray", **changes)


@pytest.mark.slow
@starts_ray
def test_actors_score_as_processes_do(joined_cluster):
    samples = make_samples(40)
    results = []
    for backend in ("processes", "ray"):
        pool = make_pool(RewardConfig(function=f"{FUNCTIONS}:picky", backend=backend, num_workers=2, max_error_share=1))
        pool.start()
        results.append(pool.score(samples))
        pool.stop()

    assert results[0].rewards == results[1].rewards
    assert results[0].components == results[1].components
    assert (
        (results[0].num_errors, results[0].num_timeouts) == (results[1].num_errors, results[1].num_timeouts) == (4, 0)
    )


@pytest.mark.slow
@starts_ray
def test_a_killed_actor_is_replaced_and_its_samples_scored_again(joined_cluster, tmp_path):
    marker = tmp_path / "killed"
    pool = RayRewardPool(config_of("kills_its_actor_once", arguments={"marker": str(marker)}, num_workers=2))
    pool.start()

    results = pool.score(make_samples(32))
    again = pool.score(make_samples(32))
    pool.stop()

    assert int(marker.read_text()) != os.getpid()
    assert results.rewards == again.rewards == [float(index) for index in range(32)]
    assert (results.num_errors, results.num_timeouts) == (0, 0)


@pytest.mark.slow
@starts_ray
@pytest.mark.parametrize("end", ["stop", "kill"])
def test_processes_that_rewards_started_end_with_their_actor(joined_cluster, tmp_path, end):
    """Ray kills the children of an actor that it ends, and no others."""
    pool = RayRewardPool(config_of("start_processes", FUNCTIONS.parents[1] / "rewards", num_workers=1))
    pool.start()
    pool.score([replace(make_samples(1)[0], response=str(tmp_path / "pids"))])
    started = [int(pid) for pid in (tmp_path / "pids").read_text().split()]

    if end == "kill":
        psutil.Process(started[0]).parents()[3].kill()
    pool.stop()

    assert len(started) == 4
    wait_until(lambda: not any(psutil.pid_exists(pid) for pid in started))


@pytest.mark.slow
@starts_ray
def test_actors_show_functions_what_they_may_see(joined_cluster):
    """Of the environment of the node that they run on."""
    seen = {}
    for allowed in (None, []):
        pool = RayRewardPool(config_of("sees", FUNCTIONS.parents[1] / "rewards", num_workers=1, environment=allowed))
        pool.start()
        names = [replace(sample, response=name) for sample, name in zip(make_samples(2), NAMES, strict=True)]
        seen[allowed is None] = pool.score(names).rewards
        pool.stop()

    assert seen == {True: [1.0, 1.0], False: [1.0, 0.0]}


@pytest.mark.slow
@starts_ray
def test_refusals_reach_the_caller_as_themselves(joined_cluster):
    with pytest.raises(PlacementError, match=re.escape("`reward.num_workers 11` needs 11 CPUs")):
        RayRewardPool(config_of("picky", num_workers=11)).start()
    with pytest.raises(ValueError, match="missing"):
        RayRewardPool(config_of("missing")).start()
    pool = RayRewardPool(config_of("picky", max_error_share=0.05))
    pool.start()
    with pytest.raises(RuntimeError, match="failed on 4 of 40"):
        pool.score(make_samples(40))
    pool.stop()


def test_each_back_end_has_its_pool():
    assert isinstance(make_pool(RewardConfig(function="gsm8k")), RewardPool)
    assert isinstance(make_pool(RewardConfig(function="gsm8k", backend="ray")), RayRewardPool)
    with pytest.raises(TypeError, match="expected one of 'processes', 'ray', got 'threads'"):
        RewardConfig(function="gsm8k", backend="threads")


def test_parts_of_a_batch_are_put_together_in_order():
    failed = RewardResults(rewards=[None], components={}, num_errors=1, num_timeouts=0, first_traceback="oh")
    good = RewardResults(
        rewards=[1.0, 2.0], components={"length": [3.0, None]}, num_errors=0, num_timeouts=0, first_traceback=None
    )

    merged = merge_results([failed, good], [1, 2])

    assert merged.rewards == [None, 1.0, 2.0]
    assert merged.components == {"length": [None, 3.0, None]}
    assert (merged.num_errors, merged.first_traceback) == (1, "oh")
