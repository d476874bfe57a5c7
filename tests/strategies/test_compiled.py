"""Compiled blocks give the numbers of plain ones, and sequences of ever new lengths share a graph."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from tests.runs import make_model_config
from tests.tolerances import assert_near, needs_compiler
from verl_lightning.models.build import build_scorer
from verl_lightning.strategies.compiled import compile_block, is_ragged
from verl_lightning.types import TokenBatch


def make_batch(lengths):
    """Rows of these lengths, padded on the right."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    ids = torch.arange(mask.numel()).view_as(mask) % 17
    return TokenBatch(input_ids=ids, attention_mask=mask, response_mask=mask[:, 1:])


@pytest.mark.parametrize(("boundaries", "longest", "answer"), [([0, 3, 6], 3, False), ([0, 2, 6], 4, True)])
def test_sequences_of_one_length_are_not_ragged(boundaries, longest, answer):
    kwargs = {"cu_seq_lens_q": torch.tensor(boundaries), "max_length_q": longest}
    assert is_ragged((torch.zeros(1, 6, 4),), kwargs) is answer
    assert not is_ragged((torch.zeros(1, 6, 4),), {})


@pytest.mark.slow
@needs_compiler
@pytest.mark.filterwarnings("ignore::Warning")  # of torch, while it compiles
def test_ragged_batches_share_a_graph_and_its_numbers(tiny_folder):
    config = make_model_config(tiny_folder, packing="always", attn_implementation="varlen")
    plain, compiled = (build_scorer(config, "policy", trainable=True) for _ in range(2))
    for block in compiled.backbone.model.layers:
        compile_block(block)
    counters.clear()
    for lengths in ([3, 5], [9, 2, 4], [7, 6, 5, 2], [12, 3]):
        batch = make_batch(lengths)
        for model in (plain, compiled):
            model.zero_grad()
            model(batch).log_probs.sum().backward()
        for weight, other in zip(plain.parameters(), compiled.parameters(), strict=True):
            assert_near(other.grad, weight.grad)
        assert_near(compiled(batch).log_probs, plain(batch).log_probs)
    assert counters["stats"]["unique_graphs"] == 1  # of all blocks, since they are alike
