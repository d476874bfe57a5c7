"""Two ranks go on from a checkpoint as if they had never stopped."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from tests.processes import on_ranks
from tests.resume.attempt import write_settings
from tests.resume.experiment import assert_same_state, read_metrics
from tests.tiny import ROOT
from verl_lightning.cli import main

NUM_STEPS = 6
WORDS = ["--config", "../ppo.yaml", "--ckpt_path", "auto", "--strategy", "ddp", "--trainer.devices", "2"]


def fit(folder: Path, last_step: int) -> None:
    """`verl-fit --strategy ddp` as one of two ranks, until it has saved after a step and is killed, or is done."""
    os.chdir(folder)
    sys.path.insert(0, str(ROOT))
    words = [*WORDS, f"--trainer.max_steps={NUM_STEPS}"]
    if last_step < NUM_STEPS:
        words += ["--trainer.callbacks+=tests.resume.stop.KillAfter", f"--trainer.callbacks.step={last_step}"]
    sys.argv = ["verl-fit", *words]
    main()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="forks gloo processes")
@pytest.mark.filterwarnings("ignore::UserWarning")  # as in a process of its own
def test_two_ranks_resume_exactly(tmp_path, tiny_folder, prompt_file):
    write_settings(tmp_path / "ppo.yaml", model=tiny_folder, prompts=prompt_file)
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    on_ranks(2, fit, tmp_path / "whole", NUM_STEPS)
    with pytest.raises(AssertionError, match="exit code -9"):
        on_ranks(2, fit, tmp_path / "killed", 3)

    on_ranks(2, fit, tmp_path / "killed", NUM_STEPS)

    ours, theirs = (
        torch.load(tmp_path / name / "runs/version_0/checkpoints/last.ckpt", weights_only=True)
        for name in ("killed", "whole")
    )
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "kl_coef", "global_step"):
        assert_same_state(ours[key], theirs[key], key)
    assert read_metrics(tmp_path / "killed/runs/version_0") == read_metrics(tmp_path / "whole/runs/version_0")
