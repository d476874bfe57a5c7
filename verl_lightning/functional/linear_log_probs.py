"""Log-probabilities straight from hidden states: the logits of the whole sequence are never held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from verl_lightning.functional.log_probs import chunk_backward, chunk_forward, fused

_CHUNK_NUMEL, _FUSED_CHUNK_NUMEL = 2**27, 5 * 2**26
"""Logits at a time: enough rows for fast matrix products. Fused kernels hold nothing else of their size."""


def linear_log_probs(
    hidden: Float[Tensor, "batch response hidden"],
    weight: Float[Tensor, "vocab hidden"],
    labels: Int[Tensor, "batch response"],
    *,
    temperature: float,
    with_entropy: bool = False,
    compiled: bool = False,
) -> tuple[Float[Tensor, "batch response"], Float[Tensor, "batch response"]]:
    """Log-probability of each label, and entropy of its distribution, under a linear head without bias.

    Computes, for ``logits = hidden @ weight.T / temperature``::

        log_softmax(logits)[label]

    The logits are made a chunk at a time, in the forward and again in the backward pass: a matrix product more, and
    memory for one chunk instead of twice the logits. They are float32 whatever the type of the weights: a logit of 20
    rounded to bfloat16 is off by up to 0.06, and on a confident model that errs about as much as all layers before.

    Args:
        hidden: Of the position before each label, after the last norm.
        weight: Of the output head, in the type of ``hidden``.
        labels: Token ids.
        temperature: Softmax temperature, dimensionless, above 0.
        with_entropy: Compute the entropy; it is 0 otherwise.
        compiled: Fuse the kernels with `torch.compile`.

    Returns:
        Both in nats and float32.
    """
    rows, options = hidden.reshape(-1, hidden.shape[-1]), (temperature, with_entropy, compiled)
    outputs: tuple[Tensor, Tensor] = _LinearLogProbs.apply(rows, weight, labels, options)  # type: ignore[no-untyped-call]
    return outputs


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, options: tuple[float, bool, bool]
    ) -> tuple[Tensor, Tensor]:
        temperature, with_entropy, compiled = options
        forward_chunk = fused(chunk_forward) if compiled else chunk_forward
        ids = labels.flatten()
        # Whole tensors of the labels' shape, no views: FSDP2 hangs its backward hooks on them.
        columns = [torch.empty(labels.shape, device=hidden.device) for _ in range(3)]
        for rows in chunks(len(hidden), len(weight), chunk_numel(compiled=compiled)):
            parts = forward_chunk(linear_logits(hidden[rows], weight), ids[rows], temperature, with_entropy)
            for column, part in zip(columns, parts, strict=True):
                column.view(-1)[rows] = part
        log_probs, entropy, log_normalizer = columns
        ctx.save_for_backward(hidden, weight, ids, entropy, log_normalizer.flatten())
        ctx.options = options
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        temperature, with_entropy, compiled = ctx.options
        backward_chunk: Callable[..., Tensor] = fused(chunk_backward) if compiled else chunk_backward
        hidden, weight = ctx.saved_tensors[:2]
        columns = [column.flatten() for column in (*ctx.saved_tensors[2:], *grads)]
        grad_hidden = torch.empty_like(hidden)
        # Summed in float32, whatever the type of the weights.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for rows in chunks(len(hidden), len(weight), chunk_numel(compiled=compiled)):
            logits, numbers = linear_logits(hidden[rows], weight), (column[rows] for column in columns)
            grad = backward_chunk(logits, *numbers, temperature, with_entropy, weight.dtype)
            grad_hidden[rows] = grad @ weight
            if grad_weight is not None:
                add_product(grad_weight, grad.T, hidden[rows])
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None


def linear_logits(
    hidden: Float[Tensor, "rows hidden"], weight: Float[Tensor, "vocab hidden"]
) -> Float[Tensor, "rows vocab"]:
    """Logits of a linear head without bias: in float32, as the products are summed."""
    with torch.autocast(hidden.device.type, enabled=False):
        if hidden.is_cuda and hidden.dtype != torch.float32:
            return torch.mm(hidden, weight.T, out_dtype=torch.float32)
        return hidden.float() @ weight.float().T


def add_product(total: Float[Tensor, "vocab hidden"], left: Tensor, right: Tensor) -> None:
    """Add ``left @ right`` to a float32 tensor in place, without rounding in between."""
    with torch.autocast(total.device.type, enabled=False):
        if total.is_cuda and left.dtype != torch.float32:
            torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
        else:
            total.addmm_(left.float(), right.float())


def chunk_numel(*, compiled: bool) -> int:
    """Logits that are held at a time."""
    return _FUSED_CHUNK_NUMEL if compiled else _CHUNK_NUMEL


def chunks(length: int, vocab: int, numel: int) -> list[slice]:
    """Cuts rows so that no part has more logits than ``numel``, or one row."""
    width = max(1, numel // vocab)
    width -= width % 256 if width > 256 else 0  # whole tiles of the matrix products
    return [slice(start, start + width) for start in range(0, max(1, length), width)]
