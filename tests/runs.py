"""Short PPO and SFT runs for tests: real parts, small sizes, each part replaceable by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from verl_lightning.algorithms.advantages.grpo import GRPO
from verl_lightning.callbacks import HFRollout
from verl_lightning.data import ChatDataModule, PreferenceDataModule, PromptDataModule
from verl_lightning.models.config import ModelConfig, OptimConfig
from verl_lightning.modules import DPOModule, PPOModule, SFTModule
from verl_lightning.modules.ppo_config import UpdateConfig
from verl_lightning.rewards.pool import RewardConfig
from verl_lightning.rollout.base import SamplingConfig
from verl_lightning.run_records import runs_in

REWARDS = Path(__file__).with_name("run_rewards.py")


class Recorder(Callback):
    """Keeps the metrics of each training step and of each validation."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.validations: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.steps.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.validations.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def column(self, name: str) -> list[float]:
        """One metric, step by step."""
        return [step[name] for step in self.steps]


def make_model_config(folder: Path, *, lr: float = 1e-3, **changes: Any) -> ModelConfig:
    """A model of a Hugging Face folder, with AdamW at a rate that changes a tiny model visibly.

    AdamW's epsilon keeps it from blowing up the rounding of gradients near zero, which differs between machines.
    """
    return ModelConfig(path=str(folder), **{"optim": OptimConfig(lr=lr, eps=1e-5)} | changes)


def make_reward(function: str = "even_share", **changes: Any) -> RewardConfig:
    """One of the functions in ``run_rewards.py``, judged by one worker."""
    return RewardConfig(function=f"{REWARDS}:{function}", **{"num_workers": 1} | changes)


def make_ppo(folder: Path, **changes: Any) -> PPOModule:
    """GRPO on the model in ``folder``: two optimizer steps of two prompts an iteration."""
    parts = {
        "actor": make_model_config(folder),
        "reward": make_reward(),
        "advantage": GRPO(),
        "update": UpdateConfig(mini_batch_size=2, micro_batch_size=4),
    }
    return PPOModule(**parts | changes)


def make_sft(folder: Path, **changes: Any) -> SFTModule:
    """SFT of the model in ``folder``."""
    return SFTModule(**{"actor": make_model_config(folder)} | changes)


def make_dpo(folder: Path, **changes: Any) -> DPOModule:
    """DPO of the model in ``folder``."""
    return DPOModule(**{"actor": make_model_config(folder)} | changes)


def make_rollout(*, num_samples: int = 4, max_new_tokens: int = 6, **changes: Any) -> HFRollout:
    """Four responses of at most six tokens to each prompt; one in validation."""
    parts = {
        "sampling": SamplingConfig(num_samples=num_samples, max_new_tokens=max_new_tokens),
        "val_sampling": SamplingConfig(max_new_tokens=max_new_tokens),
    }
    return HFRollout(**parts | changes)


def make_prompts(train_file: Path, val_file: Path | None = None, **changes: Any) -> PromptDataModule:
    """Four prompts an iteration, in the order of the file."""
    options = {"prompts_per_step": 4, "val_batch_size": 4, "max_prompt_length": 32, "shuffle": False}
    return PromptDataModule(str(train_file), str(val_file) if val_file else (), **options | changes)


def make_chats(train_file: Path, val_file: Path | None = None, **changes: Any) -> ChatDataModule:
    """Batches of four chats, in the order of the file."""
    options = {"batch_size": 4, "max_length": 64, "shuffle": False}
    return ChatDataModule(str(train_file), str(val_file) if val_file else (), **options | changes)


def make_pairs(train_file: Path, val_file: Path | None = None, **changes: Any) -> PreferenceDataModule:
    """Batches of four pairs, in the order of the file."""
    options = {"batch_size": 4, "max_length": 64, "shuffle": False}
    return PreferenceDataModule(str(train_file), str(val_file) if val_file else (), **options | changes)


def make_settings(folder: Path, prompt_file: Path, **trainer: Any) -> dict[str, Any]:
    """The same as a configuration file says it: GRPO, with two responses of at most four tokens to each prompt."""
    quiet = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
    model = {
        "actor": {"path": str(folder), "optim": {"lr": 1e-3}},
        "reward": {"function": f"{REWARDS}:even_share", "num_workers": 1},
        "advantage": "GRPO",
        "update": {"mini_batch_size": 2, "micro_batch_size": 4},
    }
    sizes = {"prompts_per_step": 4, "val_batch_size": 4, "max_prompt_length": 32}
    return {
        "trainer": quiet | trainer,
        "model": {"class_path": "PPOModule", "init_args": model},
        "data": {"class_path": "PromptDataModule", "init_args": {"train_files": str(prompt_file)} | sizes},
        "rollout": {"class_path": "HFRollout", "init_args": {"sampling": {"num_samples": 2, "max_new_tokens": 4}}},
    }


def run_folders(folder: Path) -> list[Path]:
    """Folders of the runs that `verl-fit` has begun in a working directory, the newest last."""
    return [path for path, _ in runs_in(folder / "runs")]


def make_trainer(tmp_path: Path, *callbacks: Callback, **changes: Any) -> Trainer:
    """A quiet trainer of three steps on one CPU process; writes nothing unless asked to."""
    options: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": 3,
        "default_root_dir": tmp_path,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
    return Trainer(callbacks=list(callbacks), **options | changes)
