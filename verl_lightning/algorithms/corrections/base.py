"""The interface of rollout corrections, and how several of them are applied together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from verl_lightning.functional.mismatch import (
    mismatch_k3,
    mismatch_log_ratio,
    probability_error,
)
from verl_lightning.options import Method

TokenValues = Float[Tensor, "batch response"]
"""A value per response token, 0 where masked."""


@dataclass(frozen=True, kw_only=True)
class Corrected:
    """Loss weights of the response tokens after correction, and the tokens that are kept."""

    weights: Float[Tensor, "batch response"]
    """Factor of the policy loss of each token; constant."""

    response_mask: Bool[Tensor, "batch response"]
    """The response mask without rejected tokens, which then count in no denominator."""


class RolloutCorrection(Method, ABC, key="model.corrections"):
    """Corrects for the difference between the engine's policy and the trainer's."""

    @abstractmethod
    def __call__(self, log_ratio: TokenValues, response_mask: Bool[Tensor, "batch response"]) -> Corrected:
        """Weighs and rejects tokens; ``log_ratio`` is `mismatch_log_ratio` of trainer over engine, in nats."""


def correct_rollout(
    corrections: Sequence[RolloutCorrection],
    old_log_probs: Float[Tensor, "batch response"],
    rollout_log_probs: Float[Tensor, "batch response"],
    response_mask: Bool[Tensor, "batch response"],
) -> tuple[Corrected, dict[str, TokenValues]]:
    """Applies corrections side by side: weights multiply, and what one rejects is out.

    Args:
        corrections: Corrections, each of which sees the uncorrected rollout; an empty list leaves it as it is.
        old_log_probs: Of the response tokens under the trainer's policy before this batch's first step, in nats.
        rollout_log_probs: Of the same tokens under the engine's policy, in nats.
        response_mask: True on response tokens; False on tool output and padding.

    Returns:
        The correction, and metrics of each response token, to be averaged over ``response_mask``.
    """
    log_ratio = mismatch_log_ratio(old_log_probs, rollout_log_probs, response_mask)
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
        "rollout_corr/gen_kl_error": mismatch_k3(log_ratio),
        "rollout_corr/token_mult_prob_error": probability_error(log_ratio),
        "rollout_corr/weight": corrected.weights,
        "rollout_corr/zero_weight_frac": (corrected.weights == 0).to(log_ratio.dtype),
        "rollout_corr/rejected_frac": (~corrected.response_mask).to(log_ratio.dtype),
    }
    return {name: torch.where(response_mask, values, 0.0) for name, values in metrics.items()}
