"""Clipped importance sampling policy optimization: the weight is clipped, the gradient of no token is stopped."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from verl_lightning.functional.policy_losses.ratio import clamped_log_ratio


def cispo_loss(
    log_probs: Float[Tensor, "batch response"],
    old_log_probs: Float[Tensor, "batch response"],
    advantages: Float[Tensor, "batch response"],
    response_mask: Bool[Tensor, "batch response"],
    *,
    clip_low: float,
    clip_high: float,
) -> Float[Tensor, "batch response"]:
    """Policy gradient weighted by a clipped and constant importance ratio, per response token.

    With ``r_t = exp(log_probs_t - old_log_probs_t)`` and ``sg`` the stop of the gradient::

        loss_t = -sg(clip(r_t, 1 - clip_low, 1 + clip_high)) * A_t * log_probs_t

    Args:
        log_probs: Of the response tokens under the policy in training, in nats. Carries the gradient.
        old_log_probs: Of the same tokens under the policy before this batch's first step, in nats. Constant.
        advantages: ``A_t``, in units of reward. Constant.
        response_mask: True on response tokens; False on tool output and padding.
        clip_low: How far the weight may fall below 1, in ``[0, 1]``; 1 sets no lower bound.
        clip_high: How far the weight may rise above 1.

    Returns:
        ``loss_t`` on response tokens, 0 elsewhere.

    References:
        MiniMax, *MiniMax-M1*, 2025, sec. 3.1. https://arxiv.org/abs/2506.13585
    """
    ratio = clamped_log_ratio(log_probs.detach(), old_log_probs, response_mask).exp()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    # Masked by itself too: the gradient of a product with a nan advantage would be nan.
    kept_log_probs = torch.where(response_mask, log_probs, 0.0)
    return torch.where(response_mask, -weight * advantages * kept_log_probs, 0.0)


def weight_clip_indicator(
    log_probs: Float[Tensor, "batch response"],
    old_log_probs: Float[Tensor, "batch response"],
    response_mask: Bool[Tensor, "batch response"],
    *,
    clip_low: float,
    clip_high: float,
) -> Float[Tensor, "batch response"]:
    """1 on the tokens whose weight `cispo_loss` clips; its mean is the clip fraction.

    Args:
        log_probs: Of the response tokens under the policy in training, in nats.
        old_log_probs: Of the same tokens under the policy before this batch's first step, in nats.
        response_mask: True on response tokens; False on tool output and padding.
        clip_low: As in `cispo_loss`.
        clip_high: As in `cispo_loss`.

    Returns:
        0 or 1 on response tokens, 0 elsewhere.
    """
    ratio = clamped_log_ratio(log_probs.detach(), old_log_probs, response_mask).exp()
    return (response_mask & ((ratio < 1 - clip_low) | (ratio > 1 + clip_high))).to(ratio.dtype)
