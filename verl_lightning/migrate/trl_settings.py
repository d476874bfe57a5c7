"""Makes our settings of TRL's options."""

from __future__ import annotations

from verl_lightning.migrate.models import lora_setting
from verl_lightning.migrate.parts import Findings, Remark, Setting, VerlConfig, at_home, flag, nested
from verl_lightning.migrate.report import Line, Migration, choices_of, describe, is_unknown
from verl_lightning.migrate.trl import TRLRun
from verl_lightning.migrate.trl_keys import MISSING, NOTHING, OFF

ACTOR = "model.init_args.actor"
AGGREGATIONS = {"dapo": "token-mean", "bnpo": "token-mean", "cispo": "token-mean", "vespo": "token-mean",
                "grpo": "seq-mean-token-mean", "sapo": "seq-mean-token-mean", "dr_grpo": "seq-mean-token-sum-norm",
                "luspo": "seq-mean-token-sum"}  # fmt: skip
REWARDS = {"accuracy_reward": "math", "think_format_reward": "tag_format"}
SCHEDULES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "constant_with_warmup": "constant"}


def migrate_trl(run: TRLRun) -> Migration:
    """Translates what a run of TRL's was given."""
    config = run.config
    known = {key: value for key, value in run.given.items() if not is_unknown(value)}
    config = VerlConfig(known, config.defaults)
    translate = translate_grpo if run.method == "grpo" else translate_sft
    findings = [*translate_shared(config, run.method), *translate(config)]
    settings = [finding for finding in findings if isinstance(finding, Setting)]
    remarks = [finding for finding in findings if isinstance(finding, Remark)]
    remarks += [remark_on(key, value) for key, value in known.items()]
    lines = [describe(key, value, settings, remarks) if key in known else unknown_line(key, value)
             for key, value in run.given.items()]  # fmt: skip
    ours = nested({setting.key: setting.value for setting in settings})
    unasked = [each for each in settings if each.note and not each.sources]
    choices: dict[str, list[str]] = {f"`{flag(each.key)}: {each.value}`: {each.note}": [] for each in unasked}
    return Migration(settings=ours, lines=lines, origin="TRL", choices=choices | choices_of(run.notes, run.given))


def unknown_line(key: str, value: object) -> Line:
    """Makes the line of an option whose value only a shell knows."""
    words = f"its value is known to the shell only: give `{key}=VALUE` behind the file"
    return Line(key=key, value=value, fate="not supported", words=words)


def remark_on(key: str, value: object) -> Remark:
    """Says why an option made no setting; one without an entry is not supported."""
    if key in NOTHING:
        return Remark(source=key, reason=NOTHING[key], needed=False)
    if key in MISSING:
        is_off = any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in OFF)
        return Remark(source=key, reason=f"off ({MISSING[key]})" if is_off else MISSING[key], needed=not is_off)
    return Remark(source=key, reason="this key is not known")


def translate_shared(trl: VerlConfig, method: str) -> Findings:
    """Translates what GRPO and SFT have in common: the model, its optimizer, and the run."""
    yield Setting(key="model.class_path", value="PPOModule" if method == "grpo" else "SFTModule", sources=())
    if not trl["model_name_or_path"]:
        raise ValueError(
            "TRL's `model_name_or_path` is not given. Give it behind the file: `model_name_or_path=MODEL`."
        )
    yield Setting(key=f"{ACTOR}.path", value=at_home(str(trl["model_name_or_path"])), sources=("model_name_or_path",))
    world = trl.whole("num_processes")
    yield Setting(key="trainer.devices", value=world, sources=("num_processes",))
    shards = "fsdp" in str(trl["config_file"]) or "zero" in str(trl["config_file"])
    strategy = "fsdp" if shards else "ddp" if world > 1 else "auto"
    yield Setting(key="trainer.strategy", value=strategy, sources=("config_file",))
    note = "float16 is not trained; bfloat16 in its place" if trl["fp16"] else ""
    mixed = bool(trl["bf16"] or trl["fp16"])
    yield Setting(
        key="trainer.precision", value="bf16-mixed" if mixed else "32-true", sources=("bf16", "fp16"), note=note
    )
    key = "torch_dtype" if "torch_dtype" in trl.given else "dtype"
    stored = "bfloat16" if str(trl[key]) in ("bfloat16", "bf16") else "float32"
    yield Setting(key=f"{ACTOR}.dtype", value=stored, sources=(key,))
    full = "full" if trl["gradient_checkpointing"] else "none"
    yield Setting(key=f"{ACTOR}.activation_checkpointing", value=full, sources=("gradient_checkpointing",))
    if trl["attn_implementation"]:
        value = str(trl["attn_implementation"]).split("/")[-1].replace("-", "_")
        yield Setting(key=f"{ACTOR}.attn_implementation", value=value, sources=("attn_implementation",))
    yield Setting(key="seed_everything", value=trl.whole("seed"), sources=("seed",))
    yield from translate_adapters(trl)
    yield from translate_run(trl, steps_of(trl, method), method)


def translate_adapters(trl: VerlConfig) -> Findings:
    """Translates LoRA."""
    names = {"rank": "lora_r", "alpha": "lora_alpha", "dropout": "lora_dropout",
             "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save"}  # fmt: skip
    if trl["use_peft"]:
        for ours, name in names.items():
            if trl[name] is not None:
                yield lora_setting(f"{ACTOR}.lora.{ours}", ours, trl[name], name)
    for name in ("use_peft", *names.values()):
        if name in trl.given and (name == "use_peft" or not trl["use_peft"]):
            reason = "adapters are trained: `model.actor.lora`" if trl["use_peft"] else "there are no adapters"
            yield Remark(source=name, reason=reason, needed=False)


def steps_of(trl: VerlConfig, method: str) -> int:
    """Returns the optimizer steps of one of our steps: an iteration of GRPO may have several, SFT's has one."""
    if method == "sft":
        return 1
    accumulated = trl.whole("gradient_accumulation_steps")
    generated = int(trl["steps_per_generation"] or accumulated)
    return max(1, generated // accumulated) * trl.whole("num_iterations")


def translate_run(trl: VerlConfig, inner: int, method: str) -> Findings:
    """Translates the optimizer, the length of the run, checkpoints and validation.

    Args:
        trl: Values of the run.
        inner: Optimizer steps, which TRL counts, of one of our steps.
        method: ``grpo`` or ``sft``.
    """
    optim = f"{ACTOR}.optim"
    for name, ours in (("learning_rate", "lr"), ("weight_decay", "weight_decay"), ("adam_epsilon", "eps"),
                       ("max_grad_norm", "max_grad_norm")):  # fmt: skip
        yield Setting(key=f"{optim}.{ours}", value=trl.number(name), sources=(name,))
    betas = ("adam_beta1", "adam_beta2")
    yield Setting(key=f"{optim}.betas", value=[trl.number(name) for name in betas], sources=betas)
    steps = -(-trl.whole("max_steps") // inner) if trl.number("max_steps") > 0 else None
    note = f"iterations, each of {inner} optimizer steps" if inner > 1 else ""
    if steps is not None:
        yield Setting(key="trainer.max_steps", value=steps, sources=("max_steps",), note=note)
    yield Setting(key="trainer.max_epochs", value=trl.whole("num_train_epochs"), sources=("num_train_epochs",))
    yield from translate_schedule(trl, optim, steps, inner)
    yield Setting(key="trainer.check_val_every_n_epoch", value=None, sources=())
    evaluates = trl["eval_strategy"] == "steps"
    target = ("trainer.val_check_interval", trl.whole("eval_steps")) if evaluates else ("trainer.limit_val_batches", 0)
    sources = ("eval_strategy", "eval_steps") if evaluates else ("eval_strategy",)
    yield Setting(key=target[0], value=target[1], sources=sources, note="" if evaluates else "no validation")
    if "eval_steps" in trl.given and not evaluates:
        yield Remark(source="eval_steps", reason="there is no validation", needed=False)
    every = max(1, trl.whole("save_steps") // inner)
    saved = [] if trl["save_strategy"] == "no" else [{"class_path": "ModelCheckpoint", "init_args": {
        "save_top_k": 0, "save_last": True, "every_n_train_steps": every}}]  # fmt: skip
    names = ["HFCheckpoint", "LearningRateMonitor", "PhaseProgressBar", *(["SamplesTable"] if method == "grpo" else [])]
    callbacks = [*saved, *({"class_path": name} for name in names)]
    yield Setting(key="trainer.callbacks", value=callbacks, sources=("save_steps", "save_strategy"))
    if trl["output_dir"]:
        yield Setting(key="trainer.default_root_dir", value=at_home(str(trl["output_dir"])), sources=("output_dir",))
    yield from translate_loggers(trl)


def translate_schedule(trl: VerlConfig, optim: str, steps: int | None, inner: int) -> Findings:
    """Translates warm-up and decay of the learning rate."""
    name = str(trl["lr_scheduler_type"])
    if name in SCHEDULES and (SCHEDULES[name] == "constant" or steps):
        yield Setting(key=f"{optim}.schedule", value=SCHEDULES[name], sources=("lr_scheduler_type",))
    elif name in SCHEDULES:
        reason = f"set `model.actor.optim.schedule: {name}` with `trainer.max_steps`, where the decay ends"
        yield Remark(source="lr_scheduler_type", reason=f"{reason}; it is constant until then")
    else:
        yield Remark(source="lr_scheduler_type", reason="schedules are constant, linear and cosine")
    warmup = trl.number("warmup_steps")
    share = trl.number("warmup_ratio") if warmup == 0 else warmup if warmup < 1 else 0.0
    key = "warmup_steps" if warmup else "warmup_ratio"
    if share and steps is None:
        yield Remark(source=key, reason="set `model.actor.optim.warmup_steps` to this share of the run's steps")
        return
    value = int(share * (steps or 0)) if share else -(-int(warmup) // inner)
    yield Setting(key=f"{optim}.warmup_steps", value=value, sources=("warmup_steps", "warmup_ratio"))


def translate_loggers(trl: VerlConfig) -> Findings:
    """Translates the loggers."""
    classes = {"wandb": "WandbLogger", "tensorboard": "TensorBoardLogger", "mlflow": "MLFlowLogger"}
    names = trl["report_to"] if isinstance(trl["report_to"], list) else [trl["report_to"]]
    found = [{"class_path": classes[name]} for name in names if name in classes]
    if found:
        yield Setting(key="trainer.logger", value=found, sources=("report_to",))
    elif "report_to" in trl.given:
        needed = any(name not in (None, "none") for name in names)
        yield Remark(source="report_to", reason="metrics go to the console and to a CSV file", needed=needed)


def translate_files(trl: VerlConfig) -> Findings:
    """Names the files of rows: TRL names a data set of a hub, or a script makes one."""
    yield Remark(source="dataset_name", reason="set `data.train_files` to files of this data set")
    name = str(trl["dataset_name"] or "train.jsonl")
    yield Setting(key="data.init_args.train_files", value=name, sources=(), note="a place-holder for your files")


def translate_sft(trl: VerlConfig) -> Findings:
    """Translates what only SFT has: chats, their batches, and what is supervised."""
    yield Setting(key="data.class_path", value="ChatDataModule", sources=())
    yield from translate_files(trl)
    batch, steps = "per_device_train_batch_size", "gradient_accumulation_steps"
    yield Setting(key="data.init_args.batch_size", value=trl.whole(batch), sources=(batch,))
    yield Setting(key="trainer.accumulate_grad_batches", value=trl.whole(steps), sources=(steps,))
    if trl["max_length"] is not None:
        yield Setting(key="data.init_args.max_length", value=trl.whole("max_length"), sources=("max_length",))
        yield Setting(key="data.init_args.overlong", value="truncate", sources=("truncation_mode",))
    yield Setting(key="data.init_args.shuffle", value=bool(trl["shuffle_dataset"]), sources=("shuffle_dataset",))
    every = bool(trl["assistant_only_loss"]) or trl["completion_only_loss"] is not False
    if "assistant_only_loss" in trl.given:
        note = "" if trl["assistant_only_loss"] else "TRL trains on all tokens of a chat; here on the assistant's alone"
        yield Setting(key="data.init_args.supervise", value="all", sources=("assistant_only_loss",), note=note)
    if "completion_only_loss" in trl.given:
        yield Remark(source="completion_only_loss", reason="the prompt is not trained on", needed=not every)
    if trl["loss_type"] != "nll":
        yield Remark(source="loss_type", reason="the loss is that of the next token (`nll`)")
    elif "loss_type" in trl.given:
        yield Remark(source="loss_type", reason="the loss is that of the next token", needed=False)


def translate_grpo(trl: VerlConfig) -> Findings:
    """Translates what only GRPO has."""
    yield from translate_batches(trl)
    yield from translate_policy_loss(trl)
    yield from translate_penalty(trl)
    yield from translate_correction(trl)
    yield from translate_rewards(trl)
    yield from translate_rollout(trl)
    scaled = str(trl["scale_rewards"]).lower()
    if scaled not in ("group", "true", "none", "false"):
        yield Remark(source="scale_rewards", reason="the deviation is that of the group; `group` in its place")
    normalize = scaled not in ("none", "false")
    advantage = "model.init_args.advantage"
    if trl["multi_objective_aggregation"] == "normalize_then_sum":
        yield Remark(
            source="multi_objective_aggregation", reason="set `model.advantage: GDPO` with the rewards' weights"
        )
    elif "multi_objective_aggregation" in trl.given:
        yield Remark(source="multi_objective_aggregation", reason="the sum is normalised, as here", needed=False)
    yield Setting(key=f"{advantage}.class_path", value="GRPO", sources=())
    yield Setting(key=f"{advantage}.init_args.normalize_by_std", value=normalize, sources=("scale_rewards",))


def translate_batches(trl: VerlConfig) -> Findings:
    """Translates batches: TRL counts responses on a process, we prompts over all ranks."""
    batch, steps, group = "per_device_train_batch_size", "gradient_accumulation_steps", trl.whole("num_generations")
    of_step = trl.whole(batch) * trl.whole(steps) * trl.whole("num_processes")
    generations = int(trl["steps_per_generation"] or trl.whole(steps))
    of_iteration = trl.whole(batch) * generations * trl.whole("num_processes")
    if of_step % group or of_iteration % of_step:
        raise ValueError(
            f"TRL's optimizer step has {of_step} responses, which are no whole groups of `num_generations: {group}`, or"
            f" an iteration of {of_iteration} responses has no whole steps. Give the run's batches behind the"
            f" file, such as `num_processes={group}`."
        )
    sources = (batch, steps, "num_generations", *(["steps_per_generation"] if trl["steps_per_generation"] else []))
    yield Setting(key="data.class_path", value="PromptDataModule", sources=())
    yield Setting(key="data.init_args.prompts_per_step", value=of_iteration // group, sources=sources)
    yield Setting(key="model.init_args.update.mini_batch_size", value=of_step // group, sources=sources)
    yield Setting(key="model.init_args.update.micro_batch_size", value=trl.whole(batch), sources=(batch,))
    yield Setting(key="model.init_args.update.epochs", value=trl.whole("num_iterations"), sources=("num_iterations",))
    yield Setting(key="data.init_args.shuffle", value=bool(trl["shuffle_dataset"]), sources=("shuffle_dataset",))
    yield Setting(key="data.init_args.val_batch_size", value=of_iteration // group, sources=())
    yield from translate_files(trl)
    key = "max_prompt_length"
    if trl[key] is not None:
        yield Setting(key=f"data.init_args.{key}", value=trl.whole(key), sources=(key,))
    else:
        note = "TRL has no limit; a longer prompt is an error here"
        yield Setting(key=f"data.init_args.{key}", value=4096, sources=(), note=note)


def translate_policy_loss(trl: VerlConfig) -> Findings:
    """Translates the loss and its mean."""
    kind, group = str(trl["loss_type"]), "model.init_args.policy_loss"
    if kind not in AGGREGATIONS:
        raise ValueError(f"TRL's `loss_type: {kind}` is not known here. There are {', '.join(AGGREGATIONS)}.")
    low, high = trl.number("epsilon"), float(trl["epsilon_high"] if trl["epsilon_high"] is not None else trl["epsilon"])
    sequences = trl["importance_sampling_level"] == "sequence"
    name = {"cispo": "CISPO", "sapo": "SAPO", "vespo": "VESPO"}.get(kind, "GSPO" if sequences else "PPOClip")
    options = {"clip_low": low, "clip_high": high}
    if name == "CISPO":
        options = {"clip_low": 1.0, "clip_high": high - 1}
    elif name == "PPOClip":
        options["dual_clip"] = float("inf") if trl["delta"] is None else trl.number("delta")
    elif name == "SAPO":
        options = {f"temperature_{long}": trl.number(f"sapo_temperature_{short}") for long, short in SIGNS}
    elif name == "VESPO":
        options = {f"{ours}_{long}": trl.number(f"vespo_{theirs}_{short}")
                   for long, short in SIGNS for ours, theirs in (("power", "k"), ("decay", "lambda"))}  # fmt: skip
    sources = ("loss_type", "epsilon", "epsilon_high", "delta", "importance_sampling_level",
               *(key for key in trl.given if key.startswith(("sapo_", "vespo_"))))  # fmt: skip
    yield Setting(key=f"{group}.class_path", value=name, sources=sources)
    yield Setting(key=f"{group}.init_args", value=options, sources=sources)
    if trl["delta"] is not None and (name != "PPOClip" or trl.number("delta") < 1 + high):
        yield Remark(source="delta", reason="a bound of `PPOClip` (`dual_clip`), above `1 + epsilon_high`")
    yield Setting(key="model.init_args.update.aggregation", value=AGGREGATIONS[kind], sources=("loss_type",))
    yield Setting(
        key="model.init_args.update.entropy_coef", value=trl.number("entropy_coef"), sources=("entropy_coef",)
    )
    if trl["mask_truncated_completions"]:
        yield Setting(key="model.init_args.shaping.mask_truncated", value=True, sources=("mask_truncated_completions",))


SIGNS = (("positive", "pos"), ("negative", "neg"))


def translate_penalty(trl: VerlConfig) -> Findings:
    """Translates the penalty for leaving the reference."""
    beta, corrected = trl.number("beta"), "use_bias_correction_kl"
    value = {"place": "loss", "coef": beta, "estimator": "k3"} if beta else None
    yield Setting(key="model.init_args.kl", value=value, sources=("beta",))
    if beta and trl[corrected]:
        source = corrected if corrected in trl.given else "beta"
        reason = "TRL weighs its KL by the importance ratio (`use_bias_correction_kl`); here it is not weighed"
        yield Remark(
            source=source, reason=f"{reason}: take `model.kl.estimator: k3_straight_through` for a right gradient"
        )


def translate_correction(trl: VerlConfig) -> Findings:
    """Translates the correction of the difference between the engine's policy and the trainer's."""
    mode, cap = str(trl["vllm_importance_sampling_mode"]), "vllm_importance_sampling_clip_max"
    keys = ("vllm_importance_sampling_correction", "vllm_importance_sampling_mode", cap)
    if not trl["use_vllm"] or not trl[keys[0]]:
        for key in keys:
            if key in trl.given:
                yield Remark(source=key, reason="nothing is corrected", needed=False)
        return
    most = trl.number(cap)
    level = mode.partition("_")[0]
    value = {
        "sequence_mask": {"class_path": "SequenceMask", "init_args": {"cap": most}},
        "token_mask": {"class_path": "IcePop", "init_args": {"low": 0.0, "high": most}},
    }.get(mode, {"class_path": "TruncatedImportanceSampling", "init_args": {"level": level, "cap": most}})
    yield Setting(key="model.init_args.corrections", value=[value], sources=keys)
    if trl["vllm_importance_sampling_clip_min"] is not None:
        yield Remark(source="vllm_importance_sampling_clip_min", reason="set `low` of the correction, where it has one")


def translate_rewards(trl: VerlConfig) -> Findings:
    """Translates the reward functions and their weights."""
    names, weights = trl["reward_funcs"], trl["reward_weights"]
    names = [names] if isinstance(names, str) else list(names or [])
    if not names:
        raise ValueError(
            "TRL's `reward_funcs` is not given, as a Python script gives it. Name the functions behind the file:"
            " `reward_funcs=[my_rewards.accuracy]`."
        )
    functions = [REWARDS.get(str(name), str(name)) for name in names]
    note = "like TRL's, not equal" if any(name in REWARDS for name in names) else ""
    if len(functions) == 1 and not weights:
        yield Setting(key="model.init_args.reward.function", value=functions[0], sources=("reward_funcs",), note=note)
        return
    factors = weights or [1.0] * len(functions)
    parts = [{"function": name, "weight": float(w)} for name, w in zip(functions, factors, strict=True)]
    yield Setting(
        key="model.init_args.reward.functions", value=parts, sources=("reward_funcs", "reward_weights"), note=note
    )


def translate_rollout(trl: VerlConfig) -> Findings:
    """Translates the engine and its sampling."""
    mode = "" if trl["vllm_mode"] == "colocate" or not trl["use_vllm"] else "engines run in the training processes here"
    name = "VLLMRollout" if trl["use_vllm"] else "HFRollout"
    yield Setting(key="rollout.class_path", value=name, sources=("use_vllm", "vllm_mode"), note=mode)
    sampling = "rollout.init_args.sampling"
    for theirs, ours in (("num_generations", "num_samples"), ("max_completion_length", "max_new_tokens"),
                         ("top_k", "top_k")):  # fmt: skip
        yield Setting(key=f"{sampling}.{ours}", value=max(0, int(trl[theirs] or 0)), sources=(theirs,))
    for name in ("temperature", "top_p"):
        yield Setting(key=f"{sampling}.{name}", value=trl.number(name), sources=(name,))
    for theirs, ours in (("vllm_gpu_memory_utilization",) * 2, ("vllm_tensor_parallel_size",) * 2):
        if trl["use_vllm"]:
            key = f"rollout.init_args.{ours.removeprefix('vllm_')}"
            yield Setting(key=key, value=trl[theirs], sources=(theirs,))
        elif theirs in trl.given:
            yield Remark(source=theirs, reason="vLLM does not sample", needed=False)
