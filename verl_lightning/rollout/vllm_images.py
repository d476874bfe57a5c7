"""Prompts with images as vLLM takes them, and a check that it reads them as the trainer does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl_lightning.faults import RunError
from verl_lightning.pictures import decode_image
from verl_lightning.rollout.base import Request


def vllm_prompt(request: Request) -> dict[str, Any]:
    """Returns the prompt of a request: its tokens, with one placeholder for each image, and the images."""
    if request.images is None:
        return {"prompt_token_ids": request.prompt_ids}
    images = request.images
    rest = request.prompt_ids[len(images.mm_token_type_ids) :]  # of a conversation's later turns
    pictures = [decode_image(file) for file in images.files]
    return {"prompt_token_ids": [*images.short_ids, *rest], "multi_modal_data": {"image": pictures}}


def check_written_out(name: str, expected: Sequence[int] | None, found: Sequence[int] | None) -> None:
    """Checks that vLLM has put as many tokens in the place of each image as the trainer, and the same.

    Args:
        name: The user's name for the request.
        expected: The trainer's prompt; None for one of text alone.
        found: vLLM's prompt.

    Raises:
        RunError: If they differ.
    """
    if expected is None or list(found or ()) == list(expected):
        return
    raise RunError(
        f"vLLM reads {name} as {len(found or ())} tokens, but the trainer as {len(expected)}: the two write out images"
        " otherwise. Give vLLM's process the same `transformers` and the model's own processor files."
    )
