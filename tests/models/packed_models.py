"""Small random models and a ragged batch, for tests of packing."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from verl_lightning.types import TokenBatch

SHAPE = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "head_dim": 8}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SLIDING = {"mistral": {"sliding_window": 3}, "qwen2": {"use_sliding_window": True, "sliding_window": 3}}
SLIDING["qwen2"] |= {"max_window_layers": 1, "layer_types": ["full_attention", "sliding_attention"]}


def make_backbone(model_type, attention, **changes):
    """A random model of a type, whose weights are large enough for its tokens to matter to one another."""
    options = SHAPE | (EXPERTS if model_type in ("mixtral", "qwen3_moe") else {}) | changes
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **options)
    backbone = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention)
    with torch.no_grad():
        for parameter in backbone.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    return backbone.eval()


def make_batch():
    """Left-padded prompts and right-padded responses of five lengths; masked tool output within and at the ends."""
    prompt = torch.arange(5) >= 5 - torch.tensor([5, 1, 3, 2, 4])[:, None]
    response = torch.arange(6) < torch.tensor([2, 6, 1, 4, 5])[:, None]
    trained = response.clone()
    trained[1, 2:4] = trained[4, 0] = trained[3, 3] = False
    ids = torch.randint(1, 60, (5, 11), generator=torch.Generator().manual_seed(1))
    return TokenBatch(
        input_ids=ids, attention_mask=torch.cat([prompt, response], 1), response_mask=trained, temperature=0.7
    )


def learn(scorer, batch):
    """Scores of what is trained on, and the gradient of a loss of all of them."""
    scorer.zero_grad()
    scores = scorer(batch, with_entropy=True)
    parts = {
        name: torch.where(batch.response_mask, part, 0.0) for name, part in vars(scores).items() if part is not None
    }
    weights = torch.linspace(-1, 1, batch.response_mask.numel()).view_as(batch.response_mask)
    sum((part * weights).sum() for part in parts.values()).backward()
    return parts, {name: p.grad.clone() for name, p in scorer.named_parameters() if p.grad is not None}
