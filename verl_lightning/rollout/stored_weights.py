"""Weights in Ray's object store: written once, and read by all engines of a node where they lie, without a copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_lightning.compat.torch import view_of_read_only
from verl_lightning.rollout.weight_transfer import chunks_on_host

Stored = dict[str, tuple[torch.dtype, torch.Size, "np.ndarray[Any, np.dtype[np.uint8]]"]]
"""Type, shape and bytes of each weight, by name."""


def store_weights(weights: Iterable[tuple[str, Tensor]]) -> list[Any]:
    """Stores weights in Ray as long as the returned references live; each reference holds about `BUCKET_BYTES`."""
    import ray

    return [ray.put(as_bytes(chunk)) for chunk in chunks_on_host(weights)]


def read_weights(references: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    """Yields names and weights; these lie in memory that other processes read too, and must not be written to."""
    import ray

    for reference in references:
        yield from as_weights(ray.get(reference))


def as_bytes(weights: Mapping[str, Tensor]) -> Stored:
    """Converts weights on the CPU to arrays, which Ray lays into its store as they are; numpy knows no bfloat16."""
    return {
        name: (weight.dtype, weight.shape, weight.contiguous().flatten().view(torch.uint8).numpy())
        for name, weight in weights.items()
    }


def as_weights(stored: Stored) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights that `as_bytes` was given, as views of its arrays."""
    for name, (dtype, shape, array) in stored.items():
        yield name, view_of_read_only(array).view(dtype).view(shape)
