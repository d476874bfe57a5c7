"""Geometric-mean policy optimization (GMPO): the geometric mean of the clipped ratios of a response."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from verl_lightning.algorithms.checks import check_not_negative
from verl_lightning.algorithms.losses.base import LossAndMetrics, PolicyLoss, TokenValues, loss_arguments, policy_shift
from verl_lightning.algorithms.losses.ppo_clip import clip_fractions
from verl_lightning.functional.masking import sequence_mean
from verl_lightning.functional.ratio import clamped_log_ratio
from verl_lightning.types import Experience


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


class GeoMean(PolicyLoss):
    """Geometric-mean policy optimization: the ratio of a response is the geometric mean of its clipped token ratios.

    Zhao et al., 2025, https://arxiv.org/abs/2507.20673, with ``aggregation: seq-mean-token-mean``.

    Args:
        clip_low: How far a token's log-ratio may fall below 0, in nats.
        clip_high: How far a token's log-ratio may rise above 0, in nats.
    """

    def __init__(self, clip_low: float = 0.4, clip_high: float = 0.4) -> None:
        check_not_negative("clip_low", clip_low)
        check_not_negative("clip_high", clip_high)
        self.clip_low = clip_low
        self.clip_high = clip_high

    def __call__(self, log_probs: TokenValues, batch: Experience) -> LossAndMetrics:
        """The loss, which tokens it clips, and how far the policy has moved."""
        args = loss_arguments(log_probs, batch)
        clipped, _ = clip_fractions(
            *args, clip_low=-math.expm1(-self.clip_low), clip_high=math.expm1(self.clip_high), dual_clip=math.inf
        )
        loss = geo_mean_loss(*args, clip_low=self.clip_low, clip_high=self.clip_high)
        return loss, {"actor/pg_clipfrac": clipped} | policy_shift(log_probs, batch)
