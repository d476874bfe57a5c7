"""Writes and reads sharded checkpoint folders: each item has its CRC, and nothing in them can run.

A folder's settings file is sealed and holds the digests of the table of contents and other small files. The table holds
the CRC of each item. A rank compares what it reads, as it reads it: no byte is read twice for that, and nothing of it
is used before.
"""

from __future__ import annotations

import io
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from typing_extensions import override

from verl_lightning.compat.torch import item_writer_replaced
from verl_lightning.models.digests import DamagedFileError, DigestedFile, check_file, crcs_of, digest_of
from verl_lightning.strategies.plain_pickle import plain_entry
from verl_lightning.strategies.sealed_files import check_sealed, write_sealed
from verl_lightning.strategies.sharded_metadata import CRC_FIELD, DATA_SUFFIX, METADATA_FILE, read_metadata


class DigestingWriter(FileSystemWriter):
    """Writes this rank's items in one file, with the CRC of each in the table of contents.

    Args:
        folder: Folder to write to.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, single_file_per_rank=True, overwrite=True)

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        with items_digested(filesystem):
            return super().write_data(plan, planner)


@contextmanager
def items_digested(module: ModuleType) -> Iterator[None]:
    """Have a module that writes items tell their CRCs to the table of contents, within this context.

    Args:
        module: Module that writes items by torch's function.
    """

    def digesting(
        write_item: Callable[..., WriteResult], transforms: Any, stream: IO[bytes], *args: Any, **kwargs: Any
    ) -> WriteResult:
        digested = DigestedFile(stream)
        result = write_item(transforms, digested, *args, **kwargs)
        setattr(result.storage_data, CRC_FIELD, digested.digest.crcs)
        return result

    with item_writer_replaced(module, digesting):
        yield


def saved_bytes(checkpoint: Mapping[str, Any]) -> bytes:
    """Return the bytes that `torch.save` makes of a checkpoint without tensors."""
    settings = io.BytesIO()
    torch.save(checkpoint, settings)
    return settings.getvalue()


def write_settings(path: Path, settings: bytes) -> None:
    """Complete a folder by its settings, with the digests of the small files beside them.

    Args:
        path: The file of the settings, the last one that the folder gets.
        settings: Bytes that `torch.save` made of the settings.
    """
    files = {
        file.name: digest_of(file) for file in path.parent.iterdir() if file.suffix != DATA_SUFFIX and file != path
    }
    write_sealed(path, lambda file: file.write(settings), files)


@contextmanager
def failures_told() -> Iterator[None]:
    """Within it parts are read together: what is wrong with one rank's is everybody's error, in one sentence.

    Raises:
        DamagedFileError: If a file of any rank is not as it was written.
    """
    try:
        yield
    except CheckpointException as error:
        for failure, _ in error.failures.values():
            if isinstance(failure, DamagedFileError):
                raise DamagedFileError(failure.path, failure.what) from error
        raise


class CheckedReader(FileSystemReader):
    """Reads a folder's items. What differs from what was written is refused, and so is what could run code.

    Args:
        settings: The folder's settings file.

    Raises:
        DamagedFileError: If the settings, the table of contents or another small file are not as they were written.
    """

    def __init__(self, settings: Path) -> None:
        super().__init__(settings.parent)
        self.folder = settings.parent
        check_small_files(settings)
        self._metadata = read_metadata(self.folder / METADATA_FILE)

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        wanted: dict[MetadataIndex, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            wanted[item.storage_index].append(item)
        for index, path, content in self._read({index: self.storage_data[index] for index in wanted}):
            self._hand_over(wanted[index], path, content, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def check_sizes(self) -> None:
        """See that the files of all ranks are there, and as long as they were written.

        Raises:
            DamagedFileError: If one is not.
        """
        ends: dict[str, int] = defaultdict(int)
        for info in self._metadata.storage_data.values():
            ends[info.relative_path] = max(ends[info.relative_path], info.offset + info.length)
        for name, end in ends.items():
            path = self.folder / name
            if not path.is_file() or path.stat().st_size != end:
                raise DamagedFileError(path, f"is damaged: it has not the {end} bytes that were written.")

    def check(self) -> None:
        """Read all items without keeping them.

        Raises:
            DamagedFileError: If one is not as it was written.
        """
        for _ in self._read(self._metadata.storage_data):
            pass

    def _read(self, places: Mapping[MetadataIndex, Any]) -> Iterator[tuple[MetadataIndex, Path, bytes]]:
        """Yield stored items in the order in which they lie in their files, compared with their CRCs."""
        in_order = sorted(places.items(), key=lambda pair: (pair[1].relative_path, pair[1].offset))
        for name, pairs in itertools.groupby(in_order, lambda pair: pair[1].relative_path):
            path = self.folder / name
            if not path.is_file():
                raise DamagedFileError(path, "is missing.")
            with path.open("rb") as file:
                for index, info in pairs:
                    yield index, path, self._compared(file, path, info)

    def _compared(self, file: IO[bytes], path: Path, info: Any) -> bytes:
        file.seek(info.offset)
        content = file.read(info.length)
        if len(content) != info.length:
            raise DamagedFileError(path, "is damaged: it ends before it was written to end.")
        crcs = getattr(info, CRC_FIELD, None)
        if crcs is not None and crcs != crcs_of(content):
            raise DamagedFileError(path, f"is damaged: the CRC of its bytes from {info.offset} on is wrong.")
        return content

    def _hand_over(self, items: Sequence[ReadItem], path: Path, content: bytes, planner: LoadPlanner) -> None:
        """Give the planner what it wants of one stored item."""
        value = plain_entry(content, path)
        for item in items:
            if item.type == LoadItemType.BYTE_IO:
                # The planner will unpickle what it gets, whatever that is: let it be our own pickle.
                anew = io.BytesIO()
                torch.save(value, anew)
                anew.seek(0)
                planner.load_bytes(item, anew)
                continue
            target = planner.resolve_tensor(item).detach()
            target.copy_(narrowed(value, item, path))
            planner.commit_tensor(item, target)


def check_small_files(settings: Path) -> None:
    """Compare a folder's settings, and what lies beside them, with what was written, as far as that is known.

    Args:
        settings: The folder's settings file.

    Raises:
        DamagedFileError: If a file differs, or is not there.
    """
    for name, digest in (check_sealed(settings) or {}).items():
        check_file(settings.with_name(name), digest)


def narrowed(stored: Any, item: ReadItem, path: Path) -> Tensor:
    """Return the part of a stored tensor that an item wants.

    Raises:
        DamagedFileError: If the stored value is no tensor, or smaller than the table of contents says.
    """
    name = item.storage_index.fqn
    if not isinstance(stored, Tensor):
        raise DamagedFileError(path, f"holds no tensor where `{name}` should be.")
    ends = [start + length for start, length in zip(item.storage_offsets, item.lengths, strict=True)]
    if len(ends) != stored.dim() or any(end > size for end, size in zip(ends, stored.shape, strict=True)):
        raise DamagedFileError(path, f"holds a tensor of shape {list(stored.shape)} where `{name}` should be.")
    part: Tensor = stored
    for axis, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        part = part.narrow(axis, start, length)
    return part
