"""Translates verl's training engines: how many GPUs, which strategy, and its settings."""

from __future__ import annotations

from typing import Any

from verl_lightning.migrate.parts import Findings, Remark, Setting, VerlConfig

ENGINE_DEFAULTS: dict[str, Any] = {
    "model_dtype": "fp32",
    "dtype": "bfloat16",
    "reshard_after_forward": True,
    "offload_policy": False,
    "fsdp_size": -1,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "sequence_parallel": True,
    "use_distributed_optimizer": True,
    "ulysses_sequence_parallel_size": 1,
    "vanilla_mbridge": False,
    "override_transformer_config.attention_backend": "flash",
}
SIZES = {
    "tensor_model_parallel_size": "tensor_parallel_size",
    "pipeline_model_parallel_size": "pipeline_parallel_size",
    "virtual_pipeline_model_parallel_size": "virtual_pipeline_parallel_size",
    "context_parallel_size": "context_parallel_size",
    "expert_model_parallel_size": "expert_parallel_size",
    "expert_tensor_parallel_size": "expert_tensor_parallel_size",
}
DDP_OPTIONS = ("overlap_grad_reduce", "overlap_param_gather", "grad_reduce_in_fp32", "bucket_size")
OURS = {"dp": "fsdp", "fsdp": "fsdp", "fsdp2": "fsdp", "megatron": "megatron"}


def translate_launch(verl: VerlConfig) -> Findings:
    """Translates the numbers of machines and GPUs."""
    for key, ours in (("trainer.n_gpus_per_node", "trainer.devices"), ("trainer.nnodes", "trainer.num_nodes")):
        value = verl[key]
        if isinstance(value, (int, float)):
            yield Setting(key=ours, value=int(value), sources=(key,))
        else:
            yield Remark(source=key, reason=f"its value is known to the shell only: set `{ours}`")


def engine_name(verl: VerlConfig, *sources: str) -> tuple[str, str]:
    """Returns verl's engine, and the key that says so: the first that was given."""
    key = verl.first(*sources)
    return str(verl[key]), key


def translate_strategy(engine: str, source: str) -> Findings:
    """Translates verl's engine to the strategy that trains."""
    if engine in OURS:
        yield Setting(key="trainer.strategy", value=OURS[engine], sources=(source,))
    else:
        yield Setting(
            key="trainer.strategy",
            value="fsdp",
            sources=(source,),
            note=f"there is no engine {engine}; fsdp in its place",
        )


def translate_async_save(verl: VerlConfig, key: str, engine: str) -> Findings:
    """Translates checkpoints that are written while training goes on."""
    if verl[key] and engine == "megatron":
        yield Remark(
            source=key, reason="`megatron` writes a checkpoint before training goes on; `fsdp` has `async_save`"
        )
    elif verl[key]:
        yield Setting(key="fsdp.async_save", value=True, sources=(key,))
    elif key in verl.given:
        yield Remark(source=key, reason="off: a checkpoint is written before training goes on", needed=False)


def translate_fsdp(verl: VerlConfig, group: str, actor: str) -> Findings:
    """Translates the settings of FSDP, and the types of weights and activations."""
    dtype, weights = f"{group}.dtype", f"{group}.model_dtype"
    mixed = str(verl[dtype]) in ("bfloat16", "bf16")
    note = "" if mixed or str(verl[dtype]) in ("float32", "fp32") else "float16 is not trained; bfloat16 in its place"
    yield Setting(
        key="trainer.precision",
        value="32-true" if str(verl[dtype]) in ("float32", "fp32") else "bf16-mixed",
        sources=(dtype,),
        note=note,
    )
    stored = "bfloat16" if str(verl[weights]) in ("bf16", "bfloat16") else "float32"
    yield Setting(key=f"{actor}.dtype", value=stored, sources=(weights,))
    key = f"{group}.reshard_after_forward"
    yield Setting(key="fsdp.reshard_after_forward", value=bool(verl[key]), sources=(key,))
    key = f"{group}.offload_policy"
    yield Setting(key="fsdp.cpu_offload", value=bool(verl[key]), sources=(key,))
    yield from translate_mesh(verl, f"{group}.fsdp_size")
    yield from translate_sequence_parallelism(verl, group)


def translate_sequence_parallelism(verl: VerlConfig, group: str) -> Findings:
    """Translates the number of ranks that share a sequence: as the actor says, in its engine's group or beside it."""
    name = "ulysses_sequence_parallel_size"
    key = sequence_key(verl, group)
    size = verl.whole(key) if verl[key] is not None else 1
    if size > 1:
        yield Setting(key="fsdp.sequence_parallel_size", value=size, sources=(key,))
    for other in verl.given:
        if other.endswith(name) and other != key:
            differs = verl[other] not in (None, 1, size)
            yield Remark(source=other, reason=f"one size for all models: `{key}` decides", needed=differs)


def sequence_key(verl: VerlConfig, group: str) -> str:
    """Verl's key of the ranks that share a sequence, the one that is above 1 if there is one."""
    places = [f"{place}.ulysses_sequence_parallel_size" for place in (group, group.rpartition(".")[0])]
    return next((key for key in places if isinstance(verl[key], (int, float)) and verl[key] > 1), places[0])


def sharing_ranks(verl: VerlConfig, group: str) -> int:
    """Ranks of verl's FSDP that share a sequence: its budgets of tokens are a rank's, ours a sequence's."""
    size = verl[sequence_key(verl, group)]
    return int(size) if isinstance(size, (int, float)) else 1


def translate_mesh(verl: VerlConfig, key: str) -> Findings:
    """Translates the number of ranks over which models are sharded."""
    size = verl[key] or -1
    world = world_size(verl)
    if size <= 0:
        if key in verl.given:
            yield Remark(source=key, reason="models are sharded over all ranks", needed=False)
    elif world and world % int(size) == 0:
        yield Setting(key="fsdp.replicate_size", value=world // int(size), sources=(key,))
    else:
        yield Remark(source=key, reason=f"set `fsdp.replicate_size` to the ranks over {int(size)}")


def world_size(verl: VerlConfig) -> int | None:
    """Training processes, None if only a shell knows."""
    sizes = (verl["trainer.n_gpus_per_node"], verl["trainer.nnodes"])
    return int(sizes[0]) * int(sizes[1]) if all(isinstance(size, (int, float)) for size in sizes) else None


def translate_megatron(verl: VerlConfig, group: str) -> Findings:
    """Translates the settings of Megatron."""
    dtype = f"{group}.dtype"
    full = str(verl[dtype]) in ("float32", "fp32")
    yield Setting(key="trainer.precision", value="32-true" if full else "bf16-mixed", sources=(dtype,))
    for name, ours in SIZES.items():
        if isinstance(verl[f"{group}.{name}"], (int, float)):
            yield Setting(key=f"megatron.{ours}", value=verl.whole(f"{group}.{name}"), sources=(f"{group}.{name}",))
        elif verl[f"{group}.{name}"] is not None:
            yield Remark(
                source=f"{group}.{name}", reason=f"its value is known to the shell only: set `megatron.{ours}`"
            )
    tensor, key = verl[f"{group}.tensor_model_parallel_size"], f"{group}.sequence_parallel"
    shares = bool(verl[key]) and isinstance(tensor, (int, float)) and tensor > 1
    yield Setting(key="megatron.sequence_parallel", value=shares, sources=(key,), note="")
    key = f"{group}.use_distributed_optimizer"
    yield Setting(key="megatron.use_distributed_optimizer", value=bool(verl[key]), sources=(key,))
    if verl[f"{group}.vanilla_mbridge"]:
        yield Setting(key="megatron.bridge", value="mbridge", sources=(f"{group}.vanilla_mbridge",))
    yield from translate_transformer(verl, f"{group}.override_transformer_config")
    yield from translate_ddp(verl, f"{group}.override_ddp_config")


def translate_transformer(verl: VerlConfig, group: str) -> Findings:
    """Translates recomputation, attention, and further fields of Megatron's `TransformerConfig`."""
    known = {f"{group}.{name}" for name in ("attention_backend", *RECOMPUTE)}
    recompute, layers = recompute_key(verl, group), f"{group}.recompute_num_layers"
    if recompute is not None:
        yield Setting(key="megatron.transformer.recompute", value=verl[recompute], sources=(recompute,))
    if recompute is not None and verl[recompute] == "full" and verl[layers]:
        yield Setting(key="megatron.transformer.recompute_num_layers", value=verl.whole(layers), sources=(layers,))
    if verl[f"{group}.attention_backend"]:
        backend = str(verl[f"{group}.attention_backend"])
        value = backend if backend in ("flash", "fused", "unfused", "local") else "auto"
        yield Setting(
            key="megatron.transformer.attention_backend", value=value, sources=(f"{group}.attention_backend",)
        )
    for key in verl.given:
        if key.startswith(f"{group}.") and key not in known:
            name = key.removeprefix(f"{group}.")
            yield Setting(key=f"megatron.transformer.overrides.{name}", value=verl[key], sources=(key,))


def recompute_key(verl: VerlConfig, group: str) -> str | None:
    """The key of Megatron's own recomputation of activations, None where it is off."""
    key = f"{group}.recompute_granularity"
    return key if verl[key] in ("full", "selective") else None


RECOMPUTE = ("recompute_granularity", "recompute_num_layers", "recompute_method", "recompute_modules")


def translate_ddp(verl: VerlConfig, group: str) -> Findings:
    """Translates the options of Megatron's data parallelism."""
    for key in verl.given:
        if key.startswith(f"{group}."):
            name = key.removeprefix(f"{group}.")
            place = name if name in DDP_OPTIONS else f"overrides.{name}"
            yield Setting(key=f"megatron.ddp.{place}", value=verl[key], sources=(key,))


def other_roles(verl: VerlConfig, groups: tuple[str, ...], actor: str) -> Findings:
    """Engine settings of the critic and the reference, which follow the actor's here."""
    for group in groups:
        for key in verl.given:
            if key.startswith(f"{group}."):
                same = f"{actor}.{key.removeprefix(f'{group}.')}"
                differs = verl[key] != verl[same] and key in verl.given and verl[same] is not None
                reason = f"one strategy for all models: `{same}` decides"
                yield Remark(source=key, reason=reason, needed=differs and not key.endswith("forward_only"))
