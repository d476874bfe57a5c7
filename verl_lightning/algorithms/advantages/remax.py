"""ReMax: REINFORCE with the reward of the greedy response as baseline."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from verl_lightning.algorithms.advantages.base import AdvantageEstimator, AdvantageInputs, AdvantageOutputs
from verl_lightning.functional.masking import to_type_of
from verl_lightning.functional.returns import discounted_returns


def remax_advantages(
    token_rewards: Float[Tensor, "batch response"],
    greedy_rewards: Float[Tensor, " batch"],
    response_mask: Bool[Tensor, "batch response"],
) -> Float[Tensor, "batch response"]:
    """Reward from each token on, less the reward of the greedy response to the same prompt.

    Computes::

        A_t = sum(token_rewards_s for s >= t) - greedy_reward

    Args:
        token_rewards: Of each token, in units of reward.
        greedy_rewards: Of the greedy response to each sequence's prompt, in units of reward.
        response_mask: True on response tokens; False on tool output and padding.

    Returns:
        ``A_t`` in units of reward on response tokens, 0 elsewhere.

    References:
        Li et al., *ReMax*, 2023, alg. 2. https://arxiv.org/abs/2310.10505
    """
    rewards_to_go = discounted_returns(token_rewards, response_mask, discount=1.0)
    advantages = rewards_to_go.double() - greedy_rewards.unsqueeze(-1)
    return to_type_of(torch.where(response_mask, advantages, 0.0), token_rewards)


class ReMax(AdvantageEstimator):
    """ReMax: the reward from each token on, less the score of the greedy response to the prompt."""

    needs_greedy = True

    def __call__(self, inputs: AdvantageInputs) -> AdvantageOutputs:
        """The advantage of each trainable token; 0 where the greedy response has no score."""
        assert inputs.greedy_rewards is not None  # `needs_greedy`
        mask = inputs.valid_mask & inputs.greedy_rewards.isfinite().unsqueeze(-1)
        return AdvantageOutputs(advantages=remax_advantages(inputs.token_rewards, inputs.greedy_rewards, mask))
