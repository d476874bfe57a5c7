"""The critic's loss, and the share of the returns' variance that its values explain."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def clipped_value_loss(
    values: Float[Tensor, "batch response"],
    old_values: Float[Tensor, "batch response"],
    returns: Float[Tensor, "batch response"],
    response_mask: Bool[Tensor, "batch response"],
    *,
    clip: float,
) -> Float[Tensor, "batch response"]:
    """Squared error of the critic with PPO's pessimistic clipping, per response token.

    With ``clipped_t = clip(values_t, old_values_t - clip, old_values_t + clip)``::

        loss_t = 0.5 * max((values_t - returns_t)**2, (clipped_t - returns_t)**2)

    Args:
        values: Values of the critic in training, in units of reward. Carries the gradient.
        old_values: Values of the critic before this batch's first step, in units of reward. Constant.
        returns: Targets of the critic, in units of reward. Constant.
        response_mask: True on response tokens; False on tool output and padding.
        clip: How far a value may move from its old one, in units of reward; ``inf`` for the plain squared error.

    Returns:
        ``loss_t`` on response tokens, 0 elsewhere.

    References:
        Schulman et al., *Proximal Policy Optimization Algorithms*, 2017. https://arxiv.org/abs/1707.06347
        Huang et al., *The 37 Implementation Details of PPO*, 2022, detail 9.
        https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details/
    """
    plain, clipped = _squared_errors(values, old_values, returns, response_mask, clip=clip)
    return torch.where(response_mask, 0.5 * torch.maximum(plain, clipped), 0.0)


def value_clip_indicator(
    values: Float[Tensor, "batch response"],
    old_values: Float[Tensor, "batch response"],
    returns: Float[Tensor, "batch response"],
    response_mask: Bool[Tensor, "batch response"],
    *,
    clip: float,
) -> Float[Tensor, "batch response"]:
    """1 on the tokens where clipping decides `clipped_value_loss`; its mean is the clip fraction.

    Args:
        values: Values of the critic in training, in units of reward.
        old_values: Values of the critic before this batch's first step, in units of reward.
        returns: Targets of the critic, in units of reward.
        response_mask: True on response tokens; False on tool output and padding.
        clip: How far a value may move from its old one, in units of reward.

    Returns:
        0 or 1 on response tokens, 0 elsewhere.
    """
    plain, clipped = _squared_errors(values.detach(), old_values, returns, response_mask, clip=clip)
    return (response_mask & (clipped > plain)).to(values.dtype)


def explained_variance_moments(
    values: Float[Tensor, "batch response"],
    returns: Float[Tensor, "batch response"],
    response_mask: Bool[Tensor, "batch response"],
) -> Float[Tensor, " 5"]:
    """Sums over some of a batch's tokens that `explained_variance` needs; those of all parts add up.

    Args:
        values: Values of the critic, in units of reward.
        returns: Targets of the critic, in units of reward.
        response_mask: True on response tokens; False on tool output and padding.

    Returns:
        Number of tokens, then sum and sum of squares of the returns and of the critic's errors; in float64.
    """
    count = response_mask.sum().double()
    returns = returns.double()
    parts = [torch.where(response_mask, part, 0.0) for part in (returns, returns - values)]
    return torch.stack([count, *(power for part in parts for power in (part.sum(), part.square().sum()))])


def explained_variance(moments: Float[Tensor, " 5"]) -> Float[Tensor, ""]:
    """The share of the returns' variance that the critic explains.

    Computes::

        1 - variance(returns - values) / variance(returns)

    Args:
        moments: Sum of `explained_variance_moments` over micro-batches and ranks.

    Returns:
        At most 1; 0 for a critic that says nothing, below 0 for one that misleads, and 0 for returns that don't vary.
    """
    count, return_sum, return_squares, error_sum, error_squares = moments
    variance = return_squares - return_sum.square() / count.clamp(min=1)
    residual = error_squares - error_sum.square() / count.clamp(min=1)
    is_varied = variance > 1e-12 * return_squares  # less is rounding
    return torch.where(is_varied, 1 - residual / torch.where(is_varied, variance, 1.0), 0.0)


def _squared_errors(
    values: Float[Tensor, "batch response"],
    old_values: Float[Tensor, "batch response"],
    returns: Float[Tensor, "batch response"],
    response_mask: Bool[Tensor, "batch response"],
    *,
    clip: float,
) -> tuple[Float[Tensor, "batch response"], Float[Tensor, "batch response"]]:
    values = torch.where(response_mask, values, 0.0)
    clipped = torch.clamp(values, old_values - clip, old_values + clip)
    return (values - returns).square(), (clipped - returns).square()
