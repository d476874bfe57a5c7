"""Sampling on ranks that see the same data: each asks its engine for a part, and all get the whole."""

from __future__ import annotations

import dataclasses

import torch

from verl_lightning.rollout.base import Prompts
from verl_lightning.rollout.joining import join_rollouts, select_prompts
from verl_lightning.strategies.base import PostTrainingStrategy
from verl_lightning.types import Rollout


def own_part(prompts: Prompts, contract: PostTrainingStrategy) -> Prompts:
    """Returns the prompts that this rank asks for; as many on each, so the last one may be asked for several times.

    Args:
        prompts: Prompts of this rank's data.
        contract: Strategy, which knows the ranks with the same data.
    """
    if contract.model_parallel_size == 1:
        return prompts
    rows = _own_rows(len(prompts), contract)
    return dataclasses.replace(
        prompts,
        prompt_ids=prompts.prompt_ids[rows],
        prompt_mask=prompts.prompt_mask[rows],
        seeds=[prompts.seeds[row] for row in rows],
    )


def part_of(whole: Rollout, contract: PostTrainingStrategy) -> Rollout:
    """Returns this rank's part, of which `join_parts` would make the whole, of responses that are known already.

    Args:
        whole: Responses to all prompts of this rank's data.
        contract: Strategy, which knows the ranks with the same data.
    """
    if contract.model_parallel_size == 1:
        return whole
    num_prompts = int(whole.prompt_index.max()) + 1
    return select_prompts(whole, torch.tensor(_own_rows(num_prompts, contract)))


def join_parts(part: Rollout, contract: PostTrainingStrategy, *, num_prompts: int, pad_token_id: int) -> Rollout:
    """Returns the responses to all prompts of this rank's data, bit for bit the same on each rank. Collective.

    Args:
        part: Responses to `own_part`.
        contract: Strategy, which knows the ranks with the same data.
        num_prompts: Number of all prompts of this rank's data.
        pad_token_id: Token that fills ``input_ids``.
    """
    if contract.model_parallel_size == 1:
        return part
    parts = contract.gather_over_model_parallel(part.to(torch.device("cpu")))
    joined = join_rollouts(parts, pad_token_id=pad_token_id)
    asked_once = (joined.prompt_index < num_prompts).nonzero().flatten()
    return joined.select(asked_once).to(part.input_ids.device)


def _own_rows(num_prompts: int, contract: PostTrainingStrategy) -> list[int]:
    count = -(-num_prompts // contract.model_parallel_size)
    first = count * contract.model_parallel_rank
    return [min(row, num_prompts - 1) for row in range(first, first + count)]
