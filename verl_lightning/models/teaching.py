"""What a teacher tells of its distributions, and how a student compares with it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from verl_lightning.functional.distillation import linear_divergence, linear_top_k, linear_top_k_divergence
from verl_lightning.types import Scores, TokenBatch


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """Form in which a teacher tells its distributions."""

    top_k: int | None = None
    """Number of its most probable tokens; None tells what its output head reads, from which all follows."""

    def added(self, scores: Scores, hidden: Tensor, weight: Tensor, temperature: float) -> Scores:
        """Adds a teacher's distributions to its scores.

        Args:
            scores: Scores of some tokens.
            hidden: What the output head reads for each of them.
            weight: Weight of the output head.
            temperature: Softmax temperature, dimensionless.
        """
        if self.top_k is None:
            return replace(scores, hidden=hidden)
        ids, log_probs = linear_top_k(hidden, weight, top_k=self.top_k, temperature=temperature)
        return replace(scores, top_ids=ids, top_log_probs=log_probs)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Comparison of a student with the teachers whose distributions are in its batch."""

    beta: float
    """Weight of the teacher in the mixture of the generalised Jensen-Shannon divergence."""

    heads: tuple[Tensor, ...] = ()
    """Whole weights of the teachers' output heads; empty where batches list the most probable tokens."""

    def divergence(
        self, hidden: Tensor, weight: Tensor, batch: TokenBatch, target: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        """Divergence from the teacher of each of some tokens, 0 where there is no teacher.

        Args:
            hidden: What the student's output head reads for each token.
            weight: Weight of the student's output head.
            batch: Batch that the tokens are of.
            target: Row and response column of each of the tokens, in a row; None where they are all of the batch.
        """
        assert batch.teacher_index is not None

        def chosen(column: Tensor) -> Tensor:
            return column if target is None else column[target][None]

        options = {"beta": self.beta, "temperature": batch.temperature}
        if batch.teacher_top_ids is not None:
            assert batch.teacher_top_log_probs is not None
            ids, log_probs = chosen(batch.teacher_top_ids), chosen(batch.teacher_top_log_probs)
            return linear_top_k_divergence(hidden, weight, ids, log_probs, **options)
        assert batch.teacher_hidden is not None
        of_teacher = chosen(batch.teacher_hidden)
        index = chosen(batch.teacher_index[:, None].expand(batch.response_mask.shape))
        total = torch.zeros(hidden.shape[:-1], device=hidden.device)
        for teacher, head in enumerate(self.heads):
            theirs = of_teacher[..., : head.shape[1]]
            divergence = linear_divergence(hidden, weight, theirs, head.to(theirs.dtype), **options)
            total = total + torch.where(index == teacher, divergence, 0.0)
        return total


def output_weight(head: nn.Linear, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Returns hidden states and the weight of an output head in the type in which the head computes."""
    device, weight = hidden.device.type, head.weight
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    return hidden.to(dtype), weight.to(dtype)
