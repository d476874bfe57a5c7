"""Runs of `verl-fit ray` as a user starts them, and the run without Ray that they must equal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import torch

from tests.resume.experiment import assert_same_state, read_metrics
from tests.tiny import ROOT

VERL_FIT = str(Path(sys.executable).with_name("verl-fit"))
RUN = ["--config", "../ppo.yaml", "--strategy", "ddp", "--trainer.max_steps=6"]
STATE = ("state_dict", "optimizer_states", "lr_schedulers", "kl_coef", "global_step")


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    """`verl-fit` in a folder, with its output in ``output.txt`` there."""
    folder.mkdir(exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
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


def ray_words(address: str, *options: str) -> list[str]:
    """`ray` with two workers, one on each node, and the words of the run."""
    return ["ray", "--num-workers", "2", "--cpus-per-worker", "3", "--address", address, *options, *RUN]


def assert_same_run(ours: Path, theirs: Path) -> None:
    """Both folders hold the same metrics and the same last checkpoint, to the bit."""
    assert read_metrics(ours / "runs/version_0") == read_metrics(theirs / "runs/version_0")
    left, right = (
        torch.load(folder / "runs/version_0/checkpoints/last.ckpt", weights_only=True) for folder in (ours, theirs)
    )
    for key in STATE:
        assert_same_state(left[key], right[key], key)
