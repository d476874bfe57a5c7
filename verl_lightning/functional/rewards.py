"""Placement of rewards on tokens, and penalties for length and for distance from the reference."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def place_sequence_rewards(
    rewards: Float[Tensor, " batch"], response_mask: Bool[Tensor, "batch response"]
) -> Float[Tensor, "batch response"]:
    """Puts each response's reward on its last trainable token.

    Args:
        rewards: Rewards of the whole responses, in units of reward.
        response_mask: True on response tokens; False on tool output and padding.

    Returns:
        The reward at the last True of each row, 0 elsewhere; all 0 for a row without a True.
    """
    tokens_from_here = response_mask.flip(-1).cumsum(-1).flip(-1)
    is_last = response_mask & (tokens_from_here == 1)
    return torch.where(is_last, rewards.unsqueeze(-1), 0.0)


def overlong_penalty(
    response_lengths: Int[Tensor, " batch"], *, max_length: int, buffer_length: int, factor: float
) -> Float[Tensor, " batch"]:
    """Soft punishment of responses that come close to the length limit, to be added to their reward.

    Computes::

        -factor * clip((response_length - (max_length - buffer_length)) / buffer_length, 0, 1)

    Args:
        response_lengths: Tokens of each response.
        max_length: The length limit, in tokens.
        buffer_length: Number of tokens before the limit over which the penalty grows, at least 1.
        factor: The penalty at the limit, in units of reward.

    Returns:
        From ``-factor`` to 0, in units of reward.

    References:
        Yu et al., *DAPO*, 2025, eq. 13. https://arxiv.org/abs/2503.14476
    """
    excess = (response_lengths - (max_length - buffer_length)) / buffer_length
    return -factor * excess.clamp(0, 1)


def subtract_kl(
    token_rewards: Float[Tensor, "batch response"],
    kl: Float[Tensor, "batch response"],
    response_mask: Bool[Tensor, "batch response"],
    *,
    coef: float,
) -> Float[Tensor, "batch response"]:
    """Takes a KL penalty off the reward of each token.

    Computes::

        token_rewards_t - coef * kl_t

    Args:
        token_rewards: Reward of each token, in units of reward.
        kl: Per-token estimate of the KL from the reference, in nats. Constant.
        response_mask: True on response tokens; False on tool output and padding.
        coef: Weight of the penalty, in units of reward per nat.

    Returns:
        In units of reward on response tokens, 0 elsewhere.

    References:
        Ziegler et al., *Fine-Tuning Language Models from Human Preferences*, 2019, eq. 2.
        https://arxiv.org/abs/1909.08593
    """
    return torch.where(response_mask, token_rewards - coef * kl.detach(), 0.0)
