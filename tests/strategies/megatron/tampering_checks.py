"""What Megatron's readers say of folders that are not as they were written, all within one run."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer

from tests.runs import make_prompts, make_rollout, make_trainer
from tests.strategies.conformance import Bench
from tests.strategies.tampering import Command, flip, replace_entry, replace_metadata, saved
from verl_lightning.algorithms.advantages.gae import GAE
from verl_lightning.models.digests import DamagedFileError
from verl_lightning.modules.ppo_config import CriticConfig
from verl_lightning.strategies import MegatronStrategy
from verl_lightning.strategies.megatron.portable import SETTINGS_FILE

COMMON = "common_state/shard_0_1"
"""Where Megatron-Core 0.19 keeps what is no tensor."""


def harms(proof: Path) -> dict[str, Callable[[Path], Any]]:
    """What is done to a folder, by the file that is to be named."""
    return {
        "nothing": lambda folder: None,
        "__0_0.distcp": lambda folder: flip(folder / "__0_0.distcp", -300),
        "__1_0.distcp": lambda folder: flip(folder / "__1_0.distcp", -300),
        "metadata.json": lambda folder: flip(folder / "metadata.json", 3),
        SETTINGS_FILE: lambda folder: flip(folder / SETTINGS_FILE, 300),
        ".metadata": lambda folder: replace_metadata(folder, SETTINGS_FILE, pickle.dumps(Command(proof))),
        "__9_0.distcp": lambda folder: replace_entry(folder, SETTINGS_FILE, COMMON, saved([Command(proof)])),
        "common.pt": lambda folder: torch.save(Command(proof), folder / "common.pt"),
    }


class Tries(Callback):
    """Has the strategy load each folder, and keeps what the ranks were told.

    Args:
        folder: Of whole checkpoints, and a place for others.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.told: dict[str, list[str]] = {}

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        for name, harm in harms(self.folder / "proof").items():
            path = self.folder / "tampered" / "bad.ckpt"
            if trainer.is_global_zero:
                shutil.rmtree(path.parent, ignore_errors=True)
                for kept in ("step=1.ckpt", "bad.ckpt"):
                    shutil.copytree(self.folder / "half" / "step=1.ckpt", path.with_name(kept))
                harm(path)
            dist.barrier()
            told: list[str] = [""] * trainer.world_size
            dist.all_gather_object(told, self._load(trainer, path))
            self.told[name] = told

    def _load(self, trainer: Trainer, path: Path) -> str:
        try:
            checkpoint = trainer.strategy.load_checkpoint(path)
            trainer.strategy.load_model_state_dict(checkpoint)
            trainer.strategy.load_optimizer_state_dict(checkpoint)
        except DamagedFileError as error:
            return str(error)
        return "loaded"


def tampered(bench: Bench) -> Any:
    """What both ranks were told of each folder."""
    tries = Tries(bench.folder)
    module = bench.ppo(advantage=GAE(), critic=CriticConfig(model=bench.model()))
    strategy = MegatronStrategy(**bench.options)
    trainer = make_trainer(bench.folder, make_rollout(), tries, strategy=strategy, devices=bench.devices, max_steps=1)
    trainer.fit(module, datamodule=make_prompts(bench.folder / "prompts.jsonl"))
    return tries.told
