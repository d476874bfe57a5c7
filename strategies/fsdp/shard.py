"""Spreads a model over ranks with FSDP2: what is sharded on its own, and how its weights get there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from verl_lightning.faults import RunError
from verl_lightning.models.build import check_none_missing


def shard(
    model: nn.Module,
    blocks: list[nn.Module],
    *,
    mesh: DeviceMesh,
    precision: MixedPrecisionPolicy,
    reshard_after_forward: bool,
    cpu_offload: bool,
) -> None:
    """Shard a model in place: each block on its own, all the rest with the root.

    Gradients are summed over ranks, never averaged.

    Args:
        model: The root, which every caller enters.
        blocks: Blocks of the model, from `transformer_blocks`.
        mesh: One axis to shard over, or two: replicate, then shard.
        precision: Types in which the model computes and gradients are reduced.
        reshard_after_forward: Free a block's gathered weights between its forward and its backward pass.
        cpu_offload: Keep weights, gradients and optimizer state in the host's memory.
    """
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if cpu_offload else OffloadPolicy()
    for block in blocks:
        fully_shard(
            block,
            mesh=mesh,
            mp_policy=precision,
            reshard_after_forward=reshard_after_forward,
            offload_policy=offload,
        )
    # The backward pass starts with the root: gathering its weights twice would save nothing.
    fully_shard(model, mesh=mesh, mp_policy=precision, reshard_after_forward=False, offload_policy=offload)
    for module in sharded_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def sharded_modules(model: nn.Module) -> Iterator[FSDPModule]:
    """The root and the blocks."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def free_gathered_weights(model: nn.Module) -> None:
    """Drop what forward passes have gathered; without a backward pass, the root's would stay, and go stale."""
    for module in sharded_modules(model):
        module.reshard()


@contextmanager
def gradients_kept_local(model: FSDPModule, *, keep_weights: bool) -> Iterator[None]:
    """Within it, backward passes add up whole gradients on this rank; `keep_weights` keeps gathered weights too."""
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(not keep_weights)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)


@torch.no_grad()
def receive_weights(
    model: nn.Module,
    source: Iterator[dict[str, Tensor]] | None,
    path: str,
    *,
    device: torch.device,
    cpu_offload: bool,
) -> None:
    """Fill a sharded model on the meta device with what rank 0 reads part by part. Collective.

    One tensor at a time travels to every rank, which keeps its part; tied weights stay tied.

    Args:
        model: Sharded model without memory, which it gets here.
        source: Whole parameters and buffers by the model's names, on rank 0; None elsewhere.
        path: Path of the weights, for messages.
        device: Device for communication and buffers.
        cpu_offload: Put the weights into the host's memory.

    Raises:
        RunError: If rank 0 could not read on.
        ValueError: If the source lacks weights.
    """
    model.to_empty(device=torch.device("cpu") if cpu_offload else device)
    parameters, buffers = dict(model.named_parameters(remove_duplicate=False)), dict(model.named_buffers())
    missing = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, value in _spread(source, path, parameters | buffers, device):
        if name in parameters:
            copy_whole(parameters[name], value)
            missing.pop(id(parameters[name]), None)
        else:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, value)
    check_none_missing(path, missing.values())


def _spread(
    source: Iterator[dict[str, Tensor]] | None, path: str, targets: Mapping[str, Tensor], device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor that rank 0 reads, by name, on every rank; a part ends before the next is read."""
    while True:
        part: dict[str, Tensor] = {}
        told: list[list[str] | None] = [None]
        try:
            if source is not None:
                part = next(source, {})
                told = [list(part)]
        finally:
            dist.broadcast_object_list(told, 0, device=device)
        if told[0] is None:
            raise RunError(f"rank 0 could not load `path: {path}`; its message says why.")
        if not told[0]:
            return
        for name in told[0]:
            yield name, _broadcast(part.pop(name, None), targets[name], device)


@torch.no_grad()
def copy_whole(parameter: Tensor, whole: Tensor) -> None:
    """Take this rank's part of a whole tensor."""
    if isinstance(parameter, DTensor):
        parameter.to_local().copy_(local_part(parameter, whole).to_local())
    else:
        parameter.copy_(whole)


def local_part(like: DTensor, whole: Tensor) -> DTensor:
    """A whole tensor that every rank has, sharded like a parameter; without communication."""
    whole = whole.to(like.to_local().device)
    with torch.no_grad():
        return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def _broadcast(value: Tensor | None, like: Tensor, device: torch.device) -> Tensor:
    """Rank 0's value on every rank."""
    if value is None:
        received = torch.empty(like.shape, dtype=like.dtype, device=device)
    else:
        received = value.detach().to(device, like.dtype).contiguous()
    dist.broadcast(received, 0)
    return received
