"""Attempts to bring a `verl-fit` run to its end, in processes that may be killed."""

from __future__ import annotations

import time
from pathlib import Path

import yaml

from tests.processes import Process, run_verl_fit, start
from tests.runs import REWARDS

NUM_STEPS = 30


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


def start_attempt(folder: Path) -> Process:
    """`verl-fit --config ../ppo.yaml --ckpt_path auto` in a folder."""
    return start(run_verl_fit, "--config", "../ppo.yaml", "--ckpt_path", "auto", folder=folder)


def wait_for_checkpoints(folder: Path, count: int, attempt: Process) -> float:
    """Waits for so many new checkpoints, or for the end of the attempt; gives the seconds of the last one's step."""
    last, began, seconds = checkpoint_time(folder), time.monotonic(), 0.0
    while count and attempt.poll() is None:
        if checkpoint_time(folder) != last:
            last, count = checkpoint_time(folder), count - 1
            began, seconds = time.monotonic(), time.monotonic() - began
        time.sleep(0.002)
    return seconds


def checkpoint_time(folder: Path) -> int:
    """When the last checkpoint was written."""
    checkpoint = folder / "runs/version_0/checkpoints/last.ckpt"
    return checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0


def members(group: int | None) -> list[int]:
    """Running processes of a group."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, owner = entry.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(owner) == group and state != "Z":
            found.append(int(entry.parent.name))
    return found
