"""What the tests of families compare with: transformers' own scores, one sequence at a time."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from verl_lightning.types import TokenBatch


@torch.no_grad()
def transformers_log_probs(folder: Path, batch: TokenBatch) -> Tensor:
    """Log-probs of the response tokens by plain attention, without padding, packing or code of ours."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    whole = torch.zeros(batch.input_ids.shape)
    for row, (ids, mask) in enumerate(zip(batch.input_ids, batch.attention_mask, strict=True)):
        places = mask.nonzero()[:, 0]
        logits = model(input_ids=ids[places][None]).logits[0, :-1].float() / batch.temperature
        whole[row, places[1:]] = logits.log_softmax(-1).gather(-1, ids[places[1:], None])[:, 0]
    return whole[:, -batch.response_mask.shape[1] :].where(batch.response_mask, 0.0)


def gap_of(scores: Tensor, expected: Tensor) -> float:
    """Largest difference, as a share of the largest value."""
    return float((scores - expected).abs().max() / expected.abs().max())
