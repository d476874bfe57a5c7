"""The interface of preference losses, and what they know of responses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Bool, Float, Int
from torch import Tensor

from verl_lightning.options import Method

ExampleValues = Float[Tensor, " examples"]
"""A value per example: of a pair, or of a response that has a label."""


@dataclass(frozen=True, kw_only=True)
class Responses:
    """Whole responses as the policy scores them; of pairs, the chosen and the rejected one in turn."""

    log_probs: Float[Tensor, " rows"]
    """Log-probability of each response under the policy in training, in nats: a sum over its tokens. Carries the
    gradient."""

    lengths: Int[Tensor, " rows"]
    """Tokens of each response, at least 1."""

    ref_log_probs: Float[Tensor, " rows"] | None = None
    """Log-probability of each response under the frozen reference, in nats; None for losses that need none."""

    is_desirable: Bool[Tensor, " rows"] | None = None
    """True on responses that are wanted; None for pairs."""

    kl: Float[Tensor, " rows"] | None = None
    """KL of policy and reference over the whole batch, in nats, the same in each row; None for pairs. Constant."""

    @property
    def log_ratios(self) -> Float[Tensor, " rows"]:
        """``log_probs - ref_log_probs``, in nats."""
        assert self.ref_log_probs is not None
        return self.log_probs - self.ref_log_probs

    @property
    def mean_log_probs(self) -> Float[Tensor, " rows"]:
        """``log_probs / lengths``, in nats a token."""
        return self.log_probs / self.lengths


class PreferenceLoss(Method, ABC, key="model.loss"):
    """Loss that a policy minimises on preferred and rejected responses, one value an example."""

    needs_reference: ClassVar[bool] = True
    """True if the loss compares with a frozen reference."""

    is_paired: ClassVar[bool] = True
    """True if an example is a pair of responses to one prompt; else it is a response with a label."""

    metrics: ClassVar[tuple[str, ...]] = ()
    """Names of the loss's own metrics."""

    beta: float
    """Scale of the rewards."""

    @abstractmethod
    def __call__(self, responses: Responses) -> tuple[ExampleValues, dict[str, ExampleValues]]:
        """Computes the loss of each example, and metrics of its own; see `Responses` for the order of rows."""

    def rewards(self, responses: Responses) -> Float[Tensor, " rows"]:
        """The reward that the policy itself gives each response: ``beta * log_ratio``, of which metrics tell."""
        return self.beta * (responses.log_ratios if self.needs_reference else responses.mean_log_probs)


def chosen(values: Float[Tensor, " rows"]) -> Float[Tensor, " examples"]:
    """Values of the chosen responses of pairs."""
    return values[0::2]


def rejected(values: Float[Tensor, " rows"]) -> Float[Tensor, " examples"]:
    """Values of the rejected responses of pairs."""
    return values[1::2]
