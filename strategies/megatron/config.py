"""Options of Megatron's layout, its data parallelism and its transformer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class ParallelSizes:
    """Sizes of Megatron's parallel groups; the ranks that are left over see different data."""

    tensor: int = 1
    """Ranks that share each layer."""

    pipeline: int = 1
    """Stages of the stack of layers, one after another."""

    virtual_pipeline: int = 1
    """Pieces of the stack on each stage, interleaved: smaller pipeline bubbles, more traffic."""

    context: int = 1
    """Ranks that share each sequence; needs TransformerEngine."""

    expert: int = 1
    """Ranks that share the experts of a mixture; they see different data."""

    expert_tensor: int = 1
    """Ranks that share each expert."""

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if size < 1:
                raise ValueError(f"`megatron.{name}_parallel_size` must be at least 1, got {size}.")
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise ValueError(
                f"`megatron.virtual_pipeline_parallel_size` ({self.virtual_pipeline}) needs"
                " `megatron.pipeline_parallel_size` above 1: pieces are interleaved over stages."
            )

    @property
    def model(self) -> int:
        """Ranks that hold one copy of the model and see the same data."""
        return self.tensor * self.pipeline * self.context

    def check_world(self, world: int) -> None:
        """Refuse a number of processes that these sizes don't divide.

        Raises:
            ValueError: With the sizes.
        """
        if world % self.model:
            raise ValueError(
                f"`megatron` needs a multiple of {self.model} processes (tensor {self.tensor} x pipeline"
                f" {self.pipeline} x context {self.context}), got {world}. Change `trainer.devices` or the sizes."
            )
        spread = self.expert * self.expert_tensor * self.pipeline
        if world % spread:
            raise ValueError(
                f"`megatron` needs a multiple of {spread} processes (expert {self.expert} x expert_tensor"
                f" {self.expert_tensor} x pipeline {self.pipeline}), got {world}."
            )


@dataclass(frozen=True, kw_only=True)
class DataParallelConfig:
    """Options for the travel of gradients and weights between data-parallel ranks."""

    overlap_grad_reduce: bool = False
    """Reduce gradients while the last micro-batch's backward pass goes on."""

    overlap_param_gather: bool = False
    """Gather weights while the next forward pass goes on; needs ``use_distributed_optimizer`` and
    ``overlap_grad_reduce``."""

    grad_reduce_in_fp32: bool = True
    """Add up and reduce gradients in float32, whatever the weights' type."""

    bucket_size: int | None = None
    """Most weights reduced together, with ``overlap_grad_reduce``; null takes Megatron's own, which grows with the
    ranks."""

    overrides: dict[str, Any] = field(default_factory=dict)
    """Further fields of Megatron's `DistributedDataParallelConfig`, by name."""

    def __post_init__(self) -> None:
        if self.bucket_size is not None and self.bucket_size < 1:
            raise ValueError(f"`megatron.ddp.bucket_size` must be at least 1, got {self.bucket_size}.")
        if self.bucket_size is not None and not self.overlap_grad_reduce:
            raise ValueError(
                f"`megatron.ddp.bucket_size: {self.bucket_size}` has no effect without"
                " `megatron.ddp.overlap_grad_reduce`: all gradients are reduced at once. Set that, or leave it out."
            )


@dataclass(frozen=True, kw_only=True)
class TransformerOptions:
    """Options for the computation of layers; the shape of a model comes from its own config."""

    recompute: Literal["none", "selective", "full"] = "none"
    """Activations to compute again in the backward pass: core attention alone, or whole layers. Not
    beside a model's ``activation_checkpointing``, which says the same for one model."""

    recompute_num_layers: int = 1
    """Layers between two kept activations where ``recompute`` is ``full``."""

    attention_backend: Literal["auto", "flash", "fused", "unfused", "local"] = "auto"
    """Attention of TransformerEngine; ``local`` is Megatron's own, with ``use_transformer_engine: false``."""

    use_transformer_engine: bool | None = None
    """True for TransformerEngine's layers, false for Megatron's own; null uses the former where they are installed."""

    overrides: dict[str, Any] = field(default_factory=dict)
    """Further fields of Megatron's `TransformerConfig`, by name, for every model."""

    def __post_init__(self) -> None:
        if self.recompute_num_layers < 1:
            raise ValueError(
                f"`megatron.transformer.recompute_num_layers` must be at least 1, got {self.recompute_num_layers}."
            )
        if self.recompute_num_layers > 1 and self.recompute != "full":
            raise ValueError(
                f"`megatron.transformer.recompute_num_layers` has no effect with `recompute: {self.recompute}`."
                " Set `recompute: full`, or leave it out."
            )
