"""Imports Megatron, with or without TransformerEngine, and starts its process groups."""

from __future__ import annotations

import importlib.util
import math
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from lightning.fabric.utilities import rank_zero_info
from lightning.fabric.utilities.exceptions import MisconfigurationException

from verl_lightning.compat.megatron import all_process_groups, import_bridge_without_transformer_engine
from verl_lightning.compat.torch import is_running
from verl_lightning.needs import missing_megatron
from verl_lightning.strategies.megatron.config import ParallelSizes


def has_transformer_engine() -> bool:
    """Tell whether TransformerEngine can be imported."""
    return importlib.util.find_spec("transformer_engine") is not None


def import_megatron() -> None:
    """Make `megatron.core` and `megatron.bridge` importable.

    Raises:
        MisconfigurationException: If one is missing or of another version.
    """
    if "megatron.bridge" in sys.modules:
        return
    if (complaint := missing_megatron()) is not None:
        raise MisconfigurationException(complaint)
    has_te = has_transformer_engine()
    if not has_te:
        import_bridge_without_transformer_engine()
    rank_zero_info(f"Megatron-Core computes {'with' if has_te else 'without'} TransformerEngine.")


def start_model_parallel(sizes: ParallelSizes, *, seed: int, timeout: timedelta) -> None:
    """Make Megatron's process groups and seed its generators. Collective.

    Args:
        sizes: Sizes of the groups.
        seed: Seed of dropout; each rank of a model derives its own.
        timeout: Longest wait in a collective operation.

    Raises:
        MisconfigurationException: If there is no CUDA device.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    try:
        torch.cuda.current_device()
    except (AssertionError, RuntimeError) as error:
        raise MisconfigurationException(
            f"`trainer.strategy: megatron` needs CUDA devices ({error}). Use `fsdp` or `ddp` on a CPU."
        ) from error
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        virtual_pipeline_model_parallel_size=sizes.virtual_pipeline if sizes.virtual_pipeline > 1 else None,
        context_parallel_size=sizes.context,
        expert_model_parallel_size=sizes.expert,
        expert_tensor_parallel_size=sizes.expert_tensor,
        distributed_timeout_minutes=math.ceil(timeout / timedelta(minutes=1)),
    )
    model_parallel_cuda_manual_seed(seed)


def stop_model_parallel() -> None:
    """Give back Megatron's process groups, with their threads and memory, which its own function only forgets."""
    if "megatron.core" not in sys.modules:  # a run that failed since it is not installed has none
        return
    from megatron.core import parallel_state

    groups = all_process_groups()
    parallel_state.destroy_model_parallel()
    for group in groups:
        if group is not None and is_running(group):  # None: torch's own of all ranks
            dist.destroy_process_group(group)
