"""Direct reward optimization (DRO): the policy gradient with a squared penalty on the log-ratio."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from verl_lightning.algorithms.checks import check_not_negative
from verl_lightning.algorithms.losses.base import LossAndMetrics, PolicyLoss, TokenValues, loss_arguments, policy_shift
from verl_lightning.functional.ratio import clamped_log_ratio
from verl_lightning.types import Experience


def dro_loss(
    log_probs: Float[Tensor, "batch response"],
    old_log_probs: Float[Tensor, "batch response"],
    advantages: Float[Tensor, "batch response"],
    response_mask: Bool[Tensor, "batch response"],
    *,
    beta: float,
) -> Float[Tensor, "batch response"]:
    """Policy gradient loss with a quadratic pull back to the old policy, per response token.

    Computes::

        loss_t = -(A_t * log_probs_t - beta / 2 * (log_probs_t - old_log_probs_t)**2)

    Args:
        log_probs: Of the response tokens under the policy in training, in nats. Carries the gradient.
        old_log_probs: Of the same tokens under the policy before this batch's first step, in nats. Constant.
        advantages: ``A_t``, in units of reward. Constant.
        response_mask: True on response tokens; False on tool output and padding.
        beta: Strength of the pull, in units of reward per nat.

    Returns:
        ``loss_t`` on response tokens, 0 elsewhere.

    References:
        Richemond et al., *Offline Regularised Reinforcement Learning for LLM Alignment*, 2024.
        https://arxiv.org/abs/2405.19107
    """
    log_ratio = clamped_log_ratio(log_probs, old_log_probs, response_mask)
    # Masked by itself too: the gradient of a product with a nan advantage would be nan.
    kept_log_probs = torch.where(response_mask, log_probs, 0.0)
    return torch.where(response_mask, -(advantages * kept_log_probs - beta / 2 * log_ratio.square()), 0.0)


class DRO(PolicyLoss):
    """Direct reward optimization: the policy gradient with a quadratic pull back to the old policy.

    Args:
        beta: Strength of the pull, in units of reward per nat.
    """

    def __init__(self, beta: float = 0.1) -> None:
        check_not_negative("beta", beta)
        self.beta = beta

    def __call__(self, log_probs: TokenValues, batch: Experience) -> LossAndMetrics:
        """The loss and how far the policy has moved."""
        return dro_loss(*loss_arguments(log_probs, batch), beta=self.beta), policy_shift(log_probs, batch)
