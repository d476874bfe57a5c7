"""Reads pickles as descriptions: of what a pickle names, nothing is imported, called or changed.

The one unpickler for sharded checkpoints, whichever strategy wrote them.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import IO, Any

from typing_extensions import override

from verl_lightning.compat.torch import ENTRY_NAMES
from verl_lightning.models.digests import DamagedFileError
from verl_lightning.models.torch_files import load_values

UNREADABLE = (
    *(pickle.UnpicklingError, EOFError, OSError, ValueError, KeyError, IndexError, TypeError, AttributeError),
    *(ImportError, OverflowError, MemoryError, RecursionError, zipfile.BadZipFile, StopIteration),
)
"""Errors that Python raises for pickles and archives that are none, or not whole."""


class Record:
    """An object as a pickle describes it. Each time that a class is named a new subclass stands for it."""

    args: tuple[Any, ...] = ()
    """Arguments that the object is made with."""

    state: Any = None
    """State that the object is filled with."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class DescribingUnpickler(pickle.Unpickler):
    """Makes a `Record` of each object but Python's own values.

    Args:
        file: The pickle.
        names: Modules and names that it may have.
    """

    def __init__(self, file: IO[bytes], names: Collection[tuple[str, str]]) -> None:
        super().__init__(file)
        self._names = names

    @override
    def find_class(self, module_name: str, global_name: str, /) -> type[Record]:
        if (module_name, global_name) not in self._names:
            raise ForbiddenNameError(f"{module_name}.{global_name}")
        return type(global_name, (Record,), {})

    @override
    def persistent_load(self, pid: Any) -> Record:
        return Record(pid)


class ForbiddenNameError(Exception):
    """Error for a pickle that names what files of its kind do not hold."""


def describe(file: IO[bytes], names: Collection[tuple[str, str]], path: Path, what: str) -> Any:
    """Reads a pickle as plain values and `Record` objects.

    Args:
        file: The pickle.
        names: Modules and names that it may have.
        path: The file that it comes from, for messages.
        what: Name of the pickle's content, for messages.

    Raises:
        DamagedFileError: If it can't be read, or names anything else.
    """
    try:
        return DescribingUnpickler(file, names).load()
    except ForbiddenNameError as error:
        raise DamagedFileError(
            path,
            f"names `{error}` in its {what}, which no checkpoint of `fit` does. It may be made to run code, and is not"
            " read.",
        ) from error
    except UNREADABLE as error:
        raise DamagedFileError(path, f"is damaged: its {what} can't be read ({error!r}).") from error


def plain_entry(content: bytes, path: Path) -> Any:
    """Reads an entry of a sharded checkpoint, once it is known to hold tensors and plain values alone.

    Args:
        content: Bytes that `torch.save` wrote.
        path: The file that it comes from, for messages.

    Raises:
        DamagedFileError: If it holds anything else.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            # One alone, whatever its case: torch might find another one than was described.
            (name,) = (name for name in archive.namelist() if name.lower().endswith("data.pkl"))
            pickled = archive.read(name)
    except UNREADABLE as error:
        raise DamagedFileError(path, f"is damaged: one of its entries can't be read ({error!r}).") from error
    describe(io.BytesIO(pickled), ENTRY_NAMES, path, "entries")
    return load_values(io.BytesIO(content), path)


def guarded(read: Callable[[], Any], path: Path, what: str) -> Any:
    """Calls a function that interprets a description; its failure means that the file is not what it should be.

    Raises:
        DamagedFileError: If the function fails.
    """
    try:
        return read()
    except UNREADABLE as error:
        raise DamagedFileError(path, f"is damaged: its {what} does not describe a checkpoint ({error!r}).") from error
