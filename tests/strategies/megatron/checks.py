"""Checks of Megatron on two ranks, for `ranks.run_check`: what each returns, tests look at."""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.runs import Recorder, make_chats, make_prompts, make_rollout, make_sft, make_trainer
from tests.strategies.conformance import Bench
from tests.strategies.megatron.layouts import LAYOUTS, write_kinds
from tests.strategies.megatron.sft_checks import (
    adapters_resharded,
    changed_settings,
    loaded_runs,
    older_groups,
    recomputed_adapters,
    refusals,
    resume_shifted,
    saved_runs,
)
from tests.strategies.megatron.switched import switched
from tests.strategies.megatron.tampering_checks import tampered
from tests.strategies.megatron.training_checks import learn, sft_features
from verl_lightning.algorithms.advantages.gae import GAE
from verl_lightning.callbacks import HFCheckpoint
from verl_lightning.models.config import LoraConfig
from verl_lightning.modules.ppo_config import CriticConfig, KLConfig
from verl_lightning.strategies import MegatronStrategy
from verl_lightning.strategies.megatron.config import DataParallelConfig

Check = Callable[[Bench], Any]


class Ending(Callback):
    """The policy's and the critic's weights when training ends."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        for role in ("actor", "critic"):
            model = getattr(pl_module, role, None)
            if model is not None:
                named = pl_module.contract.named_weights(model)
                self.weights |= {f"{role}.{name}": weight.clone() for name, weight in named}
                head = model.value_head
                self.weights |= {} if head is None else {f"{role}.value_head": head.weight.detach().clone()}


def critic_run(bench: Bench, *, steps: int, ckpt_path: Path | None, name: str) -> dict[str, Any]:
    """PPO with a critic, schedules and a checkpoint at its end."""
    recorder, ending = Recorder(), Ending()
    saved = ModelCheckpoint(dirpath=bench.folder / name, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = make_trainer(
        bench.folder,
        make_rollout(),
        recorder,
        ending,
        saved,
        strategy=MegatronStrategy(**bench.options),
        devices=bench.devices,
        max_steps=steps,
        enable_checkpointing=True,
    )
    module = bench.ppo(advantage=GAE(), critic=CriticConfig(model=bench.model()))
    trainer.fit(module, datamodule=make_prompts(bench.folder / "prompts.jsonl"), ckpt_path=ckpt_path, weights_only=True)
    return {"steps": recorder.steps, "weights": ending.weights}


def resume(bench: Bench) -> Any:
    """Four iterations at once, and two after two."""
    whole = critic_run(bench, steps=4, ckpt_path=None, name="whole")
    seed_everything(0, verbose=False)
    critic_run(bench, steps=2, ckpt_path=None, name="half")
    rest = critic_run(bench, steps=4, ckpt_path=bench.folder / "half" / "step=2.ckpt", name="rest")
    return {"whole": whole, "rest": rest}


def reshard(bench: Bench) -> Any:
    """Two more iterations of a run that another layout has begun."""
    return critic_run(bench, steps=4, ckpt_path=bench.folder / "half" / "step=2.ckpt", name="resharded")


def resume_stages(bench: Bench) -> Any:
    """The last iteration of `reshard` anew, from its own checkpoint before it."""
    return critic_run(bench, steps=4, ckpt_path=bench.folder / "resharded" / "step=3.ckpt", name="stages")


def resume_buckets(bench: Bench) -> Any:
    """Two data-parallel ranks, whose gradients travel in buckets of sizes that need padding."""
    ddp = DataParallelConfig(overlap_grad_reduce=True, bucket_size=3000)
    replicas = dataclasses.replace(bench, options={"timeout": 600.0, "ddp": ddp})
    whole = critic_run(replicas, steps=4, ckpt_path=bench.folder / "half" / "step=2.ckpt", name="buckets")
    rest = critic_run(replicas, steps=4, ckpt_path=bench.folder / "buckets" / "step=3.ckpt", name="rest of buckets")
    return {"whole": whole, "rest": rest}


def replicas_features(bench: Bench) -> Any:
    """Features of SFT on two data-parallel ranks."""
    return sft_features(dataclasses.replace(bench, options={"timeout": 600.0}))


def export(bench: Bench) -> Any:
    """A Hugging Face folder of the policy and one of the critic."""
    callbacks = [HFCheckpoint(dirpath=str(bench.folder / role), role=role) for role in ("actor", "critic")]
    ending = Ending()
    module = bench.ppo(advantage=GAE(), critic=CriticConfig(model=bench.model()))
    trainer = make_trainer(
        bench.folder,
        make_rollout(),
        ending,
        *callbacks,
        strategy=MegatronStrategy(**bench.options),
        devices=bench.devices,
        max_steps=1,
        enable_checkpointing=True,
    )
    trainer.fit(module, datamodule=make_prompts(bench.folder / "prompts.jsonl"))
    return ending.weights


def load_auto(bench: Bench) -> Any:
    """The weights of a checkpoint that `auto` has written, after no step; a warning says that AdamW starts anew."""
    ending, taken = Ending(), {}

    class Start(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
            ending.on_train_end(trainer, pl_module)
            taken.update(ending.weights)

    module = bench.ppo(advantage=GAE(), critic=CriticConfig(model=bench.model()))
    trainer = make_trainer(
        bench.folder,
        make_rollout(),
        Start(),
        strategy=MegatronStrategy(**bench.options),
        devices=bench.devices,
        max_steps=3,
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(
            module,
            datamodule=make_prompts(bench.folder / "prompts.jsonl"),
            ckpt_path=bench.folder / "auto.ckpt",
            weights_only=True,
        )
    return {"weights": taken, "warnings": [str(w.message) for w in told], "global_step": trainer.global_step}


class Collectives(TorchDispatchMode):
    """Counts elements that collectives reduce, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name()
        if name.startswith("c10d::") and "reduce" in name:
            tensors = torch.utils._pytree.tree_leaves(args)
            self.elements[name] += max(t.numel() for t in tensors if isinstance(t, Tensor))
        return function(*args, **(kwargs or {}))


class GradientTraffic(Callback):
    """What one gradient of each model costs."""

    def __init__(self) -> None:
        self.elements: dict[str, dict[str, int]] = {}
        self.parameters: dict[str, int] = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        for role in ("actor", "critic"):
            model = getattr(pl_module, role, None)
            if model is None:
                continue
            with Collectives() as counted:
                pl_module.contract.forward_backward(model, [batch.rollout], self._loss)
            self.elements[role] = dict(counted.elements)
            self.parameters[role] = sum(p.numel() for p in model.parameters() if p.requires_grad)
        for optimizer in trainer.optimizers:
            optimizer.zero_grad()

    @staticmethod
    def _loss(scores: Any, batch: Any) -> Any:
        score = scores.log_probs if scores.values is None else scores.values
        return torch.where(batch.response_mask, score, 0.0).sum(), {}


def collectives(bench: Bench) -> Any:
    """Elements reduced by each collective for one gradient, with and without the distributed optimizer, by bridge."""
    overlap = DataParallelConfig(overlap_grad_reduce=True)
    variants = {
        "sharded": {"use_distributed_optimizer": True},
        "plain": {"use_distributed_optimizer": False},
        "sharded, overlap": {"use_distributed_optimizer": True, "ddp": overlap},
        "sharded, mbridge": {"use_distributed_optimizer": True, "bridge": "mbridge"},
        "plain, mbridge": {"use_distributed_optimizer": False, "bridge": "mbridge"},
    }
    counted = {name: traffic(bench, options) for name, options in variants.items()}
    write_kinds(bench.folder / "kinds")
    for layout in ("virtual pipeline", "expert parallel"):
        of = LAYOUTS[layout]
        other = dataclasses.replace(bench, folder=bench.folder / "kinds" / of.kind, options=of.options)
        for kind, flag in {"sharded": True, "plain": False}.items():
            counted[f"{kind}, {layout}"] = traffic(other, {"use_distributed_optimizer": flag})
    return counted


def traffic(bench: Bench, options: dict[str, Any]) -> dict[str, Any]:
    """Elements reduced by each collective for one gradient of each model, and those that the gradients have."""
    counts = GradientTraffic()
    module = bench.ppo(advantage=GAE(), critic=CriticConfig(model=bench.model()))
    strategy = MegatronStrategy(**bench.options, **options)
    trainer = make_trainer(bench.folder, make_rollout(), counts, strategy=strategy, devices=bench.devices, max_steps=1)
    trainer.fit(module, datamodule=make_prompts(bench.folder / "prompts.jsonl"))
    return {"elements": counts.elements, "parameters": counts.parameters}


def validate(bench: Bench) -> Any:
    """The loss of SFT on validation chats by each bridge: Lightning must not copy rank 0's part to all."""
    losses = []
    for bridge in ("megatron_bridge", "mbridge"):
        recorder = Recorder()
        strategy = MegatronStrategy(**bench.options, bridge=bridge)  # type: ignore[arg-type]
        trainer = make_trainer(bench.folder, recorder, strategy=strategy, devices=bench.devices)
        chats = bench.folder / "chats.jsonl"
        trainer.validate(
            make_sft(bench.folder / "model", actor=bench.model()), datamodule=make_chats(chats, chats), verbose=False
        )
        losses.append(recorder.validations[0]["val/loss"])
    return losses


def lora(bench: Bench) -> Any:
    """Two iterations with adapters: the folder of the adapter, the merged weights, and what tells the base."""
    ending, recorder = Ending(), Recorder()
    config = LoraConfig(rank=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"])
    module = bench.ppo(actor=bench.model(lora=config), kl=KLConfig(coef=0.1))
    trainer = make_trainer(
        bench.folder,
        make_rollout(),
        ending,
        recorder,
        HFCheckpoint(dirpath=str(bench.folder / "adapter")),
        ModelCheckpoint(dirpath=bench.folder / "lora", filename="{step}"),
        strategy=MegatronStrategy(**bench.options),
        devices=bench.devices,
        max_steps=2,
        enable_checkpointing=True,
    )
    trainer.fit(module, datamodule=make_prompts(bench.folder / "prompts.jsonl"))
    return {"weights": ending.weights, "fingerprint": module.base_fingerprints["actor"], "steps": recorder.steps}


CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        *(resume, reshard, resume_stages, resume_buckets, resume_shifted, export, load_auto, collectives),
        *(validate, lora, saved_runs, adapters_resharded, recomputed_adapters, loaded_runs, refusals, changed_settings),
        *(learn, replicas_features, switched, tampered, older_groups),
    )
}
