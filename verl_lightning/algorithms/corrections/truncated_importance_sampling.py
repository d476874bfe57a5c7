"""Truncated importance sampling (TIS): weights of tokens or responses, up to a cap."""

from __future__ import annotations

from typing import Literal

from jaxtyping import Bool, Float
from torch import Tensor
from typing_extensions import override

from verl_lightning.algorithms.checks import check_positive
from verl_lightning.algorithms.corrections.base import Corrected, RolloutCorrection, TokenValues
from verl_lightning.functional.mismatch import (
    sequence_importance_weights,
    token_importance_weights,
)


def truncated_weights(weights: Float[Tensor, "batch response"], *, cap: float) -> Float[Tensor, "batch response"]:
    """Truncated importance sampling: no weight above ``cap``.

    Args:
        weights: Importance weights of tokens or of responses.
        cap: The largest weight, above 0.

    Returns:
        ``min(weights, cap)``.

    References:
        Yao et al., *Your Efficient RL Framework Secretly Brings You Off-Policy RL Training*, 2025.
        https://fengyao.notion.site/off-policy-rl
    """
    return weights.clamp(max=cap)


class TruncatedImportanceSampling(RolloutCorrection):
    """Weighs each token by how much likelier it is under the trainer's policy, up to a cap.

    Args:
        level: Whether a weight is of the single token, with little variance, or of the whole response, without bias.
        cap: The largest weight, above 0.
    """

    def __init__(self, level: Literal["token", "sequence"] = "token", cap: float = 2.0) -> None:
        check_positive("cap", cap)
        self.level = level
        self.cap = cap

    @override
    def __call__(self, log_ratio: TokenValues, response_mask: Bool[Tensor, "batch response"]) -> Corrected:
        weigh = {
            "token": token_importance_weights,
            "sequence": sequence_importance_weights,
        }[self.level]
        weights = truncated_weights(weigh(log_ratio, response_mask), cap=self.cap)
        return Corrected(weights=weights, response_mask=response_mask)
