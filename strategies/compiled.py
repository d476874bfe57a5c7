"""Compiles a model's blocks: once for batches of one shape, once for sequences of any lengths in a row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.compiler import config

_RECOMPILE_LIMIT = 32
"""Graphs of one block that torch may keep: with and without gradient, shapes of training and of evaluation."""


def compile_block(block: nn.Module) -> None:
    """Compile a block's forward method in place.

    The method alone, so that FSDP's hooks and the recomputation of activations stay outside. Ragged packed batches,
    whose every number of tokens is new, get a graph of their own for any shape; others get one for their shape.

    Args:
        block: A transformer layer, called with hidden states first.
    """
    config.recompile_limit = max(_RECOMPILE_LIMIT, config.recompile_limit)
    forward = block.forward
    of_one_shape, of_any_shape = torch.compile(forward), torch.compile(forward, dynamic=True)

    def call(*args: Any, **kwargs: Any) -> Any:
        return (of_any_shape if is_ragged(args, kwargs) else of_one_shape)(*args, **kwargs)

    block.forward = call


def is_ragged(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a block is called with packed sequences of unequal lengths."""
    cu_seq_lens, longest = kwargs.get("cu_seq_lens_q"), kwargs.get("max_length_q")
    if cu_seq_lens is None or longest is None:
        return False
    hidden = args[0] if args else kwargs["hidden_states"]
    return bool(longest * (cu_seq_lens.shape[0] - 1) != hidden.shape[1])
