"""A run that is killed at random moments ends as the one that never was."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch
import yaml

from tests.resume.attempt import Attempt
from tests.resume.experiment import assert_same_state, read_metrics
from tests.runs import REWARDS
from tests.tiny import ROOT

NUM_STEPS = 30
NUM_KILLS = 4


def write_settings(path: Path, *, model: Path, prompts: Path) -> None:
    """PPO with a critic and an adaptive KL weight; 16 steps are an epoch."""
    optim = {"lr": 1e-3, "schedule": "cosine", "warmup_steps": 3}
    actor = {"path": str(model), "optim": optim}
    ppo = {
        "actor": actor,
        "critic": {"model": actor},
        "advantage": "GAE",
        "reward": {"function": f"{REWARDS}:even_share", "num_workers": 2},
        "kl": {"coef": 0.1, "target": 0.01, "horizon": 100},
        "update": {"mini_batch_size": 2, "micro_batch_size": 4},
    }
    data = {"train_files": str(prompts), "val_files": str(prompts), "prompts_per_step": 4}
    data |= {"val_batch_size": 32, "max_prompt_length": 32}
    saves = {"save_top_k": 0, "save_last": True, "every_n_train_steps": 1}
    trainer = {
        "accelerator": "cpu",
        "max_steps": NUM_STEPS,
        "check_val_every_n_epoch": None,
        "val_check_interval": 5,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": [{"class_path": "ModelCheckpoint", "init_args": saves}],
    }
    settings = {
        "seed_everything": 3,
        "trainer": trainer,
        "model": {"class_path": "PPOModule", "init_args": ppo},
        "data": {"class_path": "PromptDataModule", "init_args": data},
        "rollout": {"class_path": "HFRollout", "init_args": {"sampling": {"num_samples": 2, "max_new_tokens": 6}}},
    }
    path.write_text(yaml.safe_dump(settings))


def run_with_kills(folder: Path, dice: random.Random) -> int:
    """Starts the run again and again until it ends by itself; returns how often it was killed."""
    for kills in range(NUM_KILLS):
        with Attempt(folder) as attempt:
            attempt.wait_for_training()
            attempt.process.join(timeout=dice.uniform(0, 0.6))
            if not attempt.process.is_alive():
                attempt.finish()
                return kills
        assert not attempt.survivors()
    with Attempt(folder) as attempt:
        attempt.finish()
    assert not attempt.survivors()
    return NUM_KILLS


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_killed_run_equals_the_uninterrupted_one(record_property, monkeypatch, tmp_path, tiny_folder, prompt_file):
    """Kills fall anywhere: in rollouts, updates, validations and while a checkpoint is written."""
    seed = random.SystemRandom().randrange(10**6)
    monkeypatch.syspath_prepend(ROOT)  # for the processes to come
    record_property("seed of the kills", seed)
    sys.stdout.write(f"seed of the kills: {seed}\n")  # pytest shows it when the test fails
    write_settings(tmp_path / "ppo.yaml", model=tiny_folder, prompts=prompt_file)

    with Attempt(tmp_path / "whole") as whole:
        kills = run_with_kills(tmp_path / "killed", random.Random(seed))
        whole.finish()

    assert kills >= 2
    ours, theirs = (
        torch.load(tmp_path / name / "runs/version_0/checkpoints/last.ckpt", weights_only=True)
        for name in ("killed", "whole")
    )
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "kl_coef", "global_step"):
        assert_same_state(ours[key], theirs[key], key)
    assert read_metrics(tmp_path / "killed/runs/version_0") == read_metrics(tmp_path / "whole/runs/version_0")
