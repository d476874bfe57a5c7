"""Short runs of each strategy that leave everything behind that can be loaded elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.processes import on_ranks
from tests.runs import make_chats, make_model_config, make_sft, make_trainer
from verl_lightning.callbacks import HFCheckpoint
from verl_lightning.models.config import LoraConfig
from verl_lightning.strategies import STRATEGIES

Kind = Literal["full", "lora"]
LORA: dict[Kind, LoraConfig | None] = {"full": None, "lora": LoraConfig(rank=4, alpha=8.0)}
RANKS = {"auto": 1, "ddp": 2, "fsdp": 2}
"""The strategies that save, and their ranks."""

STEPS = 4
"""Of a run; its checkpoint is of the step before the last."""


@dataclass(frozen=True, kw_only=True)
class SavedRun:
    """What a run left behind, and where it came to."""

    folder: Path
    """With ``hf/last``, ``merged/last`` (of a LoRA run), ``step=3.ckpt`` and ``weights.safetensors``."""

    kind: Kind
    """Whether all weights were trained, or adapters."""

    @property
    def checkpoint_bytes(self) -> int:
        """Size of the trainer's checkpoint, a file or a folder."""
        path = self.folder / "step=3.ckpt"
        return sum(file.stat().st_size for file in ([path] if path.is_file() else path.rglob("*")))

    @property
    def weights(self) -> dict[str, Tensor]:
        """Of the policy after the last step, adapters merged in."""
        return load_file(self.folder / "weights.safetensors")


def run_sft(
    model: Path, chats: Path, folder: Path, kind: Kind, strategy: str, ranks: int, resume: str | None = None
) -> dict[str, Tensor]:
    """The policy's weights at the end of SFT on four chats a step over all ranks, adapters merged in."""
    saver = ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=STEPS - 1)
    exports = [HFCheckpoint(str(folder / "hf"))]
    if kind == "lora":
        exports.append(HFCheckpoint(str(folder / "merged"), merge_adapters=True))
    options: dict[str, Any] = {"strategy": STRATEGIES[strategy]() if strategy in STRATEGIES else strategy}
    options |= {"devices": ranks, "max_steps": STEPS, "enable_checkpointing": True}
    module = make_sft(model, actor=make_model_config(model, lr=1e-2, lora=LORA[kind]))
    trainer = make_trainer(folder, saver, *exports, **options)
    trainer.fit(module, datamodule=make_chats(chats, batch_size=4 // ranks), ckpt_path=resume)
    return {name: weight.clone() for name, weight in module.contract.named_weights(module.policy)}


def save_run(model: Path, chats: Path, folder: Path, kind: Kind, strategy: str) -> SavedRun:
    """Train with a strategy and keep the results."""
    weights = on_ranks(RANKS[strategy], run_sft, model, chats, folder, kind, strategy, RANKS[strategy])[0]
    save_file(weights, folder / "weights.safetensors")
    return SavedRun(folder=folder, kind=kind)


def logits_with(model: torch.nn.Module, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """What a transformers model says with these weights."""
    missing = model.load_state_dict(weights, strict=False).missing_keys
    assert set(missing) <= {"lm_head.weight"}  # tied
    with torch.no_grad():
        logits: Tensor = model.eval()(tokens).logits
    return logits
