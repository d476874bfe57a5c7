"""Losses that weigh or drop tokens by other means than PPO's clip: REINFORCE, GPG, SAPO, VESPO, DRO and DPPO."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from jaxtyping import Bool
from torch import Tensor

from verl_lightning.functional import policy_losses as losses
from verl_lightning.modules.policy_losses.base import (
    LossAndMetrics,
    PolicyLoss,
    TokenValues,
    check_not_negative,
    check_positive,
    loss_arguments,
    policy_shift,
)
from verl_lightning.types import Experience


class Reinforce(PolicyLoss):
    """The plain policy gradient, without importance ratio or clip.

    Williams, 1992, https://doi.org/10.1007/BF00992696
    """

    def __call__(self, log_probs: TokenValues, batch: Experience) -> LossAndMetrics:
        """The loss and how far the policy has moved."""
        return losses.reinforce_loss(log_probs, batch.advantages, batch.response_mask), policy_shift(log_probs, batch)


class GPGLoss(Reinforce):
    """Group policy gradient: REINFORCE's loss under the name of its recipe, for the advantage ``GPG``.

    Chu et al., 2025, https://arxiv.org/abs/2504.02546
    """


class SAPO(PolicyLoss):
    """Soft adaptive policy optimization: a smooth gate in the place of PPO's clip.

    Gao et al., 2025, https://arxiv.org/abs/2511.20347

    Args:
        temperature_positive: How soon tokens of positive advantage stop teaching as their ratio leaves 1.
        temperature_negative: The same for other tokens.
    """

    def __init__(self, temperature_positive: float = 1.0, temperature_negative: float = 1.05) -> None:
        check_positive("temperature_positive", temperature_positive)
        check_positive("temperature_negative", temperature_negative)
        self.temperature_positive = temperature_positive
        self.temperature_negative = temperature_negative

    def __call__(self, log_probs: TokenValues, batch: Experience) -> LossAndMetrics:
        """The loss and how far the policy has moved."""
        loss = losses.sapo_loss(
            *loss_arguments(log_probs, batch),
            temperature_positive=self.temperature_positive,
            temperature_negative=self.temperature_negative,
        )
        return loss, policy_shift(log_probs, batch)


class VESPO(PolicyLoss):
    """Variational sequence-level soft policy optimization: a soft weight for the ratio of the whole response.

    VESPO, 2026, https://arxiv.org/abs/2602.10693

    Args:
        power_positive: How soon responses of positive advantage lose weight as their ratio falls below 1.
        decay_positive: How soon they lose weight as their ratio rises above 1.
        power_negative: The same for responses of negative advantage.
        decay_negative: The same for responses of negative advantage.
    """

    def __init__(
        self,
        power_positive: float = 2.0,
        decay_positive: float = 3.0,
        power_negative: float = 3.0,
        decay_negative: float = 2.0,
    ) -> None:
        check_positive("power_positive", power_positive)
        check_positive("decay_positive", decay_positive)
        check_positive("power_negative", power_negative)
        check_positive("decay_negative", decay_negative)
        self.power_positive = power_positive
        self.decay_positive = decay_positive
        self.power_negative = power_negative
        self.decay_negative = decay_negative

    def __call__(self, log_probs: TokenValues, batch: Experience) -> LossAndMetrics:
        """The loss and how far the policy has moved."""
        loss = losses.vespo_loss(
            *loss_arguments(log_probs, batch),
            power_positive=self.power_positive,
            decay_positive=self.decay_positive,
            power_negative=self.power_negative,
            decay_negative=self.decay_negative,
        )
        return loss, policy_shift(log_probs, batch)


class DRO(PolicyLoss):
    """Direct reward optimization: the policy gradient with a quadratic pull back to the old policy.

    Richemond et al., 2024, https://arxiv.org/abs/2405.19107

    Args:
        beta: Strength of the pull, in units of reward per nat.
    """

    def __init__(self, beta: float = 0.1) -> None:
        check_not_negative("beta", beta)
        self.beta = beta

    def __call__(self, log_probs: TokenValues, batch: Experience) -> LossAndMetrics:
        """The loss and how far the policy has moved."""
        return losses.dro_loss(*loss_arguments(log_probs, batch), beta=self.beta), policy_shift(log_probs, batch)


class _DPPO(PolicyLoss):
    """Divergence PPO: a policy gradient inside a trust region."""

    is_inside: ClassVar[Callable[..., Bool[Tensor, "batch response"]]]

    def __init__(self, bound_low: float, bound_high: float, max_ratio: float) -> None:
        check_not_negative("bound_low", bound_low)
        check_not_negative("bound_high", bound_high)
        if max_ratio <= 1:
            raise ValueError(f"`max_ratio` must be above 1, got {max_ratio}; the paper's is 20.")
        self.bound_low = bound_low
        self.bound_high = bound_high
        self.max_ratio = max_ratio

    def __call__(self, log_probs: TokenValues, batch: Experience) -> LossAndMetrics:
        """The loss, which tokens have left the trust region, and how far the policy has moved."""
        args = loss_arguments(log_probs, batch)
        inside = type(self).is_inside(*args, bound_low=self.bound_low, bound_high=self.bound_high)
        loss = losses.dppo_loss(*args[:3], inside, max_ratio=self.max_ratio)
        outside = (batch.response_mask & ~inside).to(loss.dtype)
        return loss, {"actor/pg_clipfrac": outside} | policy_shift(log_probs, batch)


class DPPOTV(_DPPO):
    """Divergence PPO with total variation: a token stops teaching once its probability has changed by too much.

    Qi et al., 2026, https://arxiv.org/abs/2602.04879

    Args:
        bound_low: How much probability a token of negative advantage may lose, in ``[0, 1]``.
        bound_high: How much probability a token of positive advantage may win, in ``[0, 1]``.
        max_ratio: Cap of the importance ratio, above 1.
    """

    is_inside = staticmethod(losses.inside_total_variation)

    def __init__(self, bound_low: float = 0.15, bound_high: float = 0.15, max_ratio: float = 20.0) -> None:
        super().__init__(bound_low, bound_high, max_ratio)


class DPPOKL(_DPPO):
    """Divergence PPO with binary KL: a token stops teaching once its own probability has diverged too far.

    Qi et al., 2026, https://arxiv.org/abs/2602.04879

    Args:
        bound_low: How far a token of negative advantage may fall, in nats.
        bound_high: How far a token of positive advantage may rise, in nats.
        max_ratio: Cap of the importance ratio, above 1.
    """

    is_inside = staticmethod(losses.inside_binary_kl)

    def __init__(self, bound_low: float = 0.05, bound_high: float = 0.05, max_ratio: float = 20.0) -> None:
        super().__init__(bound_low, bound_high, max_ratio)
