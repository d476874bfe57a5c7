"""On-policy optimization (OPO) with the length-weighted baseline of least variance."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from verl_lightning.algorithms.advantages.base import AdvantageEstimator, AdvantageInputs, AdvantageOutputs
from verl_lightning.functional.groups import group_statistics, group_sum
from verl_lightning.functional.masking import to_type_of


def opo_advantages(
    rewards: Float[Tensor, " batch"],
    response_lengths: Int[Tensor, " batch"],
    group_index: Int[Tensor, " batch"],
    valid: Bool[Tensor, " batch"],
) -> Float[Tensor, " batch"]:
    """Estimates each response's advantage over its group's mean, in which long responses weigh more.

    Over the valid responses of a group::

        A_i = R_i - sum(length_j * R_j) / sum(length_j)

    Args:
        rewards: ``R_i`` of the responses, in units of reward. Ignored where not valid.
        response_lengths: Trainable tokens of each response.
        group_index: Any integers; equal for the responses to one prompt.
        valid: False on responses to leave out of their group: failed rewards, nothing to train on.

    Returns:
        One advantage per response in units of reward, the same for each of its tokens; exactly 0 where not valid and
        in groups of one response or of equal rewards.

    References:
        Hao et al., *On-Policy RL with Optimal Reward Baseline*, 2025. https://arxiv.org/abs/2505.23585
    """
    total_length = group_sum(response_lengths.double(), group_index, valid).clamp(min=1)
    baseline = group_sum(response_lengths * rewards.double(), group_index, valid) / total_length
    has_signal = group_statistics(rewards, group_index, valid).has_signal
    return to_type_of(torch.where(has_signal, rewards - baseline, 0.0), rewards)


class OPO(AdvantageEstimator):
    """On-policy optimization: each response's score less its prompt's mean, in which long responses weigh more."""

    needs_groups = True

    def __call__(self, inputs: AdvantageInputs) -> AdvantageOutputs:
        """One advantage per response, on each of its trainable tokens."""
        lengths = inputs.response_mask.sum(dim=-1)
        return inputs.on_each_token(
            opo_advantages(inputs.sequence_returns, lengths, inputs.group_index, inputs.is_valid)
        )
