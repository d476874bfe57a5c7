"""JSON that every reader takes, in files that a kill leaves whole."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Writes a value as JSON, with null for numbers that are not finite: Python's own ``NaN`` is no JSON.

    Args:
        value: Made of mappings, lists, tuples, text, numbers, bools and None.
        indent: Spaces of a level; None writes one line.
    """
    return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False, indent=indent)


def write_whole(path: Path, text: str) -> None:
    """Writes a file that a kill leaves as it was before; a torn table would end each later run in its folder."""
    draft = path.with_name(f".{path.name}.tmp")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
