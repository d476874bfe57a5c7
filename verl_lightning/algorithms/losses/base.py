"""The interface of policy losses, and what several of them check and report."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from jaxtyping import Bool, Float
from torch import Tensor

from verl_lightning.functional.kl import kl_k1
from verl_lightning.options import Method
from verl_lightning.types import Experience

TokenValues = Float[Tensor, "batch response"]
"""A value per response token, 0 where masked."""

LossAndMetrics = tuple[TokenValues, dict[str, TokenValues]]
"""A loss per token and metrics per token by name."""


class PolicyLoss(Method, ABC, key="model.policy_loss"):
    """Loss that the policy minimises, per response token."""

    @abstractmethod
    def __call__(self, log_probs: TokenValues, batch: Experience) -> LossAndMetrics:
        """Computes loss and metrics of one micro-batch; ``log_probs`` carries the gradient."""

    needs_whole_step: ClassVar[bool] = False
    """True if `for_step` must be called before each optimizer step."""

    def for_step(self, old_log_probs: Float[Tensor, " tokens"], advantages: Float[Tensor, " tokens"]) -> PolicyLoss:
        """Returns the loss for one optimizer step, given the response tokens of the whole step on all ranks.

        Most losses look at one token or response at a time, and return themselves.
        """
        return self


def loss_arguments(
    log_probs: TokenValues, batch: Experience
) -> tuple[TokenValues, TokenValues, TokenValues, Bool[Tensor, "batch response"]]:
    """Returns the arguments that most loss functions take: log-probs, old log-probs, advantages and response mask."""
    return log_probs, batch.old_log_probs, batch.advantages, batch.response_mask


def policy_shift(log_probs: TokenValues, batch: Experience) -> dict[str, TokenValues]:
    """The metric ``actor/ppo_kl``: how far the policy has moved since the batch's first step, in nats."""
    return {"actor/ppo_kl": kl_k1(batch.old_log_probs, log_probs.detach(), batch.response_mask)}
