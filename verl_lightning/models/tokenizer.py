"""The one tokenizer of a run, checked when it is loaded for all that later stages need of it."""

from __future__ import annotations

from pathlib import Path

from lightning.fabric.utilities import rank_zero_info
from transformers import PreTrainedTokenizerBase

from verl_lightning.models.digests import DamagedFileError
from verl_lightning.models.library_errors import LIBRARY_ERRORS, first_line, model_must_be_at
from verl_lightning.models.pretrained import ForeignCodeError, read_config, read_tokenizer
from verl_lightning.needs import missing_model


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Loads a tokenizer that pads on the left and can turn messages into text.

    A tokenizer without a pad token pads with its end-of-sequence token. That is safe: every mask in this package is
    made from positions, never from token values. Code from the hub is never run.

    Args:
        path: A Hugging Face folder, or a model's name on the hub.

    Returns:
        The tokenizer, with ``padding_side="left"``, a chat template and a pad token.

    Raises:
        ValueError: If nothing can be loaded from ``path``, or what was loaded has no chat template, or has neither a
            pad token nor an end-of-sequence token.
    """
    tokenizer = _load(str(path))
    if not tokenizer.chat_template:
        raise ValueError(
            f"The tokenizer of `{path}` has no chat template, so messages can't be turned into text."
            " Use an instruct model, or put the template into the folder as `chat_template.jinja`."
        )
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ValueError(
                f"The tokenizer of `{path}` has neither a pad token nor an end-of-sequence token, so batches can't be"
                " padded and responses can't end. Set `pad_token` and `eos_token` in its `tokenizer_config.json`."
            )
        rank_zero_info(f"The tokenizer of `{path}` has no pad token and pads with {tokenizer.eos_token!r} instead.")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _load(path: str) -> PreTrainedTokenizerBase:
    is_folder = Path(path).is_dir()
    if not is_folder and (complaint := missing_model(path)) is not None:
        raise ValueError(complaint)
    try:
        return read_tokenizer(path, padding_side="left")
    except (DamagedFileError, ForeignCodeError):
        raise
    except LIBRARY_ERRORS as error:
        if Path(path, "config.json").is_file():
            with model_must_be_at(path):  # what is wrong with the model's own settings says more
                read_config(path)
        reason = (
            "is a folder without a tokenizer that can be loaded. Save one there with `tokenizer.save_pretrained`"
            if is_folder
            else "is neither a folder on this machine nor a model that could be found on the Hugging Face hub or in its"
            " cache. Correct the path, or download the model first"
        )
        raise ValueError(f"`{path}` {reason} ({first_line(error)})") from error
