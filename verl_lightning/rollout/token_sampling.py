"""How a token is drawn: from a row of logits, with one random number."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from verl_lightning.rollout.base import SamplingConfig


def sample_tokens(
    logits: Float[Tensor, "batch vocab"], noise: Float[Tensor, " batch"], sampling: SamplingConfig
) -> tuple[Int[Tensor, " batch"], Float[Tensor, " batch"]]:
    """Draw one token a row by inverting the cumulative distribution at ``noise``.

    Args:
        logits: Logits before the temperature, float32.
        noise: Random numbers, uniform in ``[0, 1)``, float64.
        sampling: Temperature and truncation.

    Returns:
        The tokens, and their log-probs at the temperature over the whole vocabulary, in nats (at temperature 0, of
        the distribution at temperature 1).
    """
    log_probs = torch.log_softmax(logits / (sampling.temperature or 1.0), -1)
    if sampling.temperature == 0:
        tokens = logits.argmax(-1)
    else:
        probs = _truncate(log_probs.exp(), sampling) if sampling.is_truncated else log_probs.exp()
        cumulative = probs.double().cumsum(-1)
        target = noise[:, None] * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)
    return tokens, log_probs.gather(-1, tokens[:, None]).squeeze(-1)


def _truncate(probs: Float[Tensor, "batch vocab"], sampling: SamplingConfig) -> Float[Tensor, "batch vocab"]:
    """Set the probabilities of tokens outside top-k and top-p to zero."""
    ordered, order = probs.sort(-1, descending=True)
    is_in = ordered.cumsum(-1) - ordered < sampling.top_p
    if sampling.top_k:
        is_in[:, sampling.top_k :] = False
    return torch.where(is_in.gather(-1, order.argsort(-1)), probs, 0.0)


def draw_noise(seed: int, length: int) -> Float[Tensor, " length"]:
    """Draw uniform numbers in ``[0, 1)``, on the CPU so that devices agree; fewer are the first of more."""
    return torch.rand(length, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
