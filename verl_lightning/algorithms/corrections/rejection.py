"""Rejection: tokens or responses whose mismatch leaves a band are taken out of training."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from typing_extensions import override

from verl_lightning.algorithms.corrections.base import Corrected, RolloutCorrection, TokenValues
from verl_lightning.functional.masking import sequence_mean, sequence_sum
from verl_lightning.functional.mismatch import (
    mismatch_k2,
    mismatch_k3,
)


def keep_tokens(
    statistic: Float[Tensor, "batch response"],
    response_mask: Bool[Tensor, "batch response"],
    *,
    low: float,
    high: float,
) -> Bool[Tensor, "batch response"]:
    """Rejects single tokens whose statistic leaves a band.

    Args:
        statistic: Of each token, such as its log-ratio, `mismatch_k2` or `mismatch_k3`.
        response_mask: True on response tokens; False on tool output and padding.
        low: The least statistic that stays, in its unit.
        high: The largest statistic that stays.

    Returns:
        The response mask without the rejected tokens; they then count in no denominator.
    """
    return response_mask & (statistic >= low) & (statistic <= high)


def keep_sequences(
    statistic: Float[Tensor, " batch"], response_mask: Bool[Tensor, "batch response"], *, low: float, high: float
) -> Bool[Tensor, "batch response"]:
    """Rejects whole responses whose statistic leaves a band.

    With the mean log-ratio it is rejection by the geometric mean of the token ratios.

    Args:
        statistic: Of each response: sum, mean or maximum of a statistic of its tokens.
        response_mask: True on response tokens; False on tool output and padding.
        low: The least statistic that stays, in its unit.
        high: The largest statistic that stays.

    Returns:
        The response mask without the rejected responses; they then count in no denominator.
    """
    return response_mask & ((statistic >= low) & (statistic <= high)).unsqueeze(-1)


def sequence_max(
    x: Float[Tensor, "batch response"], response_mask: Bool[Tensor, "batch response"]
) -> Float[Tensor, " batch"]:
    """Largest value of each row where the mask is True.

    Args:
        x: Values in any unit, not negative.
        response_mask: True on what counts.

    Returns:
        One maximum per row; 0 for a row without a True.
    """
    return torch.where(response_mask, x, 0.0).amax(dim=-1)


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
            raise ValueError("`statistic: k1` may be negative: its maximum bounds one side only. Use `k2` or `k3`.")
        self.statistic = statistic
        self.level = level
        self.low = low
        self.high = high

    @override
    def __call__(self, log_ratio: TokenValues, response_mask: Bool[Tensor, "batch response"]) -> Corrected:
        values = {"k1": log_ratio, "k2": mismatch_k2(log_ratio), "k3": mismatch_k3(log_ratio)}
        return Corrected(
            weights=response_mask.to(log_ratio.dtype), response_mask=self._kept(values[self.statistic], response_mask)
        )

    def _kept(
        self, statistic: TokenValues, response_mask: Bool[Tensor, "batch response"]
    ) -> Bool[Tensor, "batch response"]:
        if self.level == "token":
            return keep_tokens(statistic, response_mask, low=self.low, high=self.high)
        reduce = {
            "sequence-sum": sequence_sum,
            "sequence-mean": sequence_mean,
            "sequence-max": sequence_max,
        }[self.level]
        return keep_sequences(reduce(statistic, response_mask), response_mask, low=self.low, high=self.high)
