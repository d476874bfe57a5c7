"""The one processor of a run whose policy reads images: what images become, and the tokens that stand for them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from verl_lightning.models.digests import DamagedFileError
from verl_lightning.models.library_errors import LIBRARY_ERRORS, first_line, model_must_be_at
from verl_lightning.models.pretrained import ForeignCodeError, read_config, read_processor
from verl_lightning.models.vision import MROPE, READ, TILED, has_tower
from verl_lightning.types import ImageInputs

if TYPE_CHECKING:
    from PIL.Image import Image


class ImageProcessor:
    """Images as a model reads them, by the processor in its folder, which is loaded when the first image is met.

    Args:
        path: A Hugging Face folder, or a model's name on the hub.
        model_type: Type of the model in its ``config.json``.
        image_token_id: Token that stands for a part of an image.
    """

    def __init__(self, path: str, model_type: str, image_token_id: int) -> None:
        self.path = path
        self.model_type = model_type
        self.image_token_id = image_token_id
        self._texts: dict[tuple[int, int], str] = {}

    @cached_property
    def processor(self) -> Any:
        """Processor of transformers.

        Raises:
            ValueError: If there is none that can be loaded.
        """
        try:
            return read_processor(self.path)
        except (DamagedFileError, ForeignCodeError):
            raise
        except LIBRARY_ERRORS as error:
            raise ValueError(
                f"`{self.path}` is a model that reads images, but holds no processor that can be loaded"
                f" ({first_line(error)}). Save one there with `processor.save_pretrained`."
            ) from error

    @property
    def placeholder(self) -> str:
        """Text that a chat template writes for an image."""
        return str(self.processor.image_token)

    @property
    def image_token(self) -> str:
        """Text of the token that stands for a part of an image."""
        return str(self.processor.tokenizer.convert_ids_to_tokens(self.image_token_id))

    def read(self, images: Sequence[Image]) -> ImageInputs:
        """Returns images of one sequence as the model reads them."""
        found = self._read(images)
        pixels, mask = found["pixel_values"], found.get("pixel_attention_mask")
        if self.model_type in TILED:  # which come as those of one row
            pixels, mask = pixels[0], None if mask is None else mask[0]
        return ImageInputs(pixel_values=pixels, image_grid_thw=found.get("image_grid_thw"), pixel_attention_mask=mask)

    def text(self, size: tuple[int, int]) -> str:
        """Returns the text of the tokens that stand for an image, which depends on its width and height alone."""
        from PIL import Image

        if self.model_type in MROPE:  # the number alone changes, and can be told without a picture to read
            images, (width, height) = self.processor.image_processor, size
            patches = images.get_number_of_image_patches(height, width, {})
            return self.image_token * int(patches // images.merge_size**2)
        if size not in self._texts:
            found = self._read([Image.new("RGB", size)], return_text_replacement_offsets=True)
            self._texts[size] = str(found["text_replacement_offsets"][0][0]["replacement"])
        return self._texts[size]

    def token_types(self, ids: Sequence[int]) -> list[int]:
        """Returns 1 for each token of a prompt that stands for a part of an image, and 0 for text."""
        return [int(token == self.image_token_id) for token in ids]

    def _read(self, images: Sequence[Image], **options: Any) -> dict[str, Any]:
        """Has transformers read images of one row, with a text of nothing but their placeholders."""
        text = [self.placeholder * len(images)]
        return dict(self.processor(text=text, images=[list(images)], return_tensors="pt", **options))


def image_processor(path: str) -> ImageProcessor | None:
    """Returns the processor of a model that reads images; None for a text model, and one whose images are not tested.

    Args:
        path: A Hugging Face folder, or a model's name on the hub.
    """
    with model_must_be_at(path):
        config = read_config(path)
    if not has_tower(config) or config.model_type not in READ:
        return None
    return ImageProcessor(path, config.model_type, config.image_token_id)
