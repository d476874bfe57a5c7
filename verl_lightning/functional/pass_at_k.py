"""The chance that at least one of k samples is right, estimated without bias from n of them."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor


def pass_at_k(
    num_correct: Int[Tensor, " batch"], num_samples: Int[Tensor, " batch"], *, k: int
) -> Float[Tensor, " batch"]:
    """Unbiased estimate of the probability that one of ``k`` samples is correct, per prompt.

    With ``n`` samples of which ``c`` are correct::

        1 - binomial(n - c, k) / binomial(n, k)

    Args:
        num_correct: ``c`` of each prompt, from 0 to ``num_samples``.
        num_samples: ``n`` of each prompt, at least ``k``.
        k: How many samples one may look at, at least 1.

    Returns:
        Probabilities, float32.

    Raises:
        ValueError: If a prompt has fewer than ``k`` samples.

    References:
        Chen et al., *Evaluating Large Language Models Trained on Code*, 2021, eq. 1. https://arxiv.org/abs/2107.03374
    """
    if bool((num_samples < k).any()):
        raise ValueError(f"pass@{k} needs at least `k` = {k} samples of each prompt, got {int(num_samples.min())}.")
    drawn = torch.arange(k, device=num_samples.device)
    num_wrong = (num_samples - num_correct).unsqueeze(-1)
    chance_all_wrong = ((num_wrong - drawn).clamp(min=0) / (num_samples.unsqueeze(-1) - drawn)).prod(dim=-1)
    return 1 - chance_all_wrong
