"""Ranks that share a packed row score it and learn from it as one rank does."""

from __future__ import annotations

from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

from tests.models.packed_models import SLIDING, learn, make_backbone, make_batch
from tests.processes import on_ranks
from tests.tolerances import assert_near
from verl_lightning.functional.linear_log_probs import linear_log_probs
from verl_lightning.models.attention import VARLEN
from verl_lightning.models.build import make_value_head
from verl_lightning.models.scorer import TokenScorer
from verl_lightning.models.sequence_parallel import SequencePart
from verl_lightning.types import TokenBatch


def make_gpt2():
    """Its log-probs come from whole logits."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=60, n_embd=32, n_layer=2, n_head=4, n_positions=64, attn_pdrop=0.0)
    config._attn_implementation = VARLEN
    return GPT2LMHeadModel(config).eval()


def make_recomputing():
    """Exchanges once more in its backward pass."""
    backbone = make_backbone("qwen3", VARLEN).train()
    backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return backbone


MODELS = {
    "as many key heads": partial(make_backbone, "llama", VARLEN, num_key_value_heads=4),
    "fewer key heads": partial(make_backbone, "qwen3", VARLEN),
    "one key head": partial(make_backbone, "qwen3", VARLEN, num_key_value_heads=1),
    "sliding windows": partial(make_backbone, "mistral", VARLEN, **SLIDING["mistral"]),
    "some sliding windows": partial(make_backbone, "qwen2", VARLEN, **SLIDING["qwen2"]),
    "experts": partial(make_backbone, "qwen3_moe", VARLEN),
    "whole logits": make_gpt2,
    "recomputed": make_recomputing,
}


def make_three_tokens():
    """Fewer tokens than the four ranks."""
    mask = torch.ones(1, 3, dtype=torch.bool)
    return TokenBatch(input_ids=torch.tensor([[5, 7, 3]]), attention_mask=mask, response_mask=mask[:, 1:])


def shared_and_alone(backbone, head, batch):
    """Scores, and the gradient summed over ranks, of a row that they share and of a row of one rank."""
    value_head = None if head == "policy" else make_value_head(backbone)
    if value_head is not None:
        torch.nn.init.normal_(value_head.weight, generator=torch.Generator().manual_seed(0))
    scorer = TokenScorer(backbone.base_model if head == "value" else backbone, value_head, head, packs=True)
    alone = learn(scorer, batch)
    scorer.sequence_group = dist.group.WORLD
    scores, gradients = learn(scorer, batch)
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    return (scores, gradients), alone


def compare(model, head, make):
    """On each rank."""
    (scores, gradients), (expected, whole) = shared_and_alone(MODELS[model](), head, make())
    assert_near((scores, gradients), (expected, whole))


def compare_all():
    """Every model with a policy's head, one with the others, and a row of few tokens."""
    dist.init_process_group("gloo")
    cases = [(model, "policy", make_batch) for model in MODELS]
    cases += [("fewer key heads", head, make_batch) for head in ("value", "policy_and_value")]
    cases.append(("fewer key heads", "policy", make_three_tokens))
    for case in cases:
        compare(*case)
    return len(cases)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_that_share_a_row_score_and_learn_as_one(ranks):
    assert on_ranks(ranks, compare_all) == [11] * ranks


def make_late_scores(scored):
    """All that is trained on lies at the end of the row, where the last rank has it."""
    mask = torch.ones(1, 12, dtype=torch.bool)
    late = torch.arange(11) >= 11 - scored
    return TokenBatch(input_ids=torch.arange(1, 13)[None], attention_mask=mask, response_mask=late[None])


def count_logits():
    """Rows of logits that this rank makes for late scores of several numbers, and whether they are right."""
    dist.init_process_group("gloo")
    counted = []

    def count(hidden, *args, **options):
        counted.append(hidden.shape[1])
        return linear_log_probs(hidden, *args, **options)

    for head in ("policy", "policy_and_value"):
        for scored in (1, 3, 6):
            shared, alone = shared_and_alone(make_backbone("qwen3", VARLEN), head, make_late_scores(scored))
            assert_near(shared, alone)
    with patch("verl_lightning.models.scorer.linear_log_probs", count):
        for scored in (1, 3, 6):
            scorer = TokenScorer(make_backbone("qwen3", VARLEN), None, "policy", packs=True)
            scorer.sequence_group = dist.group.WORLD
            scorer(make_late_scores(scored))
    return counted


def test_ranks_make_equally_many_logits():
    """Of 1, 3 and 6 scored tokens, each of which the second rank's run predicts."""
    assert on_ranks(2, count_logits) == [[1, 2, 3], [0, 1, 3]]


def exchange_and_back(total):
    """Each head of each token is told by its number: what attention would see, and what comes back of it."""
    dist.init_process_group("gloo")
    part = SequencePart(group=dist.group.WORLD, total=total)
    whole = torch.arange(4 * total, dtype=torch.float32).view(1, 4, total, 1)
    own = whole[:, :, part.tokens]
    query, key, value = part.exchange_for_heads(own, own[:, :2], own[:, :1])
    back = part.exchange_for_tokens(query.transpose(1, 2))
    assert torch.equal(back, own.transpose(1, 2))
    return [x.squeeze(0).squeeze(-1).tolist() for x in (query, key, value)]


def test_ranks_exchange_tokens_for_heads():
    """Three tokens of four heads: token t of head h is 3 h + t; the second rank has one token and two heads."""
    first, second = on_ranks(2, exchange_and_back, 3)
    assert first == [[[0, 1, 2], [3, 4, 5]], [[0, 1, 2]], [[0, 1, 2]]]
    assert second == [[[6, 7, 8], [9, 10, 11]], [[3, 4, 5]], [[0, 1, 2]]]
