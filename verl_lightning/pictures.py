"""Pictures as files: decoded, written as text for browsers, made small; and what reads them for a model."""

from __future__ import annotations

import base64
import io
import mimetypes
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from verl_lightning.types import ImageInputs

if TYPE_CHECKING:
    from PIL.Image import Image


class ImageReader(Protocol):
    """What makes a model's inputs of pictures; see `models.processor.ImageProcessor`."""

    image_token_id: int
    """Token that stands for a part of an image."""

    @property
    def placeholder(self) -> str:
        """Text that a chat template writes for an image."""

    @property
    def image_token(self) -> str:
        """Text of the token that stands for a part of an image."""

    def read(self, images: Sequence[Image]) -> ImageInputs:
        """Returns images of one sequence as the model reads them."""

    def text(self, size: tuple[int, int]) -> str:
        """Returns the text of the tokens that stand for an image, which depends on its width and height alone."""

    def token_types(self, ids: Sequence[int]) -> list[int]:
        """Returns 1 for each token of a prompt that stands for a part of an image, and 0 for text."""


def decode_image(data: bytes) -> Image:
    """Decodes a picture's file, as cameras turned it; transparent parts become white."""
    from PIL import Image, ImageOps

    with Image.open(io.BytesIO(data)) as opened:
        picture = ImageOps.exif_transpose(opened)
        if picture.mode.startswith("I;16"):  # of which Pillow would make white whatever is above 255
            picture = picture.convert("I").point(lambda level: level / 257).convert("L")
        if not picture.has_transparency_data:
            return picture.convert("RGB")
        picture = picture.convert("RGBA")
        white = Image.new("RGBA", picture.size, "white")
        return Image.alpha_composite(white, picture).convert("RGB")


def encode_image(picture: Image) -> bytes:
    """Writes a picture as a PNG file."""
    file = io.BytesIO()
    picture.save(file, "png")
    return file.getvalue()


def frames_of(data: bytes, most: int) -> list[Image]:
    """Reads frames of an animated picture, evenly spread; the only one of a still picture.

    Args:
        data: The file.
        most: Most frames.
    """
    from PIL import Image

    frames = []
    with Image.open(io.BytesIO(data)) as opened:
        for index in spread(getattr(opened, "n_frames", 1), most):
            opened.seek(index)
            frames.append(opened.convert("RGBA"))
    return frames


def spread(count: int, most: int) -> list[int]:
    """Returns positions of at most so many of some things in a row, evenly spread, with the first and the last."""
    if count <= most:
        return list(range(count))
    return [round(index * (count - 1) / max(1, most - 1)) for index in range(most)]


def data_url(data: bytes, kind: str) -> str:
    """Writes a picture's file as text, which a browser shows.

    Args:
        data: The file.
        kind: Name of its format, such as ``png``.
    """
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def as_data_url(source: str) -> str:
    """Writes the picture at a path as text; a data URL stays one."""
    if source.startswith("data:"):
        return source
    kind = (mimetypes.guess_type(source)[0] or "image/png").removeprefix("image/")
    return data_url(Path(source).read_bytes(), kind)


def from_data_url(text: str) -> bytes | None:
    """Reads the file in a data URL of base64 text; None if the text is none.

    Raises:
        binascii.Error: If it is damaged.
    """
    begin = re.match(r"data:(image/[\w.+-]+|application/octet-stream)?(;[\w.+-]+=[^;,]*)*;base64,", text, re.IGNORECASE)
    return None if begin is None else base64.b64decode(re.sub(r"\s", "", text[begin.end() :]), validate=True)


def thumbnail(source: str, side: int = 96) -> str:
    """Returns a small copy of a picture as a data URL.

    Args:
        source: Path or data URL.
        side: Most pixels of a side.
    """
    data = from_data_url(source)
    picture = decode_image(Path(source).read_bytes() if data is None else data)
    picture.thumbnail((side, side))
    return data_url(encode_image(picture), "png")
