"""The repeated layers of a transformers model: found, and told to compute their activations twice."""

from __future__ import annotations

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from verl_lightning.compat.transformers import block_names
from verl_lightning.models.config import ActivationCheckpointing


def transformer_blocks(backbone: PreTrainedModel) -> list[nn.Module]:
    """The repeated layers of a transformers model, first to last.

    Raises:
        MisconfigurationException: If the model has none that could be told.
    """
    blocks: list[nn.Module] = [m for m in backbone.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not blocks:
        names = block_names(backbone)
        blocks = [module for module in backbone.modules() if type(module).__name__ in names]
    if not blocks:
        raise MisconfigurationException(
            f"`fsdp` shards a model block by block, and `activation_checkpointing: k` counts blocks, but"
            f" `{type(backbone).__name__}` does not say what its blocks are (`_no_split_modules`). Use `ddp` with"
            " `activation_checkpointing: none`, or a model class that transformers keeps up to date."
        )
    return blocks


def language_blocks(backbone: PreTrainedModel) -> list[nn.Module]:
    """The repeated layers that every batch goes through: of a model that reads images, those of its language model."""
    decoder: nn.Module = backbone.get_decoder()  # type: ignore[no-untyped-call]
    inside = set(decoder.modules())
    return [block for block in transformer_blocks(backbone) if block in inside]


def attention_heads(backbone: PreTrainedModel) -> tuple[int, int]:
    """Return the number of a model's query heads and the width of one; zeros for a model without attention."""
    config = backbone.config.get_text_config()
    heads: int = getattr(config, "num_attention_heads", None) or 0
    return heads, (getattr(config, "head_dim", None) or config.hidden_size // heads) if heads else 0


def checkpoint_activations(backbone: PreTrainedModel, which: ActivationCheckpointing) -> None:
    """Have blocks keep their input alone, and compute all else again in the backward pass; in place.

    Args:
        backbone: A transformers model.
        which: ``none``, ``full`` for all blocks, or k for the first of each k blocks.
    """
    if which == "none":
        return
    backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if which != "full":
        for index, block in enumerate(transformer_blocks(backbone)):
            if index % which:
                block.gradient_checkpointing = False  # type: ignore[assignment]
