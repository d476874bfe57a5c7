"""Tiny random models of many families: sharp scores, and norms, biases and buffers that matter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

SIZES: dict[str, Any] = {
    **{"vocab_size": 104, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 64, "tie_word_embeddings": False},
    **{"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0},
}
"""Sizes that most families share; heads of 32 are the least for which vLLM has kernels on CPUs."""

EXPERTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
EXPERTS |= {"moe_intermediate_size": 48}

GROUPS = {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True}

LATENT = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}
LATENT |= {"num_key_value_heads": 4, "head_dim": 16}

LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
LINEAR |= {"linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"]}

SLIDING = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}

FAMILIES: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "bloom": {"n_layer": 2, "n_head": 4, "num_attention_heads": None},
    "cohere": {"logit_scale": 0.7},
    "cohere2": SLIDING | {"logit_scale": 0.7},
    "deepseek_v2": EXPERTS | GROUPS | LATENT | {"first_k_dense_replace": 1, "topk_method": "greedy"},
    "deepseek_v3": EXPERTS | GROUPS | LATENT | {"first_k_dense_replace": 1},
    "ernie4_5": {"use_bias": True},
    "exaone4": SLIDING,
    "falcon": {"head_dim": None, "num_kv_heads": 2, "new_decoder_architecture": True},
    "gemma": {},
    "gemma2": SLIDING | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0, "query_pre_attn_scalar": 20},
    "gemma3_text": SLIDING | {"query_pre_attn_scalar": 20},
    "glm": {},
    "glm4": {"partial_rotary_factor": 0.5},
    "glm4_moe": EXPERTS | GROUPS | {"first_k_dense_replace": 1, "use_qk_norm": True},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": {"rotary_pct": 0.5},
    "gpt_oss": EXPERTS | SLIDING,
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3}
    | {"logits_scaling": 0.5},
    "granitemoe": EXPERTS | {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 0.5},
    "helium": {"head_dim": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "llama": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "mamba": {"state_size": 8, "num_attention_heads": None},
    "mistral": {"sliding_window": 3},
    "mixtral": EXPERTS | {"sliding_window": None},
    "nemotron": {"partial_rotary_factor": 0.5},
    "olmo2": {},
    "olmo3": SLIDING,
    "olmoe": EXPERTS | {"head_dim": None},
    "opt": {"ffn_dim": 80, "word_embed_proj_dim": 64},
    "persimmon": {"head_dim": None, "partial_rotary_factor": 0.5},
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {"sliding_window": 3, "partial_rotary_factor": 1.0},
    "qwen2": {"use_sliding_window": True, **SLIDING, "max_window_layers": 1},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 40},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_5_text": LINEAR,
    "qwen3_moe": EXPERTS | {"mlp_only_layers": [0], "norm_topk_prob": True},
    "qwen3_next": EXPERTS | LINEAR | {"shared_expert_intermediate_size": 40},
    "seed_oss": {"attention_bias": True},
    "smollm3": {"no_rope_layers": [1, 0]},
    "stablelm": {"head_dim": None, "partial_rotary_factor": 0.5, "use_qkv_bias": True},
    "starcoder2": {"sliding_window": 3, "use_bias": True},
}
"""Model types of transformers, and what a tiny config of each has beside `SIZES`."""


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2, no sliding window": ("qwen2", {"use_sliding_window": False, "layer_types": None}),
    "qwen3_moe, experts in all layers": ("qwen3_moe", {"mlp_only_layers": []}),
}
"""Families as most published models of them are, where what others have of `FAMILIES` is refused by a strategy."""


def write_named(path: Path, name: str) -> Path:
    """Write the tiny model of a family or variant as transformers does it."""
    model_type, changes = VARIANTS.get(name, (name, {}))
    return write_folder(path, model_type, **changes)


def make_config(model_type: str, **changes: Any) -> Any:
    """Make a tiny config of a family; a size that is None is left to the family."""
    usual, own = AutoConfig.for_model(model_type), FAMILIES.get(model_type, {}) | changes
    own = {name: value for name, value in own.items() if name not in EXPERTS or hasattr(usual, name)}
    wanted = SIZES | own
    return AutoConfig.for_model(model_type, **{name: value for name, value in wanted.items() if value is not None})


def make_model(model_type: str, **changes: Any) -> PreTrainedModel:
    """Make a random model in float32 whose scores depend on each weight, bias and buffer of it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config(model_type, **changes), dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() > 1:
                weight.copy_(noise * (1.0 if "embed" in name else 3.0 * weight.shape[-1] ** -0.5 / 2))
            elif "norm" in name or name.endswith("bias"):
                weight.add_(noise * 0.3)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.3)
    return model.eval()


def write_folder(path: Path, model_type: str, **changes: Any) -> Path:
    """Write a family's tiny model as transformers does it."""
    logging.disable_progress_bar()
    make_model(model_type, **changes).save_pretrained(path)
    return path
