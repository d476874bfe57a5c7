"""Losses that bound an importance ratio: PPO, GSPO, GMPO and CISPO."""

from __future__ import annotations

import math

import torch

from verl_lightning.functional import policy_losses as losses
from verl_lightning.modules.policy_losses.base import (
    LossAndMetrics,
    PolicyLoss,
    TokenValues,
    check_clip,
    check_not_negative,
    loss_arguments,
    policy_shift,
)
from verl_lightning.types import Experience


class PPOClip(PolicyLoss):
    """PPO's clipped surrogate: a token stops teaching once its probability has moved far enough.

    Schulman et al., 2017, https://arxiv.org/abs/1707.06347. ``clip_high`` above ``clip_low`` is DAPO's clip-higher, Yu
    et al., 2025, https://arxiv.org/abs/2503.14476; the dual clip is of Ye et al., 2020,
    https://arxiv.org/abs/1912.09729

    Args:
        clip_low: How far the probability ratio may fall below 1, in ``[0, 1)``.
        clip_high: How far the ratio may rise above 1.
        dual_clip: Ratio beyond which a token of negative advantage teaches no more, above 1; ``.inf`` to turn it off.
    """

    def __init__(self, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float = 3.0) -> None:
        check_clip(clip_low, clip_high)
        if dual_clip <= 1:
            raise ValueError(f"`dual_clip` must be above 1, got {dual_clip}; `.inf` turns it off.")
        self.clip_low = clip_low
        self.clip_high = clip_high
        self.dual_clip = dual_clip

    def __call__(self, log_probs: TokenValues, batch: Experience) -> LossAndMetrics:
        """The loss, which tokens it clips, and how far the policy has moved."""
        args = loss_arguments(log_probs, batch)
        low, high, dual = self.clip_low, self.clip_high, self.dual_clip
        clipped, dual_clipped = losses.clip_fractions(*args, clip_low=low, clip_high=high, dual_clip=dual)
        metrics = {"actor/pg_clipfrac": clipped, "actor/pg_clipfrac_lower": dual_clipped}
        return losses.ppo_clip_loss(*args, clip_low=low, clip_high=high, dual_clip=dual), metrics | policy_shift(
            log_probs, batch
        )


class GSPO(PolicyLoss):
    """Group sequence policy optimization: PPO's clip on the mean log-ratio of the whole response.

    Zheng et al., 2025, https://arxiv.org/abs/2507.18071, with ``aggregation: seq-mean-token-mean``.

    Args:
        clip_low: How far the response's ratio may fall below 1, in ``[0, 1)``.
        clip_high: How far the ratio may rise above 1.
    """

    def __init__(self, clip_low: float = 3e-4, clip_high: float = 4e-4) -> None:
        check_clip(clip_low, clip_high)
        self.clip_low = clip_low
        self.clip_high = clip_high

    def __call__(self, log_probs: TokenValues, batch: Experience) -> LossAndMetrics:
        """The loss, the tokens of clipped responses, and how far the policy has moved."""
        args = loss_arguments(log_probs, batch)
        log_ratio = losses.sequence_log_ratio(*args[:2], batch.response_mask)
        clipped, _ = losses.clip_fractions(
            log_ratio,
            torch.zeros_like(log_ratio),
            *args[2:],
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=math.inf,
        )
        loss = losses.gspo_loss(*args, clip_low=self.clip_low, clip_high=self.clip_high)
        return loss, {"actor/pg_clipfrac": clipped} | policy_shift(log_probs, batch)


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
        clipped, _ = losses.clip_fractions(
            *args, clip_low=-math.expm1(-self.clip_low), clip_high=math.expm1(self.clip_high), dual_clip=math.inf
        )
        loss = losses.geo_mean_loss(*args, clip_low=self.clip_low, clip_high=self.clip_high)
        return loss, {"actor/pg_clipfrac": clipped} | policy_shift(log_probs, batch)


class CISPO(PolicyLoss):
    """Clipped importance sampling policy optimization: clips the weight of a token, never its gradient.

    MiniMax, 2025, https://arxiv.org/abs/2506.13585

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
        clipped = losses.weight_clip_indicator(
            *args[:2], batch.response_mask, clip_low=self.clip_low, clip_high=self.clip_high
        )
        loss = losses.cispo_loss(*args, clip_low=self.clip_low, clip_high=self.clip_high)
        return loss, {"actor/pg_clipfrac": clipped} | policy_shift(log_probs, batch)
