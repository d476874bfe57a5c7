"""The one door to Hugging Face repositories: nothing in them is executed, and our own folders are read as written."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
)
from transformers.utils.hub import cached_file

from verl_lightning.compat.transformers import (
    asks_for_code,
    causal_model_class,
    read_image_processor,
    reads_images_only_as_whole,
)
from verl_lightning.models.digests import WEIGHTS_SUFFIX, check_folder

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files that say how a model reads images and films, beside those of its tokenizer."""

AutoClass = type[AutoModel] | type[AutoModelForCausalLM]


class ForeignCodeError(ValueError):
    """A model repository can't be read without running code that it holds."""


def read_config(path: str) -> PreTrainedConfig:
    """A model's `config.json`.

    Args:
        path: Folder or hub name.

    Raises:
        DamagedFileError: If the folder is one of ours, and not as it was written.
        ForeignCodeError: If the model has code of its own.
        OSError: If there is none.
        ValueError: If transformers does not know such a model.
    """
    with nothing_executed(path):
        try:
            config: PreTrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=False)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            if isinstance(error, ValueError) and asks_for_code(error):
                raise
            reason = next(iter(str(error).strip().splitlines()), repr(error))
            raise ValueError(
                f"`path: {path}` is no model that transformers knows: its `config.json` can't be read ({reason})."
            ) from error
    return config


def read_generation_config(path: str) -> GenerationConfig | None:
    """A model's `generation_config.json`; None if it has none.

    Raises:
        DamagedFileError: If the folder is one of ours, and not as it was written.
    """
    with nothing_executed(path):
        try:
            return GenerationConfig.from_pretrained(path)
        except OSError:
            return None


def read_tokenizer(path: str, **options: Any) -> PreTrainedTokenizerBase:
    """Read a tokenizer.

    Args:
        path: Folder or hub name.
        options: Further options of transformers.

    Raises:
        DamagedFileError: If the folder is one of ours, and not as it was written.
        OSError: If there is no tokenizer.
        ForeignCodeError: If the tokenizer has code of its own.
    """
    with nothing_executed(path):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, trust_remote_code=False, **options)
    return tokenizer


def read_processor(path: str) -> ProcessorMixin:
    """Read the processor of a model that takes images: its tokenizer and its image processor.

    Args:
        path: Folder or hub name.

    Raises:
        DamagedFileError: If the folder is one of ours, and not as it was written.
        OSError: If there is no processor.
        ForeignCodeError: If the processor has code of its own.
    """
    with nothing_executed(path):
        return read_image_processor(path, read_config(path))


def copy_processor(path: str, folder: Path) -> None:
    """Copy the files that say how a model reads images, as they are.

    Args:
        path: Folder or hub name of the model that a run began with.
        folder: Folder to write to.

    Raises:
        ForeignCodeError: If the model has code of its own.
    """
    with nothing_executed(path):
        for name in PROCESSOR_FILES:
            try:
                found = cached_file(path, name)
            except OSError:  # not all models have all of them
                continue
            if found is not None:
                shutil.copyfile(found, folder / name)


def read_model(auto_class: AutoClass, path: str, **options: Any) -> tuple[PreTrainedModel, list[str]]:
    """Read a model with its weights, and the names of weights that its files don't hold.

    Args:
        auto_class: One of transformers' auto classes.
        path: Folder or hub name.
        options: Further options of transformers.

    Raises:
        DamagedFileError: If the folder is one of ours, and not as it was written.
        ForeignCodeError: If it has code of its own.
        OSError: If there is none.
        ValueError: If transformers does not know such a model.
    """
    config = read_config(path)
    check_causal(path, config)
    check_weights(path)
    chosen: Any = fitting_class(auto_class, config)
    with nothing_executed(path):
        loaded: Any = chosen.from_pretrained(path, trust_remote_code=False, output_loading_info=True, **options)
    return loaded[0], sorted(loaded[1]["missing_keys"])


def make_model(auto_class: AutoClass, path: str, **options: Any) -> PreTrainedModel:
    """Make a model without reading its weights: those that it holds are made up.

    Args:
        auto_class: One of transformers' auto classes.
        path: Folder or hub name.
        options: Further options of transformers.

    Raises:
        DamagedFileError: If the folder is one of ours, and not as it was written.
        ForeignCodeError: If the model has code of its own.
    """
    config = read_config(path)
    check_causal(path, config)
    chosen: Any = fitting_class(auto_class, config)
    with nothing_executed(path):
        model: PreTrainedModel = chosen.from_config(config, trust_remote_code=False, **options)
    return model


def fitting_class(auto_class: AutoClass, config: PreTrainedConfig) -> type[Any]:
    """Return the auto class that knows a model: models with a vision tower have one of their own."""
    is_policy = auto_class is AutoModelForCausalLM
    return AutoModelForImageTextToText if is_policy and reads_images_only_as_whole(config) else auto_class


def check_causal(path: str, config: PreTrainedConfig) -> None:
    """Refuse a model whose tokens are not predicted from those before them alone.

    Raises:
        ValueError: If it is one.
    """
    kind = config.model_type
    if causal_model_class(config) is None:
        raise ValueError(f"`path: {path}` is a `{kind}`, of which transformers has no causal language model.")
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False):
        raise ValueError(
            f"`path: {path}` is a `{kind}`, an encoder: its tokens see those after them, which they would learn to"
            " copy. Give a causal language model."
        )


def check_weights(path: str) -> None:
    """Compare the weights of a folder of ours with what was written; a second read, as transformers does its own.

    Raises:
        DamagedFileError: If they differ.
    """
    folder = Path(path)
    check_folder(folder, [file.name for file in folder.glob(f"*{WEIGHTS_SUFFIX}")])


@contextmanager
def nothing_executed(path: str) -> Iterator[None]:
    """Refuse, within the context, a path that transformers can't read without running code that the path holds.

    Raises:
        DamagedFileError: If the folder is one of ours, and its small files are not as they were written.
        ForeignCodeError: If nothing can be read without running code.
    """
    check_folder(Path(path))
    try:
        yield
    except ValueError as error:
        if not asks_for_code(error):
            raise
        raise ForeignCodeError(
            f"`path: {path}` holds code that transformers would have to run (`auto_map` in its configuration). Code"
            " from model repositories is never executed: use a model that transformers has built in."
        ) from error
