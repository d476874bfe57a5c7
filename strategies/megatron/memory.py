"""Memory that a Megatron model takes on one device, estimated before it is built."""

from __future__ import annotations

from dataclasses import replace

from verl_lightning.models.size import Compute, ModelSize
from verl_lightning.strategies.megatron.config import DataParallelConfig, ParallelSizes, TransformerOptions
from verl_lightning.strategies.memory import ModelMemory, learning_memory


def megatron_memory(
    size: ModelSize,
    tokens: int | None,
    *,
    sizes: ParallelSizes,
    transformer: TransformerOptions,
    ddp: DataParallelConfig,
    optimizer_shards: int,
    is_bf16: bool,
) -> ModelMemory:
    """Estimate a model's memory on one device, as if layers, stages and experts had equal shares and fused kernels.

    In bfloat16 the optimizer holds weights of its own in float32. A stage keeps activations of as many micro-batches as
    there are stages, of its own layers alone: as much as one whole pass.

    Args:
        size: Size of the whole model.
        tokens: Tokens of a micro-batch of one copy of the model, None where not known.
        sizes: Sizes of Megatron's groups.
        transformer: Options for the computation of layers.
        ddp: Options for the travel of gradients.
        optimizer_shards: Data-parallel ranks that share the optimizer's state; 1 if each holds all of it.
        is_bf16: Whether layers compute in bfloat16.
    """
    width, parts = 2 if is_bf16 else 4, sizes.tensor * sizes.pipeline
    if transformer.recompute == "full":
        size = replace(size, recomputed_blocks=size.num_blocks)
    own_tokens = None if tokens is None else -(-tokens // (sizes.context * sizes.tensor))
    compute = Compute(width=width, stream_width=width, is_fused=True)
    trainable = size.trainable // parts
    return ModelMemory(
        weights=width * size.weights // parts,
        gradients=trainable * (4 if ddp.grad_reduce_in_fp32 else width),
        optimizer=trainable * (8 + (4 if is_bf16 else 0)) // optimizer_shards,
        keeps_gradients=True,
        **learning_memory(size, compute, own_tokens),  # type: ignore[arg-type]
    )
