"""A baseline for each token that weighs the group's responses by the noise that they have gathered so far."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from verl_lightning.algorithms.advantages.base import AdvantageEstimator, AdvantageInputs, AdvantageOutputs
from verl_lightning.functional.groups import group_members, group_statistics
from verl_lightning.functional.masking import sequence_sum, to_type_of
from verl_lightning.functional.returns import discounted_returns


def optimal_token_baseline_advantages(
    token_rewards: Float[Tensor, "batch response"],
    log_probs: Float[Tensor, "batch response"],
    sum_squared_probs: Float[Tensor, "batch response"],
    importance_weights: Float[Tensor, "batch response"],
    response_mask: Bool[Tensor, "batch response"],
    group_index: Int[Tensor, " batch"],
    valid: Bool[Tensor, " batch"],
) -> Float[Tensor, "batch response"]:
    """Reward from each token on, less the baseline of least variance at that token of the group's responses.

    With ``t`` counted along a response's trainable tokens, ``p_t = exp(log_probs_t)``, ``G_t`` the reward from ``t``
    on, and sums over the valid responses of a group that are longer than ``t``::

        w_t = (1 - 2 * p_t + sum_squared_probs_t) * importance_weights_t**2
        W_t = w_1 + ... + w_t
        A_t = G_t - sum(W_t * G_t) / sum(W_t)

    Where only one response is that long there is no baseline.

    Args:
        token_rewards: Of each token, in units of reward.
        log_probs: Of the response tokens under the policy, in nats.
        sum_squared_probs: ``sum(p**2)`` over the vocabulary at each token, in ``(0, 1]``.
        importance_weights: Of the policy over the one that drew the tokens; ones if they are the same.
        response_mask: True on response tokens; False on tool output and padding.
        group_index: Any integers; equal for the responses to one prompt.
        valid: False on responses to leave out of their group: failed rewards, nothing to train on.

    Returns:
        ``A_t`` in units of reward on response tokens, 0 elsewhere; exactly 0 where not valid and in groups of one
        response or of equal rewards.

    References:
        *Optimal Token Baseline*, 2026. https://arxiv.org/abs/2602.07078
    """
    mask = response_mask & valid.unsqueeze(-1)
    returns = discounted_returns(token_rewards, mask, discount=1.0)
    noise = torch.where(mask, (1 - 2 * log_probs.exp() + sum_squared_probs) * importance_weights.square(), 0.0)
    weights = noise.cumsum(dim=-1)
    members, row_of_group = group_members(group_index, valid)
    exists = _compact(mask.to(weights.dtype), mask)
    baseline = _weighted_means(_compact(returns, mask), _compact(weights, mask), exists, members)
    advantages = returns.double() - _spread(baseline[row_of_group], mask)
    has_signal = group_statistics(sequence_sum(token_rewards, mask), group_index, valid).has_signal
    return to_type_of(torch.where(mask & has_signal.unsqueeze(-1), advantages, 0.0), returns)


def _weighted_means(
    returns: Float[Tensor, "batch response"],
    weights: Float[Tensor, "batch response"],
    exists: Float[Tensor, "batch response"],
    members: Bool[Tensor, "groups batch"],
) -> Float[Tensor, "groups response"]:
    """Mean return of each group at each position; 0 where fewer than two of its responses exist."""
    # In float64, where a matrix product is never rounded to TF32.
    table = members.double()
    counts = table @ exists.double()
    totals = table @ (weights * exists).double()
    means = (table @ (weights.double() * returns * exists)) / totals.clamp(min=1e-8)
    return torch.where(counts > 1, means, 0.0)


def _compact(x: Float[Tensor, "batch response"], mask: Bool[Tensor, "batch response"]) -> Tensor:
    """Moves the trainable tokens of each row to its front, in order, and zeros behind them."""
    order = (~mask).long().argsort(dim=-1, stable=True)
    return torch.where(mask, x, 0.0).gather(-1, order)


def _spread(compact: Float[Tensor, "batch response"], mask: Bool[Tensor, "batch response"]) -> Tensor:
    """The inverse of `_compact` on the trainable tokens."""
    return compact.gather(-1, (mask.long().cumsum(dim=-1) - 1).clamp(min=0))


class OptimalTokenBaseline(AdvantageEstimator):
    """A baseline for each token of a prompt's responses that weighs them by the noise of their gradients so far.

    *Optimal Token Baseline*, 2026, https://arxiv.org/abs/2602.07078
    """

    needs_groups = True
    needs_sum_squared_probs = True

    def __call__(self, inputs: AdvantageInputs) -> AdvantageOutputs:
        """The advantage of each trainable token."""
        assert inputs.log_probs is not None
        assert inputs.sum_squared_probs is not None  # `needs_sum_squared_probs`
        weights = inputs.importance_weights
        advantages = optimal_token_baseline_advantages(
            inputs.token_rewards,
            inputs.log_probs,
            inputs.sum_squared_probs,
            torch.ones_like(inputs.log_probs) if weights is None else weights,
            inputs.response_mask,
            inputs.group_index,
            inputs.is_valid,
        )
        return AdvantageOutputs(advantages=advantages)
