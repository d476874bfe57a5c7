"""Keys of verl's that make no setting here, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from verl_lightning.migrate.parts import Remark

OFF = (None, False, 0, -1, "", "null", "none", "None", "disabled", "???")
"""Values with which a feature of verl's is off."""

UNKNOWN_KEY = "this key is not known"
"""Reason that is given for a key without an entry."""


@dataclass(frozen=True)
class LeftOut:
    """A key, or a pattern of keys, without a setting."""

    pattern: str
    """verl's key, with ``*`` for any text."""

    reason: str
    """Reason that the key makes no setting."""

    needed: bool = False
    """True if a run that uses the feature would differ here."""

    off: tuple[Any, ...] = OFF
    """Values with which the feature isn't used."""

    otherwise: str = ""
    """Reason that is given for values in `off`; empty says that the feature is off."""


def needless(reason: str, *patterns: str) -> list[LeftOut]:
    """Returns entries for keys that a run does without."""
    return [LeftOut(pattern, reason) for pattern in patterns]


def missing(reason: str, *patterns: str, off: tuple[Any, ...] = ()) -> list[LeftOut]:
    """Returns entries for keys whose feature isn't here; with the values in ``off`` it isn't used."""
    return [LeftOut(pattern, reason, needed=True, off=(*OFF, *off)) for pattern in patterns]


OWN_FILES = (
    *(f"{engine}_{role}" for engine in ("dp", "megatron") for role in ("actor", "critic", "ref")),
    "actor", "critic", "ref", "rollout", "hf_model", "legacy_data", "legacy_reward_impl", "reward",
    "rollout_correction", "distillation", "transfer_queue", "profiler", "fsdp", "megatron", "dp", "ppo_trainer",
    "ppo_megatron_trainer", "sft_trainer", "sft_trainer_engine",
)  # fmt: skip
"""Names of verl's own files, which a `defaults` list may give."""

LEFT_OUT: list[LeftOut] = [
    *missing("training and sampling take turns; `rollout.max_staleness` has them go on side by side",
             "async_training.*", "rollout.*"),
    *missing("of an engine that isn't here: see `fsdp` and `megatron` in `verl-fit fit --help all`",
             "*.mindspeed.*", "*.actor.engine.*", "*.ref.engine.*", "critic.engine.*", "*.actor.model_engine",
             "engine.?p", "engine.?p_size", "engine.etp", "engine.vpp", "engine.distributed_strategy",
             "engine.impl_cfg.*", "engine.attention_backend_override"),
    *missing("`trainer.precision` says the types", "*.mixed_precision.*", "*.mixed_precision",
             off=("bf16", "bfloat16", "fp32", "float32")),
    *missing("tokens of several turns are kept by `rollout.environment`", "data.continuous_token.*"),
    *missing("the learning rate starts at 0", "*optim.init_lr_ratio", "*optim.lr_warmup_init"),
    *needless("names a class of verl's", "_target_", "*._target_"),
    *needless("each recorded step has a trace of its own, of all roles: see `profile`", "*.profiler.*",
              "global_profiler.*", "profiler.*", "trainer.profile_*"),
    *missing("rewards are functions; no reward model is served", "reward_model.enable", "reward.reward_model.enable"),
    *needless("`model.shaping` says what long responses cost", "*.overlong_buffer*"),
    *(LeftOut(key, "rewards are functions: see `model.reward`", needed=True, off=(*OFF, "naive", "dapo"),
              otherwise="`model.reward` judges, and `model.shaping` says what long responses cost")
      for key in ("reward.reward_manager.name", "reward_model.reward_manager")),
    *missing("rewards are functions: see `model.reward`", "reward_model.reward_kwargs*",
             "reward_model.reward_loop_*", off=({},)),
    *missing("no sandbox; run one from your reward function", "reward_model.sandbox_fusion.url"),
    *needless("of a reward model: see its `enable`", "reward_model.*", "reward.reward_model.*"),
    *missing("steps are not skipped", "skip.*.enable"),
    *needless("of skipping, which is off", "skip.*"),
    *missing("no distillation from teachers", "distillation.enabled"),
    *needless("of distillation, which is off", "distillation.*"),
    *missing("rollouts stay in the training processes", "transfer_queue.enable"),
    *needless("of the queue, which is off", "transfer_queue.*"),
    *needless("the reference is not trained", "*.ref.optim.*"),
    *missing("of an engine that isn't here: see `fsdp` and `megatron` in `verl-fit fit --help all`", "*.veomni.*",
             "*.torchtitan.*", "*.automodel.*", off=()),
    *needless("one implementation of workers", "use_legacy_worker_impl", "trainer.use_legacy_worker_impl"),
    *needless("chooses Hydra files of verl's; `trainer.strategy` chooses here", "model_engine", "optim", "model",
              "engine", "*@*"),
    *missing("one trainer, which samples and learns in turns", "trainer.v1.*",
             off=("sync", 1, 4, 8, 0.4, 0.05, 0.03, 2, 3, True, "drop")),
    *needless("one trainer", "trainer.use_v1"),
    *needless("weights always travel to the engine one tensor at a time", "*.layered_summon", "*.load_format"),
    *needless("sampling and scoring share `model.update`'s micro-batches", "*.log_prob_*", "critic.forward_*"),
    *needless("log-probs of the engine are always kept", "*.rollout.calculate_log_probs"),
    *needless("`VLLMRollout` runs in the training processes", "*.rollout.mode", "*.hybrid_engine",
              "*.rollout.agent.num_workers",
              "*.rollout.agent.default_agent_loop", "*.rollout.nnodes", "*.rollout.n_gpus_per_node",
              "*.rollout.checkpoint_engine.*", "*.rollout.skip_tokenizer_init", "*.rollout.multi_stage_wake_up"),
    *needless("each response has a seed of its own, from `seed_everything`", "*.seed", "*.data_loader_seed",
              "*.full_determinism"),
    *needless("lengths follow from the data's and the sampling's", "*.rollout.prompt_length",
              "*.rollout.response_length", "*.rollout.max_model_len"),
    *needless("vLLM's own value is kept", "*.rollout.max_num_batched_tokens", "*.rollout.max_num_seqs",
              "*.rollout.enable_chunked_prefill", "*.rollout.enable_prefix_caching", "*.rollout.disable_log_stats",
              "*.rollout.scheduling_policy", "*.rollout.cudagraph_capture_sizes", "*.rollout.logprobs_mode"),
    *needless("the engine computes in `trainer.precision`", "*.rollout.dtype"),
    LeftOut("defaults.*", "this file is not there: put it beside the one that names it, or give the configuration that"
            " a run has saved", needed=True, off=OWN_FILES, otherwise="a file of verl's own, whose values are known"),
    *needless("Hydra's own", "hydra.*"),
    *missing("an engine is shared by tensors alone, with `VLLMRollout`", "*.rollout.tensor_model_parallel_size",
             "*.rollout.data_parallel_size", "*.rollout.expert_parallel_size",
             "*.rollout.pipeline_model_parallel_size", off=(1,)),
    *missing("agent loops and tools are `rollout.environment` here: see docs/agents.md",
             "*.rollout.agent.agent_loop_config_path", "*.rollout.agent.custom_async_server.*", "data.tool_config_path",
             "data.function_tool_path"),
    *needless("of turns with tools, which are off", "*.rollout.multi_turn.*"),
    *missing("options of another engine", "*.rollout.engine_kwargs*", off=({},)),
    *missing("no trace of rollouts; `SamplesTable` logs samples", "*.rollout.trace.backend"),
    *needless("of a trace, which is off", "*.rollout.trace.*"),
    *missing("the engine serves no metrics", "*.rollout.prometheus.enable"),
    *needless("of metrics that are not served", "*.rollout.prometheus.*"),
    *missing("prefill and decoding share a GPU", "*.rollout.disaggregation.enabled"),
    *needless("of disaggregation, which is off", "*.rollout.disaggregation.*"),
    *needless("there are no adapters or weights in 4 bits", "*.rollout.qat"),
    *missing("not an option of the engine here", "*.rollout.*", off=(0, 256)),
    *needless("follows the actor's", "*.rollout_n", "*.ref.strategy", "critic.strategy", "critic.enable",
              "*.strategy", "*.ref.log_prob_*"),
    *needless("only log-probs are kept in memory: the loss never holds all logits", "*.entropy_from_logits*",
              "*.entropy_checkpointing", "*.calculate_entropy", "*.use_fused_kernels", "*.fused_kernel_options.*",
              "*.calculate_sum_pi_squared", "*.use_liger"),
    *needless("verl compiles its entropy with it; `fsdp.compile` compiles the model here", "*.use_torch_compile"),
    *needless("FSDP2 needs it no more", "*.wrap_policy*", "*.use_orig_params", "*.forward_prefetch",
              "*.use_no_sync_for_gradient_accumulation", "*.turbo_config.*", "*.forward_only"),
    *missing("models stay where they are; `fsdp.cpu_offload: true` keeps them in host memory", "*.param_offload",
             "*.optimizer_offload", "*.grad_offload"),
    *missing("one size for all models: the actor's decides, which is `fsdp.sequence_parallel_size`",
             "*.ulysses_sequence_parallel_size", "ulysses_sequence_parallel_size", "*.sp_size", off=(1,)),
    *needless("null or empty: Megatron's own value stands", "engine.*_parallel_size", "*.override_ddp_config",
              "*.override_transformer_config"),
    *needless("packing has no padding", "*.use_remove_padding", "use_remove_padding", "*.pad_to_length*",
              "*.pad_bshd_to_minibatch_max", "data.pad_mode"),
    *missing("no quantization-aware training", "*.qat.enable"),
    *needless("of quantization, which is off", "*.qat.*"),
    *needless("micro-batches are counted or by tokens, as `use_dynamic_bsz` says", "*.ppo_micro_batch_size*",
              "*.use_dynamic_bsz", "*.ppo_max_token_len_per_gpu"),
    *needless("ranks always share tokens evenly", "trainer.balance_batch", "data.balance_dp_token"),
    *missing("mini-batches keep the rollout's order", "*.actor.shuffle", "critic.shuffle"),
    *missing("the sum is divided by the longest response", "*.loss_scale_factor"),
    *needless("the tower of a model that reads images is frozen unless `model.actor.train_vision_tower` is set",
              "*.freeze_vision_tower", "*.freeze_vision_*"),
    *missing("the language model is always trained", "*.freeze_language_model"),
    *missing("name the column by `data.columns: {images: ...}`", "data.image_key", off=("images",)),
    *needless("a model's own processor says how images are read", "data.image_*", "data.return_multi_modal_inputs",
              "data.mm_processor_kwargs*"),
    *missing("name the column by `data.columns: {videos: ...}`", "data.video_key", off=("videos",)),
    *needless("rows with sound are refused", "data.audio_key"),
    *missing("prefixes of a group are not shared in training", "*.use_prefix_grouper"),
    *needless("AdamW, as verl's default", "*optim.optimizer", "*optim.optimizer_impl", "*optim.name"),
    *missing("not an option of the optimizer here", "*optim.override_optimizer_config*", "*optim.eps",
             off=({}, 1e-8)),
    *needless("schedules end at `trainer.max_steps`", "*.total_training_steps", "optim.total_training_steps",
              "*.lr_decay_steps"),
    *needless("of schedules and optimizers that are not in use", "*optim.num_cycles", "*optim.zero_indexed_step",
              "*optim.warmup_style", "*optim.lr_*", "*optim.decay_type",
               "*optim.min_lr*", "*optim.weight_decay_incr_style", "*optim.muon_*",
              "*optim.use_checkpoint_opt_param_scheduler", "*optim.clip_grad"),
    *missing("not an option of Megatron's optimizer here", "*optim.use_precision_aware_optimizer", "*optim.*_dtype",
             "*optim.use_layer_wise_distributed_optimizer", off=("fp32",)),
    *needless("a checkpoint holds all that a run needs to go on", "*checkpoint.*_contents", "checkpoint.*_contents",
              "*checkpoint.strict", "*checkpoint.mbridge_config*", "*.dist_ckpt*", "*.distrib_optim*",
              "*.use_dist_checkpointing", "*.dist_checkpointing_p*", "trainer.max_critic_ckpt_to_keep",
              "trainer.default_hdfs_dir", "trainer.del_local_ckpt_after_load"),
    *needless("the critic is saved with the actor, as the actor's says", "critic.checkpoint.async_save"),
    *needless("give `--ckpt_path auto` for what verl calls `auto`, `last` to go on with a run", "trainer.resume_mode"),
    *missing("verl's checkpoints are not read; export to a Hugging Face folder and give it as `path`",
             "trainer.resume_from_path", off=()),
    *missing("add the callback `BaselineValidation` to `trainer.callbacks`", "trainer.val_before_train"),
    *missing("run `verl-fit validate` with the same files", "trainer.val_only"),
    *needless("`SamplesTable` logs samples of validation", "trainer.log_val_generations"),
    *missing("rollouts are not written to files", "trainer.rollout_data_dir", "trainer.validation_data_dir"),
    *missing("not a part of the trainer here", "trainer.checkpoint_callback_class", "trainer.esi_redundant_time"),
    *needless("Ray is not needed; `verl-fit ray` places processes", "trainer.ray_*", "ray_kwargs.*", "ray_init.*"),
    *missing("`trainer.accelerator` chooses devices", "trainer.device", off=("cuda", "cpu")),
    *needless("waits as long as the strategy's `timeout`", "*.nccl_timeout"),
    *missing("the tokenizer is read from the model's path", "data.tokenizer", "*.tokenizer_path"),
    *needless("prompts that are too long are dropped, cut or refused: `data.overlong`", "data.filter_overlong_prompts"),
    *needless("of checkpoints that are not saved", "trainer.max_*ckpt_to_keep"),
    *needless("local files are read as they are", "*.use_shm", "data.dataloader_num_workers", "data.num_workers",
              "data.filter_overlong_prompts_workers"),
    *missing("all rows are used", "data.train_max_samples", "data.val_max_samples"),
    *missing("name this column of the files `prompt`", "data.prompt_key", off=("prompt",)),
    *missing("name this column of the files `messages`", "data.messages_key", off=("messages",)),
    *missing("columns have verl's names", "data.tools_key",
             "data.enable_thinking_key", "data.reward_fn_key", "data.multiturn.*", "data.prompt_dict_keys",
             "data.response_*key*", off=("messages", "tools", "enable_thinking", "data_source")),
    *missing("an iteration samples `data.prompts_per_step` prompts", "data.gen_batch_size"),
    *needless("batches say what they are made of", "data.return_*", "data.validation_shuffle",
              "data.ignore_input_ids_mismatch"),
    *needless("micro-batches are counted or by tokens, as `use_dynamic_bsz` says", "data.use_dynamic_bsz",
              "data.micro_batch_size*", "data.max_token_len_per_gpu"),
    *missing("code from a model's folder is not run", "*.trust_remote_code"),
    *missing("write a data module and name it as `data.class_path`", "data.custom_cls.*"),
    *missing("set `data.enable_thinking`, or a template of the model's own", "data.apply_chat_template_kwargs*",
             "data.enable_thinking_default", "*.custom_chat_template", off=({},)),
    *missing("the model's own config is used", "*.hf_config_path", "*.override_config*", "*.external_lib",
             "*.override_mcore_model_config*", off=({},)),
    *missing("activations stay on the GPU; `activation_checkpointing` saves memory", "*.enable_activation_offload",
             "*.tiled_mlp.enabled"),
    *needless("of an option that is off", "*.tiled_mlp.*", "*.mtp.*_factor", "*.mtp.speculative_*", "*.mtp.method",
              "*.mtp.num_speculative_tokens"),
    *missing("no multi-token prediction", "*.mtp.*"),
    *missing("the dropout stands before the adapter", "*lora.dropout_position", off=("pre",)),
    *missing("adapters are whole on each rank of a layer", "*lora.fully_sharded_loras"),
    *needless("`lora.merge_for_rollout` decides; `B` starts at zero", "*lora.merge", "*lora.lora_*_init_method",
              "*lora.a2a_experimental", "*lora.dtype"),
    *needless("of recomputation that is off, or of one kind", "*.recompute_*"),
    *missing("not an option of Megatron's here", "*.use_megatron_fsdp", "*.dynamic_context_parallel",
             "*.max_seqlen_per_dp_cp_rank", "*.router_replay.*", off=("disabled",)),
    *needless("weights are read from Hugging Face folders by a bridge", "*.use_mbridge", "*.vanilla_mbridge"),
    *needless("the actor's sizes are all models'", "*.megatron.*"),
    *missing("rewards are functions: see `model.reward`", "reward.reward_manager.*", "reward.reward_kwargs*",
             "reward.custom_reward_function.*", "custom_reward_function.*",
             off=("register", "naive", "custom_reward_manager", "compute_score")),
    *needless("`model.reward.num_workers` is of each rank", "reward.num_workers"),
    *missing("no sandbox; run one from your reward function", "sandbox_fusion.url", "reward.sandbox_fusion.url"),
    *needless("of the sandbox, which is not in use", "sandbox_fusion.*", "reward.sandbox_fusion.*"),
    *missing("groups are judged by their rewards", "algorithm.filter_groups.metric",
             off=("reward", "acc", "score", "seq_reward")),
    *needless("of dynamic sampling", "algorithm.filter_groups.*"),
    *missing("prioritised replay is not written", "algorithm.use_pf_ppo"),
    *needless("of replay, which is off", "algorithm.pf_ppo.*"),
    *missing("not an option of corrections here", "algorithm.rollout_correction.*", off=("ppo_clip",)),
]  # fmt: skip
"""Looked through in this order: the first entry that fits a key tells of it."""


def remark_on(key: str, value: Any, table: list[LeftOut] = LEFT_OUT) -> Remark:
    """Says why a key made no setting; a key without an entry is not supported."""
    for entry in table:
        if not fnmatchcase(key, entry.pattern):
            continue
        is_off = not is_used(value, entry.off)
        if entry.needed and is_off:
            return Remark(source=key, reason=entry.otherwise or f"off ({entry.reason})", needed=False)
        return Remark(source=key, reason=entry.reason, needed=entry.needed)
    return Remark(source=key, reason=UNKNOWN_KEY, needed=True)


def is_used(value: Any, off: tuple[Any, ...]) -> bool:
    """Tells whether a feature with this value is on."""
    if isinstance(value, (list, Mapping)) and not value:
        return False
    return not any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in off)
