"""Puts the real tokens of a padded batch in one row, and the scores of that row back into the batch's columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from verl_lightning.models.sequence_parallel import SequencePart, exchange, sum_over_group
from verl_lightning.types import TokenBatch, send


@dataclass(frozen=True, kw_only=True)
class PackedTokens:
    """Sequences in a row, without padding."""

    input_ids: Int[Tensor, "1 total"]
    """Tokens of the sequences, one sequence after another."""

    position_ids: Int[Tensor, "1 total"]
    """Position of each token in its sequence, from 0."""

    cu_seq_lens: Int[Tensor, " rows_plus_1"]
    """Start of each sequence, and the end of the last; int32, as kernels want it."""

    max_length: int
    """Tokens of the longest sequence."""

    predictors: Int[Tensor, " scored"]
    """Positions in the row, ascending, that predict the scored tokens: the one before each."""

    labels: Int[Tensor, "1 scored"]
    """The scored tokens."""

    target: tuple[Int[Tensor, " scored"], Int[Tensor, " scored"]]
    """Row and response column of each scored token."""

    shape: tuple[int, int]
    """Rows and response columns of the padded batch."""

    index: Int[Tensor, " total"]
    """Place of each token in the padded batch, row after row."""

    part: SequencePart | None = None
    """Run of the row that these tokens are, where ranks share it; ``cu_seq_lens`` are those of the whole row."""

    moves: tuple[list[int], list[int]] | None = None
    """Numbers of hidden states that go to each rank and that come from each, where ranks score equal shares."""

    def shared_by(self, group: dist.ProcessGroup, *, balances: bool) -> PackedTokens:
        """Returns this rank's run of the tokens, and those that it scores. Waits for the device to count them.

        Each rank gets at least one token: models cannot take none.

        Args:
            group: Ranks that share the row.
            balances: True if ranks score equal shares of the tokens, which takes a `predicting` of all ranks; else each
                scores those that its own run predicts.
        """
        if (missing := group.size() - self.input_ids.shape[1]) > 0:
            return self._with_another(missing).shared_by(group, balances=balances)
        part = SequencePart(group=group, total=self.input_ids.shape[1])
        tokens, rank = part.tokens, group.rank()
        starts = send(torch.tensor([0, *part.lengths]).cumsum(0), self.input_ids.device)
        borders = torch.searchsorted(self.predictors, starts).tolist()
        runs = [range(*pair) for pair in pairwise(borders)]
        shares = SequencePart(group=group, total=borders[-1]).runs
        scored = shares[rank] if balances else runs[rank]
        columns = slice(scored.start, scored.stop)
        return replace(
            self,
            input_ids=self.input_ids[:, tokens],
            position_ids=self.position_ids[:, tokens],
            predictors=self.predictors[runs[rank].start : runs[rank].stop] - tokens.start,
            labels=self.labels[:, columns],
            target=(self.target[0][columns], self.target[1][columns]),
            part=part,
            moves=_moves(runs, shares, rank) if balances else None,
        )

    def in_row(self, column: Shaped[Tensor, "*kinds batch sequence"]) -> Shaped[Tensor, "*kinds 1 total"]:
        """Returns what a padded batch has for each token, in the row. Not where ranks share it."""
        return column.flatten(-2)[..., self.index].unsqueeze(-2)

    def predicting(self, hidden: Float[Tensor, "1 own dim"]) -> Float[Tensor, "1 scored dim"]:
        """Returns the hidden states that predict what this rank scores. Collective where ranks score equal shares.

        Args:
            hidden: Hidden states of this rank's tokens.
        """
        own = hidden[:, self.predictors]
        if self.moves is None or self.part is None:
            return own
        return exchange(own[0], *self.moves, self.part.group)[None]

    def _with_another(self, length: int) -> PackedTokens:
        """Adds one more sequence, of which nothing is scored."""
        end = self.cu_seq_lens[-1:]
        return replace(
            self,
            input_ids=torch.cat([self.input_ids, self.input_ids.new_zeros(1, length)], dim=1),
            position_ids=torch.cat([self.position_ids, torch.arange(length, device=end.device)[None]], dim=1),
            cu_seq_lens=torch.cat([self.cu_seq_lens, end + length]),
            max_length=max(self.max_length, length),
        )

    def unpack(self, scores: Float[Tensor, "1 scored *kind"]) -> Float[Tensor, "batch response *kind"]:
        """Puts scores, of all ranks that share the row, in the batch's columns; 0 where ``response_mask`` is False."""
        columns = scores.new_zeros(*self.shape, *scores.shape[2:]).index_put(self.target, scores.squeeze(0))
        return columns if self.part is None else sum_over_group(columns, self.part.group)

    def model_inputs(self, *, has_kernel: bool) -> dict[str, Any]:
        """Returns the arguments of a transformers model, for sequences that must not see one another.

        Args:
            has_kernel: True if the attention kernel reads boundaries itself; else transformers derives its mask from
                ``position_ids``, which it does only without an attention mask.
        """
        return {
            "input_ids": self.input_ids,
            "position_ids": self.position_ids,
            # A mask of four dimensions passes as it is: transformers then makes none, and waits for no device.
            "attention_mask": self.cu_seq_lens.new_ones(1, 1, 1, 1, dtype=torch.bool) if has_kernel else None,
            "use_cache": False,
            "cu_seq_lens_q": self.cu_seq_lens,
            "cu_seq_lens_k": self.cu_seq_lens,
            "max_length_q": self.max_length,
            "max_length_k": self.max_length,
        } | ({} if self.part is None else {"sequence_part": self.part})


def pack(batch: TokenBatch) -> PackedTokens:
    """Puts the real tokens of a batch in one row, sequence after sequence; those with ``response_mask`` are scored.

    A token is predicted by the real token before it, whatever padding lies between. Waits for the device only if the
    batch does not bring its `RowLengths`.

    Args:
        batch: Batch with any padding; a token that is scored is real and has a real one before it.
    """
    lengths = batch.known_lengths()
    is_real, columns = batch.attention_mask, batch.input_ids.shape[1]
    index = true_positions(is_real, sum(row.tokens for row in lengths))
    ends = is_real.sum(-1).cumsum(0, dtype=torch.int32)
    rows, width = batch.response_mask.shape
    scored = true_positions(batch.response_mask, sum(row.scored for row in lengths))
    target = scored // width, scored % width
    source = target[0] * columns + target[1] + (columns - width)
    rank = is_real.flatten().cumsum(0) - 1  # of each real token in the row
    return PackedTokens(
        input_ids=batch.input_ids.flatten()[index][None],
        index=index,
        position_ids=(is_real.cumsum(-1) - 1).flatten()[index][None],
        cu_seq_lens=torch.cat([ends.new_zeros(1), ends]),
        max_length=max(row.tokens for row in lengths),
        predictors=rank[source] - 1,
        labels=batch.response_ids.flatten()[scored][None],
        target=target,
        shape=(rows, width),
    )


def position_ids(attention_mask: Tensor) -> Int[Tensor, "batch sequence"]:
    """Returns positions that count real tokens only, so that left padding moves nothing."""
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)


def _moves(runs: Sequence[range], shares: Sequence[range], rank: int) -> tuple[list[int], list[int]]:
    """Counts the scored tokens of its run that a rank sends to each share, and those that it gets from each rank."""
    sent = [_overlap(runs[rank], share) for share in shares]
    return sent, [_overlap(run, shares[rank]) for run in runs]


def _overlap(one: range, other: range) -> int:
    return max(0, min(one.stop, other.stop) - max(one.start, other.start))


def true_positions(mask: Bool[Tensor, "rows columns"], count: int) -> Int[Tensor, " count"]:
    """Returns the flat positions of the True elements in order; unlike ``nonzero`` it does not wait for the device."""
    return mask.logical_not().flatten().argsort(stable=True)[:count]
