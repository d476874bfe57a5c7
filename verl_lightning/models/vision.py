"""What a model with a vision tower is given beside its tokens, and which of its weights read images."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from verl_lightning.models.packing import PackedTokens, position_ids
from verl_lightning.types import ImageInputs, TokenBatch

MROPE = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl"})
"""Model types that count a token's position in time, height and width."""

TILED = frozenset({"idefics3", "smolvlm"})
"""Model types that take an image as a list of tiles."""

PACKED = MROPE | TILED
"""Model types whose packed sequences with images are tested to have their padded scores. Gemma-3's tokens of an image
see one another, for which a packed row has no mask."""

READ = MROPE | TILED | {"gemma3"}
"""Model types whose images are tested to be read as transformers reads them."""


def image_arguments(backbone: PreTrainedModel, batch: TokenBatch, position_ids: Tensor) -> dict[str, Tensor]:
    """Returns the arguments by which a transformers model is told of a padded batch's images; none without images.

    Args:
        backbone: Model that reads images, or its trunk.
        batch: Batch on the model's device.
        position_ids: Positions of the tokens as if all were text.
    """
    found = [images for images in batch.images or () if images is not None]
    if not found:
        return {}
    assert batch.mm_token_type_ids is not None
    images, kind = ImageInputs.join(found), backbone.config.model_type
    if kind not in MROPE:
        return pixel_arguments(images, kind) | ({"token_type_ids": batch.mm_token_type_ids} if kind == "gemma3" else {})
    return pixel_arguments(images, kind) | {
        "mm_token_type_ids": batch.mm_token_type_ids,
        "position_ids": image_positions(backbone, batch, images, position_ids),
    }


def pixel_arguments(images: ImageInputs, model_type: str) -> dict[str, Tensor]:
    """Returns the arguments that bring the pixels of a batch's images."""
    if model_type in TILED:  # of one row, whatever rows the tokens have
        arguments = {"pixel_values": images.pixel_values[None]}
        mask = images.pixel_attention_mask
        return arguments | ({} if mask is None else {"pixel_attention_mask": mask[None]})
    arguments = {"pixel_values": images.pixel_values}
    return arguments | ({} if images.image_grid_thw is None else {"image_grid_thw": images.image_grid_thw})


def image_positions(
    backbone: PreTrainedModel, batch: TokenBatch, images: ImageInputs, position_ids: Tensor
) -> Int[Tensor, "3 batch sequence"]:
    """Returns the positions in time, height and width of a batch's tokens. Waits for the device.

    Args:
        backbone: Model that counts them, or its trunk.
        batch: Padded batch.
        images: Images of all its rows.
        position_ids: Positions of the tokens as if all were text, which rows of text keep.
    """
    trunk: Any = backbone.base_model
    has_images = torch.tensor([image is not None for image in batch.images or ()], device=position_ids.device)
    found: Tensor = trunk.get_rope_index(
        batch.input_ids,
        mm_token_type_ids=batch.mm_token_type_ids,
        image_grid_thw=images.image_grid_thw,
        attention_mask=batch.attention_mask,
    )[0]
    return torch.where(has_images[:, None], found, position_ids)


def packed_image_arguments(backbone: PreTrainedModel, batch: TokenBatch, packed: PackedTokens) -> dict[str, Tensor]:
    """Returns the arguments by which a transformers model is told of the images of packed sequences.

    Args:
        backbone: Model that reads images, or its trunk.
        batch: Padded batch on the model's device.
        packed: Its tokens in a row.
    """
    arguments = image_arguments(backbone, batch, position_ids(batch.attention_mask))
    if "position_ids" in arguments:  # transformers tells sequences apart by those of text, which come first
        in_row = packed.in_row(arguments["position_ids"])
        arguments["position_ids"] = torch.cat([packed.position_ids[None], in_row])
        arguments["mm_token_type_ids"] = packed.in_row(arguments["mm_token_type_ids"])
    return arguments


@contextmanager
def own_text_embedded(
    backbone: PreTrainedModel, batch: TokenBatch, packed: PackedTokens | None = None
) -> Iterator[Tensor]:
    """Yields token ids in which the image's token stands for images alone, and embeds the real ids within the context.

    A policy may say the token that stands for images in prompts: it is text then, to engines too, while transformers
    would look for one more image.

    Args:
        backbone: Model that reads images, or its trunk.
        batch: Batch on the model's device.
        packed: Its tokens in a row, which the ids are then of; None where the model reads it padded.
    """
    assert batch.mm_token_type_ids is not None
    is_said = (batch.input_ids == backbone.config.image_token_id) & (batch.mm_token_type_ids == 0)
    real = batch.input_ids
    if packed is not None:
        is_said, real = packed.in_row(is_said), packed.in_row(real)

    def look_up(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (torch.where(is_said, real, arguments[0]), *arguments[1:])

    embeddings: nn.Module = backbone.get_input_embeddings()
    handle = embeddings.register_forward_pre_hook(look_up)
    try:
        yield torch.where(is_said, 0, real)
    finally:
        handle.remove()


def has_tower(config: PreTrainedConfig) -> bool:
    """Tell whether a model reads images."""
    return getattr(config, "vision_config", None) is not None


def tower_weights(backbone: PreTrainedModel) -> list[nn.Parameter]:
    """Weights that text never reaches: those of a vision tower and of its projection; none of a text model."""
    config, text = backbone.config, backbone.get_decoder()  # type: ignore[no-untyped-call]
    if config.get_text_config() is config or text is backbone:
        return []
    head = backbone.get_output_embeddings()  # type: ignore[no-untyped-call]
    read = {id(weight) for module in (text, head) if module is not None for weight in module.parameters()}
    return [weight for weight in backbone.parameters() if id(weight) not in read]


def prepare_tower(backbone: PreTrainedModel, *, trains: bool) -> None:
    """Freezes the weights that text never reaches: without images they have no gradient, for which `ddp` would wait.

    Args:
        backbone: Model that is trained.
        trains: True leaves them to be trained.

    Raises:
        ValueError: If they are to be trained and there are none.
    """
    weights = tower_weights(backbone)
    if trains and not weights:
        raise ValueError(f"`train_vision_tower: true` does not fit a `{backbone.config.model_type}`, which has none.")
    for weight in weights:
        weight.requires_grad_(trains)
