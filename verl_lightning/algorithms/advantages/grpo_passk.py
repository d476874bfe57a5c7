"""Pass@k form of GRPO: group-relative advantages that teach only the best response of a group."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from verl_lightning.algorithms.advantages.base import AdvantageEstimator, AdvantageInputs, AdvantageOutputs
from verl_lightning.functional.groups import group_members, group_statistics
from verl_lightning.functional.masking import to_type_of


def grpo_passk_advantages(
    rewards: Float[Tensor, " batch"],
    group_index: Int[Tensor, " batch"],
    valid: Bool[Tensor, " batch"],
    *,
    normalize_by_std: bool,
) -> Float[Tensor, " batch"]:
    """Estimates the advantage of a group's best response over its second best; 0 for all others.

    Over the valid responses of a group::

        A_best = (R_best - R_second) / (std + 1e-6)    normalize_by_std
        A_best = R_best - R_second                     otherwise

    Args:
        rewards: Rewards of the responses, in units of reward. Ignored where not valid.
        group_index: Any integers; equal for the responses to one prompt.
        valid: False on responses to leave out of their group: failed rewards, nothing to train on.
        normalize_by_std: True to divide by the group's unbiased std.

    Returns:
        One advantage per response, the same for each of its tokens; 0 where two responses share the best reward.

    References:
        Tang et al., *Optimizing Language Models for Inference Time Objectives using Reinforcement Learning*, 2025.
        https://arxiv.org/abs/2503.19595
    """
    members, row_of_group = group_members(group_index, valid)
    group = group_statistics(rewards, group_index, valid)
    best_two = torch.where(members, rewards, -torch.inf).topk(min(2, len(rewards)), dim=-1).values[row_of_group]
    advantages = rewards.double() - best_two[:, -1]
    if normalize_by_std:
        advantages = advantages / (group.std + 1e-6)
    is_best = group.has_signal & (rewards == best_two[:, 0])
    return to_type_of(torch.where(is_best, advantages, 0.0), rewards)


class GRPOPassK(AdvantageEstimator):
    """Pass@k form of GRPO: only a prompt's best response learns, by how much it beats the second best.

    Args:
        normalize_by_std: True to divide by the std of the prompt's scores.
    """

    needs_groups = True

    def __init__(self, normalize_by_std: bool = True) -> None:
        self.normalize_by_std = normalize_by_std

    def __call__(self, inputs: AdvantageInputs) -> AdvantageOutputs:
        """One advantage per response, on each of its trainable tokens."""
        advantages = grpo_passk_advantages(
            inputs.sequence_returns, inputs.group_index, inputs.is_valid, normalize_by_std=self.normalize_by_std
        )
        return inputs.on_each_token(advantages)
