"""Turns of the policy in a response: the runs of its own tokens, between which it reads what others say."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def turn_starts(response_mask: Bool[Tensor, "batch response"]) -> Bool[Tensor, "batch response"]:
    """True on the first token of each turn.

    Args:
        response_mask: True on the policy's own tokens; False on what it reads and on padding.
    """
    before = torch.nn.functional.pad(response_mask[:, :-1], (1, 0), value=False)
    return response_mask & ~before


def turn_ends(response_mask: Bool[Tensor, "batch response"]) -> Bool[Tensor, "batch response"]:
    """True on the last token of each turn.

    Args:
        response_mask: True on the policy's own tokens; False on what it reads and on padding.
    """
    return turn_starts(response_mask.flip(-1)).flip(-1)


def turn_numbers(response_mask: Bool[Tensor, "batch response"]) -> Int[Tensor, "batch response"]:
    """Number of each token's turn, the first is 1; what is read has the number of the turn before it.

    Args:
        response_mask: True on the policy's own tokens; False on what it reads and on padding.
    """
    return turn_starts(response_mask).long().cumsum(dim=-1)


def over_turns(
    x: Float[Tensor, "batch response"], response_mask: Bool[Tensor, "batch response"]
) -> Float[Tensor, "batch response"]:
    """Gives each token of a turn the value of the turn's first token; 0 on others.

    Args:
        x: Values of tokens, in any unit.
        response_mask: True on the policy's own tokens; False on what it reads and on padding.
    """
    positions = torch.arange(x.shape[1], device=x.device)
    first = torch.where(turn_starts(response_mask), positions, 0).cummax(dim=-1).values
    return torch.where(response_mask, x.gather(-1, first), 0.0)
