"""Divergence PPO (DPPO): a token stops teaching when its probability, not its ratio, has moved too far."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from verl_lightning.algorithms.checks import check_not_negative
from verl_lightning.algorithms.losses.base import LossAndMetrics, PolicyLoss, TokenValues, loss_arguments, policy_shift
from verl_lightning.functional.ratio import clamped_log_ratio
from verl_lightning.types import Experience


def dppo_loss(
    log_probs: Float[Tensor, "batch response"],
    old_log_probs: Float[Tensor, "batch response"],
    advantages: Float[Tensor, "batch response"],
    is_inside: Bool[Tensor, "batch response"],
    *,
    max_ratio: float,
) -> Float[Tensor, "batch response"]:
    """Policy gradient inside a trust region, per response token.

    With ``sg`` the stop of the gradient::

        loss_t = -A_t * sg(min(exp(log_probs_t - old_log_probs_t), max_ratio)) * log_probs_t    where is_inside_t

    Args:
        log_probs: Of the response tokens under the policy in training, in nats. Carries the gradient.
        old_log_probs: Of the same tokens under the policy before this batch's first step, in nats. Constant.
        advantages: ``A_t``, in units of reward. Constant.
        is_inside: True on the response tokens in the region, by `inside_total_variation` or `inside_binary_kl`.
        max_ratio: Cap of the importance ratio, above 1; the paper's is 20.

    Returns:
        ``loss_t`` in the region, 0 elsewhere.

    References:
        Qi et al., *Rethinking the Trust Region in LLM Reinforcement Learning*, 2026.
        https://arxiv.org/abs/2602.04879
    """
    ratio = clamped_log_ratio(log_probs.detach(), old_log_probs, is_inside).exp().clamp(max=max_ratio)
    # Masked by itself too: the gradient of a product with a nan advantage would be nan.
    kept_log_probs = torch.where(is_inside, log_probs, 0.0)
    return torch.where(is_inside, -advantages * ratio * kept_log_probs, 0.0)


def inside_total_variation(
    log_probs: Float[Tensor, "batch response"],
    old_log_probs: Float[Tensor, "batch response"],
    advantages: Float[Tensor, "batch response"],
    response_mask: Bool[Tensor, "batch response"],
    *,
    bound_low: float,
    bound_high: float,
) -> Bool[Tensor, "batch response"]:
    """Marks response tokens that have not moved too far, by total variation, in the direction of their advantage.

    With ``p_t`` and ``q_t`` the probabilities of the token now and before::

        p_t - q_t <= bound_high     where A_t > 0
        p_t - q_t >= -bound_low     elsewhere

    Args:
        log_probs: Of the response tokens under the policy in training, in nats.
        old_log_probs: Of the same tokens under the policy before this batch's first step, in nats.
        advantages: ``A_t``; only the sign counts.
        response_mask: True on response tokens; False on tool output and padding.
        bound_low: How much probability a bad token may lose, in ``[0, 1]``.
        bound_high: How much probability a good token may win, in ``[0, 1]``.

    Returns:
        True on the response tokens within the bounds.
    """
    gain = torch.where(response_mask, log_probs.detach().exp() - old_log_probs.exp(), 0.0)
    return response_mask & torch.where(advantages > 0, gain <= bound_high, gain >= -bound_low)


def inside_binary_kl(
    log_probs: Float[Tensor, "batch response"],
    old_log_probs: Float[Tensor, "batch response"],
    advantages: Float[Tensor, "batch response"],
    response_mask: Bool[Tensor, "batch response"],
    *,
    bound_low: float,
    bound_high: float,
) -> Bool[Tensor, "batch response"]:
    """Marks response tokens that have not moved too far, by binary KL, in the direction of their advantage.

    With ``p_t`` and ``q_t`` the probabilities of the token now and before::

        kl_t = q_t * log(q_t / p_t) + (1 - q_t) * log((1 - q_t) / (1 - p_t))
        kl_t <= bound_high or p_t <= q_t     where A_t > 0
        kl_t <= bound_low or p_t >= q_t      elsewhere

    Args:
        log_probs: Of the response tokens under the policy in training, in nats.
        old_log_probs: Of the same tokens under the policy before this batch's first step, in nats.
        advantages: ``A_t``; only the sign counts.
        response_mask: True on response tokens; False on tool output and padding.
        bound_low: How far a bad token may fall, in nats.
        bound_high: How far a good token may rise, in nats.

    Returns:
        True on the response tokens within the bounds.
    """
    now = torch.where(response_mask, log_probs.detach(), 0.0)
    before = torch.where(response_mask, old_log_probs, 0.0)
    others_now, others_before = ((-torch.expm1(x)).clamp(min=1e-8) for x in (now, before))
    kl = before.exp() * (before - now) + others_before * (others_before / others_now).log()
    is_good = (kl <= bound_high) | (now <= before)
    is_bad = (kl <= bound_low) | (now >= before)
    return response_mask & torch.where(advantages > 0, is_good, is_bad)


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
        """Computes the loss, the tokens outside the trust region, and the policy's shift."""
        args = loss_arguments(log_probs, batch)
        inside = type(self).is_inside(*args, bound_low=self.bound_low, bound_high=self.bound_high)
        loss = dppo_loss(*args[:3], inside, max_ratio=self.max_ratio)
        outside = (batch.response_mask & ~inside).to(loss.dtype)
        return loss, {"actor/pg_clipfrac": outside} | policy_shift(log_probs, batch)


class DPPOTV(_DPPO):
    """Divergence PPO with total variation: a token stops teaching once its probability has changed by too much.

    Args:
        bound_low: How much probability a token of negative advantage may lose, in ``[0, 1]``.
        bound_high: How much probability a token of positive advantage may win, in ``[0, 1]``.
        max_ratio: Cap of the importance ratio, above 1.
    """

    is_inside = staticmethod(inside_total_variation)

    def __init__(self, bound_low: float = 0.15, bound_high: float = 0.15, max_ratio: float = 20.0) -> None:
        super().__init__(bound_low, bound_high, max_ratio)


class DPPOKL(_DPPO):
    """Divergence PPO with binary KL: a token stops teaching once its own probability has diverged too far.

    Args:
        bound_low: How far a token of negative advantage may fall, in nats.
        bound_high: How far a token of positive advantage may rise, in nats.
        max_ratio: Cap of the importance ratio, above 1.
    """

    is_inside = staticmethod(inside_binary_kl)

    def __init__(self, bound_low: float = 0.05, bound_high: float = 0.05, max_ratio: float = 20.0) -> None:
        super().__init__(bound_low, bound_high, max_ratio)
