"""Splits a rank's sequences into micro-batches without needless padding."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from verl_lightning.types import TokenBatch

BatchT = TypeVar("BatchT", bound=TokenBatch)
_SEQUENCE_FIELDS = ("input_ids", "attention_mask")


def split_micro_batches(batch: BatchT, size: int) -> list[BatchT]:
    """Consecutive micro-batches of at most ``size`` sequences, each cut to its longest prompt and response.

    Args:
        batch: Any number of sequences.
        size: Most sequences in a micro-batch.
    """
    prompt_width = batch.input_ids.shape[1] - batch.response_mask.shape[1]
    is_real = batch.attention_mask
    lengths = torch.stack([is_real[:, :prompt_width].sum(-1), _last_real(is_real[:, prompt_width:])]).tolist()
    return [
        _trim(
            batch.select(slice(start, start + size)),
            prompt=max(lengths[0][start : start + size]),
            response=max(1, *lengths[1][start : start + size]),
        )
        for start in range(0, len(batch), size)
    ]


def join_columns(parts: list[Tensor], width: int) -> Tensor:
    """Scores of micro-batches as one tensor of ``width`` response columns, 0 where a micro-batch was cut."""
    return torch.cat([F.pad(part, (0, width - part.shape[1])) for part in parts])


def _last_real(is_real: Tensor) -> Tensor:
    """How many columns reach up to each row's last True."""
    columns = torch.arange(1, is_real.shape[1] + 1, device=is_real.device)
    return torch.where(is_real, columns, 0).amax(-1)


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
