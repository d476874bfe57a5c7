"""Whole weights of a Megatron model under their Hugging Face names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor

from verl_lightning.models.weights import base_name, is_adapter_name

if TYPE_CHECKING:
    from verl_lightning.strategies.megatron.scorer import MegatronScorer


def exported_weights(model: MegatronScorer, *, merges_adapters: bool) -> Iterator[tuple[str, Tensor]]:
    """Each weight's name and whole value, one at a time; tied weights come once, a value head not at all. Collective.

    Args:
        model: Any; on its stages, trained or frozen.
        merges_adapters: Add LoRA's products to the weights beside them.
    """
    wanted = {base_name(n) for n, _ in model.backbone.named_parameters() if not is_adapter_name(n)}
    prefix = "" if model.head != "value" else f"{model.backbone.base_model_prefix}."
    weights: Any = model.bridge.export_hf_weights(
        pieces := model.pieces,
        cpu=False,
        show_progress=False,
        conversion_tasks=_tasks(model, pieces),
        merge_adapter_weights=merges_adapters,
    )
    for name, weight in weights:
        name = base_name(name).removeprefix(prefix)
        if name in wanted or not model.backbone.base_model_prefix:
            yield name, weight.detach()


def _tasks(model: MegatronScorer, pieces: list[Any]) -> list[Any]:
    """The bridge's conversions, without the heads that it does not know."""
    heads = ("output_layer", "value_head") if model.head == "value" else ("value_head",)
    tasks = model.bridge.get_conversion_tasks(pieces)
    return [task for task in tasks if task is not None and not any(head in task.global_param_name for head in heads)]
