"""Group sequence policy optimization: one importance ratio for a whole response."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from verl_lightning.functional.masking import sequence_mean
from verl_lightning.functional.policy_losses.ratio import clamped_log_ratio


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
