"""PPO's clipped surrogate with asymmetric bounds and dual clip."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from verl_lightning.functional.policy_losses.ratio import clamped_log_ratio


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
        clip_high: How far it may rise above 1. Above ``clip_low`` it is DAPO's "clip-higher".
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
    """Which tokens' gradients `ppo_clip_loss` stops, per response token.

    Args:
        log_probs: Of the response tokens under the policy in training, in nats.
        old_log_probs: Of the same tokens under the policy before this batch's first step, in nats.
        advantages: In units of reward.
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
