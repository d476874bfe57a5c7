"""Corrections for an engine whose policy is not quite the trainer's, to choose from in YAML."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from typing_extensions import override

from verl_lightning.functional import correction
from verl_lightning.functional.masking import sequence_mean, sequence_sum

TokenValues = Float[Tensor, "batch response"]
"""A value per response token, 0 where masked."""


@dataclass(frozen=True, kw_only=True)
class Corrected:
    """How much each response token counts after correction."""

    weights: Float[Tensor, "batch response"]
    """Multiplies the policy loss of each token; constant."""

    response_mask: Bool[Tensor, "batch response"]
    """The response mask without rejected tokens, which then count in no denominator."""


class RolloutCorrection(ABC):
    """Corrects for the difference between the engine's policy and the trainer's."""

    @abstractmethod
    def __call__(self, log_ratio: TokenValues, response_mask: Bool[Tensor, "batch response"]) -> Corrected:
        """Weights and rejections; ``log_ratio`` is `mismatch_log_ratio` of trainer over engine, in nats."""


class TruncatedImportanceSampling(RolloutCorrection):
    """Weighs each token by how much likelier it is under the trainer's policy, up to a cap.

    Yao et al., 2025, https://fengyao.notion.site/off-policy-rl

    Args:
        level: Whether a weight is of the single token, with little variance, or of the whole response, without bias.
        cap: The largest weight, above 0.
    """

    def __init__(self, level: Literal["token", "sequence"] = "token", cap: float = 2.0) -> None:
        _check_cap(cap)
        self.level = level
        self.cap = cap

    @override
    def __call__(self, log_ratio: TokenValues, response_mask: Bool[Tensor, "batch response"]) -> Corrected:
        weigh = {
            "token": correction.token_importance_weights,
            "sequence": correction.sequence_importance_weights,
        }[self.level]
        weights = correction.truncated_weights(weigh(log_ratio, response_mask), cap=self.cap)
        return Corrected(weights=weights, response_mask=response_mask)


class IcePop(RolloutCorrection):
    """Weighs each token by how much likelier it is under the trainer's policy, and drops tokens outside a band.

    Ling Team, 2025, https://arxiv.org/abs/2510.18855

    Args:
        low: The least weight that stays.
        high: The largest weight that stays.
    """

    def __init__(self, low: float = 0.5, high: float = 5.0) -> None:
        if not 0 <= low < high:
            raise ValueError(f"`low` must be at least 0 and below `high`, got {low} and {high}.")
        self.low = low
        self.high = high

    @override
    def __call__(self, log_ratio: TokenValues, response_mask: Bool[Tensor, "batch response"]) -> Corrected:
        weights = correction.token_importance_weights(log_ratio, response_mask)
        banded = correction.icepop_weights(weights, low=self.low, high=self.high)
        return Corrected(weights=banded, response_mask=response_mask)


class SequenceMask(RolloutCorrection):
    """Weighs each response by how much likelier it is under the trainer's policy, and drops those above a cap.

    TRL's default, there called ``sequence_mask``.

    Args:
        cap: The largest weight that stays, above 0.
    """

    def __init__(self, cap: float = 3.0) -> None:
        _check_cap(cap)
        self.cap = cap

    @override
    def __call__(self, log_ratio: TokenValues, response_mask: Bool[Tensor, "batch response"]) -> Corrected:
        weights = correction.sequence_importance_weights(log_ratio, response_mask)
        return Corrected(
            weights=correction.icepop_weights(weights, low=0.0, high=self.cap), response_mask=response_mask
        )


class Rejection(RolloutCorrection):
    """Takes tokens or responses that the two policies see too differently out of training, and leaves the rest as is.

    Rejected tokens leave the response mask, so that they count in no mean. ``k1`` over ``sequence-mean`` is rejection
    by the geometric mean of the ratios.

    Args:
        statistic: ``k1`` is the log-ratio of trainer over engine, ``k2`` half its square, ``k3`` the unbiased KL.
        level: Single tokens, or responses by the sum, mean or maximum over their tokens.
        low: The least statistic that stays, in nats.
        high: The largest statistic that stays, in nats.
    """

    def __init__(
        self,
        statistic: Literal["k1", "k2", "k3"] = "k1",
        level: Literal["token", "sequence-sum", "sequence-mean", "sequence-max"] = "sequence-mean",
        low: float = -0.001,
        high: float = 0.001,
    ) -> None:
        if low >= high:
            raise ValueError(f"`low` must be below `high`, got {low} and {high}.")
        if statistic == "k1" and level == "sequence-max":
            raise ValueError("`k1` may be negative, so its maximum bounds one side only: use `k2` or `k3`.")
        self.statistic = statistic
        self.level = level
        self.low = low
        self.high = high

    @override
    def __call__(self, log_ratio: TokenValues, response_mask: Bool[Tensor, "batch response"]) -> Corrected:
        values = {"k1": log_ratio, "k2": correction.mismatch_k2(log_ratio), "k3": correction.mismatch_k3(log_ratio)}
        return Corrected(
            weights=response_mask.to(log_ratio.dtype), response_mask=self._kept(values[self.statistic], response_mask)
        )

    def _kept(
        self, statistic: TokenValues, response_mask: Bool[Tensor, "batch response"]
    ) -> Bool[Tensor, "batch response"]:
        if self.level == "token":
            return correction.keep_tokens(statistic, response_mask, low=self.low, high=self.high)
        reduce = {
            "sequence-sum": sequence_sum,
            "sequence-mean": sequence_mean,
            "sequence-max": correction.sequence_max,
        }[self.level]
        return correction.keep_sequences(reduce(statistic, response_mask), response_mask, low=self.low, high=self.high)


def correct_rollout(
    corrections: Sequence[RolloutCorrection],
    old_log_probs: Float[Tensor, "batch response"],
    rollout_log_probs: Float[Tensor, "batch response"],
    response_mask: Bool[Tensor, "batch response"],
) -> tuple[Corrected, dict[str, TokenValues]]:
    """Applies corrections side by side: weights multiply, and what one rejects is out.

    Args:
        corrections: Each sees the uncorrected rollout; none of them leaves it as it is.
        old_log_probs: Of the response tokens under the trainer's policy before this batch's first step, in nats.
        rollout_log_probs: Of the same tokens under the engine's policy, in nats.
        response_mask: True on response tokens; False on tool output and padding.

    Returns:
        The correction, and metrics of each response token, to be averaged over ``response_mask``.
    """
    log_ratio = correction.mismatch_log_ratio(old_log_probs, rollout_log_probs, response_mask)
    weights, kept = response_mask.to(log_ratio.dtype), response_mask
    for correct in corrections:
        corrected = correct(log_ratio, response_mask)
        weights, kept = weights * corrected.weights, kept & corrected.response_mask
    corrected = Corrected(weights=torch.where(kept, weights, 0.0), response_mask=kept)
    return corrected, _metrics(log_ratio, corrected, response_mask)


def _metrics(
    log_ratio: TokenValues, corrected: Corrected, response_mask: Bool[Tensor, "batch response"]
) -> dict[str, TokenValues]:
    metrics = {
        "rollout_corr/abs_log_prob_gap": log_ratio.abs(),
        "rollout_corr/kl": -log_ratio,
        "rollout_corr/gen_kl_error": correction.mismatch_k3(log_ratio),
        "rollout_corr/token_mult_prob_error": correction.probability_error(log_ratio),
        "rollout_corr/weight": corrected.weights,
        "rollout_corr/zero_weight_frac": (corrected.weights == 0).to(log_ratio.dtype),
        "rollout_corr/rejected_frac": (~corrected.response_mask).to(log_ratio.dtype),
    }
    return {name: torch.where(response_mask, values, 0.0) for name, values in metrics.items()}


def _check_cap(cap: float) -> None:
    if cap <= 0:
        raise ValueError(f"`cap` must be above 0, got {cap}.")
