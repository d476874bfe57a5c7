"""Generalized advantage estimation (GAE), PPO's estimator."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from verl_lightning.algorithms.advantages.base import AdvantageEstimator, AdvantageInputs, AdvantageOutputs
from verl_lightning.algorithms.checks import check_in_unit_interval
from verl_lightning.functional.returns import discounted_returns


def gae(
    token_rewards: Float[Tensor, "batch response"],
    values: Float[Tensor, "batch response"],
    response_mask: Bool[Tensor, "batch response"],
    *,
    gamma: float,
    lam: float,
) -> tuple[Float[Tensor, "batch response"], Float[Tensor, "batch response"]]:
    """Advantages and returns of each trainable token, not whitened.

    With ``t + 1`` the next trainable token and value 0 after the last one::

        delta_t = token_rewards_t + gamma * values_{t+1} - values_t
        A_t = delta_t + gamma * lam * A_{t+1}
        returns_t = A_t + values_t

    Args:
        token_rewards: Reward of each token.
        values: Values of the critic, in units of reward. Ignored on masked tokens.
        response_mask: True on response tokens; False on tool output and padding, which are skipped.
        gamma: Discount per trainable token, in ``[0, 1]``.
        lam: Number from 0 (one-step, low variance) to 1 (Monte Carlo, no bias).

    Returns:
        Advantages and returns in units of reward on response tokens, 0 elsewhere.

    References:
        Schulman et al., *High-Dimensional Continuous Control Using Generalized Advantage Estimation*, 2015, eq. 16.
        https://arxiv.org/abs/1506.02438
    """
    values = torch.where(response_mask, values, 0.0)
    delta = token_rewards + gamma * next_trainable(values, response_mask) - values
    advantages = discounted_returns(delta, response_mask, discount=gamma * lam)
    return advantages, advantages + values


def next_trainable(
    values: Float[Tensor, "batch response"], response_mask: Bool[Tensor, "batch response"]
) -> Float[Tensor, "batch response"]:
    """The value at the next True after each position, 0 where there is none."""
    length = response_mask.shape[1]
    position = torch.where(response_mask, torch.arange(length, device=values.device), length)
    first_from_here = torch.nn.functional.pad(position, (0, 1), value=length).flip(-1).cummin(-1).values.flip(-1)
    return torch.nn.functional.pad(values, (0, 1)).gather(1, first_from_here[:, 1:])


class GAE(AdvantageEstimator):
    """Generalized advantage estimation: PPO's estimator, with a critic that predicts the return before each token.

    Args:
        gamma: Discount per response token, in ``[0, 1]``.
        lam: Number from 0, which trusts the critic for all but the next reward, to 1, which trusts only rewards.
        whiten: Give the advantages of a batch mean 0 and variance 1.
    """

    needs_critic = True
    estimate = staticmethod(gae)

    def __init__(self, gamma: float = 1.0, lam: float = 1.0, whiten: bool = True) -> None:
        check_in_unit_interval("gamma", gamma)
        check_in_unit_interval("lam", lam)
        self.gamma = gamma
        self.lam = lam
        self.whitens = whiten

    def __call__(self, inputs: AdvantageInputs) -> AdvantageOutputs:
        """Advantages and returns of the trainable tokens, not whitened."""
        assert inputs.values is not None  # `needs_critic`
        advantages, returns = self.estimate(
            inputs.token_rewards, inputs.values, inputs.valid_mask, gamma=self.gamma, lam=self.lam
        )
        return AdvantageOutputs(advantages=advantages, returns=returns)
