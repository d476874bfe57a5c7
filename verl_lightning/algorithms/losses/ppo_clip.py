"""PPO's clipped surrogate with asymmetric bounds and dual clip."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from verl_lightning.algorithms.checks import check_clip
from verl_lightning.algorithms.losses.base import LossAndMetrics, PolicyLoss, TokenValues, loss_arguments, policy_shift
from verl_lightning.functional.ratio import clamped_log_ratio
from verl_lightning.types import Experience


def ppo_clip_loss(
    log_probs: Float[Tensor, "batch response"],
    old_log_probs: Float[Tensor, "batch response"],
    advantages: Float[Tensor, "batch response"],
    response_mask: Bool[Tensor, "batch response"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
) -> Float[Tensor, "batch response"]:
    """Clipped surrogate loss of PPO, per response token.

    With the importance ratio ``r_t = exp(log_probs_t - old_log_probs_t)``::

        loss_t = -min(r_t * A_t, clip(r_t, 1 - clip_low, 1 + clip_high) * A_t)
        loss_t = min(loss_t, -dual_clip * A_t)    where A_t < 0

    Args:
        log_probs: Of the response tokens under the policy in training, in nats. Carries the gradient.
        old_log_probs: Of the same tokens under the policy before this batch's first step, in nats. Constant.
        advantages: ``A_t``, in units of reward. Constant.
        response_mask: True on response tokens; False on tool output and padding.
        clip_low: How far the ratio may fall below 1, in ``[0, 1)``.
        clip_high: How far the ratio may rise above 1. Above ``clip_low`` it is DAPO's "clip-higher".
        dual_clip: Ratio beyond which a bad token is pushed no further, above 1; ``inf`` for plain PPO.

    Returns:
        ``loss_t`` on response tokens, 0 elsewhere. Sum it with the weights of `token_weights`.

    References:
        Schulman et al., *Proximal Policy Optimization Algorithms*, 2017, eq. 7. https://arxiv.org/abs/1707.06347
        Yu et al., *DAPO*, 2025, sec. 3.1. https://arxiv.org/abs/2503.14476
        Ye et al., *Mastering Complex Control in MOBA Games*, 2020, eq. 5 (dual clip). https://arxiv.org/abs/1912.09729
    """
    ratio = clamped_log_ratio(log_probs, old_log_probs, response_mask).exp()
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(-ratio * advantages, -clipped_ratio * advantages)
    loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    return torch.where(response_mask, loss, 0.0)


def clip_fractions(
    log_probs: Float[Tensor, "batch response"],
    old_log_probs: Float[Tensor, "batch response"],
    advantages: Float[Tensor, "batch response"],
    response_mask: Bool[Tensor, "batch response"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
) -> tuple[Float[Tensor, "batch response"], Float[Tensor, "batch response"]]:
    """Marks the response tokens whose gradients `ppo_clip_loss` stops, by the clip and by the dual clip.

    Args:
        log_probs: Of the response tokens under the policy in training, in nats.
        old_log_probs: Of the same tokens under the policy before this batch's first step, in nats.
        advantages: Advantages of the tokens, in units of reward.
        response_mask: True on response tokens; False on tool output and padding.
        clip_low: As in `ppo_clip_loss`.
        clip_high: As in `ppo_clip_loss`.
        dual_clip: As in `ppo_clip_loss`.

    Returns:
        1 where the clip to ``[1 - clip_low, 1 + clip_high]`` decides the loss, and 1 where the dual clip does; 0
        elsewhere.
    """
    ratio = clamped_log_ratio(log_probs.detach(), old_log_probs, response_mask).exp()
    is_good, is_bad = advantages > 0, advantages < 0
    is_clipped = (is_good & (ratio > 1 + clip_high)) | (is_bad & (ratio < 1 - clip_low))
    is_dual_clipped = is_bad & (ratio > dual_clip)
    return (is_clipped & response_mask).to(ratio.dtype), (is_dual_clipped & response_mask).to(ratio.dtype)


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
        """Computes the loss, the tokens that it clips, and the policy's shift."""
        args = loss_arguments(log_probs, batch)
        low, high, dual = self.clip_low, self.clip_high, self.dual_clip
        clipped, dual_clipped = clip_fractions(*args, clip_low=low, clip_high=high, dual_clip=dual)
        metrics = {"actor/pg_clipfrac": clipped, "actor/pg_clipfrac_lower": dual_clipped}
        return ppo_clip_loss(*args, clip_low=low, clip_high=high, dual_clip=dual), metrics | policy_shift(
            log_probs, batch
        )
