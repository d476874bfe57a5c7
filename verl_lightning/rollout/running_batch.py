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

from verl_lightning.models.scorer import position_ids
from verl_lightning.rollout.base import Request
from verl_lightning.rollout.completions import pad_left
from verl_lightning.rollout.token_sampling import draw_noise, sample_tokens


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
        self._noise = draw_noise(request.seed, request.sampling.max_new_tokens)

    @property
    def noise(self) -> float:
        """Random number that draws the next token."""
        return float(self._noise[len(self.tokens)]) if self.is_open else 0.0

    @property
    def position(self) -> int:
        """Position of the newest token."""
        return len(self.request.prompt_ids) + len(self.tokens) - 1

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
        prompts = [row.sequence for row in rows]
        counts = [1] * len(rows)
        if self.can_grow:  # then samples can share what was read of their prompt
            groups = [(tokens, len(list(same))) for tokens, same in groupby(prompts)]
            prompts, counts = [tokens for tokens, _ in groups], [count for _, count in groups]
        mask = pad_left([[True] * len(tokens) for tokens in prompts], False).to(self._device)
        ids = pad_left(prompts, pad_token_id).to(self._device)
        logits = self._read(model, ids, position_ids(mask), mask)
        samples = torch.arange(len(prompts), device=self._device).repeat_interleave(torch.tensor(counts).to(ids.device))
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

    def _read(
        self, model: PreTrainedModel, ids: Tensor, positions: Tensor, mask: Bool[Tensor, "rows columns"]
    ) -> Float[Tensor, "rows vocab"]:
        """Return the logits of the next token."""
        output = model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
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
