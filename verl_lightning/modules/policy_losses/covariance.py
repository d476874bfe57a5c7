"""Losses that spare the tokens whose advantage goes with their log-probability, which keeps the entropy up."""

from __future__ import annotations

import copy
from typing import Self

from jaxtyping import Bool, Float
from torch import Tensor
from typing_extensions import override

from verl_lightning.functional import policy_losses as losses
from verl_lightning.modules.policy_losses.base import (
    LossAndMetrics,
    PolicyLoss,
    TokenValues,
    check_clip,
    check_not_negative,
    loss_arguments,
    policy_shift,
)
from verl_lightning.types import Experience


class _CovarianceLoss(PolicyLoss):
    """A loss that selects tokens by covariance, once for each optimizer step.

    The covariance is taken from the log-probabilities of before the first update, not of now: those are known for the
    whole optimizer step before its first micro-batch, so that the selection can't depend on micro-batches.
    """

    fraction: float
    needs_whole_step = True
    _selection: losses.CovarianceSelection | None = None

    def select(
        self, old_log_probs: Float[Tensor, " tokens"], advantages: Float[Tensor, " tokens"]
    ) -> losses.CovarianceSelection:
        """Chooses from the response tokens of the whole step."""
        raise NotImplementedError

    @override
    def for_step(self, old_log_probs: Float[Tensor, " tokens"], advantages: Float[Tensor, " tokens"]) -> Self:
        bound = copy.copy(self)
        bound._selection = self.select(old_log_probs, advantages)
        return bound

    def is_selected(self, batch: Experience) -> Bool[Tensor, "batch response"]:
        """Which tokens of this micro-batch were chosen."""
        if self._selection is None:
            raise RuntimeError(
                f"`{type(self).__name__}` chooses among the tokens of a whole optimizer step, and was called before it"
                " saw them. Call `for_step(old_log_probs, advantages)` and use the loss that it returns."
            )
        return losses.is_selected(
            self._selection, batch.old_log_probs, batch.advantages, batch.input_ids, batch.response_mask
        )


class ClipCov(_CovarianceLoss):
    """PPO's clipped surrogate in which a few random tokens of high covariance do not teach, to keep the entropy up.

    Cui et al., 2025, https://arxiv.org/abs/2505.22617

    Args:
        clip_low: How far the probability ratio may fall below 1, in ``[0, 1)``.
        clip_high: How far the ratio may rise above 1.
        fraction: Share of the step's tokens that do not teach, in ``(0, 1]``; at least one token.
        covariance_low: The least covariance of advantage and log-probability that may be chosen.
        covariance_high: Where the choice ends.
    """

    def __init__(
        self,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        fraction: float = 2e-4,
        covariance_low: float = 1.0,
        covariance_high: float = 5.0,
    ) -> None:
        check_clip(clip_low, clip_high)
        _check_fraction(fraction)
        if covariance_low >= covariance_high:
            raise ValueError(
                f"`covariance_low` must be below `covariance_high`, got {covariance_low} and {covariance_high}."
            )
        self.clip_low = clip_low
        self.clip_high = clip_high
        self.fraction = fraction
        self.covariance_low = covariance_low
        self.covariance_high = covariance_high

    @override
    def select(
        self, old_log_probs: Float[Tensor, " tokens"], advantages: Float[Tensor, " tokens"]
    ) -> losses.CovarianceSelection:
        low, high = self.covariance_low, self.covariance_high
        return losses.select_at_random(old_log_probs, advantages, low=low, high=high, fraction=self.fraction)

    @override
    def __call__(self, log_probs: TokenValues, batch: Experience) -> LossAndMetrics:
        low, high, selected = self.clip_low, self.clip_high, self.is_selected(batch)
        args = loss_arguments(log_probs, batch)
        clipped, _ = losses.clip_fractions(*args, clip_low=low, clip_high=high, dual_clip=float("inf"))
        loss = losses.clip_cov_loss(*args[:3], selected, batch.response_mask, clip_low=low, clip_high=high)
        metrics = {"actor/pg_clipfrac": clipped, "actor/cov_frac": selected.to(loss.dtype)}
        return loss, metrics | policy_shift(log_probs, batch)


class KLCov(_CovarianceLoss):
    """Unclipped surrogate with a penalty on the shift of the tokens of highest covariance, to keep the entropy up.

    Cui et al., 2025, https://arxiv.org/abs/2505.22617

    Args:
        coef: Weight of the penalty, units of reward per nat.
        fraction: Share of the step's tokens that are penalised, in ``(0, 1]``; at least one token.
    """

    def __init__(self, coef: float = 1.0, fraction: float = 2e-4) -> None:
        check_not_negative("coef", coef)
        _check_fraction(fraction)
        self.coef = coef
        self.fraction = fraction

    @override
    def select(
        self, old_log_probs: Float[Tensor, " tokens"], advantages: Float[Tensor, " tokens"]
    ) -> losses.CovarianceSelection:
        return losses.select_top(old_log_probs, advantages, fraction=self.fraction)

    @override
    def __call__(self, log_probs: TokenValues, batch: Experience) -> LossAndMetrics:
        selected = self.is_selected(batch)
        args = loss_arguments(log_probs, batch)
        loss = losses.kl_cov_loss(*args[:3], selected, batch.response_mask, coef=self.coef)
        return loss, {"actor/cov_frac": selected.to(loss.dtype)} | policy_shift(log_probs, batch)


def _check_fraction(fraction: float) -> None:
    if not 0 < fraction <= 1:
        raise ValueError(f"`fraction` must be above 0 and at most 1, got {fraction}.")
