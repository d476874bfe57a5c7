"""The sequence mask: responses whose importance weight is above a cap are dropped."""

from __future__ import annotations

from jaxtyping import Bool
from torch import Tensor
from typing_extensions import override

from verl_lightning.algorithms.checks import check_positive
from verl_lightning.algorithms.corrections.base import Corrected, RolloutCorrection, TokenValues
from verl_lightning.algorithms.corrections.icepop import icepop_weights
from verl_lightning.functional.mismatch import (
    sequence_importance_weights,
)


class SequenceMask(RolloutCorrection):
    """Weighs each response by how much likelier it is under the trainer's policy, and drops those above a cap.

    TRL's default, there called ``sequence_mask``.

    Args:
        cap: The largest weight that stays, above 0.
    """

    def __init__(self, cap: float = 3.0) -> None:
        check_positive("cap", cap)
        self.cap = cap

    @override
    def __call__(self, log_ratio: TokenValues, response_mask: Bool[Tensor, "batch response"]) -> Corrected:
        weights = sequence_importance_weights(log_ratio, response_mask)
        return Corrected(weights=icepop_weights(weights, low=0.0, high=self.cap), response_mask=response_mask)
