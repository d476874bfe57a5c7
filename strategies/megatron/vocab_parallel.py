"""Log-probabilities from logits of which each tensor-parallel rank holds a part of the vocabulary."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from jaxtyping import Float, Int
from torch import Tensor
from typing_extensions import override


class VocabPart(NamedTuple):
    """A rank's part of the vocabulary."""

    group: dist.ProcessGroup
    """Ranks that hold the other parts."""

    start: int
    """Token id of the first column."""

    size: int
    """Columns that are tokens; those after them are padding."""


class _LogProbsAndEntropy(torch.autograd.Function):
    """Keeps logits and three numbers a token for the backward pass."""

    @override
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, temperature: float, part: VocabPart
    ) -> tuple[Tensor, Tensor, Tensor]:
        scaled = _scaled(logits, temperature, part)
        peak = scaled.amax(-1)
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=part.group)
        weights = (scaled - peak[:, None]).exp()
        chosen, is_here = _chosen(scaled, labels, part)
        # exp(-inf) is 0, and 0 * -inf nan: padding takes no part in the sum.
        sums = torch.stack([weights.sum(-1), (weights * scaled.clamp(min=-1e30)).sum(-1), weights.square().sum(-1)])
        sums = torch.cat([sums, chosen[None]])
        dist.all_reduce(sums, group=part.group)
        log_total = peak + sums[0].log()
        mean_logit = sums[1] / sums[0]
        ctx.save_for_backward(logits, log_total, mean_logit, labels, is_here)
        ctx.temperature, ctx.part = temperature, part
        squares = sums[2] / sums[0].square()
        ctx.mark_non_differentiable(squares)
        return sums[3] - log_total, log_total - mean_logit, squares

    @override
    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        for_log_probs, for_entropy, _ = gradients
        logits, log_total, mean_logit, labels, is_here = ctx.saved_tensors
        scaled = _scaled(logits, ctx.temperature, ctx.part)
        probs = (scaled - log_total[:, None]).exp()
        # d entropy / d logit = -p * (logit - mean logit)
        gradient = -probs * (
            for_log_probs[:, None] + for_entropy[:, None] * (scaled.clamp(min=-1e30) - mean_logit[:, None])
        )
        rows = torch.arange(len(labels), device=labels.device)
        column = torch.where(is_here, labels - ctx.part.start, 0)
        gradient[rows, column] += torch.where(is_here, for_log_probs, 0.0)
        return (gradient / ctx.temperature).to(logits.dtype), None, None, None


def vocab_parallel_log_probs(
    logits: Float[Tensor, "tokens part"],
    labels: Int[Tensor, " tokens"],
    *,
    temperature: float,
    part: VocabPart,
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """Log-probability of each label, entropy and ``sum(p**2)`` of its distribution, over the whole vocabulary.

    The same numbers on every rank of the group. Collective in the forward pass.

    Args:
        logits: Logits of this rank's part of the vocabulary.
        labels: Token ids, the same on every rank of the group.
        temperature: Softmax temperature, dimensionless, above 0.
        part: Part of the vocabulary that this rank has.

    Returns:
        In nats, float32. The squares carry no gradient.
    """
    outputs: tuple[Tensor, Tensor, Tensor] = _LogProbsAndEntropy.apply(  # type: ignore[no-untyped-call]
        logits, labels, temperature, part
    )
    return outputs


def _scaled(logits: Tensor, temperature: float, part: VocabPart) -> Tensor:
    """Return logits in float32, divided by the temperature, with padding at ``-inf``."""
    scaled = logits.float() / temperature
    return (
        scaled
        if scaled.shape[-1] == part.size
        else scaled.index_fill(-1, torch.arange(part.size, scaled.shape[-1], device=logits.device), float("-inf"))
    )


def _chosen(scaled: Tensor, labels: Tensor, part: VocabPart) -> tuple[Tensor, Tensor]:
    """The logit of each label that is in this part, else 0."""
    is_here = (labels >= part.start) & (labels < part.start + part.size)
    column = torch.where(is_here, labels - part.start, 0)
    return torch.where(is_here, scaled.gather(-1, column[:, None])[:, 0], 0.0), is_here
