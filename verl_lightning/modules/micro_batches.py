"""Splits a rank's sequences into micro-batches without needless padding, and puts their scores together again."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from verl_lightning.models.scorer import TokenScorer
from verl_lightning.modules.token_budget import RowSize, TokenBudget
from verl_lightning.strategies.base import PostTrainingStrategy
from verl_lightning.types import RowLength, Scores, TokenBatch

BatchT = TypeVar("BatchT", bound=TokenBatch)
_SEQUENCE_FIELDS = ("input_ids", "attention_mask")


@dataclass(frozen=True, kw_only=True)
class SplitBatch(Generic[BatchT]):
    """A batch in micro-batches."""

    parts: list[BatchT]
    """The micro-batches, each cut to its longest prompt and response."""

    order: Tensor | None
    """Which row of the batch each row of them is, in their order; None where they follow one another."""

    width: int
    """Response columns of the batch."""

    def join(self, scores: Sequence[Scores]) -> Scores:
        """Scores of the micro-batches as those of the batch, 0 where a micro-batch was cut."""
        joined: dict[str, Tensor | None] = {}
        for field in dataclasses.fields(Scores):
            columns = [getattr(part, field.name) for part in scores]
            joined[field.name] = None if columns[0] is None else self._rows(join_columns(columns, self.width))
        return Scores(**joined)

    def _rows(self, column: Tensor) -> Tensor:
        return column if self.order is None else torch.empty_like(column).index_copy_(0, self.order, column)


@dataclass(frozen=True, kw_only=True)
class BatchSplitter:
    """Splits batches for one model: by a number of sequences, or by a budget of tokens."""

    contract: PostTrainingStrategy
    """Knows the other ranks, which must make as many passes."""

    micro_batch_size: int
    """Most sequences of a micro-batch, where there is no budget."""

    max_tokens: int | None
    """Most tokens of a micro-batch; None splits by sequences."""

    def split(self, model: TokenScorer, batches: Sequence[BatchT]) -> list[SplitBatch[BatchT]]:
        """Split batches, each in as many micro-batches on every rank if there is a budget. Collective.

        Args:
            model: That will score them.
            batches: This rank's; every rank has as many.

        Raises:
            ValueError: On every rank, if a sequence of any rank does not fit into the budget.
        """
        sizes = row_sizes(batches)
        if self.max_tokens is None:
            size = self.micro_batch_size
            return [_split(b, s, _runs(len(b), size), None) for b, s in zip(batches, sizes, strict=True)]
        budget = TokenBudget(max_tokens=self.max_tokens, packs=model.packs, attention_cost=model.attention_cost)
        plans = self._plan(budget, sizes)
        return [_reordered(b, s, plan) for b, s, plan in zip(batches, sizes, plans, strict=True)]

    def _plan(self, budget: TokenBudget, sizes: list[list[RowSize]]) -> list[list[list[int]]]:
        """The micro-batches of each batch; one exchange of their counts for all of them."""
        try:
            problem, counts = None, [len(budget.divide(rows)) for rows in sizes]
        except ValueError as error:
            problem, counts = str(error), [0] * len(sizes)
        everyone = self.contract.gather_over_data_parallel((problem, counts))
        for rank, (theirs, _) in enumerate(everyone):
            if theirs is not None:
                raise ValueError(f"data-parallel rank {rank}: {theirs}")
        most = [max(counts) for counts in zip(*(counts for _, counts in everyone), strict=True)]
        return [budget.divide_into(rows, count) for rows, count in zip(sizes, most, strict=True)]


def split_micro_batches(batch: BatchT, size: int) -> list[BatchT]:
    """Consecutive micro-batches of at most ``size`` sequences, each cut to its longest prompt and response.

    Args:
        batch: Any number of sequences.
        size: Most sequences in a micro-batch.
    """
    (sizes,) = row_sizes([batch])
    return _split(batch, sizes, _runs(len(batch), size), None).parts


def row_sizes(batches: Sequence[TokenBatch]) -> list[list[RowSize]]:
    """What each row of each batch takes. Waits for the device once for all of them."""
    counts = []
    for batch in batches:
        prompt_width = batch.input_ids.shape[1] - batch.response_mask.shape[1]
        is_real = batch.attention_mask
        spans = [_first_real(is_real[:, :prompt_width]), _last_real(is_real[:, prompt_width:])]
        counts.append(torch.stack([*spans, is_real.sum(-1), batch.response_mask.sum(-1)], dim=1))
    rows = iter(torch.cat(counts).tolist())
    return [[RowSize(*next(rows)) for _ in range(len(batch))] for batch in batches]


def join_columns(parts: list[Tensor], width: int) -> Tensor:
    """Scores of micro-batches as one tensor of ``width`` response columns, 0 where a micro-batch was cut."""
    return torch.cat([F.pad(part, (0, width - part.shape[1])) for part in parts])


def _first_real(is_real: Tensor) -> Tensor:
    """How many columns there are from each row's first True on."""
    return _last_real(is_real.flip(-1))


def _last_real(is_real: Tensor) -> Tensor:
    """How many columns reach up to each row's last True."""
    if is_real.shape[1] == 0:
        return is_real.sum(-1)
    columns = torch.arange(1, is_real.shape[1] + 1, device=is_real.device)
    return torch.where(is_real, columns, 0).amax(-1)


def _runs(length: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, length, size)]


def _reordered(batch: BatchT, sizes: list[RowSize], plan: list[list[int]]) -> SplitBatch[BatchT]:
    """The micro-batches of a plan, from one copy of the batch in their order."""
    rows = [row for part in plan for row in part]
    order = torch.tensor(rows, device=batch.input_ids.device)
    starts = [sum(len(part) for part in plan[:index]) for index in range(len(plan))]
    runs = [slice(start, start + len(part)) for start, part in zip(starts, plan, strict=True)]
    return _split(batch.select(order), [sizes[row] for row in rows], runs, order)


def _split(batch: BatchT, sizes: list[RowSize], runs: Iterable[slice], order: Tensor | None) -> SplitBatch[BatchT]:
    batch = dataclasses.replace(batch, row_lengths=tuple(RowLength(row.tokens, row.scored) for row in sizes))
    parts = [
        _trim(
            batch.select(run),
            prompt=max(row.prompt for row in sizes[run]),
            response=max(1, *(row.response for row in sizes[run])),
        )
        for run in runs
    ]
    return SplitBatch(parts=parts, order=order, width=batch.response_mask.shape[1])


def _trim(batch: BatchT, *, prompt: int, response: int) -> BatchT:
    """The same rows without ``input_ids`` columns that no row uses."""
    prompt_width = batch.input_ids.shape[1] - batch.response_mask.shape[1]
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        if not isinstance(value, Tensor) or value.dim() < 2:
            continue
        columns = slice(prompt_width - prompt, prompt_width + response) if field.name in _SEQUENCE_FIELDS else None
        changed[field.name] = value[:, columns or slice(response)]
    return dataclasses.replace(batch, **changed)
