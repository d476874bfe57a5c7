"""Activation checkpointing keeps less and changes no number, whatever the strategy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from tests.runs import make_model_config
from verl_lightning.models.build import build_scorer
from verl_lightning.models.config import ModelConfig
from verl_lightning.types import TokenBatch


def learn(folder: Any, which: Any) -> tuple[int, torch.Tensor]:
    """Bytes that the forward pass keeps beside weights, and the gradient of the embeddings."""
    scorer = build_scorer(make_model_config(folder, activation_checkpointing=which), "policy", trainable=True)
    ids, mask = torch.arange(12).view(2, 6), torch.ones(2, 6, dtype=torch.bool)
    batch = TokenBatch(input_ids=ids, attention_mask=mask, response_mask=mask[:, 1:])
    weights = {parameter.untyped_storage().data_ptr() for parameter in scorer.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = scorer(batch).log_probs.sum()
    loss.backward()
    return sum(kept.values()), scorer.backbone.get_input_embeddings().weight.grad


def test_activation_checkpointing_keeps_less_and_changes_no_gradient(tiny_folder):
    """Two blocks: none, one, or both keep all that their backward pass needs."""
    (all_kept, expected), (half_kept, half), (least_kept, full) = (
        learn(tiny_folder, which) for which in ("none", 2, "full")
    )
    assert all_kept > half_kept > least_kept
    assert_close(half, expected)
    assert_close(full, expected)


@pytest.mark.parametrize(
    ("which", "reason"),
    [
        (1, "must be `none`, `full`, or a number k of at least 2 for every k-th block"),
        (0, "must be `none`, `full`, or a number k of at least 2 for every k-th block"),
        (True, "expected one of 'none', 'full' or int, got True"),
        ("some", "expected one of 'none', 'full' or int, got 'some'"),
    ],
)
def test_other_choices_of_blocks_are_refused(which, reason):
    with pytest.raises((ValueError, TypeError), match=reason):
        ModelConfig(path="any", activation_checkpointing=which)
