"""Group sequence policy optimization (GSPO): one importance ratio for a whole response."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from verl_lightning.algorithms.checks import check_clip
from verl_lightning.algorithms.losses.base import LossAndMetrics, PolicyLoss, TokenValues, loss_arguments, policy_shift
from verl_lightning.algorithms.losses.ppo_clip import clip_fractions
from verl_lightning.functional.masking import sequence_mean
from verl_lightning.functional.ratio import clamped_log_ratio
from verl_lightning.types import Experience


def sequence_log_ratio(
    log_probs: Float[Tensor, "batch response"],
    old_log_probs: Float[Tensor, "batch response"],
    response_mask: Bool[Tensor, "batch response"],
) -> Float[Tensor, "batch response"]:
    """Mean log-ratio of each response, seen by each of its tokens with that token's own gradient.

    With ``l_t`` the `clamped_log_ratio` and ``sg`` the stop of the gradient::

        sg(mean(l)) + l_t - sg(l_t)    at most 10

    Args:
        log_probs: Of the response tokens under the policy in training, in nats. Carries the gradient.
        old_log_probs: Of the same tokens under the policy before this batch's first step, in nats. Constant.
        response_mask: True on response tokens; False on tool output and padding.

    Returns:
        In nats on response tokens, 0 elsewhere.
    """
    log_ratio = clamped_log_ratio(log_probs, old_log_probs, response_mask)
    mean = sequence_mean(log_ratio.detach(), response_mask).unsqueeze(-1)
    return torch.where(response_mask, mean + (log_ratio - log_ratio.detach()), 0.0).clamp(max=10)


def gspo_loss(
    log_probs: Float[Tensor, "batch response"],
    old_log_probs: Float[Tensor, "batch response"],
    advantages: Float[Tensor, "batch response"],
    response_mask: Bool[Tensor, "batch response"],
    *,
    clip_low: float,
    clip_high: float,
) -> Float[Tensor, "batch response"]:
    """Clipped surrogate loss with the ratio of the whole response, per response token.

    With ``s = exp(mean(log_probs - old_log_probs))`` over the response, whose gradient each token gets its share of::

        loss_t = -min(s * A_t, clip(s, 1 - clip_low, 1 + clip_high) * A_t)

    Args:
        log_probs: Of the response tokens under the policy in training, in nats. Carries the gradient.
        old_log_probs: Of the same tokens under the policy before this batch's first step, in nats. Constant.
        advantages: ``A_t``, in units of reward. Constant.
        response_mask: True on response tokens; False on tool output and padding.
        clip_low: How far the ratio may fall below 1; a mean over tokens needs a far narrower band than PPO's.
        clip_high: How far the ratio may rise above 1.

    Returns:
        ``loss_t`` on response tokens, 0 elsewhere; the paper aggregates by "seq-mean-token-mean".

    References:
        Zheng et al., *Group Sequence Policy Optimization*, 2025, eq. 5. https://arxiv.org/abs/2507.18071
    """
    ratio = sequence_log_ratio(log_probs, old_log_probs, response_mask).exp()
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(-ratio * advantages, -clipped_ratio * advantages)
    return torch.where(response_mask, loss, 0.0)


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
        log_ratio = sequence_log_ratio(*args[:2], batch.response_mask)
        clipped, _ = clip_fractions(
            log_ratio,
            torch.zeros_like(log_ratio),
            *args[2:],
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            dual_clip=math.inf,
        )
        loss = gspo_loss(*args, clip_low=self.clip_low, clip_high=self.clip_high)
        return loss, {"actor/pg_clipfrac": clipped} | policy_shift(log_probs, batch)
