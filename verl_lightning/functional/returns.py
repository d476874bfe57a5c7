"""Discounted sums along the trainable tokens of each response."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def discounted_returns(
    token_rewards: Float[Tensor, "batch response"],
    response_mask: Bool[Tensor, "batch response"],
    *,
    discount: float | Float[Tensor, "batch response"],
) -> Float[Tensor, "batch response"]:
    """Discounted sum of each trainable token's reward and of those after it; masked tokens cost no discount.

    With ``t + 1`` the next trainable token::

        G_t = token_rewards_t + discount_t * G_{t+1}

    Args:
        token_rewards: Of each token, in units of reward.
        response_mask: True on response tokens; False on tool output and padding.
        discount: Per trainable token, in ``[0, 1]``; one number, or that of what follows each token.

    Returns:
        ``G_t`` on response tokens, 0 elsewhere.
    """
    # A masked token adds nothing and multiplies by one: the sum passes through it unchanged.
    added = torch.where(response_mask, token_rewards, 0.0).unbind(dim=-1)
    kept = torch.where(response_mask, discount, 1.0).to(token_rewards.dtype).unbind(dim=-1)
    totals = [token_rewards.new_zeros(len(token_rewards))]
    for add, keep in zip(reversed(added), reversed(kept), strict=True):
        totals.append(torch.addcmul(add, keep, totals[-1]))
    return torch.where(response_mask, torch.stack(totals[:0:-1], dim=-1), 0.0)
