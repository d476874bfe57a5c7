"""Sampling on ranks that see the same data: each asks its engine for a part, and all get the whole."""

from __future__ import annotations

import dataclasses

import torch

from verl_lightning.rollout.base import Prompts
from verl_lightning.rollout.joining import join_rollouts
from verl_lightning.strategies.base import PostTrainingStrategy
from verl_lightning.types import Rollout


def own_part(prompts: Prompts, contract: PostTrainingStrategy) -> Prompts:
    """The prompts that this rank asks for; as many on each, so the last ones may be asked for more than once.

    Args:
        prompts: Of this rank's data.
        contract: Says with whom it shares them.
    """
    size = contract.model_parallel_size
    if size == 1:
        return prompts
    count = -(-len(prompts) // size)
    first = count * contract.model_parallel_rank
    rows = [min(row, len(prompts) - 1) for row in range(first, first + count)]
    return dataclasses.replace(
        prompts,
        prompt_ids=prompts.prompt_ids[rows],
        prompt_mask=prompts.prompt_mask[rows],
        seeds=[prompts.seeds[row] for row in rows],
    )


def join_parts(part: Rollout, contract: PostTrainingStrategy, *, num_prompts: int, pad_token_id: int) -> Rollout:
    """The responses to all prompts of this rank's data, to the last bit the same on each rank. Collective.

    Args:
        part: The responses to `own_part`.
        contract: Says with whom it is shared.
        num_prompts: Of all of them.
        pad_token_id: Fills ``input_ids``.
    """
    if contract.model_parallel_size == 1:
        return part
    parts = contract.gather_over_model_parallel(part.to(torch.device("cpu")))
    joined = join_rollouts(parts, pad_token_id=pad_token_id)
    asked_once = (joined.prompt_index < num_prompts).nonzero().flatten()
    return joined.select(asked_once).to(part.input_ids.device)
