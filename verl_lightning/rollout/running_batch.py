"""Sequences that a transformers model samples together, one token each at a time, and that others may join."""

from __future__ import annotations

from collections.abc import Collection
from itertools import groupby

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from verl_lightning.models.packing import position_ids
from verl_lightning.models.vision import image_arguments, own_text_embedded
from verl_lightning.rollout.base import Request
from verl_lightning.rollout.completions import image_fields, pad_left
from verl_lightning.rollout.token_sampling import draw_noise, sample_tokens
from verl_lightning.types import TokenBatch


class Row:
    """One sequence of a batch.

    Args:
        key: Number of the request.
        request: Request that it answers.
    """

    def __init__(self, key: int, request: Request) -> None:
        self.key = key
        self.request = request
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.versions: list[int] = []
        self.is_open = True
        self.is_truncated = False
        self.shift = 0
        """Positions by which images set the response off from its prompt's number of tokens."""
        self._noise = draw_noise(request.seed, request.sampling.max_new_tokens)

    @property
    def noise(self) -> float:
        """Random number that draws the next token."""
        return float(self._noise[len(self.tokens)]) if self.is_open else 0.0

    @property
    def position(self) -> int:
        """Position of the newest token."""
        return len(self.request.prompt_ids) + len(self.tokens) - 1 + self.shift

    @property
    def sequence(self) -> list[int]:
        """Tokens of the prompt and the response so far."""
        return self.request.prompt_ids + self.tokens

    def take(self, token: int, log_prob: float, version: int, ends: Collection[int]) -> None:
        """Take the next token, which may be the last."""
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        self.versions.append(version)
        is_full = len(self.tokens) == self.request.sampling.max_new_tokens
        self.is_open = token not in ends and not is_full
        self.is_truncated = token not in ends and is_full


class RunningBatch:
    """Rows whose newest token is drawn and not yet read; all end in the same column, padded on the left.

    Rows that have ended stay in their places until others join. A row depends on the others by rounding alone.

    Args:
        rows: Open rows, all sampled by one method.
        model: Model that reads them.
        version: Version of the model's weights.
        ends: Tokens that end a response.
        pad_token_id: Token that fills the padding.
    """

    def __init__(
        self, rows: list[Row], model: PreTrainedModel, version: int, *, ends: Collection[int], pad_token_id: int
    ) -> None:
        self.rows = rows
        self._ends = frozenset(ends)
        self._device = model.device
        self._cache = DynamicCache(config=model.config)
        groups = [[row] for row in rows]
        if self.can_grow:  # then samples can share what was read of their prompt
            by_prompt = groupby(rows, lambda row: (row.sequence, id(row.request.images)))
            groups = [list(same) for _, same in by_prompt]
        logits, mask = self._read_prompts(model, groups, pad_token_id)
        counts = torch.tensor([len(group) for group in groups]).to(self._device)
        samples = torch.arange(len(groups), device=self._device).repeat_interleave(counts)
        if self.can_grow:
            self._cache.batch_select_indices(samples)
        self._mask = mask[samples]
        self._draw(logits[samples], version)

    @property
    def num_open(self) -> int:
        """Number of rows that have not ended."""
        return sum(row.is_open for row in self.rows)

    @property
    def can_grow(self) -> bool:
        """True if others may join: caches of attention can be padded, states of recurrent layers can't."""
        return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in self._cache.layers)

    def go_on(self, model: PreTrainedModel, version: int) -> list[Row]:
        """Read each row's newest token and draw the next; return the rows that end with it."""
        going_on = [row for row in self.rows if row.is_open]
        ids = torch.tensor([[row.tokens[-1]] for row in self.rows], device=self._device)
        positions = torch.tensor([[row.position] for row in self.rows], device=self._device)
        self._draw(self._read(model, ids, positions, self._mask), version)
        return [row for row in going_on if not row.is_open]

    def join(self, other: RunningBatch) -> None:
        """Take another batch's rows into the places of those that have ended."""
        kept = torch.tensor([number for number, row in enumerate(self.rows) if row.is_open], device=self._device)
        self.rows = [row for row in self.rows if row.is_open] + other.rows
        self._cache.batch_select_indices(kept)
        mask = self._mask[kept]
        width = max(int(mask.sum(-1).max()), other._mask.shape[1])
        self._mask = torch.cat([last_columns(mask, width), last_columns(other._mask, width)])
        for layer, joining in zip(self._cache.layers, other._cache.layers, strict=True):
            assert isinstance(layer, DynamicLayer)
            assert isinstance(joining, DynamicLayer)
            join_layers(layer, joining, width - 1)  # the newest token is not read yet

    def _read_prompts(
        self, model: PreTrainedModel, groups: list[list[Row]], pad_token_id: int
    ) -> tuple[Float[Tensor, "prompts vocab"], Bool[Tensor, "prompts columns"]]:
        """Return the logits of the next token of each group of equal sequences, and the mask of these."""
        read = [group[0].sequence for group in groups]
        mask = pad_left([[True] * len(tokens) for tokens in read], False).to(self._device)
        ids = pad_left(read, pad_token_id).to(self._device)
        positions = position_ids(mask)
        fields = image_fields([group[0].request for group in groups], list(map(len, read)), 0)
        if not fields:
            return self._read(model, ids, positions, mask), mask
        batch = TokenBatch(input_ids=ids, attention_mask=mask, response_mask=mask[:, :0], **fields).to(self._device)
        arguments = image_arguments(model, batch, positions)
        positions = arguments.pop("position_ids", positions)
        last = positions.view(-1, *mask.shape).amax((0, 2)).tolist()
        for group, position in zip(groups, last, strict=True):
            for row in group:
                row.shift = position + 1 - len(row.sequence)
        with own_text_embedded(model, batch) as shown:
            return self._read(model, shown, positions, mask, **arguments), mask

    def _read(
        self,
        model: PreTrainedModel,
        ids: Tensor,
        positions: Tensor,
        mask: Bool[Tensor, "rows columns"],
        **images: Tensor,
    ) -> Float[Tensor, "rows vocab"]:
        """Return the logits of the next token."""
        output = model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
            **images,
        )
        logits: Tensor = output.logits
        return logits[:, -1].float()

    def _draw(self, logits: Float[Tensor, "rows vocab"], version: int) -> None:
        """Draw a token for each open row."""
        noise = torch.tensor([row.noise for row in self.rows], dtype=torch.float64).to(self._device)
        drawn, log_probs = sample_tokens(logits, noise, self.rows[0].request.sampling)
        is_open = torch.tensor([[row.is_open] for row in self.rows]).to(self._device)
        self._mask = torch.cat([self._mask, is_open], 1)
        for row, token, log_prob in zip(self.rows, drawn.tolist(), log_probs.tolist(), strict=True):
            if row.is_open:
                row.take(token, log_prob, version, self._ends)


def join_layers(layer: DynamicLayer, other: DynamicLayer, length: int) -> None:
    """Appends the rows of another cache, both cut or padded on the left to ``length`` columns, or a window's."""
    kept = length
    if isinstance(layer, DynamicSlidingWindowLayer):
        kept = min(length, layer.sliding_window - 1)
        layer.cumulative_length = length
    for name in ("keys", "values"):
        parts: list[Tensor] = [getattr(part, name) for part in (layer, other)]
        setattr(layer, name, torch.cat([last_columns(part.mT, kept).mT for part in parts]))


def last_columns(tensor: Tensor, count: int) -> Tensor:
    """Returns the last ``count`` entries of the last axis, zeros before the first where there are fewer."""
    return F.pad(tensor, (count - tensor.shape[-1], 0))
