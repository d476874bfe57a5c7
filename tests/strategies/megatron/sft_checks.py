"""Checks of SFT under Megatron, for `checks.py`: what runs leave behind, and what they start from."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from tests.callbacks.saved_runs import LORA, STEPS
from tests.runs import make_chats, make_model_config, make_sft, make_trainer
from tests.strategies.conformance import Bench
from verl_lightning.callbacks import HFCheckpoint
from verl_lightning.models.config import LoraConfig, OptimConfig
from verl_lightning.strategies import MegatronStrategy
from verl_lightning.strategies.megatron import optimizer
from verl_lightning.types import TokenBatch


class Kept(Callback):
    """The policy's weights when training starts and ends, and what it then says of some tokens."""

    def __init__(self) -> None:
        self.start: dict[str, Tensor] = {}
        self.end: dict[str, Tensor] = {}
        self.log_probs: Tensor | None = None

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.start = self._weights(pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.end = self._weights(pl_module)
        (scores,) = pl_module.contract.forward(pl_module.policy, [scored_batch()])
        self.log_probs = scores.log_probs

    @staticmethod
    def _weights(module: Any) -> dict[str, Tensor]:
        return {name: weight.clone() for name, weight in module.contract.named_weights(module.policy)}


class SaveAtEnd(Callback):
    """A trainer's checkpoint of the last step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        trainer.save_checkpoint(self.path)


def scored_batch() -> TokenBatch:
    """Two rows of six tokens, of which all but the first are scored."""
    ids = torch.arange(12).view(2, 6)
    mask = torch.ones_like(ids, dtype=torch.bool)
    return TokenBatch(input_ids=ids, attention_mask=mask, response_mask=mask[:, 1:])


def sft_run(
    bench: Bench,
    name: str,
    *callbacks: Callback,
    actor: dict[str, Any],
    steps: int = STEPS,
    ckpt_path: Path | None = None,
) -> Kept:
    """SFT as `tests.callbacks.saved_runs` does it under other strategies."""
    kept, folder = Kept(), bench.folder / name
    savers: list[Any] = [ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=STEPS - 1)]
    savers += [HFCheckpoint(str(folder / "hf")), SaveAtEnd(folder / f"step={STEPS}.ckpt")]
    if actor.get("lora") is not None:
        savers.append(HFCheckpoint(str(folder / "merged"), merge_adapters=True))
    savers = savers if steps == STEPS and ckpt_path is None else []
    seed_everything(0, verbose=False)
    trainer = make_trainer(
        bench.folder,
        kept,
        *savers,
        *callbacks,
        strategy=MegatronStrategy(**bench.options),
        devices=bench.devices,
        max_steps=steps,
        enable_checkpointing=bool(savers),
    )
    config = dataclasses.replace(make_model_config(bench.folder / "model", lr=1e-2), **actor)
    module = make_sft(bench.folder / "model", actor=config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that AdamW starts anew
        data = make_chats(bench.folder / "chats.jsonl", batch_size=4 // bench.replicas)
        trainer.fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=True)
    return kept


def saved_runs(bench: Bench) -> Any:
    """A run of all weights and one of adapters, which leave behind what others load."""
    runs = {kind: sft_run(bench, f"megatron-{kind}", actor={"lora": lora}) for kind, lora in LORA.items()}
    return {kind: {"end": run.end, "log_probs": run.log_probs} for kind, run in runs.items()}


def adapters_resharded(bench: Bench) -> Any:
    """The last step of the run of adapters, in another layout."""
    checkpoint = bench.folder / "megatron-lora" / f"step={STEPS - 1}.ckpt"
    return sft_run(bench, "resharded", actor={"lora": LORA["lora"]}, ckpt_path=checkpoint).end


def recomputed_adapters(bench: Bench) -> Any:
    """Weights after two steps of adapters, without and with activations that are computed again."""
    lora = {"lora": LORA["lora"]}
    recomputed = lora | {"activation_checkpointing": "full"}
    return [sft_run(bench, "recomputed", actor=actor, steps=2).end for actor in (lora, recomputed)]


def loaded_runs(bench: Bench) -> Any:
    """Weights before the first step, from what other strategies have left behind."""
    weights = {}
    for saver in ("auto", "fsdp"):
        for kind, lora in LORA.items():
            checkpoint = bench.folder / f"{saver}-{kind}" / f"step={STEPS - 1}.ckpt"
            resumed = sft_run(bench, "resumed", actor={"lora": lora}, ckpt_path=checkpoint)
            weights[saver, kind, "checkpoint"] = resumed.start
            actor = started_from(bench.folder / f"{saver}-{kind}" / "hf" / "last", lora)
            weights[saver, kind, "folder"] = sft_run(bench, "started", actor=actor, steps=1).start
    return weights


def started_from(folder: Path, lora: LoraConfig | None) -> dict[str, Any]:
    """Settings of a model that goes on from a folder of all weights, or of an adapter."""
    if lora is None:
        return {"path": str(folder)}
    return {"lora": dataclasses.replace(lora, adapter_path=str(folder))}


def refusals(bench: Bench) -> Any:
    """What adapters on another base, and ones that Megatron can't have, are told."""
    adapter = str(bench.folder / "auto-lora" / "hf" / "last")
    cases = {
        "another base": {
            "path": str(bench.folder / "auto-full" / "hf" / "last"),
            "lora": dataclasses.replace(LORA["lora"], adapter_path=adapter),
        },
        "another rank": {"lora": LoraConfig(rank=8, alpha=8.0, adapter_path=adapter)},
        "one of q, k and v": {"lora": LoraConfig(target_modules=["q_proj"])},
        "a whole module": {"lora": LoraConfig(modules_to_save=["norm"])},
    }
    told = {}
    for name, actor in cases.items():
        try:
            sft_run(bench, "refused", actor=actor, steps=1)
        except ValueError as error:
            told[name] = str(error)
    return told


class Settings(Callback):
    """AdamW's settings when it takes its first step, by group."""

    def __init__(self) -> None:
        self.groups: list[dict[str, Any]] = []

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        groups = [group for part in optimizer.inner.chained_optimizers for group in part.optimizer.param_groups]
        names = ("lr", "betas", "eps", "weight_decay")
        self.groups = self.groups or [{name: group[name] for name in names} for group in groups]


def changed_settings(bench: Bench) -> Any:
    """What Megatron's own optimizers are told, by kind, in a run that goes on with other settings."""
    path, optim = bench.folder / "settings.ckpt", OptimConfig(lr=5e-3, betas=(0.5, 0.7), eps=1e-3, weight_decay=0.5)
    told = {}
    for kind in (True, False):
        variant = dataclasses.replace(bench, options=bench.options | {"use_distributed_optimizer": kind})
        sft_run(variant, "settings", SaveAtEnd(path), actor={}, steps=1)
        settings = Settings()
        sft_run(variant, "settings", settings, actor={"optim": optim}, steps=2, ckpt_path=path)
        told[kind] = {"groups": settings.groups}
    return told


def older_groups(bench: Bench) -> Any:
    """Weights of a run, and of one that goes on where norms and biases had no group of their own, by kind."""
    path, optim = bench.folder / "older.ckpt", OptimConfig(lr=1e-2, weight_decay=1.0, decay_norms_and_biases=True)
    found = {}
    for kind in (True, False):
        variant = dataclasses.replace(bench, options=bench.options | {"use_distributed_optimizer": kind})
        whole = sft_run(variant, "older", actor={"optim": optim}, steps=2).end
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(optimizer, "norms_and_biases", lambda chunk: [])
            sft_run(variant, "older", SaveAtEnd(path), actor={"optim": optim}, steps=1)
        rest = sft_run(variant, "older", actor={"optim": optim}, steps=2, ckpt_path=path).end
        found[kind] = {"whole": whole, "rest": rest}
    return found


def resume_shifted(bench: Bench) -> str:
    """What a checkpoint is told in which AdamW's tensors lie where Megatron-Core 0.19 itself puts them."""

    class Unmended(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
            for part in trainer.optimizers[0].inner.chained_optimizers:
                del part.get_parameter_state_dp_zero  # ours, which hides that of the class

    path = bench.folder / "shifted.ckpt"
    sft_run(bench, "shifted", Unmended(), SaveAtEnd(path), actor={}, steps=1)
    try:
        sft_run(bench, "shifted", actor={}, steps=2, ckpt_path=path)
    except ValueError as error:
        return str(error)
    return ""
