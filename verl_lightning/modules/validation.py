"""Scores of validation responses, gathered over batches and ranks, by data source."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import torch

from verl_lightning.faults import RunError
from verl_lightning.functional.pass_at_k import pass_at_k
from verl_lightning.modules.judge import RewardResult, told_failure
from verl_lightning.modules.ppo_config import ValidationConfig
from verl_lightning.types import PromptBatch


class ScoredResponse(NamedTuple):
    """One response to a validation prompt."""

    loader: int
    row: int
    data_source: str
    reward: float
    length: int
    is_valid: bool = True
    """False where the reward function failed: such a response is in no mean."""
    components: tuple[tuple[str, float], ...] = ()
    """Names and values of what the reward function gave beside the reward."""


def scored_responses(batch: PromptBatch, reward_result: RewardResult, loader: int) -> list[ScoredResponse]:
    """The responses of a batch, without those to prompts that only fill up a rank's last batch."""
    rollout = batch.rollout
    assert rollout is not None
    rows, is_duplicate = batch.row_index.tolist(), batch.is_duplicate.tolist()
    lengths = rollout.response_mask.sum(-1).tolist()
    columns = {name: values.tolist() for name, values in reward_result.components.items()}
    return [
        ScoredResponse(
            loader, rows[prompt], batch.rows[prompt]["data_source"], reward, length, valid,
            tuple((name, values[index]) for name, values in columns.items() if math.isfinite(values[index])),
        )
        for index, (prompt, reward, length, valid) in enumerate(
            zip(
                rollout.prompt_index.tolist(),
                reward_result.rewards.tolist(),
                lengths,
                reward_result.is_valid.tolist(),
                strict=True,
            )
        )
        if not is_duplicate[prompt]
    ]  # fmt: skip


def validation_metrics(
    responses: Sequence[ScoredResponse],
    config: ValidationConfig,
    *,
    num_samples: int,
    stage: str,
    first_failure: str | None = None,
) -> dict[str, float]:
    """Mean reward, its parts, pass@k and length, over all prompts and for each data source; responses without a reward.

    Args:
        responses: Responses of every rank.
        config: Reward of a right response, and each k of pass@k.
        num_samples: Responses sampled for each prompt.
        stage: ``val`` or ``test``, the first part of each name.
        first_failure: Traceback of the first failure of the reward function on this rank; None if there was none.

    Raises:
        RunError: If none has a reward.
    """
    everyone, responses = responses, [response for response in responses if response.is_valid]
    if not responses:
        raise RunError(
            f"no {stage} response could be scored: the loader was empty, or the reward function always failed."
            f"{told_failure(first_failure)}"
        )
    sources: defaultdict[str, list[ScoredResponse]] = defaultdict(list)
    for response in responses:
        sources[response.data_source].append(response)
    metrics = {
        f"{stage}/reward": fmean(response.reward for response in responses),
        f"{stage}/response_length": fmean(response.length for response in responses),
        f"{stage}/unscored_responses": float(len(everyone) - len(responses)),
    }
    metrics |= {f"{stage}/reward/{name}": value for name, value in _component_means(responses).items()}
    metrics |= {f"{stage}/pass@{k}": value for k, value in _pass_at(responses, config).items()}
    for source, own in sources.items():
        prefix = f"{stage}-core/{source}"
        metrics[f"{prefix}/reward/mean@{num_samples}"] = fmean(response.reward for response in own)
        metrics |= {f"{prefix}/pass@{k}": value for k, value in _pass_at(own, config).items()}
        for name, value in _component_means(own).items():
            metrics[f"{stage}-aux/{source}/{name}/mean@{num_samples}"] = value
    return metrics


def _component_means(responses: Sequence[ScoredResponse]) -> dict[str, float]:
    """Mean of each component over the responses that have it."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for response in responses:
        for name, value in response.components:
            values[name].append(value)
    return {name: fmean(own) for name, own in sorted(values.items())}


def _pass_at(responses: Sequence[ScoredResponse], config: ValidationConfig) -> dict[int, float]:
    """Mean pass@k over the prompts with at least k valid responses."""
    groups: defaultdict[tuple[int, int], list[bool]] = defaultdict(list)
    for response in responses:
        groups[response.loader, response.row].append(response.reward >= config.success_reward)
    passes = {}
    for k in config.pass_k:
        large = [group for group in groups.values() if len(group) >= k]
        if large:
            num_correct = torch.tensor([sum(group) for group in large])
            num_samples = torch.tensor([len(group) for group in large])
            passes[k] = float(pass_at_k(num_correct, num_samples, k=k).mean())
    return passes
