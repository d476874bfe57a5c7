"""Whole weights of a Megatron model under their Hugging Face names."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from verl_lightning.models.lora import PEFT_PREFIX, has_adapters, peft_config
from verl_lightning.models.weights import base_name, is_adapter_name

if TYPE_CHECKING:
    from verl_lightning.strategies.megatron.scorer import MegatronScorer


def exported_weights(model: MegatronScorer, *, merges_adapters: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight's name and whole value, one at a time; tied weights once, a value head not at all. Collective.

    Args:
        model: Any model, on its stages, trained or frozen.
        merges_adapters: Add LoRA's products to the weights beside them.
    """
    gather_weights(model)
    wanted = {base_name(n): p for n, p in model.backbone.named_parameters() if not is_adapter_name(n)}
    buffers = model.backbone.state_dict().keys() - dict(model.backbone.named_parameters(remove_duplicate=False)).keys()
    adapter = exported_adapter(model) if merges_adapters and has_adapters(model.backbone) else {}
    weights = _exported_by_bridge(model) if model.mbridge is None else model.mbridge.export(model.pieces)
    experts = Experts(wanted)
    for name, weight in weights:
        name = base_name(name).removeprefix(_prefix(model))
        if name in wanted:
            yield name, _merged(name, weight.detach(), adapter, model)
        elif name in buffers:
            yield name, weight.detach()
        elif not name.endswith("lm_head.weight"):  # tied to the embedding, or of a value model
            yield from experts.add(name, weight.detach())


def _exported_by_bridge(model: MegatronScorer) -> Iterator[tuple[str, Tensor]]:
    weights: Iterator[tuple[str, Tensor]] = model.bridge.export_hf_weights(
        pieces := model.pieces,
        cpu=False,
        show_progress=False,
        conversion_tasks=_tasks(model, pieces),
        merge_adapter_weights=False,  # it knows no q_proj with an adapter beside a k_proj without
    )
    return weights


def mapped_names(model: MegatronScorer) -> set[str]:
    """Return the names on the hub that Megatron-Bridge knows for the weights of all ranks; no weight is moved."""
    names: set[str] = set()
    for task in _tasks(model, model.pieces):
        stored = task.mapping.hf_param
        names |= set(stored.values()) if isinstance(stored, dict) else {stored}
    return {base_name(name).removeprefix(_prefix(model)) for name in names}


def has_experts_of(name: str, names: Collection[str]) -> bool:
    """Tell whether a fused weight of experts is among names of single experts."""
    layer, found, _ = name.partition(".experts.")
    return bool(found) and any(each.startswith(f"{layer}.experts.") for each in names)


def gather_weights(model: MegatronScorer) -> None:
    """Bring each rank the weights that others have stepped, where that waits for the next pass. Collective."""
    for chunk in model.chunks:
        settings = getattr(chunk, "ddp_config", None)
        if settings is not None and settings.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)  # type: ignore[operator]


class Experts:
    """Joins the experts of a layer, each of which the bridge exports alone, as transformers holds them.

    Args:
        whole: Weights that experts are joined to, by name; of the right shapes, without memory.
    """

    def __init__(self, whole: Mapping[str, Tensor]) -> None:
        self.whole = whole
        self._parts: dict[str, dict[tuple[str, int], Tensor]] = defaultdict(dict)

    def add(self, name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Take one expert's weight; give the whole ones that it completes.

        Raises:
            ValueError: If it is no expert's.
        """
        match = re.fullmatch(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
        if match is None or f"{match[1]}.down_proj" not in self.whole:
            raise ValueError(f"Megatron-Bridge exports `{name}`, which transformers' model does not have.")
        layer, index, kind = match.groups()
        parts = self._parts[layer]
        parts[kind, int(index)] = weight.clone()
        if len(parts) == 3 * len(self.whole[f"{layer}.down_proj"]):
            del self._parts[layer]
            gates, ups, downs = ([parts[kind, i] for i in range(len(parts) // 3)] for kind in ("gate", "up", "down"))
            yield f"{layer}.gate_up_proj", torch.stack([torch.cat(pair) for pair in zip(gates, ups, strict=True)])
            yield f"{layer}.down_proj", torch.stack(downs)


def exported_adapter(model: MegatronScorer) -> dict[str, Tensor]:
    """Return the weights that LoRA trains, whole, under the names of a PEFT adapter file. Collective."""
    gather_weights(model)
    weights: Any = model.bridge.export_adapter_weights(model.pieces, cpu=False, show_progress=False)
    return {PEFT_PREFIX + name.removeprefix(_prefix(model)): weight.detach().clone() for name, weight in weights}


def _merged(name: str, weight: Tensor, adapter: dict[str, Tensor], model: MegatronScorer) -> Tensor:
    """Return a weight with its adapter merged in: ``W + B A * alpha / rank`` where there is one."""
    path = PEFT_PREFIX + name.removesuffix(".weight")
    down, up = adapter.get(f"{path}.lora_A.weight"), adapter.get(f"{path}.lora_B.weight")
    if down is None or up is None:
        return weight
    config = peft_config(model.backbone)
    return (weight + (up @ down).to(weight.dtype) * (config.lora_alpha / config.r)).to(weight.dtype)


def _prefix(model: MegatronScorer) -> str:
    """Return the prefix that the bridge puts before names of a trunk and transformers doesn't."""
    return "" if model.head != "value" else f"{model.backbone.base_model_prefix}."


def _tasks(model: MegatronScorer, pieces: list[Any]) -> list[Any]:
    """Return the bridge's conversions, without the heads that it does not know."""
    heads = ("output_layer", "value_head") if model.head == "value" else ("value_head",)
    tasks = model.bridge.get_conversion_tasks(pieces)
    return [task for task in tasks if task is not None and not any(head in task.global_param_name for head in heads)]
