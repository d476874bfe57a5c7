"""Group policy gradient (GPG): Dr. GRPO's advantage over the share of responses that have a reward."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from verl_lightning.algorithms.advantages.base import AdvantageEstimator, AdvantageInputs, AdvantageOutputs
from verl_lightning.functional.groups import group_statistics
from verl_lightning.functional.masking import to_type_of


def gpg_advantages(
    rewards: Float[Tensor, " batch"],
    group_index: Int[Tensor, " batch"],
    valid: Bool[Tensor, " batch"],
    *,
    nonzero_reward_share: float | Float[Tensor, ""],
) -> Float[Tensor, " batch"]:
    """Estimates each response's advantage over its group's mean, divided by the share of nonzero rewards.

    Over the valid responses of a group::

        A_i = (R_i - mean) / nonzero_reward_share

    Args:
        rewards: ``R_i`` of the responses, in units of reward. Ignored where not valid.
        group_index: Any integers; equal for the responses to one prompt.
        valid: False on responses to leave out of their group: failed rewards, nothing to train on.
        nonzero_reward_share: Valid responses with a reward other than 0, as a share of the valid responses of all
            ranks, in ``(0, 1]``; its inverse is the paper's ``alpha``. 0 is taken for 1: no reward, no advantage.

    Returns:
        One advantage per response in units of reward, the same for each of its tokens; exactly 0 where not valid and
        in groups of one response or of equal rewards.

    References:
        Chu et al., *GPG: A Simple and Strong RL Baseline for Model Reasoning*, 2025.
        https://arxiv.org/abs/2504.02546
    """
    group = group_statistics(rewards, group_index, valid)
    share = torch.as_tensor(nonzero_reward_share, dtype=torch.float64, device=rewards.device)
    advantages = (rewards - group.mean) / torch.where(share > 0, share, 1.0)
    return to_type_of(torch.where(group.has_signal, advantages, 0.0), rewards)


class GPG(AdvantageEstimator):
    """Group policy gradient: Dr. GRPO's advantage, over the share of responses whose score is not 0.

    Chu et al., 2025, https://arxiv.org/abs/2504.02546, with ``policy_loss: Reinforce``.
    """

    needs_groups = True

    def __call__(self, inputs: AdvantageInputs) -> AdvantageOutputs:
        """One advantage per response, on each of its trainable tokens."""
        advantages = gpg_advantages(
            inputs.sequence_returns,
            inputs.group_index,
            inputs.is_valid,
            nonzero_reward_share=inputs.nonzero_reward_share,
        )
        return inputs.on_each_token(advantages)
