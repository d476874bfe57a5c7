"""Runs of `verl-fit ray` as a user starts them, and the run without Ray that they must equal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.tiny import ROOT

VERL_FIT = str(Path(sys.executable).with_name("verl-fit"))
# With a schedule that does not depend on the length of the run.
SCHEDULES = ["--model.actor.optim.schedule=constant", "--model.critic.model.optim.schedule=constant"]
RUN = ["--config", "../ppo.yaml", "--strategy", "ddp", *SCHEDULES]
# A run that is stopped when it has come so far: no test depends on how fast it is.
ENDLESS = ["--trainer.max_steps=1000000", "--trainer.callbacks+=tests.ray.parts.StepMarker"]


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    """`verl-fit` in a folder, with its output in ``output.txt`` there."""
    folder.mkdir(exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    environment["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.2"  # Ray looks after its workers every two seconds
    with (folder / "output.txt").open("a") as output:
        return subprocess.Popen(
            [VERL_FIT, *words],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


def finish(process: subprocess.Popen[str], folder: Path, *, code: int = 0) -> str:
    """Waits for the end, which must have this exit code; gives the output."""
    try:
        process.wait(timeout=800)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    output = (folder / "output.txt").read_text()
    assert process.returncode == code, output[-4000:]
    return output


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Until a run has finished so many steps."""
    deadline = time.monotonic() + 400
    while last_step(folder) < step:
        assert process.poll() is None, (folder / "output.txt").read_text()[-4000:]
        assert time.monotonic() < deadline
        time.sleep(0.05)


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
