"""Opens files of tensors such that nothing in them can run, with refusals that name the file in one sentence."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from verl_lightning.models.digests import DamagedFileError

UNREADABLE = (RuntimeError, EOFError, OSError, ValueError, KeyError, TypeError, AttributeError, pickle.UnpicklingError)
"""Errors that torch raises for files that are not its own, or not whole."""


def load_values(source: Any, path: Path, *, weights_only: bool = True, way_out: str = "", **options: Any) -> Any:
    """Reads a file by `torch.load`, with refusals that name the file in one sentence.

    Args:
        source: File that `torch.load` reads.
        path: Path of the file, for messages.
        weights_only: False reads any object, which may run code.
        way_out: Advice about a file that holds more than values, as a sentence with a leading space.
        options: Further options of `torch.load`.

    Raises:
        DamagedFileError: If the file can't be read.
        FileNotFoundError: If the file is not there.
    """
    try:
        return torch.load(source, weights_only=weights_only, **({"map_location": "cpu"} | options))
    except FileNotFoundError:
        raise
    except UNREADABLE as error:
        raise DamagedFileError(path, reason_of(error, way_out)) from error


def open_safetensors(file: Path) -> safe_open:
    """Opens a file of tensors, of which only the header is read yet.

    Raises:
        DamagedFileError: If the file is not whole.
    """
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise DamagedFileError(file, f"is damaged, or not the whole of a file of weights ({error}).") from error


def reason_of(error: Exception, way_out: str = "") -> str:
    """Returns the reason why `torch.save`'s file can't be read, as the rest of a sentence that begins with its name."""
    text = str(error)
    if match := re.search(r"GLOBAL ([\w.]+)|(?:unrecognized function|but got) (<[^>]+>)", text):
        name = match[1] or match[2]
        return f"holds more than values and tensors (`{name}`). It may be made to run code, and is not read.{way_out}"
    first_line = next(iter(text.strip().splitlines()), repr(error))
    return f"can't be read as a file of `torch.save` ({first_line})."
