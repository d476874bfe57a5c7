"""Scores from chunks of hidden states equal scores from whole logits, for each model type that takes this path."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM

from verl_lightning.models.scorer import PLAIN_HEADS, TokenScorer
from verl_lightning.types import Scores, TokenBatch

SHAPE = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def make_scorer(model_type: str) -> TokenScorer:
    """A tiny random model of this type, with a value head."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SHAPE | (EXPERTS if model_type.endswith(("moe", "mixtral")) else {}))
    backbone = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return TokenScorer(backbone, torch.nn.Linear(16, 1, bias=False), "policy_and_value").eval()


def make_batch() -> TokenBatch:
    """Two left-padded prompts of three tokens and responses of four."""
    ids = torch.arange(14).view(2, 7) % 31 + 1
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, :2] = False
    return TokenBatch(input_ids=ids, attention_mask=mask, response_mask=mask[:, 3:], temperature=0.8)


def score(scorer: TokenScorer) -> tuple[Scores, dict[str, torch.Tensor]]:
    """Scores and all gradients of a made-up loss."""
    scores = scorer(make_batch(), with_entropy=True)
    (scores.log_probs.sin() + 0.3 * scores.entropy + scores.values.square()).sum().backward()
    return scores, {name: p.grad for name, p in scorer.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("model_type", sorted(PLAIN_HEADS))
def test_chunks_equal_whole_logits(model_type, monkeypatch):
    chunked, chunked_grads = score(make_scorer(model_type))

    monkeypatch.setattr(TokenScorer, "_linear_head", lambda self: None)
    whole, whole_grads = score(make_scorer(model_type))

    assert_close(chunked.log_probs, whole.log_probs)
    assert_close(chunked.entropy, whole.entropy)
    assert_close(chunked.values, whole.values)
    assert_close(chunked_grads, whole_grads)


@pytest.mark.parametrize("model_type", ["gemma2", "cohere", "granite"])
def test_models_that_cap_or_scale_logits_keep_their_own(model_type):
    scorer = make_scorer(model_type)

    assert scorer._linear_head() is None
    batch = make_batch()
    logits = scorer.backbone(batch.input_ids, batch.attention_mask).logits[:, 2:-1]
    expected = torch.log_softmax(logits / 0.8, -1).gather(-1, batch.response_ids[..., None]).squeeze(-1)
    assert_close(scorer(batch).log_probs[0], expected[0])
