"""What a policy loss is, and what several of them check and report."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Self

from jaxtyping import Bool, Float
from torch import Tensor

from verl_lightning.functional.kl import kl_k1
from verl_lightning.types import Experience

TokenValues = Float[Tensor, "batch response"]
"""A value per response token, 0 where masked."""

LossAndMetrics = tuple[TokenValues, dict[str, TokenValues]]
"""A loss per token and metrics per token by name."""


class PolicyLoss(ABC):
    """What the policy minimises, per response token."""

    @abstractmethod
    def __call__(self, log_probs: TokenValues, batch: Experience) -> LossAndMetrics:
        """Loss and metrics of one micro-batch; ``log_probs`` carries the gradient."""

    needs_whole_step: ClassVar[bool] = False
    """Whether `for_step` must be called before each optimizer step."""

    def for_step(self, old_log_probs: Float[Tensor, " tokens"], advantages: Float[Tensor, " tokens"]) -> Self:
        """The loss for one optimizer step, given the response tokens of the whole step on all ranks.

        Most losses look at one token or response at a time and need nothing of it.
        """
        return self


def loss_arguments(
    log_probs: TokenValues, batch: Experience
) -> tuple[TokenValues, TokenValues, TokenValues, Bool[Tensor, "batch response"]]:
    """What most losses of `functional` take: log-probs, old log-probs, advantages and response mask."""
    return log_probs, batch.old_log_probs, batch.advantages, batch.response_mask


def policy_shift(log_probs: TokenValues, batch: Experience) -> dict[str, TokenValues]:
    """The metric ``actor/ppo_kl``: how far the policy has moved since the batch's first step, in nats."""
    return {"actor/ppo_kl": kl_k1(batch.old_log_probs, log_probs.detach(), batch.response_mask)}


def check_clip(clip_low: float, clip_high: float) -> None:
    """Refuses bounds that no ratio can meet.

    Raises:
        ValueError: Unless ``0 <= clip_low < 1`` and ``clip_high >= 0``.
    """
    if not 0 <= clip_low < 1:
        raise ValueError(f"`clip_low` must be from 0 to below 1, got {clip_low}.")
    check_not_negative("clip_high", clip_high)


def check_positive(name: str, value: float) -> None:
    """Refuses a value that is not above 0.

    Raises:
        ValueError: With the option's name.
    """
    if value <= 0:
        raise ValueError(f"`{name}` must be above 0, got {value}.")


def check_not_negative(name: str, value: float) -> None:
    """Refuses a value below 0.

    Raises:
        ValueError: With the option's name.
    """
    if value < 0:
        raise ValueError(f"`{name}` must not be negative, got {value}.")
