"""Clipped importance sampling policy optimization (CISPO): weights are clipped, no gradient is stopped."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from verl_lightning.algorithms.checks import check_not_negative
from verl_lightning.algorithms.losses.base import LossAndMetrics, PolicyLoss, TokenValues, loss_arguments, policy_shift
from verl_lightning.functional.ratio import clamped_log_ratio
from verl_lightning.types import Experience


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


def clipped_weights(
    log_probs: Float[Tensor, "batch response"],
    old_log_probs: Float[Tensor, "batch response"],
    advantages: Float[Tensor, "batch response"],
    response_mask: Bool[Tensor, "batch response"],
    *,
    clip_low: float,
    clip_high: float,
) -> Float[Tensor, "batch response"]:
    """Marks the response tokens where the clip of `cispo_loss` holds the policy back; the mean is the clip fraction.

    Counted as in PPO and in TRL's ``cispo_clip_ratio``: a good token's weight above the upper bound, or a bad one's
    below the lower bound. Other weights are clipped too, but there the policy has moved the other way.

    Args:
        log_probs: Of the response tokens under the policy in training, in nats.
        old_log_probs: Of the same tokens under the policy before this batch's first step, in nats.
        advantages: Advantages of the tokens, in units of reward.
        response_mask: True on response tokens; False on tool output and padding.
        clip_low: As in `cispo_loss`.
        clip_high: As in `cispo_loss`.

    Returns:
        0 or 1 on response tokens, 0 elsewhere.
    """
    ratio = clamped_log_ratio(log_probs.detach(), old_log_probs, response_mask).exp()
    held_back = ((advantages > 0) & (ratio > 1 + clip_high)) | ((advantages < 0) & (ratio < 1 - clip_low))
    return (response_mask & held_back).to(ratio.dtype)


class CISPO(PolicyLoss):
    """Clipped importance sampling policy optimization: clips the weight of a token, never its gradient.

    Args:
        clip_low: How far the weight may fall below 1, in ``[0, 1]``; 1 sets no lower bound.
        clip_high: How far the weight may rise above 1.
    """

    def __init__(self, clip_low: float = 0.2, clip_high: float = 0.2) -> None:
        if not 0 <= clip_low <= 1:
            raise ValueError(f"`clip_low` must be from 0 to 1, got {clip_low}.")
        check_not_negative("clip_high", clip_high)
        self.clip_low = clip_low
        self.clip_high = clip_high

    def __call__(self, log_probs: TokenValues, batch: Experience) -> LossAndMetrics:
        """The loss, which weights it clips, and how far the policy has moved."""
        args = loss_arguments(log_probs, batch)
        clipped = clipped_weights(*args, clip_low=self.clip_low, clip_high=self.clip_high)
        loss = cispo_loss(*args, clip_low=self.clip_low, clip_high=self.clip_high)
        return loss, {"actor/pg_clipfrac": clipped} | policy_shift(log_probs, batch)
