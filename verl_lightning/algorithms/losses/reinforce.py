"""REINFORCE: the plain policy gradient, which is also GPG's loss."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from verl_lightning.algorithms.losses.base import LossAndMetrics, PolicyLoss, TokenValues, policy_shift
from verl_lightning.types import Experience


def reinforce_loss(
    log_probs: Float[Tensor, "batch response"],
    advantages: Float[Tensor, "batch response"],
    response_mask: Bool[Tensor, "batch response"],
) -> Float[Tensor, "batch response"]:
    """Policy gradient loss without importance ratio or clipping, per response token.

    Computes::

        loss_t = -A_t * log_probs_t

    Args:
        log_probs: Of the response tokens under the policy in training, in nats. Carries the gradient.
        advantages: ``A_t``, in units of reward. Constant.
        response_mask: True on response tokens; False on tool output and padding.

    Returns:
        ``loss_t`` on response tokens, 0 elsewhere.

    References:
        Williams, *Simple Statistical Gradient-Following Algorithms*, 1992. https://doi.org/10.1007/BF00992696
        Chu et al., *GPG*, 2025. https://arxiv.org/abs/2504.02546
    """
    # Masked by itself too: the gradient of a product with a nan advantage would be nan.
    kept_log_probs = torch.where(response_mask, log_probs, 0.0)
    return torch.where(response_mask, -advantages * kept_log_probs, 0.0)


class Reinforce(PolicyLoss):
    """The plain policy gradient, without importance ratio or clip."""

    def __call__(self, log_probs: TokenValues, batch: Experience) -> LossAndMetrics:
        """The loss and how far the policy has moved."""
        return reinforce_loss(log_probs, batch.advantages, batch.response_mask), policy_shift(log_probs, batch)


class GPGLoss(Reinforce):
    """Group policy gradient: REINFORCE's loss under the name of its recipe, for the advantage ``GPG``."""
