"""Builds Megatron's models from Hugging Face folders, through Megatron-Bridge."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from verl_lightning.compat.megatron import progress_hidden, set_process_groups
from verl_lightning.models.config import ModelConfig
from verl_lightning.models.digests import DamagedFileError
from verl_lightning.models.library_errors import first_line
from verl_lightning.models.pretrained import ForeignCodeError, read_config
from verl_lightning.models.scorer import Head
from verl_lightning.strategies.megatron.config import ParallelSizes, TransformerOptions
from verl_lightning.strategies.megatron.honoured import comparable, sentence, unhonoured
from verl_lightning.strategies.megatron.local_layers import sequence_parallel_block
from verl_lightning.strategies.megatron.runtime import has_transformer_engine

if TYPE_CHECKING:
    from megatron.bridge import AutoBridge
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.core.transformer import TransformerConfig

OWN_FIELDS = {
    "tensor_model_parallel_size": "megatron.tensor_parallel_size",
    "pipeline_model_parallel_size": "megatron.pipeline_parallel_size",
    "virtual_pipeline_model_parallel_size": "megatron.virtual_pipeline_parallel_size",
    "context_parallel_size": "megatron.context_parallel_size",
    "expert_model_parallel_size": "megatron.expert_parallel_size",
    "expert_tensor_parallel_size": "megatron.expert_tensor_parallel_size",
    "sequence_parallel": "megatron.sequence_parallel",
    "recompute_granularity": "megatron.transformer.recompute",
    "recompute_num_layers": "megatron.transformer.recompute_num_layers",
    "attention_backend": "megatron.transformer.attention_backend",
    "params_dtype": "trainer.precision",
    "bf16": "trainer.precision",
    "fp16": "trainer.precision",
}
"""Fields of Megatron's config that have an option elsewhere, and its name."""

_NOT_BY_STEP = "Megatron weighs it by the tokens of a micro-batch, which our losses are no longer divided by"
FIXED_FIELDS = {
    "calculate_per_token_loss": "gradients are summed, since losses are normalised already",
    "moe_aux_loss_coeff": _NOT_BY_STEP,
    "moe_z_loss_coeff": _NOT_BY_STEP,
}


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Settings of a strategy that hold for every model that it builds."""

    sizes: ParallelSizes
    """Sizes of Megatron's groups."""

    sequence_parallel: bool
    """True if tensor-parallel ranks split what lies between their layers along the sequence."""

    transformer: TransformerOptions
    """Options of the user for the computation of layers."""

    is_bf16: bool
    """True to compute in bfloat16, with weights of the optimizer's in float32."""

    device: torch.device
    """Device of this rank."""

    @property
    def uses_transformer_engine(self) -> bool:
        """True if layers are TransformerEngine's.

        Raises:
            MisconfigurationException: If it is asked for but missing, or needed but left out, or has not the attention
                that is asked for.
        """
        wanted, has = self.transformer.use_transformer_engine, has_transformer_engine()
        if wanted and not has:
            raise MisconfigurationException(
                "`megatron.transformer.use_transformer_engine: true`, but `transformer_engine` is not installed."
            )
        uses = has if wanted is None else wanted
        if not uses and self.sizes.context > 1:
            raise MisconfigurationException(
                f"`megatron.context_parallel_size: {self.sizes.context}` needs TransformerEngine's attention, which is"
                " not used. Install `transformer-engine`, or leave the option out."
            )
        backend = self.transformer.attention_backend
        if backend != "auto" and (backend == "local") == uses:
            raise MisconfigurationException(
                f"`megatron.transformer.attention_backend: {backend}` is not of"
                f" {'TransformerEngine' if uses else 'Megatron'}'s layers, which are used. Leave it out, or set"
                f" `megatron.transformer.use_transformer_engine: {str(not uses).lower()}`."
            )
        return uses


def make_bridge(path: str) -> AutoBridge:
    """Return Megatron-Bridge's map for a model; reads no weights yet.

    Raises:
        ValueError: If there is no model at the path, or the bridge has no map for it.
    """
    from megatron.bridge import AutoBridge

    try:
        fields = language_model_fields(read_config(path))  # as every reader of ours does it
        return AutoBridge.from_hf_pretrained(path, trust_remote_code=False, **fields)
    except (DamagedFileError, ForeignCodeError):
        raise
    except (ValueError, OSError) as error:
        raise ValueError(
            f"`path: {path}`: Megatron-Bridge can't map this model ({first_line(error)}). Use `fsdp`, which trains any"
            " model of transformers."
        ) from error


def language_model_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """Fields of a reward model's config that make it one of the language model with the same trunk, which bridges know.

    Args:
        config: Config of any model; of one that classifies no sequences nothing is changed.
    """
    names, model = config.architectures or [], MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if not isinstance(model, type) or not any(name.endswith("ForSequenceClassification") for name in names):
        return {}
    # The folder has no output head; a value head takes its place.
    return {"architectures": [model.__name__], "tie_word_embeddings": True}


def make_provider(bridge: AutoBridge, config: ModelConfig, head: Head, settings: ModelSettings) -> GPTModelProvider:
    """The model's shape from its Hugging Face config, with our layout and the user's options.

    Args:
        bridge: Bridge of the model.
        config: Options of the model and of its training.
        head: Kind of scores that the model gives: those of a policy, of a critic, or both.
        settings: Settings of the strategy.

    Raises:
        ValueError: If an override is unknown or belongs to an option of its own, or the bridge leaves out what the
            model's config says, or Megatron can't train such a model.
    """
    if fields := unhonoured(read_config(config.path), _describe):
        raise ValueError(sentence("megatron.bridge: megatron_bridge", config.path, fields))
    provider = bridge.to_megatron_provider(load_weights=False)
    ours = provider_fields(config, settings, provider)
    if head == "value":
        ours["share_embeddings_and_output_weights"] = False
    for name, value in (ours | checked_overrides(provider, settings.transformer)).items():
        setattr(provider, name, value)
    provider.finalize()
    if provider.num_moe_experts and provider.add_bias_linear and not settings.uses_transformer_engine:
        raise ValueError(
            f"`path: {config.path}`: Megatron-Core can't train experts with biases without TransformerEngine, which is"
            " not used. Use `fsdp`, which trains any model of transformers."
        )
    set_process_groups(provider)
    return provider


def _describe(config: PreTrainedConfig) -> object:
    """Return all that Megatron-Bridge makes of a model's config, to be compared."""
    from megatron.bridge import AutoBridge

    described = copy.copy(config)
    described.architectures = language_model_fields(config).get("architectures", config.architectures)
    provider = AutoBridge.from_hf_config(described).to_megatron_provider(load_weights=False)
    return type(provider).__name__, comparable(vars(provider))


def provider_fields(config: ModelConfig, settings: ModelSettings, transformer: TransformerConfig) -> dict[str, Any]:
    """Fields of Megatron's config, and of Megatron-Bridge's around it, that we set whatever the model is.

    Args:
        config: Options of the model and of its training.
        settings: Settings of the strategy.
        transformer: Shape of the whole model.
    """
    check_experts(transformer.num_moe_experts, settings)
    with_kernels = settings.uses_transformer_engine
    return {
        **_layout(settings),
        **_numbers(settings),
        **recompute_fields(config, settings, transformer.num_layers),
        **(fused_operations(transformer) if with_kernels else _without_transformer_engine(settings)),
        "perform_initialization": False,
    }


def build_chunks(bridge: AutoBridge, provider: GPTModelProvider, *, load: bool = True) -> list[nn.Module]:
    """This rank's pieces of the model, with the folder's weights. Collective.

    Args:
        bridge: Bridge of the model.
        provider: Provider of the model, from `make_provider`.
        load: Whether to read the folder's weights.
    """
    chunks = build_pieces(provider.provide, provider.virtual_pipeline_model_parallel_size or 1)
    if load:
        with progress_hidden():
            bridge.load_hf_weights(chunks)
    return chunks


def build_pieces(provide: Callable[..., nn.Module], count: int) -> list[nn.Module]:
    """This rank's pieces of the stack of layers.

    Args:
        provide: Function that makes a piece; told whether it is the first or the last of the model.
        count: Pieces on each stage.
    """
    from megatron.core import parallel_state

    first = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    pieces: list[nn.Module] = []
    for index in range(count):
        pre, post = first and index == 0, last and index == count - 1
        stage = index if count > 1 else None
        pieces.append(provide(pre_process=pre, post_process=post, vp_stage=stage))
    return pieces


def _layout(settings: ModelSettings) -> dict[str, Any]:
    sizes = settings.sizes
    return {
        "tensor_model_parallel_size": sizes.tensor,
        "pipeline_model_parallel_size": sizes.pipeline,
        "virtual_pipeline_model_parallel_size": sizes.virtual_pipeline if sizes.virtual_pipeline > 1 else None,
        "context_parallel_size": sizes.context,
        "expert_model_parallel_size": sizes.expert,
        "expert_tensor_parallel_size": sizes.expert_tensor,
        "sequence_parallel": settings.sequence_parallel,
        # Interleaved pieces send both ways at once, which two stages tell apart in separate calls only.
        "overlap_p2p_comm": sizes.virtual_pipeline > 1,
        "batch_p2p_comm": sizes.virtual_pipeline == 1,
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",  # the only one for lengths that vary
        "should_pad_vocab": True,
        "make_vocab_size_divisible_by": 1,
    }


def _numbers(settings: ModelSettings) -> dict[str, Any]:
    dtype = torch.bfloat16 if settings.is_bf16 else torch.float32
    return {
        "bf16": settings.is_bf16,
        "fp16": False,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "autocast_dtype": dtype,
        "attention_softmax_in_fp32": True,
        "use_cpu_initialization": settings.device.type == "cpu",
        # Gradients are summed over micro-batches and ranks, as our losses are normalised already.
        "calculate_per_token_loss": True,
        # As transformers trains them: no loss beside ours, and biases of experts that stay as they are.
        "moe_aux_loss_coeff": 0.0,
        "moe_z_loss_coeff": None,
        "moe_router_bias_update_rate": 0.0,
        "gradient_accumulation_fusion": False,
    }


def check_experts(num_experts: int | None, settings: ModelSettings) -> None:
    """Refuse a layout in which Megatron does not train experts.

    Args:
        num_experts: Experts of a layer; None for a model without.
        settings: Settings of the strategy.

    Raises:
        MisconfigurationException: If tensor-parallel ranks do not share what lies between layers too.
    """
    if num_experts and settings.sizes.tensor > 1 and not settings.sequence_parallel:
        raise MisconfigurationException(
            f"`megatron.tensor_parallel_size: {settings.sizes.tensor}` trains a mixture of experts only with"
            " `megatron.sequence_parallel: true`. Set it, or share the experts alone: `megatron.expert_parallel_size`."
        )


def recompute_fields(config: ModelConfig, settings: ModelSettings, num_layers: int) -> dict[str, Any]:
    """Megatron's fields for what is computed again; for every k-th layer, as many at the start of each piece.

    Args:
        config: Options of the model.
        settings: Settings of the strategy.
        num_layers: Layers of the whole model.

    Raises:
        ValueError: If the model and the strategy both say what to compute again.
    """
    which, options = config.activation_checkpointing, settings.transformer
    if which != "none" and options.recompute != "none":
        raise ValueError(
            f"`activation_checkpointing: {which}` of `path: {config.path}` and `megatron.transformer.recompute:"
            f" {options.recompute}` both say what is computed again in the backward pass. Take one of them out."
        )
    if isinstance(which, int):
        pieces = settings.sizes.pipeline * settings.sizes.virtual_pipeline
        return _whole_layers("block", -(-num_layers // (pieces * which)))
    kind = "full" if which == "full" else options.recompute
    if kind == "full":
        return _whole_layers("uniform", options.recompute_num_layers)
    return {"recompute_granularity": None if kind == "none" else kind}


def _whole_layers(method: str, count: int) -> dict[str, Any]:
    return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": count}


def fused_operations(transformer: TransformerConfig) -> dict[str, Any]:
    """Megatron's switches for kernels that do several operations at once; they need TransformerEngine on a GPU.

    Args:
        transformer: The model's shape, which says whether it has the operations that a kernel does.
    """
    is_swiglu = transformer.gated_linear_unit and transformer.activation_func is F.silu
    return {
        # Without it each layer of a packed row is cut into its sequences, with a wait for the device and a handful of
        # kernels for each of them. Megatron-Bridge takes it back where positions are scaled or of several kinds, and
        # Megatron calls the kernel for latent attention experimental.
        "apply_rope_fusion": not transformer.multi_latent_attention,
        "bias_activation_fusion": is_swiglu and transformer.glu_linear_offset == 0.0,
        "bias_dropout_fusion": True,
    }


def _without_transformer_engine(settings: ModelSettings) -> dict[str, Any]:
    """Megatron's own layers, and none of the fusions that need kernels of TransformerEngine or Apex."""
    from megatron.bridge.models.gpt_provider import local_layer_spec

    fusions = ("bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion", "apply_rope_fusion")
    others = ("persist_layer_norm", "moe_grouped_gemm", "moe_permute_fusion", "cross_entropy_loss_fusion")
    layers = sequence_parallel_block if settings.sequence_parallel else local_layer_spec
    return dict.fromkeys((*fusions, *others), False) | {"transformer_layer_spec": layers}


def checked_overrides(provider: TransformerConfig, options: TransformerOptions) -> dict[str, Any]:
    """The user's fields of Megatron's config.

    Args:
        provider: The config, which must have them.
        options: Options of the user.

    Raises:
        ValueError: If an override is unknown or belongs to an option of its own.
    """
    from megatron.core.transformer.enums import AttnBackend

    for name in options.overrides:
        if name in OWN_FIELDS:
            raise ValueError(f"`megatron.transformer.overrides` sets `{name}`; set `{OWN_FIELDS[name]}` instead.")
        if name in FIXED_FIELDS:
            raise ValueError(f"`megatron.transformer.overrides` can't set `{name}`: {FIXED_FIELDS[name]}.")
        if not hasattr(provider, name):
            raise ValueError(f"`megatron.transformer.overrides`: `{type(provider).__name__}` has no `{name}`.")
    return {"attention_backend": AttnBackend[options.attention_backend], **options.overrides}
