"""Libraries' errors about a model's folder, put into the user's words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from verl_lightning.faults import is_meant_for_user
from verl_lightning.needs import adapter_as_model, missing_model, no_model

LIBRARY_ERRORS = (
    *(ArithmeticError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError, ValueError),
    *(SafetensorError, StrictDataclassError),
)
"""Errors that transformers and what it calls raise over files and settings that are not as they expect."""


@contextmanager
def model_must_be_at(path: str) -> Iterator[None]:
    """Turns a library's errors into the user's words while it reads a model from a path; do nothing else within.

    Raises:
        ValueError: If the library can't read the model, with what to change.
    """
    if (complaint := adapter_as_model(path)) is not None:  # transformers would load its base beneath it
        raise ValueError(complaint)
    try:
        yield
    except LIBRARY_ERRORS as error:
        is_ours = is_meant_for_user(error) and not isinstance(error, OSError)  # which says why, and not of which path
        if is_ours or isinstance(error, torch.OutOfMemoryError):
            raise
        raise ValueError(missing_model(path) or no_model(path, first_line(error))) from error


def first_line(error: BaseException) -> str:
    """Returns the beginning of an error's message, before libraries' lists; the error's type if it has no message.

    A line that ends in a colon says nothing without the next.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    size = next((index + 1 for index, line in enumerate(lines) if not line.endswith(":")), len(lines))
    return " ".join(lines[:size]).rstrip(".") or type(error).__name__
