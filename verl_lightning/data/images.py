"""Images of rows: found in messages and columns, read from files or text, and counted in tokens."""

from __future__ import annotations

import binascii
import io
import json
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.utilities import rank_zero_warn

from verl_lightning.data.files import Row
from verl_lightning.data.messages import IMAGE_MARK, Message, clean_messages
from verl_lightning.pictures import ImageReader, data_url, decode_image, from_data_url
from verl_lightning.types import ImageInputs

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_COLUMNS = ("images", "image")
PLACEHOLDER = "<image>"
"""Text that stands for the next image of a row's column, as in verl's data."""

Span = tuple[int, int]

_EXAMPLES = (
    "a path relative to the data file, bytes, a data URL such as `data:image/png;base64,...`, or an object with one of"
    " these as `image`, `path`, `bytes` or `url`"
)


@dataclass(frozen=True, kw_only=True)
class ImageFile:
    """An image of a row, as a file has it: compressed, so that all of a data set fit into memory."""

    content: bytes | Path
    """The file, or where it is."""

    size: tuple[int, int]
    """Width and height in pixels."""

    kind: str
    """Name of its format, such as ``png``."""

    @property
    def source(self) -> str:
        """The image for reward functions and people: its path, or a data URL."""
        return data_url(self.content, self.kind) if isinstance(self.content, bytes) else str(self.content.absolute())

    @property
    def data(self) -> bytes:
        """The file's bytes."""
        return self.content if isinstance(self.content, bytes) else self.content.read_bytes()

    def decode(self) -> Image:
        """The image in red, green and blue."""
        return decode_image(self.data)


def _listed(row: Row) -> list[Any]:
    """The images of a row's column: a list, its JSON text, or a single one."""
    found = [name for name in IMAGE_COLUMNS if row.values.get(name)]
    if len(found) > 1:
        raise ValueError(f"There are both `images` and `image` in {row.name}. Put all into `images`.")
    given: Any = row.values[found[0]] if found else []
    if isinstance(given, str) and given.lstrip().startswith("["):
        try:
            given = json.loads(given)
        except json.JSONDecodeError as error:
            place = f"`{found[0]}` in {row.name}"
            raise ValueError(
                f"Expected a list of images as JSON text in {place}, but can't read it: {error}."
            ) from error
    return given if isinstance(given, list) else [given]


class RowImages:
    """Images of one row, in the order in which its messages show them.

    Args:
        row: Row, whose column ``images`` or ``image`` may hold some, for the placeholders of its messages.

    Raises:
        ValueError: If the column is damaged, or there are two.
    """

    def __init__(self, row: Row) -> None:
        self.row = row
        self.column = _listed(row)
        self._shown: list[Any] = []  # None for the next of the column

    def in_text(self, text: str) -> str:
        """Returns a text with a mark in place of each placeholder; without a column it has none."""
        if not self.column:
            if PLACEHOLDER in text:
                rank_zero_warn(
                    f"There is `{PLACEHOLDER}` in messages whose row has no column `images`, so it is a text like any"
                    " other. If images were meant, name their column by `data.columns: {images: ...}`."
                )
            return text
        self._shown += [None] * text.count(PLACEHOLDER)
        return text.replace(PLACEHOLDER, IMAGE_MARK)

    def in_part(self, part: dict[str, Any]) -> str | None:
        """Returns a mark for a message's part that is an image; None for any other part."""
        kind = part.get("type", next(iter(part), None))
        if kind not in ("image", "image_url"):
            return None
        rest = {key: value for key, value in part.items() if key not in ("type", "text")}
        self._shown.append(rest or None)
        return IMAGE_MARK

    def files(self) -> list[ImageFile]:
        """Returns the images, once all messages are looked through.

        Raises:
            ValueError: If placeholders and images do not match, or an image can't be read.
        """
        column, wanted = iter(self.column), sum(source is None for source in self._shown)
        if wanted != len(self.column):
            raise ValueError(
                f"The messages of {self.row.name} have {wanted} places for images (`{PLACEHOLDER}` in a text, or a part"
                f' {{"type": "image"}}), but its column holds {len(self.column)} images. Make them as many.'
            )
        sources = [next(column) if source is None else source for source in self._shown]
        return [image_file(source, self._name(number), self.row.file) for number, source in enumerate(sources, 1)]

    def _name(self, number: int) -> str:
        return f"image {number} of {len(self._shown)} in {self.row.name}"


def messages_and_images(
    row: Row, column: str, processor: ImageReader | None
) -> tuple[list[Message], tuple[ImageFile, ...]]:
    """Returns the clean messages of a row's column, and the images that they show.

    Args:
        row: Row with messages.
        column: Column of the messages.
        processor: Processor of a model that reads images; None for a text model, which has none.

    Raises:
        ValueError: If the messages or an image are not as described.
    """
    images = None if processor is None else RowImages(row)
    messages = clean_messages(row.values[column], name=f"`{column}` in {row.name}", images=images)
    return messages, () if images is None else tuple(images.files())


def read_images(files: Sequence[ImageFile], processor: ImageReader) -> ImageInputs | None:
    """Returns the images of one sequence as its model reads them; None without images."""
    return processor.read([file.decode() for file in files]) if files else None


def image_file(source: Any, name: str, beside: str) -> ImageFile:
    """Finds an image and reads its size.

    Args:
        source: Path, bytes, data URL, or an object with one of these.
        name: Name of the image in error messages.
        beside: Path of the data file, to whose folder paths are relative.

    Raises:
        ValueError: If there is no such image, or it lies in the network.
    """
    from PIL import Image, UnidentifiedImageError

    content = _content(source, name, beside)
    try:
        with Image.open(io.BytesIO(content) if isinstance(content, bytes) else content) as opened:
            (width, height), kind = opened.size, str(opened.format).lower()
            if opened.getexif().get(0x0112, 1) in (5, 6, 7, 8):  # to be turned by a quarter
                width, height = height, width
    except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(
            f"The {name} can't be read as a picture: {error}. Correct the file, or leave the row out."
        ) from error
    return ImageFile(content=content, size=(width, height), kind=kind)


def _content(source: Any, name: str, beside: str) -> bytes | Path:
    if isinstance(source, dict):
        found = [source[key] for key in ("bytes", "image", "path", "url", "image_url") if source.get(key)]
        if found:
            return _content(found[0], name, beside)
    if isinstance(source, bytes | bytearray | memoryview):
        return bytes(source)
    if not isinstance(source, str) or not source:
        raise ValueError(f"Expected the {name} to be {_EXAMPLES}; got {str(source)[:80]!r}.")
    try:
        if (data := from_data_url(source)) is not None:
            return data
    except binascii.Error as error:
        raise ValueError(f"The {name} is a data URL whose base64 text is damaged: {error}.") from error
    if re.match(r"[a-z][a-z0-9+.-]+://", source, re.IGNORECASE) and not source.startswith("file://"):
        raise ValueError(
            f"The {name} is the address `{source[:80]}`, and nothing is fetched from the network. Download it, and give"
            f" {_EXAMPLES}."
        )
    path = Path(beside).parent / source.removeprefix("file://")
    if not path.is_file():
        raise ValueError(f"The {name} is missing: there is no file `{path}`. Paths are relative to the data file.")
    return path


def expand(
    text: str, images: Sequence[ImageFile], processor: ImageReader, *, spans: Sequence[Span] = (), name: str
) -> tuple[str, list[Span]]:
    """Writes out each image's placeholder in a rendered text, as all tokens that stand for the image.

    Args:
        text: Text that the chat template has rendered.
        images: Images of the row, in their order.
        processor: Processor of the model.
        spans: First character of some stretches and the one after their last.
        name: Name of the row in error messages.

    Returns:
        The text, and the same stretches in it.

    Raises:
        ValueError: If the text has more or fewer placeholders than images.
    """
    if not images:
        return text, list(spans)
    pieces, mark = text.split(processor.placeholder), processor.placeholder
    token = processor.image_token
    if len(pieces) - 1 != len(images) or any(token in piece for piece in pieces):
        raise ValueError(
            f"The chat template writes {len(pieces) - 1} placeholders `{mark}` for the {len(images)} images of"
            f" {name}. Either its messages say `{mark}` or `{token}` themselves, which stand for images alone, or the"
            " template leaves images out; take the words out, or use the model's own template."
        )
    written = [processor.text(image.size) for image in images]
    ends = list(accumulate(len(piece) + len(mark) for piece in pieces[:-1]))
    shifts = [0, *accumulate(len(replacement) - len(mark) for replacement in written)]
    expanded = "".join(part for pair in zip(pieces, [*written, ""], strict=True) for part in pair)

    def moved(border: int) -> int:
        return border + shifts[bisect_right(ends, border)]

    return expanded, [(moved(begin), moved(end)) for begin, end in spans]


def without_marks(text: str) -> str:
    """The text for people and reward functions: with verl's placeholder for each image."""
    return text.replace(IMAGE_MARK, PLACEHOLDER)
