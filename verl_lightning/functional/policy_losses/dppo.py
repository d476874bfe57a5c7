"""Divergence PPO: a token stops teaching when its probability, not its ratio, has moved too far."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from verl_lightning.functional.policy_losses.ratio import clamped_log_ratio


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
    """Which response tokens have not moved too far by total variation in the direction of their advantage.

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
        True on such response tokens.
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
    """Which response tokens have not moved too far by binary KL divergence in the direction of their advantage.

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
        True on such response tokens.
    """
    now = torch.where(response_mask, log_probs.detach(), 0.0)
    before = torch.where(response_mask, old_log_probs, 0.0)
    others_now, others_before = ((-torch.expm1(x)).clamp(min=1e-8) for x in (now, before))
    kl = before.exp() * (before - now) + others_before * (others_before / others_now).log()
    is_good = (kl <= bound_high) | (now <= before)
    is_bad = (kl <= bound_low) | (now >= before)
    return response_mask & torch.where(advantages > 0, is_good, is_bad)
