"""Two ranks go on from a checkpoint as if they had never stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.resume.attempt import write_settings
from tests.resume.experiment import assert_same_state, read_metrics

NUM_STEPS = 6


def train(folder: Path, last_step: int) -> None:
    """`verl-fit --strategy ddp` on two processes, until it has saved after a step and has been killed or is done."""
    folder.mkdir(exist_ok=True)
    command = [str(Path(sys.executable).with_name("verl-fit")), "--config", "../ppo.yaml", "--ckpt_path", "last"]
    command += ["--strategy", "ddp", "--trainer.devices", "2", f"--trainer.max_steps={NUM_STEPS}"]
    if last_step < NUM_STEPS:
        command += ["--trainer.callbacks+=tests.resume.stop.KillAfter", f"--trainer.callbacks.step={last_step}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, start_new_session=True
    )
    expected = 0 if last_step == NUM_STEPS else -signal.SIGKILL
    assert done.returncode == expected, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="starts gloo processes")
def test_two_ranks_resume_exactly(tmp_path, tiny_folder, prompt_file):
    write_settings(tmp_path / "ppo.yaml", model=tiny_folder, prompts=prompt_file)
    train(tmp_path / "whole", NUM_STEPS)
    train(tmp_path / "killed", 3)

    train(tmp_path / "killed", NUM_STEPS)

    ours, theirs = (
        torch.load(tmp_path / name / "runs/version_0/checkpoints/last.ckpt", weights_only=True)
        for name in ("killed", "whole")
    )
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "kl_coef", "global_step"):
        assert_same_state(ours[key], theirs[key], key)
    assert read_metrics(tmp_path / "killed/runs/version_0") == read_metrics(tmp_path / "whole/runs/version_0")
