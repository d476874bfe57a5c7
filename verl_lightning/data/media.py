"""Pictures, video and sound of rows that would get lost: refused by the name of their column."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from verl_lightning.data.files import Row
from verl_lightning.data.image_files import looks_like_media

IMAGE_COLUMNS = ("images", "image")
VIDEO_COLUMNS = ("videos", "video")
_SOUND_COLUMNS = ("audios", "audio")
_READ_BY_MODELS = ("mm_token_type_ids", "multi_modal_data", "multi_modal_inputs", "pixel_values")

_TEXT_ALONE = (
    "only text can be learnt from, and images by a model that reads some (docs/vision.md), no sound, and videos as"
    " frames alone (`data.images.video_frames`). Leave such rows out, or the column, if the messages do without it."
)
_PLAIN = "texts that no chat template touches show none. Write prompt and responses as messages."
_NAME = re.compile(r"(image|img|picture|photo|video|audio|sound)s?_?(path|file|url|byte|data)s?(_?\d+)?")


def refuse_media(row: Row, *, images: bool, videos: bool, plain: bool = False) -> None:
    """Refuses a row with columns of pictures, video or sound that nobody reads.

    Args:
        row: Row to look at.
        images: True refuses the columns of images too.
        videos: True refuses the columns of videos too.
        plain: True where the row is text that no chat template touches.

    Raises:
        ValueError: If one of these columns is not empty.
    """
    read = (*(() if images else IMAGE_COLUMNS), *(() if videos else VIDEO_COLUMNS))
    for column in (*IMAGE_COLUMNS, *VIDEO_COLUMNS, *_SOUND_COLUMNS, *_READ_BY_MODELS):
        if column not in read and has_value(row.values.get(column)):
            reason = _PLAIN if plain else _TEXT_ALONE
            raise ValueError(f"The column `{column}` in {row.name} is not empty, but {reason}")


def refuse_lost(row: Row, *, shows: bool) -> None:
    """Refuses a row with pictures or sound in a column that nobody knows, or without images but with their addresses.

    Args:
        row: Row to look at.
        shows: True if the row's messages show images.

    Raises:
        ValueError: If there is such a column.
    """
    known = [row.values.get(column) for column in (*IMAGE_COLUMNS, *VIDEO_COLUMNS)]
    for column, value in row.values.items():
        if not has_value(value) or any(value is each for each in known):
            continue
        is_address = not shows and isinstance(value, str | list) and _NAME.fullmatch(column) is not None
        if is_address or looks_like_media(value):
            raise ValueError(
                f"The column `{column}` in {row.name} seems to hold pictures or sound, which nobody would read. If it"
                f" is the images of the messages, set `data.columns: {{images: {column}}}`; else leave the column out."
            )


def without_media(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row's values without its pictures and videos, also under the names that their columns had before."""
    known = [values.get(column) for column in (*IMAGE_COLUMNS, *VIDEO_COLUMNS)]
    found = [each for each in known if has_value(each)]
    return {name: value for name, value in values.items() if not any(value is each for each in found)}


def has_value(value: Any) -> bool:
    """Tells whether a column has something in a row: no empty text or list, and not null."""
    return value is not None and not (isinstance(value, str | bytes | list | tuple | dict) and not value)
