"""`verl-fit ray` trains as ddp does, through deaths, stops and new starts; all on two nodes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest
import yaml

from tests.processes import run_verl_fit, start_ranks, wait_until
from tests.ray.launches import ENDLESS, RUN, last_step, ray_words, start, steps_done_twice, wait_for_step
from tests.resume.experiment import read_metrics
from tests.resume.settings import write_settings
from tests.runs import run_folders

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="forks gloo processes and reads /proc"),
]

NUM_STEPS = 6
TWO_PROCESSES = [*RUN, "--trainer.devices", "2", f"--trainer.max_steps={NUM_STEPS}"]
SAMPLING = {"num_samples": 2, "max_new_tokens": 6}
ENGINES = {"num_replicas": 1, "rollout": {"class_path": "HFRollout", "init_args": {"sampling": SAMPLING}}}
ACTORS = {
    "model": {"init_args": {"reward": {"backend": "ray", "num_workers": 1}}},
    "rollout": {"class_path": "RayRollout", "init_args": ENGINES},
}


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
    run_ranks(runs / "ddp")
    return read_metrics(run_folders(runs / "ddp")[0])


def run_ranks(folder: Path, *words: str) -> None:
    """`verl-fit` on two ranks that Ray has not started."""
    with contextlib.ExitStack() as stack:
        ranks = start_ranks(2, run_verl_fit, *TWO_PROCESSES, *words, folder=folder)
        for rank in ranks:
            stack.enter_context(rank)
        for rank in ranks:
            rank.wait()


@pytest.fixture(scope="module")
def stopped(cluster_address, runs) -> tuple[Path, str]:
    """Folder and output of a run whose second worker is killed in its third step; some steps later comes SIGTERM."""
    folder = runs / "ray"
    kill = ["--trainer.callbacks+=tests.ray.parts.KillOnce", "--trainer.callbacks.step=2"]
    with start(folder, *ray_words(cluster_address), "--config", "../actors.yaml", *ENDLESS, *kill) as process:
        wait_for_step(folder, 4, process)
        os.kill(process.pid, signal.SIGTERM)
        return folder, process.wait(code=75)


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
    """But for last bits, as on some machines an engine's log-probs depend on its batch; only Ray's have a canary."""
    for our_row, their_row in zip(ours, theirs, strict=True):
        our_row.pop("rollout/canary_gap", None)
        left, right = ({name: float(value) for name, value in row.items()} for row in (our_row, their_row))
        assert left == pytest.approx(right, rel=1e-3, abs=1e-4)


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
    with start(folder, *words) as process:
        wait_for_step(folder, max(stop, NUM_STEPS) + 2, process)
        assert len(processes_in(folder)) >= 6  # the driver, two workers, an engine, two reward workers with processes

        os.killpg(process.pid, signal.SIGINT)
        process.wait(code=130)

    wait_until(lambda: not processes_in(folder))
    assert_same_metrics(read_metrics(run_folders(folder)[0])[: len(expected)], expected)
    assert not steps_done_twice(folder)


def test_processes_without_rays_launcher_share_engines_too(cluster_address, runs, expected, monkeypatch):
    folder = runs / "shared"
    monkeypatch.setenv("RAY_ADDRESS", cluster_address)

    run_ranks(folder, "--config", "../actors.yaml")

    assert_same_metrics(read_metrics(run_folders(folder)[0]), expected)


def test_a_users_mistake_is_told_once(cluster_address, runs):
    folder = runs / "mistaken"
    words = ray_words(cluster_address, num_workers=1)

    with start(folder, *words, "--model.reward.function=no.such") as process:
        output = process.wait(code=1)

    assert "verl-fit ray: " in output
    assert "no.such" in output.rsplit("verl-fit ray: ", 1)[1]
    assert "starting all workers again" not in output
