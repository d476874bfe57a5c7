"""Lets Megatron-Core run on CPUs, over gloo, for tests: what it asks of CUDA is answered for the CPU.

Never for real runs: it lies about devices and tensor types to everyone in the process.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


class _Stream:
    """Does nothing, whatever is asked."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self  # an event of a stream is asked again


class CudaMeansCpu(TorchFunctionMode):
    """Reads `cuda` as `cpu` wherever a device is named, and calls CPU tensors CUDA tensors by type."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            return function(*args).replace("torch.", "torch.cuda.", 1)  # optimizers compare the names
        if "device" in kwargs:
            kwargs["device"] = _cpu_for_cuda(kwargs["device"])
        if function is torch.Tensor.to and len(args) > 1:
            args = (args[0], _cpu_for_cuda(args[1]), *args[2:])
        return function(*args, **kwargs)


def _cpu_for_cuda(device: Any) -> Any:
    is_device = isinstance(device, str | torch.device)
    return CPU if is_device and torch.device(device).type == "cuda" else device


def _as_moved_to_cpu(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
    """What Megatron makes of a CUDA tensor that it moves to the CPU; it leaves one that is there already alone."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def pretend_cuda() -> None:
    """Take CUDA's part for the rest of the process; does nothing where there is a GPU."""
    if torch.cuda.is_available():
        return
    for name, value in {
        "current_device": lambda: CPU,
        "synchronize": lambda *args, **kwargs: None,
        "empty_cache": lambda: None,
        "Stream": _Stream,
        "Event": _Stream,
        "current_stream": lambda *args, **kwargs: _Stream(),
        "stream": lambda *args, **kwargs: contextlib.nullcontext(),
        "manual_seed": torch.manual_seed,
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
    }.items():
        setattr(torch.cuda, name, value)

    from verl_lightning.strategies.megatron.runtime import import_megatron

    import_megatron()
    import megatron.core.tensor_parallel.random as generators
    import megatron.core.transformer.moe.token_dispatcher as dispatcher
    from megatron.bridge.models.conversion.param_mapping import MegatronParamMapping

    generators._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    generators._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    dispatcher.maybe_move_tensor_to_cpu = _as_moved_to_cpu
    scatter = MegatronParamMapping.scatter_to_tp_ranks

    def scatter_contiguous(self: Any, splits: Any, *args: Any, **kwargs: Any) -> Any:
        """Gloo sends the memory of a view as if it were in a row."""
        return scatter(self, None if splits is None else [part.contiguous() for part in splits], *args, **kwargs)

    MegatronParamMapping.scatter_to_tp_ranks = scatter_contiguous
    CudaMeansCpu().__enter__()
