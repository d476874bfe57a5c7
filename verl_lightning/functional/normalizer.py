"""The one place where per-token losses are weighted into a loss, with totals counted over the whole optimizer step."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Aggregation = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
"""How the loss weighs tokens and sequences; see `token_weights`."""


def token_weights(
    response_mask: Bool[Tensor, "batch response"],
    aggregation: Aggregation,
    *,
    num_tokens: int | Int[Tensor, ""],
    num_sequences: int | Int[Tensor, ""],
    max_response_length: int,
    sequence_tokens: Int[Tensor, " batch"] | None = None,
) -> Float[Tensor, "batch response"]:
    """The weight of each token's loss, such that ``(loss * weights).sum()`` adds up over micro-batches and ranks.

    With ``n_i`` the response tokens of sequence ``i``, on response tokens::

        token-mean               1 / num_tokens
        token-sum                1
        seq-mean-token-sum       1 / num_sequences
        seq-mean-token-mean      1 / (num_sequences * n_i)
        seq-mean-token-sum-norm  1 / (num_sequences * max_response_length)

    The sum over all micro-batches of all ranks is the loss, so whatever adds up gradients must not average them.

    Args:
        response_mask: True on response tokens; False on tool output and padding.
        aggregation: Which of the formulas above.
        num_tokens: Response tokens of the whole optimizer step on all ranks; 0 counts as 1.
        num_sequences: Sequences with a response token in the whole optimizer step on all ranks; 0 counts as 1.
        max_response_length: The fixed length of "seq-mean-token-sum-norm", tokens.
        sequence_tokens: ``n_i`` of each row's sequence where a sequence may be several rows, such as an episode of
            several trajectories; None counts the tokens of each row.

    Returns:
        Float32 weights on response tokens, 0 elsewhere.

    References:
        Yu et al., *DAPO*, 2025, sec. 3.3 (token-mean). https://arxiv.org/abs/2503.14476
        Liu et al., *Understanding R1-Zero-Like Training*, 2025, sec. 3.2 (the fixed length of Dr. GRPO).
        https://arxiv.org/abs/2503.20783
    """
    weights = response_mask.float()
    sequences = torch.as_tensor(num_sequences, device=weights.device).clamp(min=1)
    match aggregation:
        case "token-mean":
            return weights / torch.as_tensor(num_tokens, device=weights.device).clamp(min=1)
        case "token-sum":
            return weights
        case "seq-mean-token-sum":
            return weights / sequences
        case "seq-mean-token-mean":
            own = weights.sum(dim=-1) if sequence_tokens is None else sequence_tokens
            return weights / own.unsqueeze(-1).clamp(min=1) / sequences
        case "seq-mean-token-sum-norm":
            return weights / sequences / max_response_length
