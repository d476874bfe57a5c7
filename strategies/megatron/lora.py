"""Low-rank adapters on Megatron's layers, chosen by transformers' names and exported under them."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn
from transformers import PreTrainedModel

from verl_lightning.models.config import LoraConfig
from verl_lightning.models.hf_folder import layer_of

MEGATRON_NAMES = {
    "q_proj": "linear_q",
    "k_proj": "linear_k",
    "v_proj": "linear_v",
    "o_proj": "linear_proj",
    "gate_proj": "linear_fc1_gate",
    "up_proj": "linear_fc1_up",
    "down_proj": "linear_fc2",
}
"""Of the layers that can have adapters; Megatron fuses some of them, but keeps their adapters apart."""

FUSED = (frozenset({"q_proj", "k_proj", "v_proj"}), frozenset({"gate_proj", "up_proj"}))
"""Layers that Megatron holds as one."""


def add_megatron_adapters(chunks: list[nn.Module], lora: LoraConfig, backbone: PreTrainedModel) -> list[nn.Module]:
    """Freeze the weights and put adapters beside those that transformers' model has adapters on.

    Args:
        chunks: Pieces of one model, not wrapped yet.
        lora: Options of the adapters.
        backbone: The model of transformers, with PEFT's adapters; needs no memory.

    Raises:
        ValueError: If Megatron can't have these adapters.
    """
    from megatron.bridge.peft.canonical_lora import CanonicalLoRA

    if lora.modules_to_save:
        raise ValueError(
            f"`lora.modules_to_save: {lora.modules_to_save}` can't be trained under `megatron`: Megatron-Bridge's LoRA"
            " freezes all but adapters, exports nothing else, and keeps no frozen copy of a module for the reference."
            " Leave it out and raise `lora.rank`, or train with `fsdp`, and go on from its merged model."
        )
    adapters = CanonicalLoRA(
        target_modules=megatron_targets(backbone),
        dim=lora.rank,
        alpha=lora.alpha,
        dropout=lora.dropout,
        lora_A_init_method="kaiming" if lora.init == "kaiming" else "normal",
    )
    adapted: list[nn.Module] = adapters(chunks, training=True)
    if lora.init == "gaussian":
        _rescale(adapted, 5.0 / lora.rank)  # from the bridge's deviation of 0.2 to PEFT's 1 / rank
    return adapted


def megatron_targets(backbone: PreTrainedModel) -> list[str]:
    """Megatron's names of the layers that have PEFT's adapters in transformers' model.

    Raises:
        ValueError: If Megatron has no such layer, or blocks differ in what is adapted.
    """
    by_block: dict[str, set[str]] = defaultdict(set)
    for name, _ in backbone.named_modules():
        if name.endswith(".lora_A"):
            path = name.removesuffix(".lora_A")
            by_block[layer_of(path)].add(path.rpartition(".")[2])
    chosen = next(iter(by_block.values()))
    if unknown := sorted(set().union(*by_block.values()) - MEGATRON_NAMES.keys()):
        raise ValueError(
            f"`lora.target_modules` reaches `{unknown[0]}`, which can't have adapters under `megatron`."
            f" Choose among {', '.join(MEGATRON_NAMES)}."
        )
    if len(by_block) != backbone.config.num_hidden_layers or any(names != chosen for names in by_block.values()):
        raise ValueError("`lora.target_modules` must be the same in each block under `megatron`.")
    for fused in FUSED:
        if missing := sorted(fused - chosen) if fused & chosen else []:
            raise ValueError(
                f"`lora.target_modules` names `{min(fused & chosen)}` but not `{missing[0]}`: Megatron-Bridge adapts"
                f" {', '.join(sorted(fused))} together or not at all. Add it, or use `fsdp`."
            )
    return sorted(MEGATRON_NAMES[name] for name in chosen)


@torch.no_grad()
def _rescale(chunks: list[nn.Module], factor: float) -> None:
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if name.endswith("linear_in.weight") and parameter.requires_grad:
                parameter.mul_(factor)
