"""`verl-fit ray` trains as ddp does, through deaths, stops and new starts; all on two nodes."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.processes import on_ranks
from tests.ray.launches import ENDLESS, RUN, finish, last_step, ray_words, start, steps_done_twice, wait_for_step
from tests.resume.attempt import write_settings
from tests.resume.experiment import read_metrics
from tests.tiny import ROOT
from verl_lightning.cli import main

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),  # half a minute each on an idle machine
    pytest.mark.skipif(sys.platform != "linux", reason="forks gloo processes and reads /proc"),
]

NUM_STEPS = 6
SAMPLING = {"num_samples": 2, "max_new_tokens": 6}
ENGINES = {"num_replicas": 1, "rollout": {"class_path": "HFRollout", "init_args": {"sampling": SAMPLING}}}
ACTORS = {
    "model": {"init_args": {"reward": {"backend": "ray", "num_workers": 1}}},
    "rollout": {"class_path": "RayRollout", "init_args": ENGINES},
}


def fit(folder: Path) -> None:
    """`verl-fit` without Ray, as one of two processes."""
    os.chdir(folder)
    sys.path.insert(0, str(ROOT))
    sys.argv = ["verl-fit", *RUN, "--trainer.devices", "2", f"--trainer.max_steps={NUM_STEPS}"]
    main()


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_folder, prompt_file) -> Path:
    """A folder with settings for all runs."""
    folder = tmp_path_factory.mktemp("runs")
    write_settings(folder / "ppo.yaml", model=tiny_folder, prompts=prompt_file)
    (folder / "actors.yaml").write_text(yaml.safe_dump(ACTORS))
    return folder


@pytest.fixture(scope="module")
def expected(runs) -> list[dict[str, str]]:
    """The metrics of two processes of ddp without Ray."""
    (runs / "ddp").mkdir()
    on_ranks(2, fit, runs / "ddp")
    return read_metrics(runs / "ddp/runs/version_0")


@pytest.fixture(scope="module")
def stopped(cluster_address, runs) -> tuple[Path, str]:
    """Folder and output of a run whose second worker is killed in its third step; some steps later comes SIGTERM."""
    folder = runs / "ray"
    kill = ["--trainer.callbacks+=tests.ray.parts.KillOnce", "--trainer.callbacks.step=2"]
    process = start(folder, *ray_words(cluster_address), "--config", "../actors.yaml", *ENDLESS, *kill)
    wait_for_step(folder, 4, process)
    os.kill(process.pid, signal.SIGTERM)
    return folder, finish(process, folder, code=128 + signal.SIGTERM)


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


def assert_same_metrics(ours: list[dict[str, str]], theirs: list[dict[str, str]]) -> None:
    """But for last bits: on some machines an engine's log-probs depend on its batch."""
    for our_row, their_row in zip(ours, theirs, strict=True):
        left, right = ({name: float(value) for name, value in row.items()} for row in (our_row, their_row))
        assert left == pytest.approx(right, rel=1e-4, abs=1e-5)


def test_a_killed_worker_is_named_and_all_start_again(stopped):
    folder, output = stopped

    assert (folder / "killed").exists()
    assert "world_rank=1, local_rank=0, node_rank=1" in output
    assert "rank 1 on node" in output
    assert "in phase `update_actor` of step 2" in output
    assert "restart 1 of 3" in output
    assert not steps_done_twice(folder)


def test_sigterm_saves_and_ends_the_run(stopped):
    folder, output = stopped

    assert "saved in" in output
    assert "--ckpt_path last" in output
    assert not processes_in(folder)


def test_it_goes_on_with_the_losses_of_two_processes_and_ctrl_c_leaves_nothing(
    cluster_address, runs, stopped, expected
):
    folder, _ = stopped
    stop = last_step(folder)
    words = [*ray_words(cluster_address), "--config", "../actors.yaml", *ENDLESS, "--ckpt_path", "last"]
    process = start(folder, *words)
    wait_for_step(folder, max(stop, NUM_STEPS) + 2, process)
    assert len(processes_in(folder)) >= 6  # the driver, two workers, an engine, two reward workers and their processes

    os.killpg(process.pid, signal.SIGINT)
    finish(process, folder, code=128 + signal.SIGINT)

    deadline = time.monotonic() + 60
    while (left := processes_in(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left
    assert_same_metrics(read_metrics(folder / "runs/version_0")[: len(expected)], expected)
    assert not steps_done_twice(folder)


def test_processes_without_rays_launcher_share_engines_too(cluster_address, runs, expected, monkeypatch):
    folder = runs / "shared"
    monkeypatch.setenv("RAY_ADDRESS", cluster_address)
    words = [*RUN, "--config", "../actors.yaml", "--trainer.devices", "2", f"--trainer.max_steps={NUM_STEPS}"]

    finish(start(folder, *words), folder)

    assert_same_metrics(read_metrics(folder / "runs/version_0"), expected)


def test_a_users_mistake_is_told_once(cluster_address, runs):
    folder = runs / "mistaken"
    words = ray_words(cluster_address, num_workers=1)

    output = finish(start(folder, *words, "--model.reward.function=no.such"), folder, code=1)

    assert "verl-fit ray: " in output
    assert "no.such" in output.rsplit("verl-fit ray: ", 1)[1]
    assert "starting all workers again" not in output
