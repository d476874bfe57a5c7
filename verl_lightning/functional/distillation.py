"""Divergences of a student's distribution from its teacher's, per token, without the logits of either held whole."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from verl_lightning.functional.linear_log_probs import add_product, chunks, linear_logits

_CHUNK_NUMEL = 2**25
"""Logits of one model at a time; a divergence and its gradient hold about eight float32 tensors of that size."""

_SMALLEST_REST = 1e-6  # of a token's probability: rounding may lift the sum of listed ones above 1
_IMPOSSIBLE = -1e4  # nats: the probability is 0 in float32, while gradients stay finite


def generalized_jsd(
    log_probs: Float[Tensor, "*rows vocab"], teacher_log_probs: Float[Tensor, "*rows vocab"], *, beta: float
) -> Float[Tensor, "*rows"]:
    """Generalised Jensen-Shannon divergence between a student and its teacher.

    With the student ``p``, the teacher ``q`` and their mixture ``m = (1 - beta) * p + beta * q``::

        beta * KL(q || m) + (1 - beta) * KL(p || m)

    At its ends it would be 0, and is by convention the KL to which it tends when divided by ``beta * (1 - beta)``:
    ``KL(q || p)``, the forward KL, for ``beta`` 0, and ``KL(p || q)``, the reverse KL, for ``beta`` 1.

    Args:
        log_probs: Of every token under the student, in nats. Carries the gradient.
        teacher_log_probs: Of every token under the teacher, in nats. Constant.
        beta: Weight of the teacher in the mixture, in ``[0, 1]``.

    Returns:
        In nats, at least 0.

    References:
        Agarwal et al., *On-Policy Distillation of Language Models*, 2023, eq. 1. https://arxiv.org/abs/2306.13649
    """
    if beta == 0:
        return _kl(teacher_log_probs, log_probs)
    if beta == 1:
        return _kl(log_probs, teacher_log_probs)
    mixture = torch.logaddexp(log_probs + math.log(1 - beta), teacher_log_probs + math.log(beta))
    return beta * _kl(teacher_log_probs, mixture) + (1 - beta) * _kl(log_probs, mixture)


def top_k_jsd(
    log_probs: Float[Tensor, "*rows listed"], teacher_log_probs: Float[Tensor, "*rows listed"], *, beta: float
) -> Float[Tensor, "*rows"]:
    """Generalised JSD of which the teacher has listed a few tokens: all others count as one token.

    It is never above that of the whole vocabulary, and equal to it where all tokens are listed.

    Args:
        log_probs: Of the listed tokens under the student, in nats. Carries the gradient.
        teacher_log_probs: Of the same tokens under the teacher, in nats; ``-inf`` fills up shorter lists. Constant.
        beta: As in `generalized_jsd`.
    """
    is_listed = teacher_log_probs.isfinite()
    both = (torch.where(is_listed, listed, _IMPOSSIBLE) for listed in (log_probs, teacher_log_probs))
    return generalized_jsd(*map(_with_rest, both), beta=beta)


def linear_divergence(
    hidden: Float[Tensor, "*rows hidden"],
    weight: Float[Tensor, "vocab hidden"],
    teacher_hidden: Float[Tensor, "*rows teacher_hidden"],
    teacher_weight: Float[Tensor, "teacher_vocab teacher_hidden"],
    *,
    beta: float,
    temperature: float,
) -> Float[Tensor, "*rows"]:
    """`generalized_jsd` of two linear heads without bias, over the tokens that both have.

    Logits of both models are made a chunk of rows at a time, in the forward and again in the backward pass.

    Args:
        hidden: Of the student at the position before each token, after its last norm. Carries the gradient.
        weight: Of the student's output head, in the type of ``hidden``. Carries the gradient.
        teacher_hidden: Of the teacher at the same positions. Constant.
        teacher_weight: Of the teacher's output head, in the type of ``teacher_hidden``. Constant.
        beta: Weight of the teacher in the mixture, in ``[0, 1]``.
        temperature: Softmax temperature of both, dimensionless, above 0.

    Returns:
        In nats and float32.
    """
    width = min(len(weight), len(teacher_weight))

    def divergence(logits: Tensor, of_teacher: Tensor) -> Tensor:
        with torch.no_grad():
            teacher = (linear_logits(of_teacher, teacher_weight[:width]) / temperature).log_softmax(-1)
        return generalized_jsd((logits[:, :width] / temperature).log_softmax(-1), teacher, beta=beta)

    return _over_logits(divergence, hidden, weight, teacher_hidden)


def linear_top_k_divergence(
    hidden: Float[Tensor, "*rows hidden"],
    weight: Float[Tensor, "vocab hidden"],
    top_ids: Int[Tensor, "*rows listed"],
    top_log_probs: Float[Tensor, "*rows listed"],
    *,
    beta: float,
    temperature: float,
) -> Float[Tensor, "*rows"]:
    """`top_k_jsd` of a linear head without bias from the tokens that a teacher has listed.

    Args:
        hidden: Of the student at the position before each token, after its last norm. Carries the gradient.
        weight: Of the student's output head, in the type of ``hidden``. Carries the gradient.
        top_ids: Tokens that the teacher has listed.
        top_log_probs: Of these under the teacher at ``temperature``, in nats; ``-inf`` fills up shorter lists.
        beta: Weight of the teacher in the mixture, in ``[0, 1]``.
        temperature: Softmax temperature of both, dimensionless, above 0.

    Returns:
        In nats and float32.
    """

    def divergence(logits: Tensor, ids: Tensor, of_teacher: Tensor) -> Tensor:
        return top_k_jsd((logits / temperature).log_softmax(-1).gather(-1, ids), of_teacher, beta=beta)

    return _over_logits(divergence, hidden, weight, top_ids, top_log_probs)


@torch.no_grad()
def linear_top_k(
    hidden: Float[Tensor, "*rows hidden"], weight: Float[Tensor, "vocab hidden"], *, top_k: int, temperature: float
) -> tuple[Int[Tensor, "*rows listed"], Float[Tensor, "*rows listed"]]:
    """The most probable tokens under a linear head without bias, and their log-probs in nats; without gradient.

    Args:
        hidden: Of the position before each token, after the last norm.
        weight: Of the output head, in the type of ``hidden``.
        top_k: Number of tokens, at most those of the vocabulary.
        temperature: Softmax temperature, dimensionless, above 0.
    """
    rows = hidden.reshape(-1, hidden.shape[-1])
    parts = [
        (linear_logits(rows[part], weight) / temperature).log_softmax(-1).topk(min(top_k, len(weight)), dim=-1)
        for part in chunks(len(rows), len(weight), _CHUNK_NUMEL)
    ]
    log_probs, ids = (torch.cat(columns) for columns in zip(*parts, strict=True))
    return ids.view(*hidden.shape[:-1], -1), log_probs.view(*hidden.shape[:-1], -1)


def _kl(log_probs: Tensor, other: Tensor) -> Tensor:
    """KL of a distribution from another one."""
    return (log_probs.exp() * (log_probs - other)).sum(-1)


def _with_rest(listed: Tensor) -> Tensor:
    """Adds a token with the probability that the listed ones leave."""
    total = listed.exp().sum(-1, keepdim=True)
    return torch.cat([listed, (1 - total).clamp(min=_SMALLEST_REST).log()], dim=-1)


def _over_logits(
    function: Callable[..., Tensor], hidden: Tensor, weight: Tensor, *columns: Tensor
) -> Float[Tensor, "*rows"]:
    """A number of each row's logits, made a chunk at a time.

    Args:
        function: Maps logits and the same rows of ``columns`` to a number for each row.
        hidden: What the head reads.
        weight: The head.
        columns: Constants of each row.
    """
    shape = hidden.shape[:-1]
    rows = [column.reshape(-1, column.shape[-1]) for column in columns]
    numbers: Tensor = _OverLogits.apply(  # type: ignore[no-untyped-call]
        hidden.reshape(-1, hidden.shape[-1]), weight, function, shape, *rows
    )
    return numbers


class _OverLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, function: Callable[..., Tensor], shape: torch.Size, *columns: Tensor
    ) -> Tensor:
        numbers = torch.empty(shape, device=hidden.device)  # no view: FSDP2 hangs its backward hooks on it
        for rows in chunks(len(hidden), len(weight), _CHUNK_NUMEL):
            numbers.view(-1)[rows] = function(linear_logits(hidden[rows], weight), *(c[rows] for c in columns))
        ctx.save_for_backward(hidden, weight, *columns)
        ctx.function = function
        return numbers

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, *columns = ctx.saved_tensors
        grad, grad_hidden = grads[0].flatten(), torch.empty_like(hidden)
        # Summed in float32, whatever the type of the weights.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for rows in chunks(len(hidden), len(weight), _CHUNK_NUMEL):
            logits = linear_logits(hidden[rows], weight).requires_grad_()
            with torch.enable_grad():
                numbers = ctx.function(logits, *(column[rows] for column in columns))
            (of_logits,) = torch.autograd.grad(numbers, logits, grad[rows])
            of_logits = of_logits.to(weight.dtype)
            grad_hidden[rows] = of_logits @ weight
            if grad_weight is not None:
                add_product(grad_weight, of_logits.T, hidden[rows])
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, *(None for _ in columns)
