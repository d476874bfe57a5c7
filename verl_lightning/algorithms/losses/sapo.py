"""Soft adaptive policy optimization (SAPO): a smooth gate in the place of the clip."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from verl_lightning.algorithms.checks import check_positive
from verl_lightning.algorithms.losses.base import LossAndMetrics, PolicyLoss, TokenValues, loss_arguments, policy_shift
from verl_lightning.functional.ratio import clamped_log_ratio
from verl_lightning.types import Experience


def sapo_loss(
    log_probs: Float[Tensor, "batch response"],
    old_log_probs: Float[Tensor, "batch response"],
    advantages: Float[Tensor, "batch response"],
    response_mask: Bool[Tensor, "batch response"],
    *,
    temperature_positive: float,
    temperature_negative: float,
) -> Float[Tensor, "batch response"]:
    """Surrogate loss whose gradient fades as the ratio leaves 1, per response token.

    With ``r_t = exp(log_probs_t - old_log_probs_t)`` and ``tau`` the temperature of the advantage's sign::

        loss_t = -A_t * 4 / tau * sigmoid(tau * (r_t - 1))

    At ``r_t = 1`` its gradient is that of the plain policy gradient.

    Args:
        log_probs: Of the response tokens under the policy in training, in nats. Carries the gradient.
        old_log_probs: Of the same tokens under the policy before this batch's first step, in nats. Constant.
        advantages: ``A_t``, in units of reward. Constant.
        response_mask: True on response tokens; False on tool output and padding.
        temperature_positive: ``tau`` where ``A_t > 0``, above 0; a larger one fades sooner.
        temperature_negative: ``tau`` elsewhere.

    Returns:
        ``loss_t`` on response tokens, 0 elsewhere.

    References:
        Gao et al., *Soft Adaptive Policy Optimization*, 2025. https://arxiv.org/abs/2511.20347
    """
    ratio = clamped_log_ratio(log_probs, old_log_probs, response_mask).exp()
    temperature = torch.where(advantages > 0, temperature_positive, temperature_negative).to(ratio.dtype)
    gate = torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature
    return torch.where(response_mask, -advantages * gate, 0.0)


class SAPO(PolicyLoss):
    """Soft adaptive policy optimization: a smooth gate in the place of PPO's clip.

    Args:
        temperature_positive: How soon tokens of positive advantage stop teaching as their ratio leaves 1.
        temperature_negative: The same for other tokens.
    """

    def __init__(self, temperature_positive: float = 1.0, temperature_negative: float = 1.05) -> None:
        check_positive("temperature_positive", temperature_positive)
        check_positive("temperature_negative", temperature_negative)
        self.temperature_positive = temperature_positive
        self.temperature_negative = temperature_negative

    def __call__(self, log_probs: TokenValues, batch: Experience) -> LossAndMetrics:
        """The loss and how far the policy has moved."""
        loss = sapo_loss(
            *loss_arguments(log_probs, batch),
            temperature_positive=self.temperature_positive,
            temperature_negative=self.temperature_negative,
        )
        return loss, policy_shift(log_probs, batch)
