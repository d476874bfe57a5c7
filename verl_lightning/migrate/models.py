"""Translates verl's models, adapters and optimizers."""

from __future__ import annotations

from typing import Any

from verl_lightning.migrate.parts import Findings, Remark, Setting, VerlConfig, at_home, flag

MODEL_DEFAULTS: dict[str, Any] = {
    "path": "~/models/deepseek-llm-7b-chat",
    "enable_gradient_checkpointing": True,
    "use_remove_padding": True,
    "lora_rank": 0,
    "lora_alpha": 16,
    "target_modules": "all-linear",
    "lora.rank": 0,
    "lora.alpha": 32,
    "lora.dropout": 0.0,
    "lora.target_modules": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"],
}
OPTIM_DEFAULTS: dict[str, Any] = {
    "lr": 1e-3,
    "betas": [0.9, 0.999],
    "weight_decay": 0.01,
    "clip_grad": 1.0,
    "lr_scheduler_type": "constant",
    "lr_warmup_steps": -1,
    "lr_warmup_steps_ratio": 0.0,
    "min_lr_ratio": 0.0,
}
LINEARS = {
    "linear_qkv": ["q_proj", "k_proj", "v_proj"],
    "linear_q": ["q_proj"],
    "linear_k": ["k_proj"],
    "linear_v": ["v_proj"],
    "linear_proj": ["o_proj"],
    "linear_fc1": ["gate_proj", "up_proj"],
    "linear_fc1_gate": ["gate_proj"],
    "linear_fc1_up": ["up_proj"],
    "linear_fc2": ["down_proj"],
}
"""Transformers' names of linear layers, as most families have them, for Megatron's."""

ALL_LINEARS = {name for names in LINEARS.values() for name in names}
ADAPTERS = {
    "lora": "",
    "canonical_lora": "`fsdp` gives each projection an adapter of its own, as this type does; under `megatron`, those"
    " that are fused share one",
}
"""Note on each of verl's types of adapters that is trained here."""
SCHEDULES = {"constant": "constant", "cosine": "cosine", "linear": "linear"}


def translate_model(verl: VerlConfig, verl_group: str, ours: str, *, recomputed_by: str | None = None) -> Findings:
    """Translates a model and its adapters.

    Args:
        verl: Values that the run was given.
        verl_group: Key of verl's model, such as ``critic.model``.
        ours: Key of our model, such as ``model.actor``.
        recomputed_by: verl's key of Megatron's own recomputation, where that is on and decides.
    """
    path = verl.first(f"{verl_group}.path", f"{verl_group}.partial_pretrain", f"{verl_group}.path")
    yield Setting(key=f"{ours}.path", value=at_home(verl[path]), sources=(path,))
    key = f"{verl_group}.enable_gradient_checkpointing"
    if recomputed_by is not None:
        yield Remark(source=key, reason=f"`{recomputed_by}` decides", needed=False)
    else:
        which = "full" if verl[key] else "none"
        yield Setting(key=f"{ours}.activation_checkpointing", value=which, sources=(key,))
    key = f"{verl_group}.use_remove_padding"
    yield Setting(key=f"{ours}.packing", value="auto" if verl[key] else "never", sources=(key,))
    yield from translate_lora(verl, verl_group, f"{ours}.lora")


def translate_lora(verl: VerlConfig, model: str, ours: str) -> Findings:
    """Translates adapters by verl's flat keys (``lora_rank``) or its structured ones (``lora.rank``)."""
    if verl[f"{model}.lora_rank"]:
        names = {"rank": "lora_rank", "alpha": "lora_alpha", "target_modules": "target_modules",
                 "exclude_modules": "exclude_modules", "adapter_path": "lora_adapter_path"}  # fmt: skip
        other = "lora."
    elif verl[f"{model}.lora.rank"]:
        names = {name: f"lora.{name}" for name in
                 ("rank", "alpha", "dropout", "target_modules", "exclude_modules", "adapter_path")}  # fmt: skip
        other = "lora_"
    else:
        yield from no_adapters(verl, model)
        return
    kind = f"{model}.lora.type"
    for name, verl_name in names.items():
        value = verl[f"{model}.{verl_name}"]
        if value is not None:
            yield lora_setting(f"{ours}.{name}", name, value, f"{model}.{verl_name}")
    if kind in verl.given and verl[kind] in ADAPTERS:
        rank = f"{model}.{names['rank']}"
        yield Setting(key=f"{ours}.rank", value=verl.whole(rank), sources=(kind,), note=ADAPTERS[str(verl[kind])])
    elif kind in verl.given:
        yield Remark(source=kind, reason=f"there are no adapters of the type {verl[kind]}; LoRA in its place")
    used = {f"{model}.{verl_name}" for verl_name in names.values()}
    for key in verl.given:
        if key.startswith(f"{model}.{other}") and key not in used and key.removeprefix(f"{model}.") not in LORA_REST:
            yield Remark(source=key, reason="the other form of the LoRA keys is in use", needed=False)


LORA_REST = {
    f"lora.{name}"
    for name in ("type", "fully_sharded_loras", "merge", "dropout_position", "lora_A_init_method", "dtype")
}
"""Structured LoRA keys that the table of what is left out knows."""


def lora_setting(key: str, name: str, value: Any, source: str) -> Setting:
    """Translates one option of adapters, with Megatron's names of linear layers in transformers' terms."""
    if name in ("target_modules", "exclude_modules") and isinstance(value, list) and set(value) & LINEARS.keys():
        names = list(dict.fromkeys(own for given in value for own in LINEARS.get(given, [given])))
        note = "by transformers' names of the layers"
        if set(names) == ALL_LINEARS and name == "target_modules":
            return Setting(key=key, value="all-linear", sources=(source,))
        return Setting(key=key, value=names, sources=(source,), note=note)
    if name in ("rank", "alpha"):
        value = int(value) if name == "rank" else float(value)
    if name == "exclude_modules" and isinstance(value, str):
        value = [value]
    return Setting(key=key, value=value, sources=(source,))


def no_adapters(verl: VerlConfig, model: str) -> Findings:
    """Says of each LoRA key that there are no adapters."""
    for key in verl.given:
        name = key.removeprefix(f"{model}.")
        if key.startswith(f"{model}.") and name.startswith(("lora", "target_modules", "exclude_modules")):
            yield Remark(source=key, reason="there are no adapters (the rank is 0)", needed=False)


def translate_optim(
    verl: VerlConfig, group: str, ours: str, total_steps: int | None, *, engine: str, clip: str | None = None
) -> Findings:
    """Translates an optimizer and its schedule.

    Args:
        verl: Values that the run was given.
        group: Key of verl's optimizer, such as ``critic.optim``.
        ours: Key of ours, such as ``model.actor.optim``.
        total_steps: Steps of the run, if they are known.
        engine: Strategy of the run, ours.
        clip: verl's older key of the largest gradient norm, which stands beside the optimizer.
    """
    for name in ("lr", "weight_decay"):
        yield Setting(key=f"{ours}.{name}", value=verl.number(f"{group}.{name}"), sources=(f"{group}.{name}",))
    if engine == "fsdp":
        note = "verl's FSDP decays all weights, its Megatron spares norms and biases"
        yield Setting(key=f"{ours}.decay_norms_and_biases", value=True, sources=(), note=note)
    yield Setting(key=f"{ours}.betas", value=verl.numbers(f"{group}.betas"), sources=(f"{group}.betas",))
    norm = verl.first(*((clip,) if clip else ()), f"{group}.clip_grad")
    sources = tuple(key for key in (clip, f"{group}.clip_grad") if key in verl.given and (key == norm))
    yield Setting(key=f"{ours}.max_grad_norm", value=verl.number(norm), sources=sources or (norm,))
    if clip and norm == clip and f"{group}.clip_grad" in verl.given:
        yield Remark(source=f"{group}.clip_grad", reason=f"`{clip}` says how far gradients are clipped", needed=False)
    yield from translate_schedule(verl, group, ours, total_steps)


def translate_schedule(verl: VerlConfig, group: str, ours: str, total_steps: int | None) -> Findings:
    """Translates warm-up and decay of the learning rate."""
    shape = verl.first(f"{group}.warmup_style", f"{group}.lr_decay_style", f"{group}.lr_scheduler_type")
    name = str(verl[shape] or "constant")
    if name in SCHEDULES and (name == "constant" or total_steps):
        yield Setting(key=f"{ours}.schedule", value=SCHEDULES[name], sources=(shape,))
    elif name in SCHEDULES:
        reason = f"set `{flag(ours)}.schedule: {name}` with `trainer.max_steps`, where the decay ends"
        yield Remark(source=shape, reason=reason)
    else:
        yield Remark(source=shape, reason="schedules are constant, linear and cosine")
    steps, ratio = f"{group}.lr_warmup_steps", f"{group}.lr_warmup_steps_ratio"
    if (verl[steps] or -1) > 0:
        yield Setting(key=f"{ours}.warmup_steps", value=verl.whole(steps), sources=(steps,))
    elif verl[ratio] and total_steps:
        yield Setting(key=f"{ours}.warmup_steps", value=int(verl[ratio] * total_steps), sources=(ratio,))
    elif verl[ratio]:
        yield Remark(source=ratio, reason=f"set `{flag(ours)}.warmup_steps` to this share of the run's steps")
    minimum = verl.first(f"{group}.min_lr", f"{group}.min_lr_ratio")
    share = float(verl[minimum] or 0.0) / (verl.number(f"{group}.lr") if minimum.endswith("min_lr") else 1.0)
    if share:
        yield Setting(key=f"{ours}.min_lr_ratio", value=share, sources=(minimum,))
