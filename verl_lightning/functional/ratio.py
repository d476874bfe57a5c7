"""The importance ratio of a token, taken so that neither padding nor a far-off policy can overflow it."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def clamped_log_ratio(
    log_probs: Float[Tensor, "batch response"],
    old_log_probs: Float[Tensor, "batch response"],
    response_mask: Bool[Tensor, "batch response"],
) -> Float[Tensor, "batch response"]:
    """Log of the importance ratio, clamped to 20 nats either way.

    Computes::

        clip(log_probs_t - old_log_probs_t, -20, 20)

    Args:
        log_probs: Of the response tokens under the policy in training, in nats. Carries the gradient.
        old_log_probs: Of the same tokens under the policy before this batch's first step, in nats. Constant.
        response_mask: True on response tokens; False on tool output and padding.

    Returns:
        In nats on response tokens, 0 elsewhere.
    """
    # Mask before anyone takes `exp`: an overflow on padding makes the gradient nan even if it is masked afterwards.
    return torch.where(response_mask, log_probs - old_log_probs, 0.0).clamp(-20, 20)
