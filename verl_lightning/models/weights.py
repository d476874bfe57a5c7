"""A model's weights under their Hugging Face names, as rollout engines and checkpoints want them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn


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
