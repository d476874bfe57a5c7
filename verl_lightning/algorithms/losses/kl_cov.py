"""KL-Cov: an unclipped surrogate with a penalty on the shift of the tokens of highest covariance."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from typing_extensions import override

from verl_lightning.algorithms.checks import check_fraction, check_not_negative
from verl_lightning.algorithms.losses.base import LossAndMetrics, TokenValues, loss_arguments, policy_shift
from verl_lightning.algorithms.losses.covariance import (
    CovarianceLoss,
    CovarianceSelection,
    select_top,
)
from verl_lightning.functional.ratio import clamped_log_ratio
from verl_lightning.types import Experience


def kl_cov_loss(
    log_probs: Float[Tensor, "batch response"],
    old_log_probs: Float[Tensor, "batch response"],
    advantages: Float[Tensor, "batch response"],
    is_selected: Bool[Tensor, "batch response"],
    response_mask: Bool[Tensor, "batch response"],
    *,
    coef: float,
) -> Float[Tensor, "batch response"]:
    """Unclipped surrogate loss with a penalty on the log-ratio of selected tokens, per response token.

    With ``l_t = log_probs_t - old_log_probs_t``::

        loss_t = -exp(l_t) * A_t + coef * abs(l_t) * is_selected_t

    Args:
        log_probs: Of the response tokens under the policy in training, in nats. Carries the gradient.
        old_log_probs: Of the same tokens under the policy before this batch's first step, in nats. Constant.
        advantages: ``A_t``, in units of reward. Constant.
        is_selected: True on the tokens of highest covariance, by `select_top`.
        response_mask: True on response tokens; False on tool output and padding.
        coef: Units of reward per nat.

    Returns:
        ``loss_t`` on response tokens, 0 elsewhere.

    References:
        Cui et al., *The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models*, 2025.
        https://arxiv.org/abs/2505.22617
    """
    log_ratio = clamped_log_ratio(log_probs, old_log_probs, response_mask)
    penalty = torch.where(is_selected, coef * log_ratio.abs(), 0.0)
    return torch.where(response_mask, -log_ratio.exp() * advantages + penalty, 0.0)


class KLCov(CovarianceLoss):
    """Unclipped surrogate with a penalty on the shift of the tokens of highest covariance, to keep the entropy up.

    Args:
        coef: Weight of the penalty, units of reward per nat.
        fraction: Share of the step's tokens that are penalised, in ``(0, 1]``; at least one token.
    """

    def __init__(self, coef: float = 1.0, fraction: float = 2e-4) -> None:
        check_not_negative("coef", coef)
        check_fraction("fraction", fraction)
        self.coef = coef
        self.fraction = fraction

    @override
    def select(
        self, old_log_probs: Float[Tensor, " tokens"], advantages: Float[Tensor, " tokens"]
    ) -> CovarianceSelection:
        return select_top(old_log_probs, advantages, fraction=self.fraction)

    @override
    def __call__(self, log_probs: TokenValues, batch: Experience) -> LossAndMetrics:
        selected = self.is_selected(batch)
        args = loss_arguments(log_probs, batch)
        loss = kl_cov_loss(*args[:3], selected, batch.response_mask, coef=self.coef)
        return loss, {"actor/cov_frac": selected.to(loss.dtype)} | policy_shift(log_probs, batch)
