"""What fits into a cluster, and what is refused with which arithmetic."""

from __future__ import annotations

import inspect
import sys

import pytest

from tests.ray.launches import ray_words, start
from verl_lightning.callbacks import RayRollout
from verl_lightning.launch.actor_demands import actor_demands
from verl_lightning.launch.options import LaunchOptions, parse_launch
from verl_lightning.ray.cluster import Demand, Node, connect_like, shortage
from verl_lightning.rewards.pool import RewardConfig

SMALL = Node(address="10.0.0.1", resources={"CPU": 8.0, "GPU": 1.0})
LARGE = Node(address="10.0.0.2", resources={"CPU": 12.0, "GPU": 4.0})


def workers(count: int, *, cpus: float, gpus: float = 0.0) -> Demand:
    return Demand(option="--num-workers", count=count, cpus=cpus, gpus=gpus)


@pytest.mark.parametrize(
    ("demand", "fits"),
    [
        (workers(20, cpus=1), True),
        (workers(21, cpus=1), False),
        (workers(5, cpus=1, gpus=1), True),
        (workers(6, cpus=1, gpus=1), False),
        (workers(3, cpus=6), True),
        (workers(4, cpus=5), False),  # 20 CPUs in all, but no node has room for more than 1 and 2 of 5
        (workers(200, cpus=0.1), True),
        (workers(1000, cpus=0), True),
    ],
)
def test_bundles_are_not_split_over_nodes(demand, fits):
    assert (shortage([demand], [SMALL, LARGE]) is None) == fits


def test_the_refusal_shows_the_arithmetic():
    message = shortage([workers(6, cpus=4, gpus=1)], [SMALL, LARGE])

    assert message is not None
    assert "`--num-workers 6` needs 24 CPUs and 6 GPUs (6 x 4 CPUs and 1 GPUs, each on one node)" in message
    assert "has 20 CPUs and 5 GPUs, which hold 4 (1 on 10.0.0.1, 3 on 10.0.0.2)" in message


@pytest.mark.parametrize(("num_engines", "fits"), [(2, True), (3, False)])
def test_engines_and_trainers_share_the_gpus(num_engines, fits):
    engines = Demand(option="rollout.num_replicas", count=num_engines, cpus=1.0, gpus=1.0)

    message = shortage([workers(3, cpus=2, gpus=1), engines], [SMALL, LARGE])

    assert message is None if fits else "`rollout.num_replicas 3` (3 x 1 CPUs and 1 GPUs) need 9 CPUs and 6" in message


@pytest.mark.parametrize("gpus", [0.0, 5.0])
def test_a_worker_takes_a_gpu_where_there_are_any(gpus):
    assert LaunchOptions(num_workers=2).demand(gpus).gpus == min(gpus, 1.0)
    assert LaunchOptions(num_workers=2, gpus_per_worker=0).demand(gpus).gpus == 0.0


@pytest.mark.parametrize("separator", [[], ["--"]])
def test_rays_options_come_first_and_the_rest_is_left_alone(separator):
    words = ["--num-workers=4", "--max-restarts", "1", *separator, "validate", "--config", "a.yaml", "--x", "-1"]

    options, rest = parse_launch(words)

    assert options == LaunchOptions(num_workers=4, max_restarts=1)
    assert rest == ["validate", "--config", "a.yaml", "--x", "-1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-workers", "2"], "usual settings"),
        (["--num-workers", "0", "--config", "a"], "at least 1, got 0"),
        (["--num-workers", "2", "--config", "a", "--address", "auto"], "put it before"),
        (["--num-workers", "2", "--config", "a", "--trainer.devices=2"], "does not apply under Ray"),
        (["--num-workers", "2", "--gpus-per-worker", "2", "--config", "a"], "must be 0 or 1"),
        (["--num-workers", "2", "--max-restarts", "-1", "--config", "a"], "must not be negative"),
    ],
)
def test_bad_options_are_refused(words, message):
    with pytest.raises(ValueError, match=message):
        parse_launch(words)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="starts a Ray cluster")
def test_over_asking_is_refused_before_anything_is_started(cluster_address, tmp_path):
    (tmp_path / "ppo.yaml").write_text("trainer: {max_steps: 10}")
    words = [*ray_words(cluster_address), "--rollout", "RayRollout", "--rollout.num_replicas=5"]

    with start(tmp_path / "run", *words) as process:
        output = process.wait(code=2)

    assert [path.name for path in (tmp_path / "run").iterdir()] == ["output.txt"]  # not even Ray Train's own folder
    assert "`--num-workers 2` (2 x 3 CPUs) and `rollout.num_replicas 5` (5 x 1 CPUs) need 11 CPUs in all" in output
    assert "but the cluster has 10 CPUs and 0 GPUs" in output


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="starts a Ray cluster")
@pytest.mark.usefixtures("joined_cluster")
def test_processes_of_a_run_must_be_in_one_cluster(cluster_address):
    connect_like(cluster_address)

    with pytest.raises(ConnectionError, match=r"is in the one at 10.0.0.1:6379. Join all machines by `ray start`"):
        connect_like("10.0.0.1:6379")


def write(path, text):
    path.write_text(text)
    return str(path)


def test_actors_are_counted_from_files_and_flags(tmp_path):
    rollout = "rollout: {class_path: verl_lightning.callbacks.RayRollout, init_args: {num_replicas: 4}}"
    engines = write(tmp_path / "engines.yaml", rollout)
    rewards = write(tmp_path / "rewards.yaml", "model: {init_args: {reward: {backend: ray, num_workers: 3}}}")
    flags = ["--rollout.gpus_per_replica", "1", "--rollout.init_args.num_replicas=5", "--strategy", "ddp"]

    demands = actor_demands(["--config", engines, *flags, "--config", rewards], 2)

    assert demands == [
        Demand(option="rollout.num_replicas", count=5, cpus=1.0, gpus=1.0),
        Demand(option="reward.num_workers", count=6, cpus=1.0),
    ]
    assert actor_demands(["--config", rewards, "--strategy", "megatron"], 2)[0].count == 3
    assert actor_demands(["--config", engines, "--rollout", "HFRollout"], 2) == []
    assert actor_demands(["--config", engines, "--rollout.num_replicas", "many"], 2) == []


def test_actors_that_nobody_counts_are_those_of_the_signatures():
    defaults = {name: value.default for name, value in inspect.signature(RayRollout).parameters.items()}

    (demand,) = actor_demands(["--rollout", "RayRollout"], 2)

    assert demand == Demand(
        option="rollout.num_replicas",
        count=defaults["num_replicas"],
        cpus=defaults["cpus_per_replica"],
        gpus=defaults["gpus_per_replica"],
    )
    assert actor_demands(["--model.reward.backend", "ray"], 2)[0].count == RewardConfig(function="gsm8k").num_workers
