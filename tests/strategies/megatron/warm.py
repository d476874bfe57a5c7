"""Imports Megatron, where it is installed, before `tests.processes` forks; see `preload` there."""

from __future__ import annotations

import importlib.util

import torch

from verl_lightning.strategies.megatron.runtime import import_megatron

if importlib.util.find_spec("megatron") is not None:
    unpickle = torch.storage._load_from_bytes
    import_megatron()
    import megatron.core.models.mimo  # noqa: F401

    # Megatron has put a function of its own there, which pickles of tensors then name: tests would have to import it.
    torch.storage._load_from_bytes = unpickle
