"""Translates an SFT configuration of verl."""

from __future__ import annotations

from typing import Any

from verl_lightning.migrate.engines import (
    ENGINE_DEFAULTS,
    engine_name,
    recompute_key,
    sharing_ranks,
    translate_async_save,
    translate_fsdp,
    translate_launch,
    translate_megatron,
    translate_strategy,
    world_size,
)
from verl_lightning.migrate.models import MODEL_DEFAULTS, OPTIM_DEFAULTS, translate_model, translate_optim
from verl_lightning.migrate.parts import Findings, Remark, Setting, VerlConfig, at_home
from verl_lightning.migrate.runs import (
    TRAINER_DEFAULTS,
    total_steps,
    translate_callbacks,
    translate_length,
    translate_loggers,
)

DEFAULTS: dict[str, Any] = (
    TRAINER_DEFAULTS
    | {f"model.{key}": value for key, value in MODEL_DEFAULTS.items()}
    | {f"optim.{key}": value for key, value in OPTIM_DEFAULTS.items()}
    | {f"engine.{key}": value for key, value in ENGINE_DEFAULTS.items()}
    | {
        "engine.strategy": "fsdp",
        "data.train_batch_size": 256,
        "data.micro_batch_size_per_gpu": 4,
        "data.max_token_len_per_gpu": 8192,
        "data.use_dynamic_bsz": True,
        "data.train_files": "~/data/gsm8k/train.parquet",
        "data.max_length": 1024,
        "data.truncation": "error",
        "trainer.total_epochs": 4,
        "trainer.n_gpus_per_node": 1,
        "trainer.project_name": "gsm8k-sft",
        "trainer.experiment_name": "test",
        "trainer.seed": 1,
    }
)
"""verl's own values of the keys that make a setting."""


def translate_sft(verl: VerlConfig) -> Findings:
    """Translates everything that an SFT run of verl's says."""
    actor = "model.init_args.actor"
    engine, source = engine_name(verl, "engine", "defaults.engine", "engine.strategy")
    yield Setting(key="model.class_path", value="SFTModule", sources=())
    yield from translate_launch(verl)
    yield from translate_length(verl)
    yield from translate_callbacks(verl, rollout=False)
    yield from translate_loggers(verl)
    yield from translate_strategy(engine, source)
    yield from translate_async_save(verl, "checkpoint.async_save", engine)
    yield from translate_megatron(verl, "engine") if engine == "megatron" else translate_fsdp(verl, "engine", actor)
    recompute = recompute_key(verl, "engine.override_transformer_config") if engine == "megatron" else None
    yield from translate_model(verl, "model", actor, recomputed_by=recompute)
    yield from translate_optim(verl, "optim", f"{actor}.optim", total_steps(verl), engine=engine)
    yield Setting(key="seed_everything", value=verl.whole("trainer.seed"), sources=("trainer.seed",))
    yield from translate_chats(verl)
    sharing = 1 if engine == "megatron" else sharing_ranks(verl, "engine")
    yield from translate_batches(verl, model_ranks(verl, engine), sharing)


def model_ranks(verl: VerlConfig, engine: str) -> int:
    """Returns the number of ranks that see the same data."""
    if engine != "megatron":
        return sharing_ranks(verl, "engine")
    sizes = (f"engine.{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context"))
    product = 1
    for key in sizes:
        product *= verl.whole(key)
    return product


def translate_chats(verl: VerlConfig) -> Findings:
    """Translates the files of conversations, and the treatment of those that are too long."""
    group = "data.init_args"
    yield Setting(key="data.class_path", value="ChatDataModule", sources=())
    yield Setting(key=f"{group}.train_files", value=at_home(verl["data.train_files"]), sources=("data.train_files",))
    if verl["data.val_files"]:
        yield Setting(key=f"{group}.val_files", value=at_home(verl["data.val_files"]), sources=("data.val_files",))
    elif "data.val_files" in verl.given:
        yield Remark(source="data.val_files", reason="null: no validation", needed=False)
    yield Setting(key=f"{group}.max_length", value=verl.whole("data.max_length"), sources=("data.max_length",))
    cut = verl["data.truncation"] != "error"
    note = "" if verl["data.truncation"] in ("error", "right") else "chats are cut at their end, as verl's `right` does"
    yield Setting(
        key=f"{group}.overlong", value="truncate" if cut else "error", sources=("data.truncation",), note=note
    )


def translate_batches(verl: VerlConfig, ranks: int, sharing: int) -> Findings:
    """Translates the batches of a step: verl says the chats of a step, we those of a batch and batches of a step.

    Args:
        verl: The configuration.
        ranks: Number of ranks that see the same chats.
        sharing: Number of ranks, among these, that share a budget of tokens.
    """
    whole, dynamic = "data.train_batch_size", "data.use_dynamic_bsz"
    world = world_size(verl)
    if world is None:
        yield Remark(source=whole, reason="set `data.batch_size` to the chats of a step on one rank")
        return
    share = max(1, verl.whole(whole) // max(1, world // ranks))
    if verl[dynamic]:
        budget = "data.max_token_len_per_gpu"
        yield Setting(key="data.init_args.batch_size", value=share, sources=(whole,))
        tokens = max(verl.whole(budget) * sharing, verl.whole("data.max_length"))
        yield Setting(key="model.init_args.max_tokens_per_micro_batch", value=tokens, sources=(dynamic, budget))
        return
    micro = verl.first("data.micro_batch_size_per_gpu", "data.micro_batch_size", "data.micro_batch_size_per_gpu")
    batch = max(1, min(share, verl.whole(micro)))
    yield Setting(key="data.init_args.batch_size", value=batch, sources=(micro, dynamic))
    yield Setting(key="trainer.accumulate_grad_batches", value=max(1, share // batch), sources=(whole,))
