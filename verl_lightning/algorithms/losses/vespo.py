"""Variational sequence-level soft policy optimization (VESPO): a soft weight for the ratio of a whole response."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from verl_lightning.algorithms.checks import check_positive
from verl_lightning.algorithms.losses.base import LossAndMetrics, PolicyLoss, TokenValues, loss_arguments, policy_shift
from verl_lightning.functional.masking import sequence_sum
from verl_lightning.functional.ratio import clamped_log_ratio
from verl_lightning.types import Experience


def vespo_loss(
    log_probs: Float[Tensor, "batch response"],
    old_log_probs: Float[Tensor, "batch response"],
    advantages: Float[Tensor, "batch response"],
    response_mask: Bool[Tensor, "batch response"],
    *,
    power_positive: float,
    decay_positive: float,
    power_negative: float,
    decay_negative: float,
) -> Float[Tensor, "batch response"]:
    """Policy gradient weighted by a soft and constant function of the response's ratio, per response token.

    With ``w = exp(sum(log_probs - old_log_probs))`` over the response, power and decay of the advantage's sign, and
    ``sg`` the stop of the gradient::

        loss_t = -sg(w**power * exp(decay * (1 - w))) * A_t * log_probs_t

    The weight is 1 at ``w = 1`` and vanishes for ratios near 0 and for large ones.

    Args:
        log_probs: Of the response tokens under the policy in training, in nats. Carries the gradient.
        old_log_probs: Of the same tokens under the policy before this batch's first step, in nats. Constant.
        advantages: ``A_t``, in units of reward, the same for each token of a response. Constant.
        response_mask: True on response tokens; False on tool output and padding.
        power_positive: Power where ``A_t >= 0``, dimensionless.
        decay_positive: Decay where ``A_t >= 0``, dimensionless, above 0.
        power_negative: Power where ``A_t < 0``.
        decay_negative: Decay where ``A_t < 0``, above 0.

    Returns:
        ``loss_t`` on response tokens, 0 elsewhere.

    References:
        Shen et al., *VESPO*, 2026. https://arxiv.org/abs/2602.10693
    """
    log_ratio = clamped_log_ratio(log_probs.detach(), old_log_probs, response_mask)
    log_weight = sequence_sum(log_ratio, response_mask).clamp(math.log(1e-8), 20).unsqueeze(-1)
    power = torch.where(advantages >= 0, power_positive, power_negative)
    decay = torch.where(advantages >= 0, decay_positive, decay_negative)
    weight = (power * log_weight + decay * (1 - log_weight.exp())).exp()
    # Masked by itself too: the gradient of a product with a nan advantage would be nan.
    kept_log_probs = torch.where(response_mask, log_probs, 0.0)
    return torch.where(response_mask, -weight * advantages * kept_log_probs, 0.0)


class VESPO(PolicyLoss):
    """Variational sequence-level soft policy optimization: a soft weight for the ratio of the whole response.

    Args:
        power_positive: How soon responses of positive advantage lose weight as their ratio falls below 1.
        decay_positive: How soon they lose weight as their ratio rises above 1.
        power_negative: The same for responses of negative advantage.
        decay_negative: The same for responses of negative advantage.
    """

    def __init__(
        self,
        power_positive: float = 2.0,
        decay_positive: float = 3.0,
        power_negative: float = 3.0,
        decay_negative: float = 2.0,
    ) -> None:
        check_positive("power_positive", power_positive)
        check_positive("decay_positive", decay_positive)
        check_positive("power_negative", power_negative)
        check_positive("decay_negative", decay_negative)
        self.power_positive = power_positive
        self.decay_positive = decay_positive
        self.power_negative = power_negative
        self.decay_negative = decay_negative

    def __call__(self, log_probs: TokenValues, batch: Experience) -> LossAndMetrics:
        """The loss and how far the policy has moved."""
        loss = vespo_loss(
            *loss_arguments(log_probs, batch),
            power_positive=self.power_positive,
            decay_positive=self.decay_positive,
            power_negative=self.power_negative,
            decay_negative=self.decay_negative,
        )
        return loss, policy_shift(log_probs, batch)
