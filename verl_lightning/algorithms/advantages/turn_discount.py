"""Group-relative advantages of turns: what follows a turn is compared with what follows the same turn of others."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from verl_lightning.algorithms.advantages.base import AdvantageEstimator, AdvantageInputs, AdvantageOutputs
from verl_lightning.algorithms.checks import check_in_unit_interval
from verl_lightning.functional.groups import group_statistics
from verl_lightning.functional.masking import to_type_of
from verl_lightning.functional.returns import discounted_returns
from verl_lightning.functional.turns import over_turns, turn_ends, turn_numbers, turn_starts


def turn_advantages(
    token_rewards: Float[Tensor, "batch response"],
    response_mask: Bool[Tensor, "batch response"],
    group_index: Int[Tensor, " batch"],
    *,
    gamma: float,
    normalize_by_std: bool,
) -> Float[Tensor, "batch response"]:
    """Estimates each turn's advantage over the same turn of the group's other episodes.

    With ``R_k`` the sum of the token rewards of an episode's turn ``k``, and the mean and unbiased std over the group's
    episodes that have a turn ``k``::

        G_k = R_k + gamma * G_{k+1}
        A_k = (G_k - mean_k) / (std_k + 1e-6)    normalize_by_std
        A_k = G_k - mean_k                       otherwise

    Args:
        token_rewards: Reward of each token.
        response_mask: True on the policy's own tokens; False on what it reads, which parts turns, on padding, and on
            episodes to leave out of their group.
        group_index: Any integers; equal for the episodes of one prompt.
        gamma: Discount per turn, in ``[0, 1]``.
        normalize_by_std: True to divide by the std.

    Returns:
        The advantage of each turn on all of its tokens; exactly 0 elsewhere, and where one episode alone has such a
        turn or all return the same.
    """
    passing = torch.where(turn_ends(response_mask), gamma, 1.0)
    returns = discounted_returns(token_rewards, response_mask, discount=passing)
    rows, columns = turn_starts(response_mask).nonzero(as_tuple=True)
    numbers = turn_numbers(response_mask)[rows, columns]
    peers = group_index[rows] * (response_mask.shape[1] + 1) + numbers
    of_turns = returns[rows, columns]
    group = group_statistics(of_turns, peers, torch.ones_like(peers, dtype=torch.bool))
    advantages = of_turns - group.mean
    if normalize_by_std:
        advantages = advantages / (group.std + 1e-6)
    firsts = torch.zeros_like(token_rewards, dtype=advantages.dtype)
    firsts[rows, columns] = torch.where(group.has_signal, advantages, 0.0)
    return to_type_of(over_turns(firsts, response_mask), token_rewards)


class TurnDiscount(AdvantageEstimator):
    """Group-relative advantages of turns: the discounted reward from a turn on, less that of the prompt's others.

    An episode's turn is compared with the turn of the same number in the others; where no other has as many turns, it
    is neither good nor bad. With one turn and no discount it is GRPO.

    Args:
        gamma: Discount per turn of the policy, in ``[0, 1]``; below 1 it prefers short episodes.
        normalize_by_std: True to divide by the std of the turns that are compared.
    """

    needs_groups = True

    def __init__(self, gamma: float = 1.0, normalize_by_std: bool = True) -> None:
        check_in_unit_interval("gamma", gamma)
        self.gamma = gamma
        self.normalize_by_std = normalize_by_std

    def __call__(self, inputs: AdvantageInputs) -> AdvantageOutputs:
        """One advantage per turn, on each of its tokens."""
        advantages = turn_advantages(
            inputs.token_rewards,
            inputs.valid_mask,
            inputs.group_index,
            gamma=self.gamma,
            normalize_by_std=self.normalize_by_std,
        )
        return AdvantageOutputs(advantages=advantages)
