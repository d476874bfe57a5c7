"""Checkpoint folders in torch's distributed format: every rank writes and reads its own part."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from verl_lightning.compat.torch import load_alone
from verl_lightning.models.hf_folder import atomic_folder, partial_folder
from verl_lightning.strategies.checkpoints import FolderFormat, register_format
from verl_lightning.strategies.fsdp.shard import copy_whole, local_part
from verl_lightning.strategies.sealed_files import load_settings
from verl_lightning.strategies.sharded_io import (
    CheckedReader,
    DigestingWriter,
    failures_told,
    saved_bytes,
    write_settings,
)
from verl_lightning.strategies.sharded_metadata import DATA_SUFFIX, METADATA_FILE
from verl_lightning.strategies.weight_decay import part_state

SETTINGS_FILE = "meta.pt"
"""Everything but tensors of models and optimizers; Lightning's own name for it."""


def save_sharded(checkpoint: dict[str, Any], path: Path, *, is_writer: bool) -> None:
    """Write a checkpoint folder, whole or not at all: a kill leaves what was there before. Collective.

    Args:
        checkpoint: Lightning's checkpoint, with sharded states of the model and of the optimizers by parameter names.
        path: The folder.
        is_writer: Whether this rank moves the finished folder to its place.
    """
    tensors, draft = take_tensors(checkpoint), partial_folder(path)
    with atomic_folder(path) if is_writer else nullcontext(draft) as folder:
        dist.barrier()  # the folder exists
        save(tensors, storage_writer=DigestingWriter(folder))
        if is_writer:
            write_settings(folder / SETTINGS_FILE, saved_bytes(checkpoint))
    dist.barrier()


def take_tensors(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Take out of a checkpoint the tensors of which each rank writes its part; the rest is the same on all ranks."""
    tensors = {"state_dict": checkpoint.pop("state_dict")}
    return tensors | {f"optimizer_{i}": state for i, state in enumerate(checkpoint.pop("optimizer_states", []))}


def load_sharded_model(model: nn.Module, reader: CheckedReader) -> None:
    """Read this rank's part of each weight in place; frozen weights that no checkpoint holds stay. Collective.

    Raises:
        CheckpointException: If a weight in training is missing.
        DamagedFileError: If a file is not as it was written.
    """
    stored = reader.read_metadata().state_dict_metadata
    frozen = {name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
    state = get_model_state_dict(model)
    wanted = {name: t for name, t in state.items() if f"state_dict.{name}" in stored or name not in frozen}
    with failures_told():
        load({"state_dict": wanted}, storage_reader=reader)


def load_sharded_optimizer(model: nn.Module, optimizer: Optimizer, index: int, reader: CheckedReader) -> None:
    """Read this rank's part of an optimizer's state. Collective.

    Raises:
        DamagedFileError: If a file is not as it was written.
    """
    key = f"optimizer_{index}"
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
    names = [group["params"] for group in state["param_groups"]]
    stored = reader.read_metadata().state_dict_metadata
    is_parted = len(names) == 1 or any(name.startswith(f"{key}.param_groups.1.") for name in stored)
    if not is_parted:  # an older checkpoint, with norms and biases in the group of all weights
        state["param_groups"] = state["param_groups"][:1]
    with failures_told():
        load({key: state}, storage_reader=reader)
    if not is_parted:
        state["param_groups"] = [state["param_groups"][0] | {"params": own} for own in names]
    set_optimizer_state_dict(model, optimizer, optim_state_dict=state)


def load_whole_model(model: nn.Module, state: Mapping[str, Tensor], *, strict: bool) -> None:
    """Take this rank's part of each weight of a state dict that every rank has.

    Raises:
        ValueError: If ``strict`` and a weight is missing.
    """
    targets = model.state_dict()
    if strict and (missing := sorted(targets.keys() - state.keys())):
        raise ValueError(f"the checkpoint lacks {len(missing)} weights of the model, such as `{missing[0]}`.")
    for name in targets.keys() & state.keys():
        if isinstance(state[name], DTensor):  # the model's own frozen weight
            continue
        copy_whole(targets[name], state[name])


def load_whole_optimizer(model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Take this rank's part of an optimizer's state as an unsharded run has written it."""
    parted = part_state(optimizer, model, state)
    pairs = zip(parted["param_groups"], optimizer.param_groups, strict=True)
    owners = {i: p for saved, own in pairs for i, p in zip(saved["params"], own["params"], strict=True)}
    states = {
        index: {name: _shard_like(owners[index], value) for name, value in slots.items()}
        for index, slots in parted["state"].items()
    }
    optimizer.load_state_dict({**parted, "state": states})


def read_whole(path: Path, *, weights_only: bool | None, with_optimizers: bool = True) -> dict[str, Any]:
    """A checkpoint folder as the checkpoint of an unsharded run, for strategies without sharding.

    Args:
        path: The folder.
        weights_only: Option of `torch.load`, for the settings.
        with_optimizers: Not asked: they are read in one go with the weights.

    Raises:
        DamagedFileError: If a file is not as it was written.
    """
    del with_optimizers
    tensors: dict[str, Any] = {}
    with failures_told():
        load_alone(CheckedReader(path / SETTINGS_FILE), tensors)
    count = sum(key.startswith("optimizer_") for key in tensors)
    optimizers = [_by_index(tensors[f"optimizer_{index}"]) for index in range(count)]
    return load_settings(path / SETTINGS_FILE, weights_only=weights_only) | {
        "state_dict": tensors["state_dict"],
        "optimizer_states": optimizers,
    }


def _by_index(state: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state with parameters by position instead of by name, as torch's optimizers want it."""
    names = [name for group in state["param_groups"] for name in group["params"]]
    position = {name: index for index, name in enumerate(names)}
    groups = [group | {"params": [position[name] for name in group["params"]]} for group in state["param_groups"]]
    return {"state": {position[name]: slots for name, slots in state["state"].items()}, "param_groups": groups}


def _shard_like(parameter: Tensor, value: Any) -> Any:
    if isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.shape == parameter.shape:
        return local_part(parameter, value)
    return value


FORMAT = FolderFormat(settings_file=SETTINGS_FILE, remains=(METADATA_FILE, f"*{DATA_SUFFIX}"), read_whole=read_whole)
register_format(FORMAT)
