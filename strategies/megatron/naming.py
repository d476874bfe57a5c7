"""Maps each of Megatron's weights to our own names for its parts, and cuts it into these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from torch import Tensor, nn

if TYPE_CHECKING:
    from verl_lightning.strategies.megatron.scorer import MegatronScorer

Cut = Literal["whole", "qkv", "gate_up", "unknown"]

LORA_MATRICES = {"linear_in": "lora_A", "linear_out": "lora_B"}
"""PEFT's names of the two LoRA matrices, by Megatron-Bridge's."""

FUSED_PARTS = {"adapter_q": 0, "adapter_k": 1, "adapter_v": 2, "adapter_gate": 0, "adapter_up": 1}
"""Index of the part of a fused layer that an adapter stands beside, by the adapter's name."""


class Held(NamedTuple):
    """Contents of one of Megatron's weights."""

    cut: Cut
    """Way in which the weight is cut into parts."""

    names: tuple[str, ...]
    """Our names of the parts, in the order of the cut, of experts one by one."""


def held_names(model: MegatronScorer) -> dict[int, Held]:
    """Return what this rank's weights hold, by their `id`; those without a name of their own are left out. Collective.

    Args:
        model: Model with any head, trained or frozen.
    """
    prefix = "" if model.head != "value" else f"{model.backbone.base_model_prefix}."
    held: dict[int, Held] = {}
    for task in model.bridge.get_conversion_tasks(model.pieces):
        if task is not None and task.param_weight is not None:
            cut, names = _cut_of(task.mapping, model.pieces[0].config)
            held[id(task.param_weight)] = Held(cut, tuple(f"backbone.{name.removeprefix(prefix)}" for name in names))
    for piece in model.pieces:
        wrappers: list[Any] = [m for m in piece.modules() if hasattr(m, "to_wrap") and hasattr(m, "adapter")]
        for wrapper in wrappers:
            held |= _of_adapters(wrapper, held[id(wrapper.to_wrap.weight)])
    if (head := model.local_value_head) is not None:
        held[id(head.weight)] = Held("whole", ("value_head.weight",))
    return held


def _cut_of(mapping: Any, config: Any) -> tuple[Cut, list[str]]:
    from megatron.bridge.models.conversion import param_mapping as kinds

    plain = (kinds.AutoMapping, kinds.ColumnParallelMapping, kinds.RowParallelMapping, kinds.ReplicatedMapping)
    source = mapping.hf_param
    if type(mapping) in plain and isinstance(source, str) and getattr(mapping, "permute_dims", None) is None:
        return "whole", [source]
    if type(mapping) is kinds.QKVMapping and not getattr(config, "attention_output_gate", False):
        return "qkv", [source[part] for part in ("q", "k", "v")]
    if type(mapping) is kinds.GatedMLPMapping:
        return "gate_up", [source["gate"], source["up"]]
    return "unknown", [source] if isinstance(source, str) else list(source.values())


def _of_adapters(wrapper: Any, base: Held) -> dict[int, Held]:
    """Return what the adapters beside one layer hold, under the names that transformers gives PEFT's."""
    parts = wrapper.adapter.items() if isinstance(wrapper.adapter, nn.ModuleDict) else [(None, wrapper.adapter)]
    held = {}
    for part, adapter in parts:
        path = base.names[0 if part is None else FUSED_PARTS[part]].removesuffix(".weight")
        for ours, peft in LORA_MATRICES.items():
            held[id(getattr(adapter, ours).weight)] = Held("whole", (f"{path}.{peft}.default.weight",))
    return held


def cut_weight(weight: Tensor, cut: Cut, *, heads: int, groups: int) -> Sequence[Tensor]:
    """Cut a whole weight or bias, or an optimizer's moment of it, into its parts.

    Megatron keeps, for each group of query heads that share a key, their queries, the key and the value, in this
    order::

        weight = [q_1 ... q_n k v] of the first group, [q_1 ... q_n k v] of the second, ...

    Args:
        weight: Whole weight of all ranks, in Megatron's order.
        cut: Way in which it is cut.
        heads: Number of query heads.
        groups: Number of groups of query heads.

    Raises:
        ValueError: If the cut is not known.
    """
    if cut == "whole":
        return [weight]
    if cut == "gate_up":
        return weight.chunk(2)
    if cut == "unknown":
        raise ValueError("Megatron-Bridge holds it in a form of its own.")
    rest = weight.shape[1:]
    grouped = weight.reshape(groups, heads // groups + 2, -1, *rest)
    return [part.reshape(-1, *rest) for part in (grouped[:, :-2], grouped[:, -2], grouped[:, -1])]
