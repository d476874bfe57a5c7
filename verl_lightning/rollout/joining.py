"""Several rollouts as one, and a part of one by itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from verl_lightning.types import Rollout


def join_rollouts(parts: Sequence[Rollout], *, pad_token_id: int) -> Rollout:
    """Joins rollouts into one: prompts padded on the left, responses on the right, groups kept apart.

    Args:
        parts: Rollouts, at least one, of any widths.
        pad_token_id: Token that fills the padding of ``input_ids``.
    """
    responses = max(part.response_mask.shape[1] for part in parts)
    prompts = max(part.input_ids.shape[1] - part.response_mask.shape[1] for part in parts)
    padded = [_pad(part, prompts, responses, pad_token_id) for part in parts]
    joined: dict[str, Any] = {name: torch.cat([row[name] for row in padded]) for name in padded[0]}
    counts = torch.tensor([int(part.prompt_index.max()) + 1 if len(part) else 0 for part in parts])
    offsets = (counts.cumsum(0) - counts).tolist()
    joined["prompt_index"] = torch.cat(
        [part.prompt_index + offset for part, offset in zip(parts, offsets, strict=True)]
    )
    return Rollout(temperature=parts[0].temperature, **joined)


def select_prompts(rollout: Rollout, prompts: Int[Tensor, " chosen"]) -> Rollout:
    """Selects the responses to some prompts, which are numbered anew in this order.

    Args:
        rollout: Rollout with equally many responses to each prompt, group after group.
        prompts: Numbers of the prompts in the rollout.
    """
    num_samples = len(rollout) // (int(rollout.prompt_index.max()) + 1)
    rows = prompts[:, None] * num_samples + torch.arange(num_samples)
    chosen = rollout.select(rows.flatten())
    return dataclasses.replace(chosen, prompt_index=torch.arange(len(prompts)).repeat_interleave(num_samples))


def dealt_prompts(counts: Sequence[int], *, rank: int, ranks: int) -> list[int]:
    """Returns the prompts of a joined rollout that are one rank's, where other ranks had sampled its parts.

    Rank ``r`` of ``n`` has every ``n``-th prompt of a batch, so the batch's order is the first prompt of each part, the
    second of each, and so on; dealt out in that order, a mini-batch has the same prompts on any number of ranks.

    Args:
        counts: Prompts of each part.
        rank: Rank whose prompts are returned.
        ranks: Number of ranks that there are now.
    """
    starts = accumulate(counts, initial=0)
    turns = [(turn, start + turn) for start, count in zip(starts, counts, strict=False) for turn in range(count)]
    return [prompt for _, prompt in sorted(turns)][rank::ranks]


def _pad(rollout: Rollout, prompts: int, responses: int, pad_token_id: int) -> dict[str, Tensor]:
    width = rollout.response_mask.shape[1]
    right = (0, responses - width)
    both = (prompts - (rollout.input_ids.shape[1] - width), responses - width)
    return {
        "input_ids": F.pad(rollout.input_ids, both, value=pad_token_id),
        "attention_mask": F.pad(rollout.attention_mask, both, value=False),
        "response_mask": F.pad(rollout.response_mask, right, value=False),
        "rollout_log_probs": F.pad(rollout.rollout_log_probs, right),
        "is_truncated": rollout.is_truncated,
    }
