"""REINFORCE leave-one-out (RLOO): the baseline is the mean of the other responses to the prompt."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from verl_lightning.algorithms.advantages.base import AdvantageEstimator, AdvantageInputs, AdvantageOutputs
from verl_lightning.functional.groups import group_statistics
from verl_lightning.functional.masking import to_type_of


def rloo_advantages(
    rewards: Float[Tensor, " batch"], group_index: Int[Tensor, " batch"], valid: Bool[Tensor, " batch"]
) -> Float[Tensor, " batch"]:
    """Estimates each response's advantage over the mean of the others in its group.

    With ``n`` valid responses in the group::

        A_i = R_i - sum(R_j for j != i) / (n - 1) = n / (n - 1) * (R_i - mean)

    Args:
        rewards: ``R_i`` of the responses, in units of reward. Ignored where not valid.
        group_index: Any integers; equal for the responses to one prompt.
        valid: False on responses to leave out of their group: failed rewards, nothing to train on.

    Returns:
        One advantage per response in units of reward, the same for each of its tokens; exactly 0 where not valid and
        in groups of one response or of equal rewards.

    References:
        Ahmadian et al., *Back to Basics*, 2024, sec. 3.2. https://arxiv.org/abs/2402.14740
    """
    group = group_statistics(rewards, group_index, valid)
    advantages = (rewards - group.mean) * group.size / (group.size - 1).clamp(min=1)
    return to_type_of(torch.where(group.has_signal, advantages, 0.0), rewards)


class RLOO(AdvantageEstimator):
    """REINFORCE leave-one-out: each response's score less the mean score of the other responses to its prompt."""

    needs_groups = True

    def __call__(self, inputs: AdvantageInputs) -> AdvantageOutputs:
        """One advantage per response, on each of its trainable tokens."""
        return inputs.on_each_token(rloo_advantages(inputs.sequence_returns, inputs.group_index, inputs.is_valid))
