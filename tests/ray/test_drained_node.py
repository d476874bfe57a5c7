"""A run leaves a node that Ray announces to take away, and goes on elsewhere from what it saved."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processes import wait_until
from tests.ray.conftest import SIZE, start_cluster
from tests.ray.launches import ENDLESS, last_step, ray_words, start, steps_done_twice, wait_for_step
from tests.resume.experiment import read_metrics
from tests.resume.settings import write_settings
from tests.runs import run_folders


def drain(cluster: Any, node: Any) -> None:
    """Tells the cluster that a node will be taken away in five minutes."""
    words = ["--address", cluster.address, "--node-id", node.node_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
    words += ["--reason-message", "spot", "--deadline-remaining-seconds", "300"]
    subprocess.run([Path(sys.executable).with_name("ray"), "drain-node", *words], check=True)


@pytest.mark.backend
@pytest.mark.skipif(sys.platform != "linux", reason="starts a Ray cluster")
def test_a_run_leaves_a_node_that_is_taken_away(tmp_path, tiny_folder, prompt_file):
    write_settings(tmp_path / "ppo.yaml", model=tiny_folder, prompts=prompt_file)
    cluster, folder = start_cluster(head_cpus=1), tmp_path / "run"  # all workers on the second node
    [node] = cluster.worker_nodes
    rare = "--trainer.callbacks.every_n_train_steps=1000000"  # only what is saved at the notice can be gone on from
    with start(folder, *ray_words(cluster.address, cpus=2), rare, *ENDLESS) as process:
        wait_for_step(folder, 2, process)

        cluster.add_node(**SIZE, node_ip_address="127.0.0.3")
        drain(cluster, node)
        wait_until(lambda: "starting all workers again" in process.output, process)
        wait_for_step(folder, last_step(folder) + 2, process)
        os.kill(process.pid, signal.SIGTERM)
        output = process.wait(code=75)
    cluster.shutdown()

    assert "NodeLeavingError" in output
    assert "restart 1 of 3" in output
    assert not steps_done_twice(folder)
    steps = [int(row["step"]) for row in read_metrics(run_folders(folder)[0]) if "actor/lr" in row]
    assert steps == list(range(len(steps)))
