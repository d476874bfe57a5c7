"""Log-probabilities and entropy of response tokens; the only place that shifts labels and applies the temperature."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from verl_lightning.compat.torch import mark_static

_CHUNK_NUMEL = 2**26
"""Logits per chunk: 256 MiB for each float32 temporary, few kernel launches."""


def response_logits(
    logits: Float[Tensor, "batch positions vocab"], response_length: int
) -> Float[Tensor, "batch response vocab"]:
    """The logits that predict the response: those of the position before each response token.

    Computes::

        logits[:, -response_length - 1 : -1]

    Args:
        logits: Of the whole sequence or of any ending of it with at least ``response_length + 1`` positions, such as
            a Hugging Face model gives for ``logits_to_keep=response_length + 1``.
        response_length: Columns of the response, tokens.

    Returns:
        A view, aligned with the response's token ids: position ``t`` predicts response token ``t``.

    Raises:
        ValueError: If there is no logit for the position before the first response token.
    """
    if logits.shape[1] <= response_length:
        raise ValueError(
            f"`logits` must cover the `response_length` = {response_length} response positions and the one before,"
            f" got {logits.shape[1]} positions. Ask the model for `logits_to_keep={response_length + 1}`."
        )
    return logits[:, -response_length - 1 : -1]


def token_log_probs(
    logits: Float[Tensor, "batch response vocab"],
    labels: Int[Tensor, "batch response"],
    *,
    temperature: float,
    compiled: bool = False,
) -> Float[Tensor, "batch response"]:
    """Log-probability of each label under the softmax of its logits.

    Computes::

        log_softmax(logits / temperature)[label]

    Args:
        logits: Of the position before each label (see `response_logits`), in any float type.
        labels: Token ids.
        temperature: Softmax temperature, dimensionless, above 0.
        compiled: Fuse the kernels with `torch.compile`, which needs a C compiler and, on a GPU, Triton. The same
            numbers up to float order, in a quarter of the time on an H100.

    Returns:
        In nats, float32. A position whose result gets no gradient gives none to its logits, even if they are ``nan``.
    """
    return _apply(logits, labels, temperature=temperature, with_entropy=False, compiled=compiled)[0]


def token_entropy(
    logits: Float[Tensor, "batch response vocab"], *, temperature: float
) -> Float[Tensor, "batch response"]:
    """Entropy of the softmax of each position's logits.

    With ``p = softmax(logits / temperature)``::

        -sum(p * log(p))

    Args:
        logits: Of the position before each token, in any float type.
        temperature: Softmax temperature, dimensionless, above 0.

    Returns:
        In nats, float32, from 0 to ``log(vocab)``.
    """
    any_label = torch.zeros(logits.shape[:2], dtype=torch.long, device=logits.device)
    _, entropy = log_probs_and_entropy(logits, any_label, temperature=temperature)
    return entropy


def log_probs_and_entropy(
    logits: Float[Tensor, "batch response vocab"],
    labels: Int[Tensor, "batch response"],
    *,
    temperature: float,
    compiled: bool = False,
) -> tuple[Float[Tensor, "batch response"], Float[Tensor, "batch response"]]:
    """Log-probability of each label and entropy of its distribution, from one pass over the logits.

    Keeps nothing of the vocabulary's size for the backward pass but the logits themselves, and holds float32 copies of
    a chunk at a time, or none at all when compiled.

    Args:
        logits: Of the position before each label (see `response_logits`), in any float type.
        labels: Token ids.
        temperature: Softmax temperature, dimensionless, above 0.
        compiled: Fuse the kernels with `torch.compile`, which needs a C compiler and, on a GPU, Triton. The same
            numbers up to float order, in a quarter of the time on an H100.

    Returns:
        `token_log_probs` and `token_entropy`, both in nats and float32.
    """
    return _apply(logits, labels, temperature=temperature, with_entropy=True, compiled=compiled)


@torch.no_grad()
def token_sum_squared_probs(
    logits: Float[Tensor, "batch response vocab"], *, temperature: float
) -> Float[Tensor, "batch response"]:
    """Sum of the squared probabilities of the whole vocabulary at each position; without gradient.

    With ``p = softmax(logits / temperature)``::

        sum(p**2)

    Args:
        logits: Of the position before each token, in any float type.
        temperature: Softmax temperature, dimensionless, above 0.

    Returns:
        Float32, from ``1 / vocab`` to 1.
    """
    parts = [
        (logits[:, chunk].float() / temperature).softmax(dim=-1).square().sum(dim=-1)
        for chunk in _response_chunks(logits.shape, is_whole=False)
    ]
    return torch.cat(parts, dim=1)


def _apply(
    logits: Tensor, labels: Tensor, *, temperature: float, with_entropy: bool, compiled: bool
) -> tuple[Tensor, Tensor]:
    outputs: tuple[Tensor, Tensor] = _LogProbsAndEntropy.apply(  # type: ignore[no-untyped-call]
        logits, labels, temperature, with_entropy, compiled
    )
    return outputs


class _LogProbsAndEntropy(torch.autograd.Function):
    """Recomputes the softmax chunk by chunk in the backward pass instead of saving it."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, temperature: float, with_entropy: bool, compiled: bool
    ) -> tuple[Tensor, Tensor]:
        forward_chunk = fused(chunk_forward) if compiled else chunk_forward
        parts = [
            forward_chunk(logits[:, chunk], labels[:, chunk], temperature, with_entropy)
            for chunk in _response_chunks(logits.shape, is_whole=compiled)
        ]
        log_probs, entropy, log_normalizer = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
        ctx.save_for_backward(logits, labels, entropy, log_normalizer)
        ctx.options = temperature, with_entropy, compiled
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        temperature, with_entropy, compiled = ctx.options
        backward_chunk: Callable[..., Tensor] = fused(chunk_backward) if compiled else chunk_backward
        logits = ctx.saved_tensors[0]
        rows = (*ctx.saved_tensors[1:], *grads)
        grad_logits = torch.empty_like(logits, memory_format=torch.contiguous_format)
        for chunk in _response_chunks(logits.shape, is_whole=compiled):
            # Written into one buffer of the logits' own type: a list of parts would hold the gradient twice.
            grad_logits[:, chunk] = backward_chunk(
                logits[:, chunk], *(row[:, chunk] for row in rows), temperature, with_entropy, logits.dtype
            )
        return grad_logits, None, None, None, None


@functools.cache
def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function of logits into kernels that keep no copy of them."""
    # Dynamic shapes: batches and responses of another size must not compile anew.
    compiled = torch.compile(function, dynamic=True)

    def call(logits: Tensor, *others: Any) -> Any:
        # All but the vocabulary: to find the row of each element, kernels divide by it, which is cheap by a constant.
        mark_static(logits, logits.dim() - 1)
        return compiled(logits, *others)

    return call


def _response_chunks(shape: torch.Size, *, is_whole: bool) -> list[slice]:
    # Fused kernels hold nothing of the vocabulary's size, and so need no chunks.
    batch, response, vocab = shape
    width = max(1, response if is_whole else _CHUNK_NUMEL // max(1, batch * vocab))
    return [slice(start, start + width) for start in range(0, max(1, response), width)]


def _scaled(values: Tensor, temperature: float) -> Tensor:
    # Fused kernels take a number as a float64 tensor, and divide by it in float64: slower than all the rest.
    return values if temperature == 1.0 else values / temperature


def chunk_forward(
    logits: Tensor, labels: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the labels' log-probs, entropies and log-normalizers of a part of the rows."""
    scaled = _scaled(logits.float(), temperature)
    log_normalizer = scaled.logsumexp(dim=-1)
    log_probs = scaled.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - log_normalizer
    if not with_entropy:
        return log_probs, torch.zeros_like(log_probs), log_normalizer
    probs = (scaled - log_normalizer.unsqueeze(-1)).exp()
    # `entr` is 0 at p = 0, where p * log(p) would be nan.
    return log_probs, torch.special.entr(probs).sum(dim=-1), log_normalizer


def chunk_backward(
    logits: Tensor,
    labels: Tensor,
    entropy: Tensor,
    log_normalizer: Tensor,
    grad_log_probs: Tensor,
    grad_entropy: Tensor,
    temperature: float,
    with_entropy: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Compute the gradient of a part of the logits.

    ``dlog_prob/dz = onehot - p`` and ``dentropy/dz = -p * (log(p) + entropy)``, ``z = logits / temperature``.
    """
    probs = (_scaled(logits.float(), temperature) - log_normalizer.unsqueeze(-1)).exp()
    grad = -probs * (grad_log_probs + grad_entropy * entropy).unsqueeze(-1)
    if with_entropy:
        grad = grad + torch.special.entr(probs) * grad_entropy.unsqueeze(-1)
    # A comparison, unlike a scatter, can be fused with the rest.
    columns = torch.arange(logits.shape[-1], device=logits.device, dtype=torch.int32)
    is_label = labels.int().unsqueeze(-1) == columns
    grad = _scaled(grad + torch.where(is_label, grad_log_probs.unsqueeze(-1), 0.0), temperature)
    # What no one learns from stays out even if it is nan, such as the logits of padding.
    is_idle = (grad_log_probs == 0) & (grad_entropy == 0)
    return torch.where(is_idle.unsqueeze(-1), 0.0, grad).to(dtype)
