"""Makes one role's model: Megatron's pieces with weights, heads, adapters and the wrapper for training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from verl_lightning.compat.megatron import fuse_weight_gradients
from verl_lightning.faults import is_meant_for_user, is_of_collective
from verl_lightning.models.build import build_skeleton, read_value_head
from verl_lightning.models.config import ModelConfig
from verl_lightning.models.library_errors import LIBRARY_ERRORS, first_line
from verl_lightning.models.scorer import Head
from verl_lightning.models.weights import base_name, is_adapter_name
from verl_lightning.strategies.megatron.checkpoint import load_adapter_folder
from verl_lightning.strategies.megatron.config import DataParallelConfig
from verl_lightning.strategies.megatron.ddp_config import make_ddp_config
from verl_lightning.strategies.megatron.lora import add_megatron_adapters
from verl_lightning.strategies.megatron.mbridge import MBridge
from verl_lightning.strategies.megatron.provider import ModelSettings, build_chunks, make_bridge, make_provider
from verl_lightning.strategies.megatron.safe_reads import check_weights_once
from verl_lightning.strategies.megatron.scorer import VALUE_HEAD, MegatronScorer
from verl_lightning.strategies.megatron.tokens import Slicing
from verl_lightning.strategies.megatron.weights import exported_weights, has_experts_of, mapped_names

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallelConfig


def build_model(
    config: ModelConfig,
    head: Head,
    *,
    trainable: bool,
    settings: ModelSettings,
    ddp_options: DataParallelConfig,
    use_distributed_optimizer: bool,
    bridge: Literal["megatron_bridge", "mbridge"],
) -> MegatronScorer:
    """This rank's pieces of a model, with the weights of its folder. Collective.

    Args:
        config: Options of the model and of its training.
        head: Kind of scores that the model gives: those of a policy, of a critic, or both.
        trainable: False freezes every weight, and wraps nothing.
        settings: Settings of the strategy.
        ddp_options: Options of the user for models in training.
        use_distributed_optimizer: True if ranks share the optimizer's state of models in training.
        bridge: Package that maps weights.
    """
    ddp_config = make_ddp_config(ddp_options, use_distributed_optimizer=use_distributed_optimizer)
    mapping = make_bridge(config.path)
    check_weights_once(config.path)
    mbridge: MBridge | None = None
    with _buildable(config.path, with_kernels=settings.uses_transformer_engine):
        if bridge == "mbridge":
            mbridge = MBridge(config, head, settings)
            provider: Any = mbridge.transformer
            chunks = mbridge.build()
        else:
            provider = make_provider(mapping, config, head, settings)
            chunks = build_chunks(mapping, provider)
    skeleton = build_skeleton(config, head, trainable=trainable)
    for chunk in chunks:
        chunk.requires_grad_(trainable)
    if config.lora is not None and trainable:
        chunks = add_megatron_adapters(chunks, config.lora, skeleton.backbone)
    add_value_head(chunks[-1], provider, config, head, trainable=trainable)
    padding = getattr(skeleton.backbone.get_input_embeddings(), "padding_idx", None)
    if padding is not None and chunks[0].pre_process:
        spare_padding_token(chunks[0], padding)
    chunks = [_finished(chunk, provider, settings) for chunk in chunks]
    if trainable:
        chunks = wrap(chunks, provider, ddp_config)
        if settings.uses_transformer_engine and settings.is_bf16 and ddp_options.grad_reduce_in_fp32:
            for chunk in chunks:
                fuse_weight_gradients(chunk)
    packs = decide_packing(config, uses_transformer_engine=settings.uses_transformer_engine)
    model = MegatronScorer(chunks, skeleton, mapping, mbridge=mbridge, slicing=make_slicing(settings), packs=packs)
    check_map(model)
    if trainable and config.lora is not None and config.lora.adapter_path is not None:
        load_adapter_folder(model, config.lora)
    return model.train(trainable)


@contextmanager
def _buildable(path: str, *, with_kernels: bool) -> Iterator[None]:
    """Turn errors of Megatron and its bridges into the user's words while they make a model.

    Raises:
        ValueError: If they can't make it, with what to change.
    """
    try:
        yield
    except (*LIBRARY_ERRORS, AssertionError) as error:
        if is_meant_for_user(error) or is_of_collective(error) or isinstance(error, torch.OutOfMemoryError):
            raise
        layers = "" if with_kernels else " without TransformerEngine, which is not used"
        raise ValueError(
            f"`path: {path}`: Megatron can't make this model{layers} ({first_line(error)}). Use `fsdp`, which trains"
            " any model of transformers."
        ) from error


def check_map(model: MegatronScorer) -> None:
    """See that the bridge gives every weight back. Collective.

    Raises:
        ValueError: If one has no name there.
    """
    wanted = {base_name(name) for name, _ in model.backbone.named_parameters() if not is_adapter_name(name)}
    if model.mbridge is None:
        names = mapped_names(model)
        missing = sorted(name for name in wanted - names if not has_experts_of(name, names))
    else:
        missing = sorted(wanted - {name for name, _ in exported_weights(model, merges_adapters=False)})
    if missing:
        bridge = "megatron_bridge" if model.mbridge is None else "mbridge"
        raise ValueError(
            f"`megatron.bridge: {bridge}` can't map `path: {model.backbone.name_or_path}`: it leaves out {len(missing)}"
            f" weights, such as `{missing[0]}`. Use `fsdp`, which trains any model of transformers."
        )


def add_value_head(piece: nn.Module, provider: Any, config: ModelConfig, head: Head, *, trainable: bool) -> None:
    """Put a value head on the last stage's piece: zeros, or what the model's folder holds.

    Args:
        piece: Last piece of this stage.
        provider: Provider of the model.
        config: Options of the model.
        head: ``value`` takes the place of the output layer.
        trainable: False freezes it.
    """
    if head == "policy" or not piece.post_process:
        return
    value_head = nn.Linear(provider.hidden_size, 1, bias=False, dtype=provider.params_dtype)
    nn.init.zeros_(value_head.weight)
    read_value_head(value_head, config)
    setattr(piece, "output_layer" if head == "value" else VALUE_HEAD, value_head.requires_grad_(trainable))


def spare_padding_token(piece: Any, token: int) -> None:
    """Give the padding token's embedding no gradient as an input, as torch's embedding layers do.

    Args:
        piece: The first stage's first.
        token: ``padding_idx`` of the embedding in transformers.
    """
    from megatron.core import parallel_state

    def stop(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        is_padding = inputs[0] == token
        if piece.config.sequence_parallel:  # a part of the columns, which come first
            parts = is_padding.t().chunk(parallel_state.get_tensor_model_parallel_world_size())
            is_padding = parts[parallel_state.get_tensor_model_parallel_rank()]
        return torch.where(is_padding[..., None], output.detach(), output)

    piece.embedding.word_embeddings.register_forward_hook(stop)


def wrap(chunks: list[nn.Module], provider: Any, ddp_config: DistributedDataParallelConfig) -> list[nn.Module]:
    """Wrap each piece in Megatron's data parallelism; the schedule calls what sums gradients over ranks.

    Args:
        chunks: Pieces of one model.
        provider: Config of the model, which the schedule reads.
        ddp_config: Megatron's config, from `make_ddp_config`.
    """
    from megatron.core.distributed import DistributedDataParallel

    wrapped: list[Any] = [
        DistributedDataParallel(provider, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    provider.finalize_model_grads_func = finalize_gradients
    if ddp_config.overlap_grad_reduce:
        functions = [chunk.no_sync for chunk in wrapped]
        provider.no_sync_func = functions if len(functions) > 1 else functions[0]
    for chunk in wrapped:
        chunk.broadcast_params()
    return wrapped


def finalize_gradients(model: list[nn.Module], _: Tensor | None = None, **options: Any) -> None:
    """Megatron's sum of gradients over all ranks, without its division by tokens: our losses are normalised."""
    from megatron.core.distributed import finalize_model_grads

    finalize_model_grads(model, None, **options)


def make_slicing(settings: ModelSettings) -> Slicing:
    """Return the part of each sequence that this rank holds."""
    from megatron.core import parallel_state

    context = settings.sizes.context
    shared = settings.sizes.tensor if settings.sequence_parallel else 1
    return Slicing(
        multiple=shared * (2 * context if context > 1 else 1),
        context_size=context,
        context_rank=int(parallel_state.get_context_parallel_rank()),
    )


def decide_packing(config: ModelConfig, *, uses_transformer_engine: bool) -> bool:
    """Decide whether sequences lie in one row, which only TransformerEngine's attention can tell apart.

    Raises:
        MisconfigurationException: If ``packing: always`` is asked of Megatron's own attention.
    """
    if config.packing == "always" and not uses_transformer_engine:
        raise MisconfigurationException(
            "`packing: always` needs TransformerEngine under `megatron`. Install it, or set `packing: auto`."
        )
    return uses_transformer_engine and config.packing != "never"


def _finished(chunk: nn.Module, provider: Any, settings: ModelSettings) -> nn.Module:
    """Put a piece on its device, in its type, with the marks by which Megatron tells shared from spread weights."""
    from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
    from megatron.core.transformer.module import Float16Module

    for parameter in chunk.parameters():
        set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    chunk = chunk.to(settings.device)
    finished: nn.Module = Float16Module(provider, chunk) if settings.is_bf16 else chunk
    return finished
