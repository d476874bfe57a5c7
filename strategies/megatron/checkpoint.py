"""Checkpoint folders in Megatron's distributed format, for any layout of ranks, and those of other strategies."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from verl_lightning.compat.megatron import adapter_as_one, item_writer, leave_out_groups, load_weights
from verl_lightning.models.config import LoraConfig
from verl_lightning.models.hf_folder import atomic_folder, stored_weights
from verl_lightning.models.lora import has_adapters, read_adapter
from verl_lightning.strategies.megatron.naming import held_names
from verl_lightning.strategies.megatron.optimizer import MegatronOptimizer
from verl_lightning.strategies.megatron.portable import MAP_KEY, SETTINGS_FILE, describe
from verl_lightning.strategies.megatron.safe_reads import load_parts
from verl_lightning.strategies.megatron.scorer import MegatronScorer
from verl_lightning.strategies.megatron.weights import gather_weights
from verl_lightning.strategies.sharded_io import CheckedReader, items_digested, saved_bytes, write_settings

FORMAT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
}
"""Megatron's settings under which optimizers can be loaded by other layouts."""

Roles = Mapping[str, MegatronScorer]
"""Models of a module by their attribute."""


def save_folder(
    checkpoint: dict[str, Any],
    path: Path,
    *,
    roles: Roles,
    optimizers: list[MegatronOptimizer],
    is_writer: bool,
) -> None:
    """Write a checkpoint folder, whole or not at all. Collective.

    Args:
        checkpoint: Lightning's checkpoint, without tensors.
        path: The folder.
        roles: Models to save, by their attribute.
        optimizers: Optimizers of the roles, in their order; empty to leave them out.
        is_writer: Whether this rank moves the finished folder to its place.
    """
    from megatron.core import dist_checkpointing

    states = {role: model_state(role, model) for role, model in roles.items()}
    tensors: dict[str, Any] = dict(states)
    for (role, state), optimizer in zip(states.items(), optimizers, strict=False):
        tensors[f"{role}.optimizer"] = optimizer_state(role, optimizer, state, is_loading=False)
    described = describe(roles, states, optimizers)
    names: list[Any] = [None]
    with atomic_folder(path) if is_writer else contextlib.nullcontext(path) as folder:
        names[0] = str(folder)
        dist.broadcast_object_list(names, 0)
        with items_digested(item_writer()):
            dist_checkpointing.save(tensors, names[0])
        if is_writer:
            write_settings(folder / SETTINGS_FILE, saved_bytes(checkpoint | {MAP_KEY: described}))
    dist.barrier()


def load_models(reader: CheckedReader, roles: Roles) -> None:
    """Read this rank's part of each trained weight. Collective.

    Raises:
        DamagedFileError: If a file is not as it was written.
    """
    loaded = load_parts({role: model_state(role, model) for role, model in roles.items()}, reader)
    for role, model in roles.items():
        for piece, state in zip(model.pieces, loaded[role].values(), strict=True):
            piece.load_state_dict({name.removeprefix(f"{role}."): w for name, w in state.items()}, strict=False)


def load_optimizer(reader: CheckedReader, role: str, model: MegatronScorer, optimizer: MegatronOptimizer) -> None:
    """Read this rank's part of an optimizer's state. Collective.

    Raises:
        DamagedFileError: If a file is not as it was written.
    """
    optimizer.allocate_state()
    key = f"{role}.optimizer"
    state = optimizer_state(role, optimizer, model_state(role, model), is_loading=True)
    for own in optimizer.states_of(state):
        leave_out_groups(own)
    optimizer.load(load_parts({key: state}, reader)[key])


def model_state(role: str, model: MegatronScorer) -> dict[str, Any]:
    """Return the trained weights of a model as Megatron's sharded tensors, piece by piece. Collective."""
    gather_weights(model)
    states: dict[str, Any] = {}
    for index, piece in enumerate(model.pieces):
        trained = {f"{role}.{name}" for name, p in piece.named_parameters() if p.requires_grad}
        sharded: dict[str, Any] = piece.sharded_state_dict(prefix=f"{role}.", metadata=dict(FORMAT))  # type: ignore[operator]
        states[f"model{index}"] = {
            name: adapter_as_one(name, part) for name, part in sharded.items() if name in trained
        }
    return states


def optimizer_state(role: str, optimizer: MegatronOptimizer, model: dict[str, Any], *, is_loading: bool) -> Any:
    """Return an optimizer's state as sharded tensors, under its role's name."""
    from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding

    state = optimizer.inner.sharded_state_dict(model, is_loading=is_loading, metadata=dict(FORMAT))
    add_prefix_for_sharding(state, f"{role}.")
    return state


def load_other(state: Mapping[str, Tensor], roles: Roles) -> None:
    """Take weights that another strategy has saved, through the bridge. Collective.

    Args:
        state: Whole tensors by our own names: role, then ``backbone`` or ``value_head``, then transformers'.
        roles: Models that take the weights, by their attribute.
    """
    for role, model in roles.items():
        own = {n.removeprefix(f"{role}."): w for n, w in state.items() if n.startswith(f"{role}.")}
        if has_adapters(model.backbone):
            load_adapters(model, own)
        else:
            load_whole(model, {n.removeprefix("backbone."): w for n, w in own.items() if n.startswith("backbone.")})
        head = model.local_value_head
        if head is not None:
            with torch.no_grad():
                head.weight.copy_(own["value_head.weight"])


def load_adapter_folder(model: MegatronScorer, lora: LoraConfig) -> None:
    """Take the adapters of ``lora.adapter_path``. Collective.

    Raises:
        ValueError: If the folder is not a LoRA adapter, or not of these settings, or was trained on another base.
    """
    weights = read_adapter(model.backbone, lora, model.base_fingerprint())
    load_adapters(model, {state_dict_name(name): weight for name, weight in weights.items()})


def state_dict_name(name: str) -> str:
    """Return our name of a weight in a PEFT adapter file."""
    return "backbone." + re.sub(r"\.(lora_[AB])\.", r".\1.default.", name)


@torch.no_grad()
def load_adapters(model: MegatronScorer, weights: Mapping[str, Tensor]) -> None:
    """Take this rank's part of each adapter. Collective.

    Args:
        model: Model with adapters.
        weights: Whole adapter weights by our own names.
    """
    held = held_names(model)
    for piece, sharded in zip(model.pieces, model_state("model", model).values(), strict=True):
        for name, parameter in piece.named_parameters():
            if ".adapter." in name and parameter.requires_grad:
                (ours,) = held[id(parameter)].names
                parameter.copy_(_part_of(weights[ours], sharded[f"model.{name}"]))


def _part_of(whole: Tensor, part: Any) -> Tensor:
    """Return the part of a whole tensor of one layer that a rank holds."""
    for axis, (start, size) in enumerate(
        zip(part.global_offset[part.prepend_axis_num :], part.local_shape, strict=True)
    ):
        whole = whole.narrow(axis, start, size)
    return whole


def load_whole(model: MegatronScorer, weights: Mapping[str, Tensor]) -> None:
    """Take whole weights under transformers' names. Collective."""
    prefix = "" if model.head != "value" else f"{model.backbone.base_model_prefix}."
    stored = {prefix + name: weight for name, weight in stored_weights(model.backbone, weights.items())}
    source: Any = SimpleNamespace(
        state=_State(stored), config=model.bridge.hf_pretrained.config, model_name_or_path="a checkpoint"
    )
    pieces: list[nn.Module] = model.pieces
    load_weights(model.bridge, source, pieces)


class _State(dict[str, Tensor]):
    """Weights as Megatron-Bridge looks them up."""

    @property
    def source(self) -> _State:
        """Source that the bridge asks for the weights and their names: this mapping itself."""
        return self

    def get_all_keys(self) -> list[str]:
        """Return the names of the weights."""
        return list(self)
