"""What fits into a cluster, and what is refused with which arithmetic."""

from __future__ import annotations

import sys
import time

import pytest

from tests.ray.launches import RUN, finish, start
from verl_lightning.launch.options import LaunchOptions, parse_launch
from verl_lightning.ray.cluster import Demand, Node, shortage

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
    assert (shortage(demand, [SMALL, LARGE]) is None) == fits


def test_the_refusal_shows_the_arithmetic():
    message = shortage(workers(6, cpus=4, gpus=1), [SMALL, LARGE])

    assert message is not None
    assert "`--num-workers 6` needs 24 CPUs and 6 GPUs (6 x 4 CPUs and 1 GPUs, each on one node)" in message
    assert "has 20 CPUs and 5 GPUs, which hold 4 (1 on 10.0.0.1, 3 on 10.0.0.2)" in message


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
def test_over_asking_fails_within_ten_seconds(cluster_address, tmp_path):
    words = ["ray", "--num-workers", "3", "--cpus-per-worker", "3", "--address", cluster_address, *RUN]

    begin = time.monotonic()
    output = finish(start(tmp_path, *words), tmp_path, code=2)

    assert time.monotonic() - begin < 10
    assert "needs 9 CPUs (3 x 3 CPUs, each on one node), but the cluster has 10 CPUs" in output
    assert "which hold 2 (1 on" in output
