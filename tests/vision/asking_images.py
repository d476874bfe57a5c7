"""Requests with images for tests of engines."""

from __future__ import annotations

import io
from pathlib import Path

from PIL import Image

from tests.vision.tiny_vision import PLACEHOLDERS, squares
from verl_lightning.models.processor import image_processor
from verl_lightning.models.tokenizer import load_tokenizer
from verl_lightning.rollout.base import Request, SamplingConfig
from verl_lightning.types import PromptImages

GREEDY = SamplingConfig(max_new_tokens=6, temperature=0.0)


def requests_with_images(folder: Path, family: str) -> list[Request]:
    """Two requests with a picture each, of two sizes, and one of text alone."""
    pictures = [squares(2), squares(3, size=(24, 16)), None]
    return [make_request(folder, family, number, picture) for number, picture in enumerate(pictures)]


def make_request(folder: Path, family: str, number: int, picture: Image.Image | None) -> Request:
    """A request of a few letters around a picture."""
    tokenizer, processor = load_tokenizer(folder), image_processor(str(folder))
    text = f"<|user|>a{PLACEHOLDERS[family] if picture else ''}b<|end|><|assistant|>"
    short = tokenizer(text, add_special_tokens=False)["input_ids"]
    if picture is None:
        return Request(prompt_ids=short, sampling=GREEDY, seed=number, name=f"prompt {number}")
    whole = text.replace(processor.placeholder, processor.text(picture.size))
    ids, file = tokenizer(whole, add_special_tokens=False)["input_ids"], io.BytesIO()
    picture.save(file, "png")
    images = PromptImages(
        inputs=processor.read([picture]),
        mm_token_type_ids=processor.token_types(ids),
        files=[file.getvalue()],
        short_ids=short,
    )
    return Request(prompt_ids=ids, sampling=GREEDY, seed=number, name=f"prompt {number}", images=images)
