"""Mismatch of the trainer's and the engine's policy on the tokens the engine drew: ratios, weights, divergences."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from verl_lightning.functional.masking import sequence_sum


def mismatch_log_ratio(
    old_log_probs: Float[Tensor, "batch response"],
    rollout_log_probs: Float[Tensor, "batch response"],
    response_mask: Bool[Tensor, "batch response"],
) -> Float[Tensor, "batch response"]:
    """Log-ratio of the trainer's to the engine's probability of each token, clamped to 20 nats either way.

    Computes::

        clip(old_log_probs_t - rollout_log_probs_t, -20, 20)

    Args:
        old_log_probs: Of the response tokens under the trainer's policy before this batch's first step, in nats.
        rollout_log_probs: Of the same tokens under the engine's policy, in nats; ``-inf`` is allowed.
        response_mask: True on response tokens; False on tool output and padding.

    Returns:
        In nats on response tokens, 0 elsewhere and where both are ``-inf``.
    """
    difference = torch.where(response_mask, old_log_probs - rollout_log_probs, 0.0)
    return difference.nan_to_num(nan=0.0).clamp(-20, 20)


def token_importance_weights(
    log_ratio: Float[Tensor, "batch response"], response_mask: Bool[Tensor, "batch response"]
) -> Float[Tensor, "batch response"]:
    """Importance weight of each token by itself: little variance, some bias.

    Args:
        log_ratio: `mismatch_log_ratio`, in nats.
        response_mask: True on response tokens; False on tool output and padding.

    Returns:
        ``exp(log_ratio_t)`` on response tokens, 0 elsewhere.
    """
    return torch.where(response_mask, log_ratio.exp(), 0.0)


def sequence_importance_weights(
    log_ratio: Float[Tensor, "batch response"], response_mask: Bool[Tensor, "batch response"]
) -> Float[Tensor, "batch response"]:
    """Importance weight of the whole response at each of its tokens: no bias, much variance.

    Computes::

        exp(clip(sum(log_ratio), -20, 20))

    Args:
        log_ratio: `mismatch_log_ratio`, in nats.
        response_mask: True on response tokens; False on tool output and padding.

    Returns:
        The response's weight on response tokens, 0 elsewhere.
    """
    weight = sequence_sum(log_ratio, response_mask).clamp(-20, 20).exp()
    return torch.where(response_mask, weight.unsqueeze(-1), 0.0)


def mismatch_k2(log_ratio: Float[Tensor, "batch response"]) -> Float[Tensor, "batch response"]:
    """Half the squared log-ratio, a divergence that is the same in both directions.

    Args:
        log_ratio: `mismatch_log_ratio`, in nats.

    Returns:
        ``log_ratio_t**2 / 2``; never negative.
    """
    return log_ratio.square() / 2


def mismatch_k3(log_ratio: Float[Tensor, "batch response"]) -> Float[Tensor, "batch response"]:
    """Unbiased estimator of ``KL(engine || trainer)`` on the engine's tokens.

    Args:
        log_ratio: `mismatch_log_ratio`, in nats.

    Returns:
        ``exp(log_ratio_t) - log_ratio_t - 1`` in nats; never negative.

    References:
        Schulman, *Approximating KL Divergence*, 2020. http://joschu.net/blog/kl-approx.html
    """
    return log_ratio.exp() - log_ratio - 1


def weight_moments(
    weights: Float[Tensor, "batch response"], response_mask: Bool[Tensor, "batch response"]
) -> Float[Tensor, " 3"]:
    """Sums over some of a batch's tokens that `effective_sample_size` needs; those of all parts add up.

    Args:
        weights: Importance weights on response tokens.
        response_mask: True on response tokens; False on tool output and padding.

    Returns:
        Number of tokens, sum and sum of squares of their weights; in float64.
    """
    kept = torch.where(response_mask, weights, 0.0).double()
    return torch.stack([response_mask.sum().double(), kept.sum(), kept.square().sum()])


def effective_sample_size(moments: Float[Tensor, " 3"]) -> Float[Tensor, ""]:
    """Effective sample size of weighted tokens, as a share of their number.

    Computes::

        1 / mean((weights / mean(weights))**2)

    Args:
        moments: Sum of `weight_moments` over ranks.

    Returns:
        In ``(0, 1]``, 1 for equal weights; 0 if all weights are 0.

    References:
        Kish, *Survey Sampling*, 1965.
    """
    count, total, squares = moments.unbind()
    return total.square() / (count * squares).clamp(min=torch.finfo(moments.dtype).tiny)


def probability_error(log_ratio: Float[Tensor, "batch response"]) -> Float[Tensor, "batch response"]:
    """Factor by which trainer and engine disagree about the probability of each token, in either direction.

    Args:
        log_ratio: `mismatch_log_ratio`, in nats.

    Returns:
        ``exp(abs(log_ratio_t))``, at least 1; 1.02 is usual, 1.05 a warning.
    """
    return log_ratio.abs().exp()
