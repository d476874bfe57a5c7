"""Settings of a short `verl-fit` run with all that PPO may have."""

from __future__ import annotations

from pathlib import Path

import yaml

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
