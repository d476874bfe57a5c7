"""Translates a PPO configuration of verl: data, rewards, rollout, updates, and everything that it is made of."""

from __future__ import annotations

from typing import Any

from verl_lightning.migrate.algorithms import (
    ALGORITHM_DEFAULTS,
    SEQUENCE_MEANS,
    translate_advantage,
    translate_correction,
    translate_kl,
    translate_loss,
)
from verl_lightning.migrate.engines import (
    ENGINE_DEFAULTS,
    engine_name,
    other_roles,
    recompute_key,
    sharing_ranks,
    translate_async_save,
    translate_fsdp,
    translate_launch,
    translate_megatron,
    translate_strategy,
)
from verl_lightning.migrate.models import MODEL_DEFAULTS, OPTIM_DEFAULTS, translate_model, translate_optim
from verl_lightning.migrate.parts import Findings, Remark, Setting, VerlConfig, at_home
from verl_lightning.migrate.runs import (
    TRAINER_DEFAULTS,
    total_steps,
    translate_callbacks,
    translate_length,
    translate_loggers,
    translate_profiler,
)

ROLE = "actor_rollout_ref"
ACTOR, ROLLOUT = f"{ROLE}.actor", f"{ROLE}.rollout"
DEFAULTS: dict[str, Any] = (
    ALGORITHM_DEFAULTS
    | TRAINER_DEFAULTS
    | {f"{group}.{key}": value for group in (f"{ROLE}.model", "critic.model") for key, value in MODEL_DEFAULTS.items()}
    | {f"{group}.{key}": value for group in (f"{ACTOR}.optim", "critic.optim") for key, value in OPTIM_DEFAULTS.items()}
    | {
        f"{ACTOR}.{group}.{key}": value
        for group in ("fsdp_config", "megatron")
        for key, value in ENGINE_DEFAULTS.items()
    }
    | {
        f"{ACTOR}.optim.lr": 1e-6,
        f"{ACTOR}.use_dynamic_bsz": False,
        f"{ACTOR}.ulysses_sequence_parallel_size": 1,
        "critic.optim.lr": 1e-5,
        f"{ACTOR}.strategy": "fsdp",
        f"{ACTOR}.ppo_mini_batch_size": 256,
        f"{ACTOR}.ppo_max_token_len_per_gpu": 16384,
        f"{ACTOR}.ppo_epochs": 1,
        f"{ACTOR}.loss_agg_mode": "token-mean",
        f"{ACTOR}.entropy_coeff": 0,
        "critic.cliprange_value": 0.5,
        "data.train_files": "~/data/rlhf/gsm8k/train.parquet",
        "data.val_files": "~/data/rlhf/gsm8k/test.parquet",
        "data.train_batch_size": 1024,
        "data.max_prompt_length": 512,
        "data.max_response_length": 512,
        "data.truncation": "error",
        "data.shuffle": True,
        "data.filter_overlong_prompts": False,
        f"{ROLLOUT}.name": "vllm",
        f"{ROLLOUT}.n": 1,
        f"{ROLLOUT}.temperature": 1.0,
        f"{ROLLOUT}.top_p": 1.0,
        f"{ROLLOUT}.top_k": -1,
        f"{ROLLOUT}.do_sample": True,
        f"{ROLLOUT}.gpu_memory_utilization": 0.5,
        f"{ROLLOUT}.enforce_eager": False,
        f"{ROLLOUT}.multi_turn.enable": False,
        f"{ACTOR}.checkpoint.async_save": False,
        f"{ROLLOUT}.free_cache_engine": True,
        f"{ROLLOUT}.tensor_model_parallel_size": 2,
        f"{ROLLOUT}.val_kwargs.n": 1,
        f"{ROLLOUT}.val_kwargs.temperature": 0,
        f"{ROLLOUT}.val_kwargs.top_p": 1.0,
        f"{ROLLOUT}.val_kwargs.top_k": -1,
        f"{ROLLOUT}.val_kwargs.do_sample": False,
    }
)
"""verl's own values of the keys that make a setting."""

OVERLONG = (
    "reward.reward_kwargs.overlong_buffer_cfg",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward_model.overlong_buffer",
)
"""Keys under which verl says what long responses cost, the newest first."""


def translate_ppo(verl: VerlConfig) -> Findings:
    """Translates everything that a PPO run of verl's says."""
    actor = "model.init_args.actor"
    engine, source = engine_name(verl, "model_engine", f"{ACTOR}.strategy")
    steps = total_steps(verl)
    yield Setting(key="model.class_path", value="PPOModule", sources=())
    yield from translate_launch(verl)
    yield from translate_length(verl)
    yield from translate_callbacks(verl, rollout=True)
    yield from translate_loggers(verl)
    yield from translate_profiler(verl)
    yield from translate_strategy(engine, source)
    yield from translate_async_save(verl, f"{ACTOR}.checkpoint.async_save", engine)
    group = f"{ACTOR}.megatron" if engine == "megatron" else f"{ACTOR}.fsdp_config"
    yield from translate_megatron(verl, group) if engine == "megatron" else translate_fsdp(verl, group, actor)
    parts = ("megatron",) if engine == "megatron" else ("fsdp_config", "fsdp")
    yield from other_roles(verl, tuple(f"{role}.{part}" for role in (f"{ROLE}.ref", "critic") for part in parts), group)
    yield from translate_model(verl, f"{ROLE}.model", actor, recomputed_by=recomputed_by(verl, engine))
    clip = f"{ACTOR}.grad_clip"
    yield from translate_optim(verl, f"{ACTOR}.optim", f"{actor}.optim", steps, engine=engine, clip=clip)
    yield from translate_advantage(verl)
    yield from translate_critic(verl, steps, engine)
    yield from translate_loss(verl)
    yield from translate_kl(verl)
    yield from translate_correction(verl)
    yield from translate_updates(verl, 1 if engine == "megatron" else sharing_ranks(verl, group))
    yield from translate_filter(verl)
    yield from translate_prompts(verl)
    yield from translate_reward(verl)
    yield from translate_shaping(verl)
    yield from translate_rollout(verl)
    yield from translate_turns(verl)


def translate_turns(verl: VerlConfig) -> Findings:
    """Tells what `rollout.environment` needs for conversations with tools, which only the user knows."""
    group = f"{ROLLOUT}.multi_turn"
    if not verl[f"{group}.enable"]:
        return
    turns = verl[f"{group}.max_assistant_turns"] or verl[f"{group}.max_user_turns"]
    most = f" and `--rollout.episodes.max_turns {int(turns)}`" if isinstance(turns, (int, float)) else ""
    reason = "give your tools, or an `Environment`, by `--rollout.environment` (docs/agents.md)" + most
    yield Remark(source=f"{group}.enable", reason=reason)
    for key in verl.given:
        if key.startswith(f"{group}.") and key != f"{group}.enable" and verl[key] not in (None, ""):
            yield Remark(source=key, reason="a part of `rollout.environment`, which needs your tools")


def recomputed_by(verl: VerlConfig, engine: str) -> str | None:
    """Returns the key of Megatron's own recomputation, where it trains and recomputes."""
    return recompute_key(verl, f"{ACTOR}.megatron.override_transformer_config") if engine == "megatron" else None


def translate_critic(verl: VerlConfig, steps: int | None, engine: str) -> Findings:
    """Translates the value model, where the estimator needs one."""
    if str(verl["algorithm.adv_estimator"]).lower() != "gae":
        for key in verl.given:
            if key.startswith("critic.") or key == "trainer.critic_warmup":
                yield Remark(source=key, reason="the estimator needs no critic", needed=False)
        return
    critic = "model.init_args.critic"
    yield from translate_model(verl, "critic.model", f"{critic}.model", recomputed_by=recomputed_by(verl, engine))
    optim = ("critic.optim", f"{critic}.model.optim", steps)
    yield from translate_optim(verl, *optim, engine=engine, clip="critic.grad_clip")
    clip, epochs = "critic.cliprange_value", verl.first("critic.ppo_epochs", f"{ACTOR}.ppo_epochs")
    yield Setting(key=f"{critic}.value_clip", value=verl.number(clip), sources=(clip,))
    yield Setting(key=f"{critic}.epochs", value=verl.whole(epochs), sources=(epochs,))
    warmup = "trainer.critic_warmup"
    yield Setting(key=f"{critic}.warmup_steps", value=verl.whole(warmup), sources=(warmup,))
    shared = ("ppo_mini_batch_size", "ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz",
              "ppo_max_token_len_per_gpu", "loss_agg_mode")  # fmt: skip
    for name in shared:
        key = f"critic.{name}"
        if key in verl.given:
            needed = is_in_use(verl, name) and verl[f"{ACTOR}.{name}"] not in (None, verl[key])
            yield Remark(source=key, reason=f"the critic follows `{ACTOR}.{name}`", needed=needed)


def is_in_use(verl: VerlConfig, name: str) -> bool:
    """Tells whether the critic reads this size of its batches."""
    if verl[f"critic.{name}"] is None:
        return False
    return bool(verl[f"{ACTOR}.use_dynamic_bsz"]) if name == "ppo_max_token_len_per_gpu" else True


def translate_updates(verl: VerlConfig, sharing: int) -> Findings:
    """Translates the optimizer steps of an iteration and their batches; ``sharing`` ranks share a sequence."""
    group = "model.init_args.update"
    for name, ours in (("ppo_mini_batch_size", "mini_batch_size"), ("ppo_epochs", "epochs")):
        key = f"{ACTOR}.{name}"
        if isinstance(verl[key], (int, float)):
            yield Setting(key=f"{group}.{ours}", value=verl.whole(key), sources=(key,))
        else:
            yield Remark(source=key, reason=f"its value is known to the shell only: set `model.update.{ours}`")
    dynamic, budget = f"{ACTOR}.use_dynamic_bsz", f"{ACTOR}.ppo_max_token_len_per_gpu"
    micro = verl.first(f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ACTOR}.ppo_micro_batch_size")
    if verl[dynamic] and isinstance(verl[budget], (int, float)):
        tokens = verl.whole(budget) * sharing
        yield Setting(key=f"{group}.max_tokens_per_micro_batch", value=tokens, sources=(dynamic, budget))
    elif isinstance(verl[micro], (int, float)):
        note = "" if micro.endswith("per_gpu") else "verl's is of all GPUs, ours of one"
        yield Setting(key=f"{group}.micro_batch_size", value=verl.whole(micro), sources=(micro,), note=note)
    aggregation, entropy = f"{ACTOR}.loss_agg_mode", f"{ACTOR}.entropy_coeff"
    loss = verl[f"{ACTOR}.policy_loss.loss_mode"]
    fixed = loss in SEQUENCE_MEANS and verl[aggregation] != "seq-mean-token-mean"
    value, note = ("seq-mean-token-mean", f"verl's loss `{loss}` is always so") if fixed else (verl[aggregation], "")
    yield Setting(key=f"{group}.aggregation", value=value, sources=(aggregation,), note=note)
    yield Setting(key=f"{group}.entropy_coef", value=verl.number(entropy), sources=(entropy,))


def translate_filter(verl: VerlConfig) -> Findings:
    """Translates the filter that trains on groups with signal only."""
    enable, batches = "algorithm.filter_groups.enable", "algorithm.filter_groups.max_num_gen_batches"
    if verl[enable]:
        most = int(verl[batches]) if isinstance(verl[batches], (int, float)) and verl[batches] > 0 else 10
        target = "model.init_args.dynamic_sampling.max_batches"
        yield Setting(key=target, value=most, sources=(enable, batches) if batches in verl.given else (enable,))


def translate_prompts(verl: VerlConfig) -> Findings:
    """Translates the files of prompts, their order, lengths and batches."""
    group = "data.init_args"
    yield Setting(key="data.class_path", value="PromptDataModule", sources=())
    for name in ("train_files", "val_files"):
        yield Setting(key=f"{group}.{name}", value=at_home(verl[f"data.{name}"]), sources=(f"data.{name}",))
    yield Setting(
        key=f"{group}.prompts_per_step", value=verl.whole("data.train_batch_size"), sources=("data.train_batch_size",)
    )
    validation = verl["data.val_batch_size"]
    value = int(validation) if isinstance(validation, (int, float)) else verl.whole("data.train_batch_size")
    note = "" if validation else "verl takes the whole set at once; here a training batch's number at a time"
    yield Setting(key=f"{group}.val_batch_size", value=value, sources=("data.val_batch_size",), note=note)
    key = "data.max_prompt_length"
    yield Setting(key=f"{group}.max_prompt_length", value=verl.whole(key), sources=(key,))
    yield from translate_overlong(verl, group)
    yield Setting(key=f"{group}.shuffle", value=bool(verl["data.shuffle"]), sources=("data.shuffle",))
    if isinstance(verl["data.seed"], (int, float)):
        yield Setting(key="seed_everything", value=verl.whole("data.seed"), sources=("data.seed",))


def translate_overlong(verl: VerlConfig, group: str) -> Findings:
    """Translates the treatment of prompts that are too long."""
    drop, truncation = "data.filter_overlong_prompts", "data.truncation"
    if verl[drop]:
        yield Setting(key=f"{group}.overlong", value="drop", sources=(drop,))
        if truncation in verl.given:
            yield Remark(source=truncation, reason="longer prompts are dropped before", needed=False)
        return
    cut = verl[truncation] != "error"
    note = "" if verl[truncation] in ("error", "left") else "prompts are cut at their beginning, as verl's `left` does"
    yield Setting(key=f"{group}.overlong", value="truncate" if cut else "error", sources=(truncation,), note=note)


def translate_reward(verl: VerlConfig) -> Findings:
    """Translates the function that judges responses."""
    path = verl.first("reward.custom_reward_function.path", "custom_reward_function.path")
    name = path.removesuffix("path") + "name"
    target = "model.init_args.reward.function"
    if verl[path]:
        function = f"{verl[path]}:{verl[name] or 'compute_score'}"
        note = "called as verl does, in worker processes: see docs/extending.md"
        yield Setting(key=target, value=function, sources=(path, name) if name in verl.given else (path,), note=note)
        return
    files = str(verl["data.train_files"]).lower()
    value = "math" if "math" in files and "gsm8k" not in files else "gsm8k"
    note = "guessed from the files' names: verl chooses by each row's `data_source`"
    yield Setting(key=target, value=value, sources=("data.train_files",), note=note)
    for key in (path, name, "reward.custom_reward_function.name", "custom_reward_function.name"):
        if key in verl.given:
            yield Remark(source=key, reason="no reward function of its own is given", needed=False)


def translate_shaping(verl: VerlConfig) -> Findings:
    """Translates the penalty on long responses, by verl's key or one of its older ones."""
    group = next((place for place in OVERLONG if verl[f"{place}.enable"]), None)
    if group is None:
        return
    length, factor = f"{group}.len", f"{group}.penalty_factor"
    ours = "model.init_args.shaping"
    yield Setting(key=f"{ours}.overlong_buffer", value=verl.whole(length), sources=(f"{group}.enable", length))
    if verl[factor] is not None:
        yield Setting(key=f"{ours}.overlong_penalty", value=verl.number(factor), sources=(factor,))
    limit = f"{group.rpartition('.')[0]}.max_resp_len"
    if limit in verl.given:
        differs = verl[limit] != verl["data.max_response_length"]
        yield Remark(source=limit, reason="the limit is `rollout.sampling.max_new_tokens`", needed=differs)


def translate_rollout(verl: VerlConfig) -> Findings:
    """Translates the rollout engine, and how it samples."""
    key = f"{ROLLOUT}.name"
    name = str(verl[key])
    ours = "HFRollout" if name == "hf" else "VLLMRollout"
    note = "" if name in ("hf", "vllm", "???") else f"there is no engine {name}; vLLM in its place"
    yield Setting(key="rollout.class_path", value=ours, sources=(key,), note=note)
    yield from translate_sampling(verl, ROLLOUT, "rollout.init_args.sampling")
    yield from translate_sampling(verl, f"{ROLLOUT}.val_kwargs", "rollout.init_args.val_sampling")
    if ours == "VLLMRollout":
        options = {"gpu_memory_utilization": "gpu_memory_utilization", "enforce_eager": "enforce_eager",
                   "free_cache_engine": "sleeps", "tensor_model_parallel_size": "tensor_parallel_size"}  # fmt: skip
        for verl_name, option in options.items():
            source = f"{ROLLOUT}.{verl_name}"
            if verl[source] is not None:
                yield Setting(key=f"rollout.init_args.{option}", value=verl[source], sources=(source,))


def translate_sampling(verl: VerlConfig, group: str, ours: str) -> Findings:
    """Translates the sampling of responses."""
    greedy = not verl[f"{group}.do_sample"]
    length = "data.max_response_length"
    yield Setting(key=f"{ours}.num_samples", value=verl.whole(f"{group}.n"), sources=(f"{group}.n",))
    yield Setting(key=f"{ours}.max_new_tokens", value=verl.whole(length), sources=(length,))
    heat = (f"{group}.do_sample", f"{group}.temperature")
    yield Setting(key=f"{ours}.temperature", value=0.0 if greedy else verl.number(heat[1]), sources=heat)
    yield Setting(key=f"{ours}.top_p", value=verl.number(f"{group}.top_p"), sources=(f"{group}.top_p",))
    top_k = max(0, verl.whole(f"{group}.top_k"))
    yield Setting(key=f"{ours}.top_k", value=top_k, sources=(f"{group}.top_k",))
