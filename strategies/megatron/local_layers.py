"""Megatron's own layers with norms that know sequence parallelism, which Megatron has in TransformerEngine's alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules


def sequence_parallel_block(config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """This stage's layers and its last norm, for Megatron's GPT model.

    Args:
        config: The provider.
        vp_stage: Index of the piece among the stage's, with a virtual pipeline.
    """
    from megatron.bridge.models.gpt_provider import local_layer_spec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    layer = local_layer_spec(config)
    around: Any = layer.submodules
    within = around.self_attention.submodules
    norms = {"input_layernorm": around, "pre_mlp_layernorm": around, "q_layernorm": within, "k_layernorm": within}
    for name, part in norms.items():
        if getattr(part, name) is WrappedTorchNorm:
            setattr(part, name, shared_norm)
    count = get_num_layers_to_build(config, vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=shared_norm)


def shared_norm(*, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> nn.Module:
    """A norm whose weights' gradients Megatron sums over tensor-parallel ranks: each sees a part of the columns.

    Args:
        config: Megatron's config, which says the kind of norm.
        hidden_size: Size of the last dimension of the norm's input.
        eps: Added to the variance.
    """
    kind = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
    norm: nn.Module = kind(hidden_size, eps=eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return norm
