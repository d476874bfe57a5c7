"""Ulysses sequence parallelism: each rank of a group has a run of a row's tokens, and in attention a share of heads.

All else of a transformer looks at one token at a time, so that activations take a share of their memory on each rank.
Attention needs whole sequences: before it, ranks exchange tokens for heads, and after it heads for tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from typing_extensions import override


@dataclass(frozen=True, kw_only=True)
class SequencePart:
    """This rank's run of the tokens of one row, which lies spread over a group of ranks.

    References:
        Jacobs et al., *DeepSpeed Ulysses*, 2023. https://arxiv.org/abs/2309.14509
    """

    group: dist.ProcessGroup
    """The ranks that have a run of the row."""

    total: int
    """Tokens of the whole row; need not be a multiple of the ranks."""

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each rank, as equal as can be."""
        share, rest = divmod(self.total, self.group.size())
        return [share + (rank < rest) for rank in range(self.group.size())]

    @property
    def runs(self) -> list[range]:
        """Range of the row's tokens that each rank has."""
        return [range(end - length, end) for end, length in zip(accumulate(self.lengths), self.lengths, strict=True)]

    @property
    def tokens(self) -> slice:
        """Slice of the row's tokens that this rank has."""
        own = self.runs[self.group.rank()]
        return slice(own.start, own.stop)

    def exchange_for_heads(
        self,
        query: Float[Tensor, "1 heads own dim"],
        key: Float[Tensor, "1 kv_heads own dim"],
        value: Float[Tensor, "1 kv_heads own dim"],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gathers all tokens of the row for this rank's share of the heads. Collective, as is its backward pass.

        Where there are fewer key heads than ranks, several ranks get the same one.

        Args:
            query: Queries of this rank's tokens.
            key: Keys of these tokens.
            value: Values of these tokens.

        Returns:
            ``[1, heads of this rank, total, dim]`` of each.
        """
        size = self.group.size()
        key, value = (x.repeat_interleave(max(1, size // x.shape[1]), dim=1) for x in (key, value))
        # By rank and token, so that what arrives is in the order of the row: [rank, own, heads of that rank, dim].
        own, dim = query.shape[2:]
        parts = [x.reshape(size, x.shape[1] // size, own, dim).transpose(1, 2) for x in (query, key, value)]
        counts = [part.shape[2] for part in parts]
        whole = exchange(torch.cat(parts, dim=2).flatten(0, 1), [own] * size, self.lengths, self.group)
        queries, keys, values = (x.transpose(0, 1)[None] for x in torch.split(whole, counts, dim=1))
        return queries, keys, values

    def exchange_for_tokens(self, output: Float[Tensor, "1 total own_heads dim"]) -> Float[Tensor, "1 own heads dim"]:
        """Gathers all heads of this rank's tokens: undoes `exchange_for_heads`. Collective, as is its backward pass.

        Args:
            output: Output of attention for this rank's heads.
        """
        size, own = self.group.size(), self.lengths[self.group.rank()]
        parts = exchange(output.squeeze(0), self.lengths, [own] * size, self.group)
        return parts.view(size, own, *output.shape[2:]).transpose(0, 1).flatten(1, 2)[None]


def exchange(blocks: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """Sends a block of rows to each rank and receives one from each. Collective, as is its backward pass.

    Args:
        blocks: Blocks of rows, one after another by rank.
        sent: Rows of the block for each rank.
        received: Rows of the block from each rank.
        group: The ranks.
    """
    exchanged: Tensor = _Exchange.apply(blocks, sent, received, group)  # type: ignore[no-untyped-call]
    return exchanged


def sum_over_group(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sums every rank's tensor, on every rank. Collective in the forward pass.

    Each rank's part gets the whole gradient, as each rank computes the whole loss.

    Args:
        part: Tensor of this rank.
        group: The ranks.
    """
    summed: Tensor = _SumOverGroup.apply(part, group)  # type: ignore[no-untyped-call]
    return summed


class _Exchange(torch.autograd.Function):
    @override
    @staticmethod
    def forward(ctx: Any, blocks: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.lengths, ctx.group = (sent, received), group
        arrived = blocks.new_empty(sum(received), *blocks.shape[1:])
        dist.all_to_all_single(arrived, blocks.contiguous(), received, sent, group=group)
        return arrived

    @override
    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received = ctx.lengths
        return exchange(gradients[0], received, sent, ctx.group), None, None, None


class _SumOverGroup(torch.autograd.Function):
    @override
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        summed = part.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @override
    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
