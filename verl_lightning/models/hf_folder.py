"""Writes Hugging Face folders: weights in shards, configs, and all of it at once or not at all."""

from __future__ import annotations

import copy
import ctypes
import errno
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from verl_lightning.compat.transformers import weights_as_stored
from verl_lightning.models.classifier import Classifier
from verl_lightning.models.pretrained import read_generation_config
from verl_lightning.models.weights import base_name

PARTIAL_SUFFIX = ".partial"
VALUE_HEAD_FILE = "value_head.safetensors"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux' renameat2


class ShardWriter:
    """Writes tensors into ``model*.safetensors`` files; holds at most one of them in memory.

    Args:
        folder: Folder of the files.
        max_shard_bytes: Largest size of a file; a larger tensor gets a file of its own.
    """

    def __init__(self, folder: Path, max_shard_bytes: int) -> None:
        self.folder = folder
        self.max_shard_bytes = max_shard_bytes
        self._shard: dict[str, Tensor] = {}
        self._shard_bytes = 0
        self._names: list[list[str]] = []  # of each file that is written
        self._total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one tensor; it is copied, so its memory may be used again."""
        if self._shard and self._shard_bytes + tensor.nbytes > self.max_shard_bytes:
            self._flush()
        self._shard[name] = torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format).copy_(tensor)
        self._shard_bytes += tensor.nbytes

    def finish(self) -> None:
        """Write what is left, and the index if there are several files, or a value head's beside them."""
        self._flush()
        count = len(self._names)
        files = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        if count == 1:
            files = ["model.safetensors"]
        for index, file in enumerate(files):
            self._path(index).rename(self.folder / file)
        # Engines such as vLLM take each file for a part of the model that an index does not leave out.
        if count > 1 or (self.folder / VALUE_HEAD_FILE).exists():
            weight_map = {name: file for file, names in zip(files, self._names, strict=True) for name in names}
            content = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
            (self.folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=2, sort_keys=True))

    def _flush(self) -> None:
        save_file(self._shard, self._path(len(self._names)), metadata={"format": "pt"})
        self._names.append(list(self._shard))
        self._total_bytes += self._shard_bytes
        self._shard, self._shard_bytes = {}, 0

    def _path(self, index: int) -> Path:
        return self.folder / f"shard-{index}"  # the final name says how many there are


def write_model(
    folder: Path,
    backbone: PreTrainedModel,
    weights: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 2**30,
    *,
    classifier: Classifier | None = None,
) -> None:
    """Write weights, ``config.json`` and a ``generation_config.json`` as ``from_pretrained`` reads them.

    Args:
        folder: An empty folder.
        backbone: The model whose class and configs are written; its own weights are not read.
        weights: Hugging Face names and whole tensors.
        dtype: Type in which floating-point weights are stored; None leaves them as they are.
        max_shard_bytes: Largest size of a weights file, in bytes.
        classifier: Head of a reward model, for which ``backbone`` is the trunk; None for any other model.
    """
    writer = ShardWriter(folder, max_shard_bytes)
    stored = stored_weights(backbone, weights)
    for name, weight in stored if classifier is None else classifier.complete(stored, backbone.config):
        writer.add(name, weight.to(dtype) if dtype is not None and weight.is_floating_point() else weight)
    writer.finish()
    if backbone.can_generate() and (generation := read_generation_config(str(backbone.name_or_path))) is not None:
        generation.to_json_file(folder / "generation_config.json")
    config = copy.deepcopy(backbone.config)
    config.dtype = str(dtype or backbone.dtype).removeprefix("torch.")
    config.architectures = [type(backbone).__name__.removeprefix("FSDP")]
    if classifier is not None:
        classifier.describe(config)
    config.save_pretrained(folder)  # last: without it no loader accepts the folder


def stored_weights(backbone: PreTrainedModel, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield weights and saved buffers as files name them; transformers holds some weights fused, experts above all.

    Fused weights are cut apart layer by layer, so that no more than one layer is held. Buffers come from ``backbone``,
    unless it is on the meta device: they are then among the weights.
    """
    for _, layer in itertools.groupby(weights, key=lambda item: layer_of(item[0])):
        yield from weights_as_stored(backbone, dict(layer)).items()
    parameters = dict(backbone.named_parameters(remove_duplicate=False))
    state = {base_name(name): tensor for name, tensor in backbone.state_dict().items() if name not in parameters}
    buffers = {name: tensor for name, tensor in state.items() if not tensor.is_meta}
    yield from weights_as_stored(backbone, buffers).items()


def layer_of(name: str) -> str:
    """Return the part of a weight's name up to its layer's number, empty outside of layers."""
    match = re.match(r".*?\.\d+\.", name)
    return match[0] if match else ""


def write_value_head(folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Write a value head to its own file before `write_model`, if there is one; `build_scorer` reads it back."""
    if weights:
        save_file({name: weight.cpu().contiguous() for name, weight in weights.items()}, folder / VALUE_HEAD_FILE)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Lends a hidden folder that takes the place of ``path`` at the end; a kill before that leaves ``path`` as it was.

    At ``path`` there may be a file: a run that changes its strategy writes folders where it wrote files.

    An exception removes the hidden folder. One that a kill left behind is cleared by `clear_partial_folders`.
    """
    partial = partial_folder(path)
    discard(partial)
    partial.mkdir(parents=True)
    try:
        yield partial
        _sync(partial)
        replace(partial, path)
    finally:
        discard(partial)


def partial_folder(path: Path) -> Path:
    """Return the path at which `atomic_folder` keeps the folder that is to take the place of ``path``."""
    return path.with_name(f".{path.name}{PARTIAL_SUFFIX}")


def remove_folder(path: Path) -> None:
    """Delete a folder so that no moment shows half of it, or a file; one that is gone already is fine."""
    partial = partial_folder(path)
    discard(partial)
    if path.is_dir() and not path.is_symlink():
        path.rename(partial)
        discard(partial)
    else:
        path.unlink(missing_ok=True)


def discard(path: Path) -> None:
    """Delete a folder or file that a save left behind, as far as the system lets it."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def clear_partial_folders(parent: Path) -> None:
    """Delete what saves that were killed left behind."""
    for partial in parent.glob(f".*{PARTIAL_SUFFIX}"):
        discard(partial)


def _sync(folder: Path) -> None:
    """Wait until everything in a folder is on the disk."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def replace(new: Path, path: Path) -> None:
    """Put ``new`` in the place of ``path``; what was there is at ``new`` afterwards, if anything."""
    if not path.exists():
        new.rename(path)
    elif not _exchange(new, path):  # a file system that can't: for a moment nothing is at `path`
        old = new.with_name(f"{new.name}.old{PARTIAL_SUFFIX}")
        path.rename(old)
        new.rename(path)
        old.rename(new)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one step; False where the system can't."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS):
        return False
    raise OSError(number, os.strerror(number), str(other))
