"""IcePop: importance weights inside a band, 0 outside it."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from typing_extensions import override

from verl_lightning.algorithms.corrections.base import Corrected, RolloutCorrection, TokenValues
from verl_lightning.functional.mismatch import (
    token_importance_weights,
)


def icepop_weights(
    weights: Float[Tensor, "batch response"], *, low: float, high: float
) -> Float[Tensor, "batch response"]:
    """Importance weights inside a band, 0 outside it: a token that the two policies see too differently is dropped.

    With weights of whole responses and ``low=0`` it is the sequence mask.

    Args:
        weights: Importance weights of tokens or of responses.
        low: The least weight that stays.
        high: The largest weight that stays.

    Returns:
        ``weights`` where from ``low`` to ``high``, 0 elsewhere.

    References:
        Ling Team, *Every Step Evolves: Scaling RL for Trillion-Scale Thinking Model*, 2025.
        https://arxiv.org/abs/2510.18855
    """
    return torch.where((weights >= low) & (weights <= high), weights, 0.0)


class IcePop(RolloutCorrection):
    """Weighs each token by how much likelier it is under the trainer's policy, and drops tokens outside a band.

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
        weights = token_importance_weights(log_ratio, response_mask)
        banded = icepop_weights(weights, low=self.low, high=self.high)
        return Corrected(weights=banded, response_mask=response_mask)
