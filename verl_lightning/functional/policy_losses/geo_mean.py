"""Geometric-mean policy optimization: a response's ratio is the geometric mean of its clipped token ratios."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from verl_lightning.functional.masking import sequence_mean
from verl_lightning.functional.policy_losses.ratio import clamped_log_ratio


def geo_mean_loss(
    log_probs: Float[Tensor, "batch response"],
    old_log_probs: Float[Tensor, "batch response"],
    advantages: Float[Tensor, "batch response"],
    response_mask: Bool[Tensor, "batch response"],
    *,
    clip_low: float,
    clip_high: float,
) -> Float[Tensor, "batch response"]:
    """Surrogate loss with the geometric mean of a response's clipped ratios, seen by each of its tokens.

    With ``l_t`` the log-ratio of a token, clipped only on the side where it overshoots::

        c_t = min(l_t, clip_high)     where A_t > 0
        c_t = max(l_t, -clip_low)     where A_t < 0
        loss_t = -A_t * exp(mean(c))

    Each token gets its own share of the gradient of ``exp(mean(c))``, so that any aggregation may follow.

    Args:
        log_probs: Of the response tokens under the policy in training, in nats. Carries the gradient.
        old_log_probs: Of the same tokens under the policy before this batch's first step, in nats. Constant.
        advantages: ``A_t``, in units of reward, the same for each token of a response. Constant.
        response_mask: True on response tokens; False on tool output and padding.
        clip_low: How far a token's log-ratio may fall below 0, in nats.
        clip_high: How far a token's log-ratio may rise above 0, in nats.

    Returns:
        ``loss_t`` on response tokens, 0 elsewhere; the paper aggregates by "seq-mean-token-mean".

    References:
        Zhao et al., *Geometric-Mean Policy Optimization*, 2025. https://arxiv.org/abs/2507.20673
    """
    log_ratio = clamped_log_ratio(log_probs, old_log_probs, response_mask)
    clipped = torch.where(advantages > 0, log_ratio.clamp(max=clip_high), log_ratio.clamp(min=-clip_low))
    mean = sequence_mean(clipped.detach(), response_mask).unsqueeze(-1)
    ratio = torch.where(response_mask, mean + (clipped - clipped.detach()), 0.0).exp()
    return torch.where(response_mask, -advantages * ratio, 0.0)
