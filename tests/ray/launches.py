"""Runs of `verl-fit ray` as a user starts them, and the run without Ray that they must equal."""

from __future__ import annotations

from pathlib import Path

from tests import processes
from tests.processes import Process
from tests.tiny import ROOT

# With a schedule that does not depend on the length of the run.
SCHEDULES = ["--model.actor.optim.schedule=constant", "--model.critic.model.optim.schedule=constant"]
RUN = ["--config", "../ppo.yaml", "--strategy", "ddp", *SCHEDULES]
# A run that is stopped when it has come so far: no test depends on how fast it is.
ENDLESS = ["--trainer.max_steps=1000000", "--trainer.callbacks+=tests.ray.parts.StepMarker"]


def start(folder: Path, *words: str) -> Process:
    """`verl-fit` in a folder."""
    environment = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    environment["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.2"  # Ray looks after its workers every two seconds
    return processes.start(processes.run_verl_fit, *words, folder=folder, environment=environment)


def wait_for_step(folder: Path, step: int, process: Process) -> None:
    """Until a run has finished so many steps."""
    processes.wait_until(lambda: last_step(folder) >= step, process)


def last_step(folder: Path) -> int:
    """As far as a `StepMarker` has seen a run come."""
    return max((int(path.name.removeprefix("step ")) for path in folder.glob("step *")), default=0)


def steps_done_twice(folder: Path) -> list[str]:
    """Names of those steps that a `StepMarker` has seen end more than once."""
    return [path.name for path in folder.glob("step *") if path.read_text() != "x"]


def ray_words(address: str, *, num_workers: int = 2, cpus: int = 3) -> list[str]:
    """`ray` with workers on nodes of five CPUs, and the words of the run."""
    words = ["ray", "--num-workers", str(num_workers), "--cpus-per-worker", str(cpus), "--address", address]
    return [*words, *RUN]
