"""Images of rows: found in messages and columns, and counted in tokens."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from lightning.fabric.utilities import rank_zero_warn

from verl_lightning.data.files import Row
from verl_lightning.data.image_files import ImageFile, ImagesConfig, frame_files, image_file
from verl_lightning.data.media import IMAGE_COLUMNS, VIDEO_COLUMNS, has_value, refuse_lost, refuse_media
from verl_lightning.data.messages import IMAGE_MARK, Message, clean_messages
from verl_lightning.pictures import ImageReader
from verl_lightning.types import ImageInputs

PLACEHOLDER = "<image>"
"""Text that stands for the next image of a row's column, as in verl's data."""

Span = tuple[int, int]


def _listed(row: Row, columns: Sequence[str]) -> list[Any]:
    """The pictures of a row's column: a list, its JSON text, or a single one."""
    found = [name for name in columns if has_value(row.values.get(name))]
    if len(found) > 1:
        raise ValueError(f"There are both `{found[0]}` and `{found[1]}` in {row.name}. Put all into `{columns[0]}`.")
    given: Any = row.values[found[0]] if found else []
    if isinstance(given, str) and given.lstrip().startswith("["):
        try:
            given = json.loads(given)
        except json.JSONDecodeError as error:
            place = f"`{found[0]}` in {row.name}"
            raise ValueError(
                f"Expected a list of images as JSON text in {place}, but can't read it: {error}."
            ) from error
    return list(given) if isinstance(given, list | tuple) else [given]


class RowImages:
    """Images of one row, in the order in which its messages show them; each frame of a video is one.

    Args:
        row: Row, whose columns ``images`` and ``videos`` may hold some, for the placeholders of its messages.
        config: Places where they may be.

    Raises:
        ValueError: If a column is damaged, or there are two of the same.
    """

    def __init__(self, row: Row, config: ImagesConfig) -> None:
        self.row = row
        self.config = config
        self._columns = {"image": _listed(row, IMAGE_COLUMNS)}
        self._columns["video"] = _listed(row, VIDEO_COLUMNS) if config.video_frames else []
        self._places = dict.fromkeys(self._columns, 0)
        self._videos = 0
        self._shown: list[Any] = []

    def in_text(self, text: str) -> str:
        """Returns a text with marks in place of each placeholder; without a column it has none."""
        if PLACEHOLDER in text and not self._columns["image"]:
            rank_zero_warn(
                f"There is `{PLACEHOLDER}` in messages whose row has no column `images`, so it is a text like any"
                " other. If images were meant, name their column by `data.columns: {images: ...}`."
            )
        return re.sub(
            "<(image|video)>", lambda found: self._next(found[1]) if self._columns[found[1]] else found[0], text
        )

    @staticmethod
    def is_media(part: dict[str, Any]) -> bool:
        """Tells whether a message's part is an image or a video."""
        return kind_of_part(part) is not None

    def in_part(self, part: dict[str, Any]) -> str | None:
        """Returns marks for a message's part that is an image or a video; None for any other part.

        Raises:
            ValueError: If the part names another of the column than the next.
        """
        kind = kind_of_part(part)
        if kind is None or (kind == "video" and not self.config.video_frames):
            return None
        rest = {key: value for key, value in part.items() if key not in ("type", "text", "index")}
        if rest:
            return self._marks(kind, rest)
        if (place := part.get("index")) not in (None, self._places[kind]):
            raise ValueError(
                f"The parts of {self.row.name} name the {kind} of the index {place}, where that of the index"
                f" {self._places[kind]} is next. Put the column's {kind}s in the order in which they are shown."
            )
        return self._next(kind)

    def files(self) -> list[ImageFile]:
        """Returns the images, once all messages are looked through.

        Raises:
            ValueError: If placeholders and images do not match, or an image can't be read.
        """
        for kind, column in self._columns.items():
            if (places := self._places[kind]) != len(column):
                raise ValueError(
                    f"The messages of {self.row.name} have {places} places for {kind}s (`<{kind}>` in a text, or a part"
                    f' {{"type": "{kind}"}}), but its column holds {len(column)} {kind}s. Make them as many; turns of'
                    " the assistant have no such places."
                )
        return [self._file(source, number) for number, source in enumerate(self._shown, 1)]

    def _next(self, kind: str) -> str:
        """Marks for the next of a column."""
        column, place = self._columns[kind], self._places[kind]
        self._places[kind] += 1
        return self._marks(kind, column[place]) if place < len(column) else IMAGE_MARK  # which `files` refuses

    def _marks(self, kind: str, source: Any) -> str:
        if kind == "image":
            self._shown.append(source)
            return IMAGE_MARK
        self._videos += 1
        frames = frame_files(source, f"video {self._videos} in {self.row.name}", self.row.file, self.config)
        self._shown += frames
        return IMAGE_MARK * len(frames)

    def _file(self, source: Any, number: int) -> ImageFile:
        if isinstance(source, ImageFile):
            return source
        return image_file(
            source, f"image {number} of {len(self._shown)} in {self.row.name}", self.row.file, self.config
        )


def kind_of_part(part: dict[str, Any]) -> str | None:
    """Returns ``image`` or ``video`` for a message's part that is one; None for any other part."""
    kind = str(part.get("type", next(iter(part), None)))
    return kind.removesuffix("_url") if kind in ("image", "image_url", "video", "video_url") else None


def messages_and_images(
    row: Row, column: str, processor: ImageReader | None, config: ImagesConfig = ImagesConfig()
) -> tuple[list[Message], tuple[ImageFile, ...]]:
    """Returns the clean messages of a row's column, and the images that they show.

    Args:
        row: Row with messages.
        column: Column of the messages.
        processor: Processor of a model that reads images; None for a text model, which has none.
        config: Places where images may be.

    Raises:
        ValueError: If the messages or an image are not as described, or the row has what the model can't read.
    """
    refuse_media(row, images=processor is None, videos=processor is None or not config.video_frames)
    images = None if processor is None else RowImages(row, config)
    messages = clean_messages(row.values[column], name=f"`{column}` in {row.name}", images=images)
    files = () if images is None else tuple(images.files())
    refuse_lost(row, shows=bool(files))
    return messages, files


def read_images(files: Sequence[ImageFile], processor: ImageReader) -> ImageInputs | None:
    """Returns the images of one sequence as its model reads them; None without images."""
    return processor.read([file.decode() for file in files]) if files else None


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
    written = [_written(image, processor) for image in images]
    ends = list(accumulate(len(piece) + len(mark) for piece in pieces[:-1]))
    shifts = [0, *accumulate(len(replacement) - len(mark) for replacement in written)]
    expanded = "".join(part for pair in zip(pieces, [*written, ""], strict=True) for part in pair)

    def moved(border: int) -> int:
        return border + shifts[bisect_right(ends, border)]

    return expanded, [(moved(begin), moved(end)) for begin, end in spans]


def _written(image: ImageFile, processor: ImageReader) -> str:
    """The tokens that stand for an image, as text."""
    try:
        return processor.text(image.size)
    except (ValueError, ZeroDivisionError) as error:
        width, height = image.size
        raise ValueError(
            f"The model's processor refuses the {image.name}, of {width} by {height} pixels: {error}. Give it another"
            " size, or leave the row out."
        ) from error


def without_marks(text: str) -> str:
    """The text for people and reward functions: with verl's placeholder for each image."""
    return text.replace(IMAGE_MARK, PLACEHOLDER)
