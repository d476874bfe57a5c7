"""Fields of a config that a map leaves out, found by what the map makes of changed configs; no Megatron needed."""

from __future__ import annotations

from functools import partial

import pytest
from transformers import DeepseekV3Config, Gemma3Config, GptOssConfig, LlamaConfig, Qwen2Config, Qwen3MoeConfig

from verl_lightning.strategies.megatron.honoured import comparable, unhonoured

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192, "rope_theta": 10000.0}


def dense_map(config):
    """A map that honours sizes and the base of rotary positions."""
    positions = config.rope_parameters
    return comparable({"hidden": config.hidden_size, "act": partial(max, config.hidden_act)}), (
        positions["rope_theta"],
        positions.get("factor"),
        positions["rope_type"],
    )


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (LlamaConfig(hidden_size=64, hidden_act="gelu", bos_token_id=7, use_cache=False), set()),
        (LlamaConfig(num_hidden_layers=3, attention_bias=True, mlp_bias=True), {"attention_bias", "mlp_bias"}),
        (LlamaConfig(rope_parameters=LLAMA3), set()),
        (LlamaConfig(rope_parameters=LLAMA3 | {"high_freq_factor": 2.0}), {"rope_parameters.high_freq_factor"}),
        (LlamaConfig(rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "beta_fast": 3.0}),)
        + ({"rope_parameters.beta_fast", "rope_parameters.original_max_position_embeddings"},),
        (Qwen2Config(use_sliding_window=False, sliding_window=4096, max_window_layers=21), set()),
        (Qwen2Config(use_sliding_window=True, sliding_window=9, max_window_layers=28),)
        + ({"use_sliding_window", "sliding_window"},),
        (Qwen3MoeConfig(mlp_only_layers=[0], decoder_sparse_step=2), {"mlp_only_layers", "decoder_sparse_step"}),
        (DeepseekV3Config(n_group=1, qk_rope_head_dim=32), {"n_group", "qk_rope_head_dim"}),
        (GptOssConfig(num_hidden_layers=2, layer_types=["full_attention"] * 2), set()),
        (GptOssConfig(num_hidden_layers=2, sliding_window=9), {"sliding_window"}),
    ],
)
def test_what_a_map_leaves_out_is_named(config, fields):
    assert unhonoured(config, dense_map).keys() == fields


def test_a_field_that_the_map_cannot_do_without_is_honoured():
    def describe(config):
        if not config.attention_bias:
            raise ValueError("no such model")
        return config.hidden_size

    assert unhonoured(LlamaConfig(attention_bias=True), describe) == {}


def test_what_a_map_always_has_is_no_difference():
    config = Qwen3MoeConfig(norm_topk_prob=True)

    assert unhonoured(config, lambda config: config.hidden_size) == {"norm_topk_prob": True}
    assert unhonoured(config, lambda config: config.hidden_size, always={"norm_topk_prob": True}) == {}


def test_the_text_model_of_several_is_looked_into():
    config = Gemma3Config(text_config={"hidden_act": "gelu", "attn_logit_softcapping": 5.0, "num_hidden_layers": 2})

    assert unhonoured(config, lambda config: config.text_config.hidden_size) == {
        "text_config.attn_logit_softcapping": 5.0
    }
