"""Requests of a batch, the part of them that a rank asks for, and the rollout that is made of the answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from verl_lightning.modules.base import PostTrainingModule
from verl_lightning.rollout.base import Completion, Request, SamplingConfig
from verl_lightning.rollout.completions import make_requests, to_rollout
from verl_lightning.seeding import derive_seed, run_seed
from verl_lightning.strategies.base import PostTrainingStrategy
from verl_lightning.types import PromptBatch, Rollout

T = TypeVar("T")


def batch_requests(batch: PromptBatch, sampling: SamplingConfig, purpose: str, turn: int) -> list[Request]:
    """Returns what an engine is asked for a batch, with a seed for each sample.

    Args:
        batch: Prompts.
        sampling: Settings of all samples.
        purpose: Use of the responses, on which the seeds depend.
        turn: Number of the batch in training, on which they depend too; 0 elsewhere: validation draws the same noise
            each time, so that its curve shows the policy and not the dice.
    """
    seeds = [
        [derive_seed(run_seed(), purpose, turn, row, sample) for sample in range(sampling.num_samples)]
        for row in batch.row_index.tolist()
    ]
    return make_requests(batch.prompts(), seeds, sampling, batch.images)


def batch_rollout(
    module: PostTrainingModule,
    requests: Sequence[Request],
    completions: Sequence[Completion],
    sampling: SamplingConfig,
) -> Rollout:
    """Makes the rollout of a batch, on the module's device."""
    return to_rollout(
        requests,
        completions,
        num_samples=sampling.num_samples,
        pad_token_id=module.tokenizer.pad_token_id,
        device=module.device,
    )


def own_prompts(num_prompts: int, contract: PostTrainingStrategy) -> range:
    """Returns the prompts whose responses this rank samples: all, unless others have the same data."""
    size = -(-num_prompts // contract.model_parallel_size)
    return range(num_prompts)[size * contract.model_parallel_rank :][:size]


def own_part(
    requests: Sequence[Request], sampling: SamplingConfig, contract: PostTrainingStrategy
) -> Sequence[Request]:
    """Returns the requests that this rank asks, whole groups: all, unless others have the same data."""
    size = sampling.num_samples
    own = own_prompts(len(requests) // size, contract)
    return requests[own.start * size : own.stop * size]


def join_parts(part: list[T], contract: PostTrainingStrategy) -> list[T]:
    """Returns the whole of what each rank with the same data has a part. Collective."""
    if contract.model_parallel_size == 1:
        return part
    return [each for parts in contract.gather_over_model_parallel(part) for each in parts]
