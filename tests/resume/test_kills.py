"""A run that is killed at random moments ends as the one that never was."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.processes import wait_until
from tests.resume.attempt import members, start_attempt, wait_for_checkpoints, write_settings
from tests.resume.experiment import assert_same_state, read_metrics

NUM_KILLS = 4


def run_with_kills(folder: Path, dice: random.Random) -> int:
    """Starts the run again and again until it ends by itself; returns how often it was killed."""
    for kills in range(NUM_KILLS):
        with start_attempt(folder) as attempt:
            step_seconds = wait_for_checkpoints(folder, dice.randint(1, 4), attempt)
            time.sleep(dice.uniform(0, step_seconds))
            if attempt.poll() is not None:
                attempt.wait()
                return kills
        wait_until(lambda: not members(attempt.pid))
    with start_attempt(folder) as attempt:
        attempt.wait()
    wait_until(lambda: not members(attempt.pid))
    return NUM_KILLS


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_killed_run_equals_the_uninterrupted_one(record_property, tmp_path, tiny_folder, prompt_file):
    """Kills fall anywhere: in rollouts, updates, validations and while a checkpoint is written."""
    seed = random.SystemRandom().randrange(10**6)
    record_property("seed of the kills", seed)
    sys.stdout.write(f"seed of the kills: {seed}\n")  # pytest shows it when the test fails
    write_settings(tmp_path / "ppo.yaml", model=tiny_folder, prompts=prompt_file)

    with start_attempt(tmp_path / "whole") as whole:
        kills = run_with_kills(tmp_path / "killed", random.Random(seed))
        whole.wait()

    assert kills > 0
    ours, theirs = (
        torch.load(tmp_path / name / "runs/version_0/checkpoints/last.ckpt", weights_only=True)
        for name in ("killed", "whole")
    )
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "kl_coef", "global_step"):
        assert_same_state(ours[key], theirs[key], key)
    assert read_metrics(tmp_path / "killed/runs/version_0") == read_metrics(tmp_path / "whole/runs/version_0")
