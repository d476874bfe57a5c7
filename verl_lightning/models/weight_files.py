"""Reads a model's weights from its Hugging Face folder a layer at a time, under the names that the model has."""

from __future__ import annotations

import zipfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_INDEX_NAME, WEIGHTS_NAME, logging
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from verl_lightning.compat.transformers import convert_weights
from verl_lightning.models.hf_folder import layer_of
from verl_lightning.models.torch_files import load_values, open_safetensors


def weight_files(path: str) -> list[Path]:
    """The files that hold a model's weights, safetensors before pickled ones; fetched where the path is a hub's name.

    Raises:
        OSError: If there are none.
    """
    for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, WEIGHTS_NAME, WEIGHTS_INDEX_NAME):
        try:
            found = cached_file(path, name)
        except OSError:  # the next name, or the last word below
            continue
        if found is None:
            continue
        if not name.endswith(".json"):
            return [Path(found)]
        files, _ = get_checkpoint_shard_files(path, found)  # type: ignore[no-untyped-call]
        return [Path(file) for file in files]
    raise OSError(f"it has neither {SAFE_WEIGHTS_NAME} nor {WEIGHTS_NAME}")


def stored_weight(path: str, name: str) -> Tensor | None:
    """One weight of a model's safetensors files; None where they have none of this name."""
    try:
        files = weight_files(path)
    except OSError:
        return None
    for file in files:
        if file.suffix == ".safetensors":
            with open_safetensors(file) as stored:
                if name in stored.keys():  # noqa: SIM118
                    weight: Tensor = stored.get_tensor(name)
                    return weight
    return None


def stream_weights(skeleton: PreTrainedModel, files: list[Path]) -> Iterator[dict[str, Tensor]]:
    """Yield a model's weights and stored buffers, converted as `from_pretrained` does it.

    One layer is held at a time, or one weight outside of layers.

    Args:
        skeleton: The model on the meta device, as it is again after each step.
        files: Paths from `weight_files`.
    """
    groups: dict[str, dict[str, Path]] = {}
    for file in files:
        with _open(file) as stored:
            for key in stored:
                groups.setdefault(layer_of(key) or key, {})[key] = file
    for place in groups.values():
        if weights := _convert(skeleton, place):
            yield weights
            weights.clear()  # before the next ones are read


def _convert(skeleton: PreTrainedModel, place: dict[str, Path]) -> dict[str, Tensor]:
    """Some of the files' tensors under the model's names, in its types; those that it has no use for are left out."""
    empty = dict(_tensors(skeleton))
    with _lazy(place) as stored, _no_progress_bar():
        found = convert_weights(skeleton, stored)
    _check(found.mismatched_keys, found.conversion_errors)
    read = {name: tensor.detach() for name, tensor in _tensors(skeleton) if not tensor.is_meta}
    for name in read:
        owner, _, leaf = name.rpartition(".")
        setattr(skeleton.get_submodule(owner), leaf, empty[name])
    return read


def _check(mismatched: Collection[tuple[str, Any, Any]], failed: Mapping[str, str]) -> None:
    """Refuse weights of another model.

    Raises:
        ValueError: With the first of them.
    """
    for name, theirs, ours in mismatched:
        raise ValueError(f"the files hold `{name}` with shape {list(theirs)}, but by `config.json` it is {list(ours)}.")
    for name, reason in failed.items():
        raise ValueError(f"`{name}` could not be made of what the files hold: {reason}")


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


@contextmanager
def _lazy(place: dict[str, Path]) -> Iterator[dict[str, Any]]:
    """Tensors that are read when they are sliced; their files are let go afterwards, with the memory they map."""
    with ExitStack() as stack:
        opened = {file: stack.enter_context(_open(file)) for file in set(place.values())}
        yield {key: opened[file][key] for key, file in place.items()}


@contextmanager
def _open(file: Path) -> Iterator[dict[str, Any]]:
    """A file's tensors by name, not read yet.

    Raises:
        DamagedFileError: If it can't be read, or could run code.
    """
    if file.suffix != ".safetensors":
        yield load_values(file, file, mmap=zipfile.is_zipfile(file))
        return
    with open_safetensors(file) as stored:
        yield {key: stored.get_slice(key) for key in stored.keys()}  # noqa: SIM118


def check_readable(path: str) -> None:
    """See that files of weights can be opened, without reading what they hold.

    Raises:
        DamagedFileError: With the first that can't.
    """
    for file in weight_files(path):
        with _open(file):
            pass


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Keep transformers from drawing one for each layer."""
    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
