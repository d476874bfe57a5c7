"""Estimates of a model's size and of what it keeps of a token until its backward pass, made before it is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from transformers import PreTrainedModel

from verl_lightning.functional.linear_log_probs import chunk_numel
from verl_lightning.models.blocks import attention_heads, transformer_blocks
from verl_lightning.models.config import ModelConfig
from verl_lightning.models.scorer import PLAIN_HEADS, Head, TokenScorer


class ModelRole(NamedTuple):
    """A model that a module asks its strategy for."""

    name: str
    """Name of the model for people, and of the module's attribute."""

    config: ModelConfig
    """Settings of the model and its training."""

    head: Head
    """Scores that the model gives."""

    trainable: bool
    """True if the model is trained."""

    key: str = "model.actor"
    """Key of the model in the user's settings."""

    is_kept: bool = False
    """True if the weights change without an optimizer, so that checkpoints must hold them."""

    is_elsewhere: bool = False
    """True if the model is on other devices than the trainer's."""


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Sizes of the types in which a model computes."""

    width: int
    """Bytes of an activation."""

    stream_width: int
    """Bytes of a value between blocks: larger than ``width`` under autocast, which casts at each layer."""

    is_fused: bool = False
    """True if kernels are fused, by `torch.compile` or by hand, so that nothing is kept twice."""

    @property
    def casts(self) -> bool:
        """True if each layer casts its input for itself; a whole model then holds weights in both types."""
        return self.stream_width > self.width


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Sizes on which the memory of a model depends: numbers of weights, or of values of a token."""

    weights: int
    """Number of all weights; tied ones count once."""

    trainable: int
    """Number of weights in training."""

    weight_width: int
    """Bytes of a stored weight."""

    num_blocks: int
    """Number of blocks, the repeated layers."""

    recomputed_blocks: int
    """Number of blocks with activation checkpointing."""

    largest_block: int
    """Weights of the largest block."""

    outside: int
    """Weights outside blocks: embeddings, output head, last norm."""

    hidden: int
    """Values of a token between blocks."""

    queries: int
    """Values of a token in all query heads."""

    keys: int
    """Values of a token in all key heads, as many as in all value heads."""

    heads: int
    """Number of query heads."""

    feed_forward: int
    """Values of a token in the feed-forward layer; in a mixture, in all experts that a token is sent to."""

    normalizes_heads: bool
    """True if queries and keys have norms of their own."""

    vocabulary: int
    """Logits of a token, 0 for a value model."""

    chunks_logits: bool
    """True if logits are made a chunk at a time, from hidden states."""

    def block_bytes(self, compute: Compute) -> int:
        """Estimates the bytes that one block keeps of a token until its backward pass.

        Counted from what autograd saves of a pre-norm block with grouped-query attention, without a kernel that holds
        attention's scores: inputs of norms (float32 copies and what they scale, where kernels are not fused), inputs of
        linear layers, rotated queries and keys, values, attention's output, and four values of the feed-forward layer.
        """
        width, normed = compute.width, self.queries + self.keys if self.normalizes_heads else 0
        values = 2 * self.queries + 2 * self.keys + 4 * self.feed_forward
        sums = 4 * (self.heads + 2)  # of softmax and of norms, in float32
        if compute.is_fused:
            return width * (values + normed) + compute.stream_width * self.hidden + sums
        copies = 4 + max(width, compute.stream_width)
        linear_inputs = 5 if compute.casts else 2  # beside those of the two output layers
        return copies * (2 * self.hidden + normed) + width * (values + linear_inputs * self.hidden) + sums

    def activation_bytes(self, tokens: int, compute: Compute) -> int:
        """Estimates the bytes that all blocks keep of a forward pass, and those that the block at work computes again.

        Args:
            tokens: Tokens of the pass.
            compute: Types of the pass.
        """
        block = self.block_bytes(compute)
        inputs = self.recomputed_blocks * self.hidden * compute.stream_width
        whole = self.num_blocks - self.recomputed_blocks + min(1, self.recomputed_blocks)
        return tokens * (inputs + whole * block)

    def head_bytes(self, tokens: int, compute: Compute) -> int:
        """Estimates the bytes that the step from hidden states to log-probs and back takes at its peak.

        Args:
            tokens: Tokens of the pass.
            compute: Types of the pass.
        """
        last_norm = tokens * self.hidden * (4 + 2 * compute.width)
        logits = tokens * self.vocabulary
        if not self.chunks_logits:
            return last_norm + logits * (2 * compute.width + 4)
        gradient = self.vocabulary * self.hidden * (4 + compute.width)
        chunk = min(logits, chunk_numel(compiled=compute.is_fused))
        return last_norm + gradient + chunk * (4 + compute.width + (4 if compute.is_fused else 12))


def model_size(scorer: TokenScorer) -> ModelSize:
    """Measures a model, which may be on the meta device."""
    backbone = scorer.backbone
    config = backbone.config.get_text_config()
    blocks = _blocks(backbone)
    in_blocks = [sum(weight.numel() for weight in block.parameters()) for block in blocks]
    weights = [(weight, weight.numel()) for weight in scorer.parameters()]
    total = sum(numel for _, numel in weights)
    heads, head_dim = attention_heads(backbone)
    is_recomputed = [bool(getattr(block, "gradient_checkpointing", False)) for block in blocks]
    return ModelSize(
        weights=total,
        trainable=sum(numel for weight, numel in weights if weight.requires_grad),
        weight_width=backbone.dtype.itemsize,
        num_blocks=config.num_hidden_layers,
        recomputed_blocks=sum(is_recomputed),
        largest_block=max(in_blocks, default=0),
        outside=total - sum(in_blocks),
        hidden=config.hidden_size,
        queries=heads * head_dim,
        keys=(getattr(config, "num_key_value_heads", None) or heads) * head_dim,
        heads=heads,
        feed_forward=_feed_forward(config),
        normalizes_heads=any(name.endswith("q_norm.weight") for name, _ in backbone.named_parameters()),
        vocabulary=0 if scorer.head == "value" else config.vocab_size,
        chunks_logits=backbone.config.model_type in PLAIN_HEADS,
    )


def _blocks(backbone: PreTrainedModel) -> list[nn.Module]:
    try:
        return transformer_blocks(backbone)
    except MisconfigurationException:  # `fsdp` and k need them; an estimate does without
        return []


def _feed_forward(config: Any) -> int:
    """Counts the values of a token in the widest layers of a block."""
    dense: int = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    chosen = getattr(config, "num_experts_per_tok", None)
    if not chosen:
        return dense
    expert = getattr(config, "moe_intermediate_size", None) or dense
    return int(chosen * expert + (getattr(config, "shared_expert_intermediate_size", None) or 0))
