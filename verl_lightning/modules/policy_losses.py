"""Policy losses to choose from in YAML: their options, and the maths of `functional` that they bind."""

from __future__ import annotations

from abc import ABC, abstractmethod

from jaxtyping import Float
from torch import Tensor

from verl_lightning.functional.kl import kl_k1
from verl_lightning.functional.policy_losses import clip_fractions, ppo_clip_loss
from verl_lightning.types import Experience

LossAndMetrics = tuple[Float[Tensor, "batch response"], dict[str, Float[Tensor, "batch response"]]]
"""A loss per token and metrics per token by name, all 0 where masked."""


class PolicyLoss(ABC):
    """What the policy minimises, per response token."""

    @abstractmethod
    def __call__(self, log_probs: Float[Tensor, "batch response"], batch: Experience) -> LossAndMetrics:
        """Loss and metrics of one micro-batch; ``log_probs`` carries the gradient."""


class PPOClip(PolicyLoss):
    """PPO's clipped surrogate: a token stops teaching once its probability has moved far enough.

    Schulman et al., 2017, https://arxiv.org/abs/1707.06347. ``clip_high`` above ``clip_low`` is DAPO's clip-higher, Yu
    et al., 2025, https://arxiv.org/abs/2503.14476; the dual clip is of Ye et al., 2020,
    https://arxiv.org/abs/1912.09729

    Args:
        clip_low: How far the probability ratio may fall below 1, in ``[0, 1)``.
        clip_high: How far the ratio may rise above 1.
        dual_clip: Ratio beyond which a token of negative advantage teaches no more, above 1; ``.inf`` to turn it off.
    """

    def __init__(self, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float = 3.0) -> None:
        _check_clip(clip_low, clip_high)
        if dual_clip <= 1:
            raise ValueError(f"`dual_clip` must be above 1, got {dual_clip}; `.inf` turns it off.")
        self.clip_low = clip_low
        self.clip_high = clip_high
        self.dual_clip = dual_clip

    def __call__(self, log_probs: Float[Tensor, "batch response"], batch: Experience) -> LossAndMetrics:
        """The loss, which tokens it clips, and how far the policy has moved."""
        args = (log_probs, batch.old_log_probs, batch.advantages, batch.response_mask)
        bounds = {"clip_low": self.clip_low, "clip_high": self.clip_high, "dual_clip": self.dual_clip}
        clipped, dual_clipped = clip_fractions(*args, **bounds)
        metrics = {"actor/pg_clipfrac": clipped, "actor/pg_clipfrac_lower": dual_clipped}
        return ppo_clip_loss(*args, **bounds), metrics | moved(log_probs, batch)


def moved(log_probs: Float[Tensor, "batch response"], batch: Experience) -> dict[str, Float[Tensor, "batch response"]]:
    """How far the policy has moved since the batch's first step: `kl_k1` of the old policy from the new one, in nats."""
    return {"actor/ppo_kl": kl_k1(batch.old_log_probs, log_probs.detach(), batch.response_mask)}


def _check_clip(clip_low: float, clip_high: float) -> None:
    if not 0 <= clip_low < 1:
        raise ValueError(f"`clip_low` must be from 0 to below 1, got {clip_low}.")
    if clip_high < 0:
        raise ValueError(f"`clip_high` must not be negative, got {clip_high}.")
