"""Puts a batch into the shapes that Megatron's models read: left-aligned rows, or sequences in a row (THD)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int
from torch import Tensor

from verl_lightning.models.packing import PackedTokens, pack, true_positions
from verl_lightning.models.router_replay import ReadTokens
from verl_lightning.types import TokenBatch, send

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams


@dataclass(frozen=True, kw_only=True)
class Slicing:
    """Part of each sequence that a rank holds, and the multiple to which sequences are padded."""

    multiple: int = 1
    """Tokens of which every padded length is a multiple."""

    context_size: int = 1
    """Ranks that share each sequence."""

    context_rank: int = 0
    """Index of this rank among those that share each sequence."""


@dataclass(frozen=True, kw_only=True)
class ModelTokens:
    """This rank's tokens of a batch, and where its scored tokens lie."""

    input_ids: Int[Tensor, "rows columns"]
    """Tokens; 0 on padding, which nothing real can see."""

    position_ids: Int[Tensor, "rows columns"]
    """Positions, from 0 in each sequence."""

    packed: PackedSeqParams | None
    """Boundaries of the sequences if they lie in one row, else None."""

    source: tuple[Int[Tensor, " scored"], Int[Tensor, " scored"]]
    """Row and column whose hidden state predicts each scored token of this rank."""

    labels: Int[Tensor, " scored"]
    """The scored tokens."""

    target: tuple[Int[Tensor, " scored"], Int[Tensor, " scored"]]
    """Rows and response columns of the scored tokens in the batch."""

    shape: tuple[int, int]
    """Rows and response columns of the batch."""

    places: Int[Tensor, " tokens"]
    """Row by row, the position of each real token of the batch; of the whole sequences, where ranks share them."""

    def read_from(self, batch: TokenBatch) -> ReadTokens:
        """Return the order in which layers read the batch's tokens: column by column."""
        rows, columns = self.input_ids.shape
        positions = true_positions(batch.attention_mask, len(self.places))
        places = self.places % columns * rows + self.places // columns
        return ReadTokens(positions=positions, places=places, total=rows * columns)


def model_tokens(batch: TokenBatch, *, slicing: Slicing, packs: bool) -> ModelTokens:
    """Put a batch into a model's shapes; tokens with ``response_mask`` are scored.

    Real tokens stand first in each row: a causal mask then hides all padding, and rotary positions count from 0.

    Args:
        batch: Batch with any padding.
        slicing: Part of each sequence that this rank holds.
        packs: Put sequences in one row.
    """
    flat = pack(batch)
    real = [row.tokens for row in batch.known_lengths()]
    padded = [-(-max(1, length) // slicing.multiple) * slicing.multiple for length in real]
    if not packs:
        padded = [max(padded)] * len(padded)
    columns = sum(padded) if packs else padded[0]
    ids, positions, places = _spread(flat, real, padded)
    return _slice(flat, ids, positions, places, padded, columns, slicing, packs)


def _spread(flat: PackedTokens, real: list[int], padded: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Lay sequences end to end with padding after each; return tokens, positions, and where real tokens come to lie.

    Args:
        flat: The real tokens in a row.
        real: Length of each sequence.
        padded: Length of each sequence with its padding.
    """
    device = flat.input_ids.device
    if padded == real:
        return flat.input_ids[0], flat.position_ids[0], torch.arange(sum(real), device=device)
    starts = torch.tensor([0, *padded[:-1]]).cumsum(0)
    # On the host, which knows all lengths: it would wait for the device otherwise.
    first = send(torch.repeat_interleave(starts, torch.tensor(real)), device)
    places = first + flat.position_ids[0]
    ids = torch.zeros(sum(padded), dtype=flat.input_ids.dtype, device=device)
    positions = send(torch.cat([torch.arange(length) for length in padded]), device)
    return ids.index_copy(0, places, flat.input_ids[0]), positions, places


def _slice(
    flat: PackedTokens,
    ids: Tensor,
    positions: Tensor,
    places: Tensor,
    padded: list[int],
    columns: int,
    slicing: Slicing,
    packs: bool,
) -> ModelTokens:
    """Keep what this rank holds of each sequence."""
    labels, target, predictors = flat.labels[0], flat.target, places[flat.predictors]
    if slicing.context_size > 1:
        kept = send(context_slice(padded, slicing), ids.device)
        place = torch.full((len(ids),), -1, device=ids.device)
        place[kept] = torch.arange(len(kept), device=ids.device)
        ids, positions, predictors = ids[kept], positions[kept], place[predictors]
        is_here = predictors >= 0
        labels, predictors = labels[is_here], predictors[is_here]
        target = target[0][is_here], target[1][is_here]
        columns //= slicing.context_size
    return ModelTokens(
        input_ids=ids.view(-1, columns),
        position_ids=positions.view(-1, columns),
        packed=_boundaries(padded, ids.device) if packs else None,
        source=(predictors // columns, predictors % columns),
        labels=labels,
        target=target,
        shape=flat.shape,
        places=places,
    )


def context_slice(lengths: list[int], slicing: Slicing) -> Int[Tensor, " kept"]:
    """Flat positions that a context-parallel rank holds: of each sequence's ``2 n`` pieces, one early and one late.

    A causal mask makes late pieces dear; rank ``i`` of ``n`` gets the pieces ``i`` and ``2 n - 1 - i``.

    Args:
        lengths: Tokens of sequences laid end to end, each a multiple of ``2 n``.
        slicing: Part of each sequence that this rank holds.
    """
    parts, start = [], 0
    for length in lengths:
        piece = length // (2 * slicing.context_size)
        for index in (slicing.context_rank, 2 * slicing.context_size - 1 - slicing.context_rank):
            parts.append(torch.arange(piece) + start + index * piece)
        start += length
    return torch.cat(parts)


def _boundaries(lengths: list[int], device: torch.device) -> PackedSeqParams:
    from megatron.core.packed_seq_params import PackedSeqParams

    ends = send(torch.tensor([0, *lengths]).cumsum(0).int(), device)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=ends,
        cu_seqlens_kv_padded=ends,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
