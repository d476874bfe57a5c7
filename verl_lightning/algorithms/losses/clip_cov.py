"""Clip-Cov: PPO's clipped surrogate in which a few tokens of high covariance give no gradient."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from typing_extensions import override

from verl_lightning.algorithms.checks import check_clip, check_fraction
from verl_lightning.algorithms.losses.base import LossAndMetrics, TokenValues, loss_arguments, policy_shift
from verl_lightning.algorithms.losses.covariance import (
    CovarianceLoss,
    CovarianceSelection,
    select_at_random,
)
from verl_lightning.algorithms.losses.ppo_clip import clip_fractions, ppo_clip_loss
from verl_lightning.types import Experience


def clip_cov_loss(
    log_probs: Float[Tensor, "batch response"],
    old_log_probs: Float[Tensor, "batch response"],
    advantages: Float[Tensor, "batch response"],
    is_selected: Bool[Tensor, "batch response"],
    response_mask: Bool[Tensor, "batch response"],
    *,
    clip_low: float,
    clip_high: float,
) -> Float[Tensor, "batch response"]:
    """PPO's clipped loss in which selected tokens of high covariance give no gradient, per response token.

    Args:
        log_probs: Of the response tokens under the policy in training, in nats. Carries the gradient.
        old_log_probs: Of the same tokens under the policy before this batch's first step, in nats. Constant.
        advantages: In units of reward. Constant.
        is_selected: True on tokens to detach, by `select_at_random`.
        response_mask: True on response tokens; False on tool output and padding.
        clip_low: How far the ratio may fall below 1, in ``[0, 1)``.
        clip_high: How far it may rise above 1.

    Returns:
        The loss on response tokens, 0 elsewhere; with the value of `ppo_clip_loss` throughout.

    References:
        Cui et al., *The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models*, 2025.
        https://arxiv.org/abs/2505.22617
    """
    log_probs = torch.where(is_selected, log_probs.detach(), log_probs)
    return ppo_clip_loss(
        log_probs,
        old_log_probs,
        advantages,
        response_mask,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=torch.inf,
    )


class ClipCov(CovarianceLoss):
    """PPO's clipped surrogate in which a few random tokens of high covariance do not teach, to keep the entropy up.

    Args:
        clip_low: How far the probability ratio may fall below 1, in ``[0, 1)``.
        clip_high: How far the ratio may rise above 1.
        fraction: Share of the step's tokens that do not teach, in ``(0, 1]``; at least one token.
        covariance_low: The least covariance of advantage and log-probability that may be chosen.
        covariance_high: Where the choice ends.
    """

    def __init__(
        self,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        fraction: float = 2e-4,
        covariance_low: float = 1.0,
        covariance_high: float = 5.0,
    ) -> None:
        check_clip(clip_low, clip_high)
        check_fraction("fraction", fraction)
        if covariance_low >= covariance_high:
            raise ValueError(
                f"`covariance_low` must be below `covariance_high`, got {covariance_low} and {covariance_high}."
            )
        self.clip_low = clip_low
        self.clip_high = clip_high
        self.fraction = fraction
        self.covariance_low = covariance_low
        self.covariance_high = covariance_high

    @override
    def select(
        self, old_log_probs: Float[Tensor, " tokens"], advantages: Float[Tensor, " tokens"]
    ) -> CovarianceSelection:
        low, high = self.covariance_low, self.covariance_high
        return select_at_random(old_log_probs, advantages, low=low, high=high, fraction=self.fraction)

    @override
    def __call__(self, log_probs: TokenValues, batch: Experience) -> LossAndMetrics:
        low, high, selected = self.clip_low, self.clip_high, self.is_selected(batch)
        args = loss_arguments(log_probs, batch)
        clipped, _ = clip_fractions(*args, clip_low=low, clip_high=high, dual_clip=float("inf"))
        loss = clip_cov_loss(*args[:3], selected, batch.response_mask, clip_low=low, clip_high=high)
        metrics = {"actor/pg_clipfrac": clipped, "actor/cov_frac": selected.to(loss.dtype)}
        return loss, metrics | policy_shift(log_probs, batch)
