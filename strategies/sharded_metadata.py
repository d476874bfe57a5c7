"""The table of contents of a sharded checkpoint folder, built anew from what its `.metadata` says."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from verl_lightning.compat.torch import METADATA_NAMES, STORAGE_INFO, storage_info
from verl_lightning.models.digests import DamagedFileError
from verl_lightning.strategies.plain_pickle import Record, describe, guarded

T = TypeVar("T")

METADATA_FILE = ".metadata"
DATA_SUFFIX = ".distcp"
CRC_FIELD = "crc32"
"""Name of the field, beside torch's own of a stored item, that holds the CRC of each of its blocks."""

MAX_LIST = 2**20  # an index of a list above it would fill the memory


def read_metadata(path: Path) -> Metadata:
    """Read a folder's `.metadata` into torch's classes, none of which has seen the file itself.

    Raises:
        DamagedFileError: If it is missing, can't be read, or says what no table of contents does.
    """
    if not path.is_file():
        raise DamagedFileError(path, "is missing.")
    with path.open("rb") as file:
        described = describe(file, METADATA_NAMES, path, "table of contents")
    metadata: Metadata = guarded(partial(_metadata, described), path, "table of contents")
    return metadata


def _metadata(described: Any) -> Metadata:
    fields = _fields(described, "Metadata")
    paths = fields["planner_data"]
    return Metadata(
        state_dict_metadata={_of(str, key): _entry(entry) for key, entry in fields["state_dict_metadata"].items()},
        planner_data=None if paths is None else {_of(str, key): _path(path) for key, path in paths.items()},
        storage_data={_index(index): _place(place) for index, place in fields["storage_data"].items()},
        storage_meta=StorageMeta(),
        version=_of(str, fields.get("version") or ""),
    )


def _entry(entry: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if _name(entry) == "BytesStorageMetadata":
        return BytesStorageMetadata()
    fields = _fields(entry, "TensorStorageMetadata")
    (dtype, *_), chunks = _record(fields["properties"], "TensorProperties").state, fields["chunks"]
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=_dtype(dtype)),
        size=_size(fields["size"]),
        chunks=[_chunk(_fields(chunk, "ChunkStorageMetadata")) for chunk in chunks],
    )


def _chunk(fields: dict[str, Any]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=_size(fields["offsets"]), sizes=_size(fields["sizes"]))


def _index(index: Any) -> MetadataIndex:
    fields = _fields(index, "MetadataIndex")
    offset, number = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        _of(str, fields["fqn"]),
        None if offset is None else _size(offset),
        None if number is None else _of(int, number),
    )


def _place(place: Any) -> Any:
    fields = _fields(place, STORAGE_INFO)
    name = _of(str, fields["relative_path"])
    if Path(name).name != name or not name.endswith(DATA_SUFFIX) or fields.get("transform_descriptors"):
        raise ValueError(f"`{name}` is no file of a checkpoint")
    info = storage_info(name, _count(fields["offset"]), _count(fields["length"]))
    if (crcs := fields.get(CRC_FIELD)) is not None:
        setattr(info, CRC_FIELD, tuple(_count(crc) for crc in crcs))
    return info


def _path(path: Any) -> tuple[str | int, ...]:
    parts = tuple(part if isinstance(part, str) else _of(int, part) for part in _of(tuple, path))
    if any(isinstance(part, int) and not 0 <= part < MAX_LIST for part in parts):
        raise ValueError(f"there is no place {parts}")
    return parts


def _dtype(kind: Any) -> torch.dtype:
    if not isinstance(kind, type) or not issubclass(kind, Record):
        raise TypeError("a tensor has no type")
    return _of(torch.dtype, getattr(torch, kind.__name__))


def _size(size: Any) -> torch.Size:
    (numbers,) = _record(size, "Size").args
    return torch.Size(tuple(_counts(numbers)))


def _counts(numbers: Any) -> Iterator[int]:
    return (_count(number) for number in _of(tuple, numbers))


def _count(number: Any) -> int:
    if _of(int, number) < 0:
        raise ValueError(f"{number} counts nothing")
    return int(number)


def _fields(record: Any, name: str) -> dict[str, Any]:
    return _of(dict, _record(record, name).state)


def _record(record: Any, name: str) -> Record:
    if _name(record) != name:
        raise TypeError(f"{_name(record)} stands where {name} should")
    return _of(Record, record)


def _name(record: Any) -> str:
    return type(record).__name__


def _of(kind: type[T], value: Any) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"{_name(value)} stands where {kind.__name__} should")
    return value
