"""A model's weights under their Hugging Face names, as rollout engines and checkpoints want them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def merged_weights(backbone: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each weight's Hugging Face name and value, adapters merged in; tied weights come once.

    The base weights are never written to, so nothing drifts however often this runs.

    Args:
        backbone: A transformers model, with or without PEFT adapters.
    """
    layers = dict(backbone.named_modules())
    for name, parameter in backbone.named_parameters():
        if is_adapter_name(name):
            continue
        owner, _, leaf = name.rpartition(".")
        weight = parameter.detach()
        if owner.endswith(".base_layer"):
            owner = owner.removesuffix(".base_layer")
            if leaf == "weight":
                weight = weight + sum(layers[owner].get_delta_weight(adapter) for adapter in layers[owner].lora_A)
        yield f"{owner}.{leaf}" if owner else leaf, weight.detach()


def is_adapter_name(name: str) -> bool:
    """Whether this parameter belongs to a LoRA adapter."""
    return ".lora_" in name


def value_head_weights(value_head: nn.Linear | None) -> dict[str, Tensor]:
    """Whole tensors of a value head by name, none without one. Collective."""
    if value_head is None:
        return {}
    return {name: whole(parameter.detach()) for name, parameter in value_head.named_parameters()}


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or all of it if every rank holds a part. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
