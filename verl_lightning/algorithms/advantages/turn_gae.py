"""Generalized advantage estimation over turns: a turn of the policy is one action."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from verl_lightning.algorithms.advantages.gae import GAE, next_trainable
from verl_lightning.functional.returns import discounted_returns
from verl_lightning.functional.turns import over_turns, turn_ends, turn_starts


def turn_gae(
    token_rewards: Float[Tensor, "batch response"],
    values: Float[Tensor, "batch response"],
    response_mask: Bool[Tensor, "batch response"],
    *,
    gamma: float,
    lam: float,
) -> tuple[Float[Tensor, "batch response"], Float[Tensor, "batch response"]]:
    """Advantages and returns of each turn, on all of its tokens, not whitened.

    With ``R_k`` the sum of the token rewards of turn ``k``, ``V_k`` the critic's value before its first token, and 0
    after the last turn::

        delta_k = R_k + gamma * V_{k+1} - V_k
        A_k = delta_k + gamma * lam * A_{k+1}
        returns_k = A_k + V_k

    Args:
        token_rewards: Reward of each token.
        values: Values of the critic, in units of reward. Those of a turn's first token alone are read.
        response_mask: True on the policy's own tokens; False on what it reads, which parts turns, and on padding.
        gamma: Discount per turn, in ``[0, 1]``.
        lam: Number from 0 (one-step, low variance) to 1 (Monte Carlo, no bias).

    Returns:
        Advantages and returns in units of reward on the policy's tokens, 0 elsewhere.

    References:
        Schulman et al., *High-Dimensional Continuous Control Using Generalized Advantage Estimation*, 2015, eq. 16.
        https://arxiv.org/abs/1506.02438
    """
    values = torch.where(response_mask, values, 0.0)
    starts, ends = turn_starts(response_mask), turn_ends(response_mask)
    # A turn's delta is the sum of these over its tokens: what passes a turn's end alone is discounted.
    after = torch.where(ends, gamma * next_trainable(values, response_mask), 0.0)
    delta = token_rewards + after - torch.where(starts, values, 0.0)
    passing = torch.where(ends, gamma * lam, 1.0)
    advantages = over_turns(discounted_returns(delta, response_mask, discount=passing), response_mask)
    return advantages, advantages + over_turns(values, response_mask)


class TurnGAE(GAE):
    """Generalized advantage estimation over the turns of an episode, each of which is one action, with a critic.

    Where an environment rewards turns, a turn's tokens share its advantage: what it earned, and how much better the
    critic finds the next turn's beginning than its own.

    Args:
        gamma: Discount per turn of the policy, in ``[0, 1]``.
        lam: Number from 0, which trusts the critic for all but the turn's own reward, to 1, which trusts only rewards.
        whiten: Give the advantages of a batch mean 0 and variance 1.
    """

    estimate = staticmethod(turn_gae)
