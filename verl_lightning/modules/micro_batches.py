"""Splits a rank's sequences into micro-batches without needless padding, and puts their scores together again."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic

import torch
import torch.nn.functional as F
from torch import Tensor

from verl_lightning.models.scorer import TokenScorer
from verl_lightning.modules.token_budget import TokenBudget, example_lengths
from verl_lightning.strategies.base import PostTrainingStrategy, blank
from verl_lightning.types import BatchT, RowLength, Scores, TokenBatch, send, with_lengths

_SEQUENCE_FIELDS = ("input_ids", "attention_mask", "experts", "mm_token_type_ids")


@dataclass(frozen=True, kw_only=True)
class SplitBatch(Generic[BatchT]):
    """A batch in micro-batches."""

    parts: list[BatchT]
    """The micro-batches, each cut to its longest prompt and response."""

    order: Tensor | None
    """Row of the batch for each row of the micro-batches, in their order; None where rows keep the batch's order."""

    width: int
    """Response columns of the batch."""

    prompt_width: int
    """Prompt columns of the batch."""

    num_blank: int = 0
    """Micro-batches at the end that teach nothing, by which this rank makes as many passes as others."""

    def join(self, scores: Sequence[Scores]) -> Scores:
        """Scores of the micro-batches as those of the batch, 0 where a micro-batch was cut."""
        joined: dict[str, Tensor | None] = {}
        for field in dataclasses.fields(Scores):
            columns = [getattr(part, field.name) for part in scores[: len(scores) - self.num_blank]]
            if columns[0] is None:
                joined[field.name] = None
            elif field.name in _SEQUENCE_FIELDS:
                joined[field.name] = self._rows(
                    torch.cat([self._whole(*each) for each in zip(self.parts, columns, strict=False)])
                )
            else:
                joined[field.name] = self._rows(join_columns(columns, self.width))
        return Scores(**joined)

    def _whole(self, part: BatchT, experts: Tensor) -> Tensor:
        """The experts of a micro-batch in the columns of the batch, -1 where it was cut."""
        response = part.response_mask.shape[1]
        left = self.prompt_width - (part.input_ids.shape[1] - response)
        return F.pad(experts, (0, 0, 0, 0, left, self.width - response), value=-1)

    def _rows(self, column: Tensor) -> Tensor:
        return column if self.order is None else torch.empty_like(column).index_copy_(0, self.order, column)


@dataclass(frozen=True, kw_only=True)
class BatchSplitter:
    """Splits batches for one model: by a number of sequences, or by a budget of tokens."""

    contract: PostTrainingStrategy
    """Strategy that reaches the other ranks, which must make as many passes."""

    micro_batch_size: int | None = None
    """Most sequences of a micro-batch, where there is no budget."""

    max_tokens: int | None
    """Most tokens of a micro-batch; None splits by sequences."""

    grows: bool = False
    """True if a longer sequence may take more than the budget, by itself."""

    def split(self, model: TokenScorer, batches: Sequence[BatchT]) -> list[SplitBatch[BatchT]]:
        """Splits batches, each into as many micro-batches on every rank if there is a budget. Collective.

        Args:
            model: Model that will score the batches.
            batches: Batches of this rank; every rank has as many.

        Raises:
            ValueError: On every rank, if a sequence of any rank does not fit into the budget.
        """
        batches = with_lengths(batches)
        if self.max_tokens is None:
            assert self.micro_batch_size is not None
            splits = [_split(batch, _runs(batch, self.micro_batch_size), None) for batch in batches]
            return self._levelled(splits) if batches[0].rows_vary else splits
        example = batches[0].rows_per_example
        budget = TokenBudget(
            max_tokens=self.max_tokens,
            packs=all(map(model.packs_batch, batches)),
            attention_cost=model.attention_cost,
            rows_per_example=example,
            grows=self.grows,
        )
        plans = self._plan(budget, [example_lengths(batch.known_lengths(), example) for batch in batches])
        splits = [_reordered(batch, plan) for batch, plan in zip(batches, plans, strict=True)]
        return self._levelled(splits) if batches[0].rows_vary else splits

    def _levelled(self, splits: list[SplitBatch[BatchT]]) -> list[SplitBatch[BatchT]]:
        """Adds blank micro-batches where other ranks have more. Collective."""
        everyone = self.contract.gather_over_data_parallel([len(split.parts) for split in splits])
        missing = [max(counts) - len(split.parts) for split, *counts in zip(splits, *everyone, strict=True)]
        return [
            dataclasses.replace(split, parts=split.parts + [blank(split.parts[-1])] * count, num_blank=count)
            for split, count in zip(splits, missing, strict=True)
        ]

    def _plan(self, budget: TokenBudget, sizes: list[list[RowLength]]) -> list[list[list[int]]]:
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
    return _split(batch, _runs(batch, size), None).parts


def join_columns(parts: list[Tensor], width: int) -> Tensor:
    """Scores of micro-batches as one tensor of ``width`` response columns, 0 where a micro-batch was cut."""
    return torch.cat([F.pad(part, ((0, 0) * (part.dim() - 2)) + (0, width - part.shape[1])) for part in parts])


def _runs(batch: TokenBatch, size: int) -> list[slice]:
    size = max(batch.rows_per_example, size // batch.rows_per_example * batch.rows_per_example)
    return [slice(start, start + size) for start in range(0, len(batch), size)]


def _reordered(batch: BatchT, plan: list[list[int]]) -> SplitBatch[BatchT]:
    """The micro-batches of a plan of examples, from one copy of the batch in their order."""
    width = batch.rows_per_example
    plan = [[example * width + row for example in part for row in range(width)] for part in plan]
    rows, lengths = [row for part in plan for row in part], batch.known_lengths()
    order = send(torch.tensor(rows), batch.input_ids.device)
    starts = [sum(len(part) for part in plan[:index]) for index in range(len(plan))]
    runs = [slice(start, start + len(part)) for start, part in zip(starts, plan, strict=True)]
    ordered = dataclasses.replace(batch.select(order), row_lengths=tuple(lengths[row] for row in rows))
    return _split(ordered, runs, order)


def _split(batch: BatchT, runs: Iterable[slice], order: Tensor | None) -> SplitBatch[BatchT]:
    (batch,) = with_lengths([batch])
    parts = [_trim(batch.select(run)) for run in runs]
    width = batch.response_mask.shape[1]
    return SplitBatch(parts=parts, order=order, width=width, prompt_width=batch.input_ids.shape[1] - width)


def _trim(batch: BatchT) -> BatchT:
    """The same rows without ``input_ids`` columns that no row uses."""
    lengths = batch.known_lengths()
    prompt, response = max(row.prompt for row in lengths), max(1, *(row.response for row in lengths))
    prompt_width = batch.input_ids.shape[1] - batch.response_mask.shape[1]
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        if not isinstance(value, Tensor) or value.dim() < 2:
            continue
        columns = slice(prompt_width - prompt, prompt_width + response) if field.name in _SEQUENCE_FIELDS else None
        changed[field.name] = value[:, columns or slice(response)]
    return dataclasses.replace(batch, **changed)
