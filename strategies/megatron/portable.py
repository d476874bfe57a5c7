"""Reads Megatron's checkpoint folders as checkpoints of an unsharded run, without Megatron.

A folder keeps Megatron's names and fused layers, whole, whatever ranks have written it. Beside them lies a map from
them to our own names, which is all that is needed to take them apart on any machine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from verl_lightning.compat.torch import load_alone
from verl_lightning.strategies.checkpoints import FolderFormat, register_format
from verl_lightning.strategies.megatron.naming import Held, cut_weight, held_names
from verl_lightning.strategies.megatron.weights import Experts
from verl_lightning.strategies.sealed_files import load_settings
from verl_lightning.strategies.sharded_io import CheckedReader, failures_told

if TYPE_CHECKING:
    from verl_lightning.strategies.megatron.optimizer import MegatronOptimizer
    from verl_lightning.strategies.megatron.scorer import MegatronScorer

SETTINGS_FILE = "megatron_meta.pt"
"""Everything but tensors of models and optimizers."""

MAP_KEY = "megatron_map"
"""Key under which a folder's settings tell what its tensors hold."""

MASTER_WEIGHTS = ("param", "fp32_param")
"""Names of the optimizer's own weights, which are in float32 where the model's are in bfloat16."""

MOMENTS = ("exp_avg", "exp_avg_sq")


def describe(
    roles: Mapping[str, MegatronScorer], states: Mapping[str, Any], optimizers: list[MegatronOptimizer]
) -> dict[str, Any]:
    """Describe what the tensors of a checkpoint hold, in plain types. Collective.

    Args:
        roles: Models that are saved.
        states: Sharded tensors of the models, from `model_state`.
        optimizers: Optimizers of the roles, in their order; empty if they are left out.
    """
    models = {role: _describe_model(role, model, states[role]) for role, model in roles.items()}
    return {"models": models, "optimizers": [optimizer.describe() for optimizer in optimizers]}


def _describe_model(role: str, model: MegatronScorer, state: Mapping[str, Any]) -> dict[str, Any]:
    config: Any = model.pieces[0].config
    skeleton = model.skeleton
    return {
        "heads": config.num_attention_heads,
        "groups": config.num_query_groups or config.num_attention_heads,
        "shapes": {name: list(p.shape) for name, p in skeleton.named_parameters() if p.requires_grad},
        "tied": _tied_names(skeleton),
        "parts": _gather_parts(role, model, state),
    }


def _tied_names(skeleton: nn.Module) -> dict[str, str]:
    """Further names of trained weights, as state dicts have them."""
    first: dict[int, str] = {id(p): name for name, p in skeleton.named_parameters()}
    every = skeleton.named_parameters(remove_duplicate=False)
    return {name: first[id(p)] for name, p in every if p.requires_grad and first[id(p)] != name}


def _gather_parts(role: str, model: MegatronScorer, state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every rank's weights: where each lies in the folder, and what it holds."""
    held = held_names(model)
    own: dict[tuple[Any, ...], Held] = {}
    for piece, sharded in zip(model.pieces, state.values(), strict=True):
        parameters = dict(piece.named_parameters())
        for name, part in sharded.items():
            first = part.build()[0] if hasattr(part, "build_fn") else part
            key = (part.key, *first.global_offset[: first.prepend_axis_num])
            found = held.get(id(parameters[name.removeprefix(f"{role}.")]))
            if found is not None:  # a copy of a tied weight has no name of its own
                own[key] = found
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, own)
    merged: dict[tuple[Any, ...], Held] = {key: part for rank in ranks for key, part in rank.items()}
    return [
        {"key": key[0], "index": list(key[1:]), "cut": part.cut, "names": list(part.names)}
        for key, part in merged.items()
    ]


def read_portable(path: Path, *, weights_only: bool | None, with_optimizers: bool = True) -> dict[str, Any]:
    """Read a Megatron run's checkpoint as that of an unsharded run. Needs neither Megatron nor an accelerator.

    Weights are those of the optimizer, in float32, where it is saved.

    Args:
        path: The folder.
        weights_only: Option of `torch.load`.
        with_optimizers: Whether to read AdamW's moments.

    Raises:
        ValueError: If the folder does not tell what it holds, or that can't be taken apart.
    """
    settings = read_settings(path, weights_only=weights_only)
    described = settings.pop(MAP_KEY)
    folder = _Folder(path)
    state: dict[str, Tensor] = {}
    for role, model in described["models"].items():
        weights = assemble(model, partial(folder.weight, role), path)
        weights |= {name: weights[owner] for name, owner in model["tied"].items()}
        state |= {f"{role}.{name}": weight for name, weight in weights.items()}
    settings["state_dict"] = state
    settings.pop("optimizer_states", None)
    if with_optimizers and described["optimizers"]:
        pairs = zip(described["models"].items(), described["optimizers"], strict=True)
        settings["optimizer_states"] = [_optimizer_state(folder, role, m, group) for (role, m), group in pairs]
    return settings


def read_settings(path: Path, *, weights_only: bool | None) -> dict[str, Any]:
    """Read what a folder holds beside tensors, with the map that tells what these hold.

    Raises:
        DamagedFileError: If the file is not as it was written.
        ValueError: If the folder has an older layout, whose adapters may lie in the order of the ranks that wrote them.
    """
    settings = load_settings(path / SETTINGS_FILE, weights_only=weights_only)
    if MAP_KEY not in settings:
        raise ValueError(
            f"`ckpt_path: {path}` was written by `megatron` in an older layout, which does not say what its tensors"
            " hold. Resume it with the version that wrote it, have `HFCheckpoint` write a folder, and start from that."
        )
    return settings


def assemble(model: Mapping[str, Any], read: Callable[[str], Tensor], path: Path) -> dict[str, Tensor]:
    """Assemble whole tensors under our names from those under Megatron's.

    Args:
        model: Description of a model, from `describe`.
        read: Function from a key to its tensor of all layers.
        path: Path of the folder, for messages.

    Raises:
        ValueError: If one can't be taken apart, or is missing.
    """
    shapes = {name: torch.Size(shape) for name, shape in model["shapes"].items()}
    experts = Experts({name: torch.empty(shape, device="meta") for name, shape in shapes.items()})
    by_key: dict[str, list[Any]] = defaultdict(list)
    for part in model["parts"]:
        by_key[part["key"]].append(part)
    found: dict[str, Tensor] = {}
    for key, parts in by_key.items():
        whole = read(key)
        for part in parts:
            try:
                pieces = cut_weight(
                    whole[tuple(part["index"])], part["cut"], heads=model["heads"], groups=model["groups"]
                )
            except ValueError as error:
                raise ValueError(f"`ckpt_path: {path}`: `{key}` can't be taken apart. {error}") from error
            for name, piece in zip(part["names"], pieces, strict=True):
                if name in shapes:
                    found[name] = piece[: len(piece) if not shapes[name] else shapes[name][0]]  # a padded vocabulary
                elif ".experts." in name:
                    found |= dict(experts.add(name, piece))
    if missing := [name for name, shape in shapes.items() if name not in found or found[name].shape != shape]:
        raise ValueError(f"`ckpt_path: {path}` lacks {len(missing)} weights of the model, such as `{missing[0]}`.")
    return {name: found[name].contiguous() for name in shapes}


class _Folder:
    """Reads whole tensors of a folder, one at a time.

    Args:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = CheckedReader(path / SETTINGS_FILE)
        self.stored: dict[str, Any] = self._reader.read_metadata().state_dict_metadata

    def weight(self, role: str, key: str) -> Tensor:
        """Return a weight, from the optimizer if it has it in higher precision."""
        stored, master = self.read(key), self._master(role, key)
        return master if master is not None and torch.equal(master.to(stored.dtype), stored) else stored

    def check_order(self, role: str, key: str) -> None:
        """See that the optimizer's tensors of a weight lie in its order, as `keep_buckets_apart` has them written.

        Raises:
            ValueError: With the way out.
        """
        stored, master = self.read(key), self._master(role, key)
        if master is not None and not torch.equal(master.to(stored.dtype), stored):
            raise ValueError(
                f"`ckpt_path: {self.path}`: Megatron has written AdamW's state of the {role} in an order of its own."
                " Make a folder of the weights with `verl-export`, and start from that by `path`."
            )

    def _master(self, role: str, key: str) -> Tensor | None:
        """Return the optimizer's own copy of a weight; None if none is stored."""
        own = [slot_key(role, name, key) for name in MASTER_WEIGHTS]
        found = next((name for name in own if name in self.stored), None)
        return None if found is None else self.read(found)

    def moment(self, role: str, slot: str, key: str) -> Tensor:
        """Return one of AdamW's moments of a weight."""
        return self.read(slot_key(role, slot, key))

    def read(self, key: str) -> Tensor:
        """Read one tensor, whole, of which ranks have saved parts."""
        described = self.stored[key]
        tensor = torch.empty(described.size, dtype=described.properties.dtype)
        with failures_told():
            load_alone(self._reader, {key: tensor})
        return tensor


def slot_key(role: str, slot: str, key: str) -> str:
    """Return the key in a folder of an optimizer's tensor for a weight."""
    return f"{role}.optimizer.state.{slot}.{key}"


def _optimizer_state(folder: _Folder, role: str, model: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """Return AdamW's state by the position of each weight, as torch's own has it."""
    described = dict(group)
    for key in {part["key"] for part in model["parts"]}:
        folder.check_order(role, key)
    step = torch.tensor(float(described.pop("step")))
    moments = {slot: assemble(model, partial(folder.moment, role, slot), folder.path) for slot in MOMENTS}
    state = {
        index: {"step": step.clone(), **{slot: moments[slot][name] for slot in MOMENTS}}
        for index, name in enumerate(model["shapes"])
    }
    parameters = [nn.Parameter(torch.empty(0)) for _ in state]
    options = torch.optim.AdamW(parameters, fused=True).state_dict()["param_groups"][0]
    return {"state": state, "param_groups": [options | described]}


FORMAT = FolderFormat(settings_file=SETTINGS_FILE, remains=("metadata.json",), read_whole=read_portable)
register_format(FORMAT)
