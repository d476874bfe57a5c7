"""The lines in the pipes between pool and workers: one JSON value a line, never pickle."""

from __future__ import annotations

import base64
import json
from array import array
from collections.abc import Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from verl_lightning.rewards.base import RewardSample


def encode_samples(samples: Sequence[RewardSample]) -> bytes:
    """Writes samples as one line of JSON.

    Values that JSON lacks become: arrays and tensors nested lists, sets sorted lists, dates ISO 8601 text, durations
    seconds, bytes base64 text, decimals and UUIDs text. Keys become text.

    Args:
        samples: Samples as read from the data set.

    Returns:
        ASCII with a line feed at its end and nowhere else.

    Raises:
        TypeError: If a sample has a value of another type.
    """
    # Tokens as bytes: a list of them would take longer to write and to read than all else.
    return encode_line([vars(each) | {"token_ids": array("I", each.token_ids).tobytes()} for each in samples])


def decode_samples(line: bytes) -> list[RewardSample]:
    """Reads what ``encode_samples`` wrote; values that JSON lacks stay what they became."""
    return [RewardSample(**fields | {"token_ids": _read_ids(fields["token_ids"])}) for fields in json.loads(line)]


def _read_ids(text: str) -> list[int]:
    """Reads the token ids that `encode_samples` wrote."""
    ids = array("I")
    ids.frombytes(base64.b64decode(text))
    return ids.tolist()


def add_tag(tag: bytes, line: bytes) -> bytes:
    """Marks a line so that it can be told from whatever else comes out of the same pipe."""
    return tag + b" " + line


def split_tag(line: bytes) -> tuple[bytes, bytes]:
    """Splits a line into its tag and the line that the tag was added to."""
    tag, _, rest = line.partition(b" ")
    return tag, rest


def encode_line(value: Any) -> bytes:
    """Writes any value as one line of JSON, by the rules of ``encode_samples``."""
    return _ENCODER.encode(value).encode("ascii") + b"\n"


def _to_plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # NumPy's scalars and arrays, tensors
        is_time = getattr(getattr(value, "dtype", None), "kind", "") in ("M", "m")
        return value.astype(str).tolist() if is_time else value.tolist()
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, Decimal | UUID):
        return str(value)
    raise TypeError(
        f"A reward function gets its sample as JSON, and a `{type(value).__name__}` can't be written so."
        " Convert it in the data set to text, numbers, lists or dicts, or leave the column out."
    )


_ENCODER = json.JSONEncoder(default=_to_plain, separators=(",", ":"))
