"""What the critic minimises, and how well it explains the returns."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from verl_lightning.functional.masking import masked_variance


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
        values: Of the critic in training, in units of reward. Carries the gradient.
        old_values: Of the critic before this batch's first step, in units of reward. Constant.
        returns: What the critic should predict, in units of reward. Constant.
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
        values: Of the critic in training, in units of reward.
        old_values: Of the critic before this batch's first step, in units of reward.
        returns: What the critic should predict, in units of reward.
        response_mask: True on response tokens; False on tool output and padding.
        clip: How far a value may move from its old one, in units of reward.

    Returns:
        0 or 1 on response tokens, 0 elsewhere.
    """
    plain, clipped = _squared_errors(values.detach(), old_values, returns, response_mask, clip=clip)
    return (response_mask & (clipped > plain)).to(values.dtype)


def explained_variance(
    values: Float[Tensor, "batch response"],
    returns: Float[Tensor, "batch response"],
    response_mask: Bool[Tensor, "batch response"],
) -> Float[Tensor, ""]:
    """The share of the returns' variance that the critic explains.

    Computes::

        1 - variance(returns - values) / variance(returns)

    Args:
        values: Of the critic, in units of reward.
        returns: What it should have predicted, in units of reward.
        response_mask: True on response tokens; False on tool output and padding.

    Returns:
        At most 1; 0 for a critic that says nothing, below 0 for one that misleads, and 0 for returns that don't vary.
    """
    variance = masked_variance(returns, response_mask)
    residual = masked_variance(returns - values, response_mask)
    is_varied = variance > 0
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
