"""`verl-fit ray` trains as ddp does, and comes through the death of a worker; all on two nodes."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.ray.launches import RUN, assert_same_run, finish, ray_words, start
from tests.resume.attempt import write_settings
from tests.resume.experiment import read_metrics

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),  # half a minute each on an idle machine
    pytest.mark.skipif(sys.platform != "linux", reason="starts gloo processes and reads /proc"),
]

SAMPLING = {"num_samples": 2, "max_new_tokens": 6}
ENGINES = {"num_replicas": 1, "rollout": {"class_path": "HFRollout", "init_args": {"sampling": SAMPLING}}}
ACTORS = {
    "model": {"init_args": {"reward": {"backend": "ray", "num_workers": 1}}},
    "rollout": {"class_path": "RayRollout", "init_args": ENGINES},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_folder, prompt_file) -> Path:
    """A folder with the settings, and the run that they give on two processes of ddp without Ray."""
    folder = tmp_path_factory.mktemp("runs")
    write_settings(folder / "ppo.yaml", model=tiny_folder, prompts=prompt_file)
    (folder / "actors.yaml").write_text(yaml.safe_dump(ACTORS))
    finish(start(folder / "ddp", *RUN, "--trainer.devices", "2"), folder / "ddp")
    return folder


def wait_for(path: Path, process) -> None:
    """Until the run has written a file."""
    deadline = time.monotonic() + 400
    while not path.exists():
        assert process.poll() is None, (path.parent / "output.txt").read_text()[-4000:]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def as_numbers(row: dict[str, str]) -> dict[str, float]:
    """A row of a metrics file."""
    return {name: float(value) for name, value in row.items()}


def processes_in(folder: Path) -> list[int]:
    """Processes whose working directory is a folder, and which have not ended."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            is_here = (entry / "cwd").readlink() == folder
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue
        if is_here:
            found.append(int(entry.name))
    return found


def test_two_nodes_give_the_losses_of_two_processes(cluster_address, runs):
    output = finish(start(runs / "ray", *ray_words(cluster_address)), runs / "ray")

    assert "world_rank=1, local_rank=0, node_rank=1" in output
    assert_same_run(runs / "ray", runs / "ddp")


def test_a_killed_worker_costs_nothing_but_time_with_rewards_and_engines_in_actors(cluster_address, runs):
    folder = runs / "killed"
    kill = ["--trainer.callbacks+=tests.ray.parts.KillOnce", "--trainer.callbacks.step=3"]

    output = finish(start(folder, *ray_words(cluster_address), "--config", "../actors.yaml", *kill), folder)

    assert (folder / "killed").exists()
    assert "rank 1 on node" in output
    assert "in phase `update_actor` of step 3" in output
    assert "restart 1 of 3" in output
    assert "Restoring states from the checkpoint" in output
    # An engine's log-probs depend on its batch in the last bits; its tokens don't, nor what is learnt from them.
    ours, theirs = (read_metrics(runs / name / "runs/version_0") for name in ("killed", "ddp"))
    for our_row, their_row in zip(ours, theirs, strict=True):
        assert as_numbers(our_row) == pytest.approx(as_numbers(their_row), rel=1e-4, abs=1e-5)


def test_sigterm_saves_and_ends_the_run(cluster_address, runs):
    folder = runs / "preempted"
    process = start(folder, *ray_words(cluster_address), "--trainer.callbacks+=tests.ray.parts.StepMarker")
    wait_for(folder / "step 2", process)

    os.kill(process.pid, signal.SIGTERM)
    output = finish(process, folder, code=128 + signal.SIGTERM)
    finish(start(folder, *ray_words(cluster_address), "--ckpt_path", "last"), folder)

    assert "--ckpt_path last" in output
    assert_same_run(folder, runs / "ddp")


def test_ctrl_c_leaves_no_process(cluster_address, runs):
    folder = runs / "interrupted"
    marker = "--trainer.callbacks+=tests.ray.parts.StepMarker"
    process = start(folder, *ray_words(cluster_address), "--config", "../actors.yaml", marker)
    wait_for(folder / "step 1", process)
    assert len(processes_in(folder)) >= 6  # the driver, two workers, an engine, two reward workers and their processes

    os.killpg(process.pid, signal.SIGINT)
    finish(process, folder, code=128 + signal.SIGINT)

    deadline = time.monotonic() + 60
    while (left := processes_in(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def test_a_users_mistake_is_told_once(cluster_address, runs):
    folder = runs / "mistaken"

    output = finish(start(folder, *ray_words(cluster_address), "--model.reward.function=no.such"), folder, code=1)

    assert "verl-fit ray: " in output
    assert "no.such" in output.rsplit("verl-fit ray: ", 1)[1]
    assert "starting all workers again" not in output
