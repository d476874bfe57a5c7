"""A model's weights under their Hugging Face names, as rollout engines and checkpoints want them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def merged_weights(backbone: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields each weight's Hugging Face name and value, adapters merged in; tied weights come once.

    The base weights are never written to, so nothing drifts however often this runs.

    Args:
        backbone: A transformers model, with or without PEFT adapters.
    """
    layers = dict(backbone.named_modules())
    for name, parameter in backbone.named_parameters():
        weight, owner = parameter.detach(), name.rpartition(".")[0]
        if owner.endswith(".base_layer") and name.endswith(".weight"):
            layer = layers[owner.removesuffix(".base_layer")]
            delta = sum(layer.get_delta_weight(adapter) for adapter in layer.r)
            yield base_name(name), (weight + delta).detach().to(weight.dtype)
        elif ".modules_to_save." in name:
            module, _, rest = name.partition(".modules_to_save.")
            yield f"{module}.{rest.partition('.')[2]}", weight
        elif not is_adapter_name(name) and ".original_module." not in name:
            yield base_name(name), weight


def base_weights(backbone: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields each weight of the model without adapters, by its Hugging Face name; tied weights come once."""
    for name, parameter in backbone.named_parameters():
        if not is_adapter_name(name):
            yield base_name(name), parameter


def base_name(name: str) -> str:
    """Returns the Hugging Face name of a weight that PEFT has wrapped."""
    return name.replace(".base_layer.", ".").replace(".original_module.", ".")


def is_adapter_name(name: str) -> bool:
    """Tells whether a parameter was added by PEFT: a LoRA matrix, or the trained copy of a whole module."""
    return ".lora_" in name or ".modules_to_save." in name


def value_head_weights(value_head: nn.Linear | None) -> dict[str, Tensor]:
    """Returns the whole tensors of a value head by name, none without a head. Collective."""
    if value_head is None:
        return {}
    return {name: whole(parameter.detach()) for name, parameter in value_head.named_parameters()}


def as_type(weight: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Converts a weight to another type, unless it holds integers or the type is None."""
    return weight.to(dtype) if dtype is not None and weight.is_floating_point() else weight


def whole(tensor: Tensor) -> Tensor:
    """Returns the tensor itself, or all of it if every rank holds a part. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
