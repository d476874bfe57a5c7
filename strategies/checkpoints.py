"""Reads trainer checkpoints of every format, and names one to use in place of a damaged one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from verl_lightning.models.digests import DamagedFileError
from verl_lightning.strategies.sealed_files import check_sealed, load_file, load_settings
from verl_lightning.strategies.sharded_io import CheckedReader

READER_KEY = "folder_reader"
"""Key under which a folder's contents hold the reader of its tensors while it is loaded."""

MAX_CHECKED_BYTES = 2**36
"""Most bytes of a folder whose every byte is checked; of a larger one, only sizes and small files are."""


class ReadWhole(Protocol):
    """A function that reads a folder as the checkpoint of an unsharded run."""

    def __call__(self, path: Path, *, weights_only: bool | None, with_optimizers: bool = True) -> dict[str, Any]:
        """See `read_checkpoint`."""


@dataclass(frozen=True, kw_only=True)
class FolderFormat:
    """A kind of folder that a strategy writes checkpoints as."""

    settings_file: str
    """Name of the file that holds all but tensors. It is written last, sealed, and tells folders of this format."""

    remains: tuple[str, ...]
    """Patterns of other files, any of which shows that a folder without settings was one of this format."""

    read_whole: ReadWhole
    """Function that reads a folder without the strategy."""

    def is_at(self, path: Path) -> bool:
        """Tell whether a folder of this format, with its settings, lies at a path."""
        return self.settings_of(path).is_file()

    def settings_of(self, path: Path) -> Path:
        """Return the path of a folder's settings."""
        return path / self.settings_file


_FORMATS: list[FolderFormat] = []


def register_format(known: FolderFormat) -> None:
    """Make folders of a format checkpoints to all strategies and commands.

    Args:
        known: Format to add. A later one is asked for earlier: it may build on a format that is known already.
    """
    _FORMATS.insert(0, known)


class NoCheckpointError(ValueError):
    """Error for a path that is given as a checkpoint but holds something else.

    Args:
        path: Path that was given.
        what: Words on what it is, as the rest of a sentence that begins with the path.
    """

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(f"`ckpt_path: {path}` {what}")
        self.what = what


def format_of(path: Path) -> FolderFormat | None:
    """Return the format of a checkpoint folder, None for a checkpoint that is one file.

    Raises:
        DamagedFileError: If it is a folder whose settings are gone.
        FileNotFoundError: If there is nothing at the path.
        NoCheckpointError: If there is something else, with what to do with it.
    """
    if (found := next((known for known in _FORMATS if known.is_at(path)), None)) is not None:
        return found
    if not path.exists():
        raise FileNotFoundError(f"`ckpt_path: {path}` does not exist.")
    if not path.is_dir():
        return None
    for known in _FORMATS:
        if any(file for pattern in known.remains for file in path.glob(pattern)):
            raise DamagedFileError(known.settings_of(path), "is missing.")
    raise NoCheckpointError(path, what_folder_is(path))


def what_folder_is(folder: Path) -> str:
    """Say what a folder is that can't resume a run, and what to do with it."""
    if (folder / "adapter_config.json").exists():
        return "is a PEFT folder, which can't resume a run. Start from it: `model.actor.lora.adapter_path`."
    if (folder / "config.json").exists():
        return "is a Hugging Face folder, which can't resume a run. Start from it: `model.actor.path`."
    found = [*folder.glob("checkpoints/last*"), *folder.glob("last*"), *folder.glob("*.ckpt")]
    return "is not a checkpoint." + (
        f" Did you mean `{found[0]}`?" if found else " Give its file or folder, or `last`."
    )


def read_checkpoint(
    path: Path, *, weights_only: bool | None = True, with_optimizers: bool = True, **options: Any
) -> dict[str, Any]:
    """Read a checkpoint of any strategy as that of an unsharded run.

    Args:
        path: File or folder of the checkpoint.
        weights_only: False lets a file, or a folder's settings, hold any object, which may run code.
        with_optimizers: Whether to read the optimizers' state, where it lies apart.
        options: Further options of `load_file`, for a file.

    Raises:
        DamagedFileError: If a file is not as it was written; it names the newest whole checkpoint.
        FileNotFoundError: If there is nothing at the path.
        NoCheckpointError: If there is something else.
    """
    with naming_another(path):
        if (known := format_of(path)) is not None:
            return known.read_whole(path, weights_only=weights_only, with_optimizers=with_optimizers)
        return as_checkpoint(path, load_file(path, weights_only=weights_only, **options))


def as_checkpoint(path: Path, content: Any) -> dict[str, Any]:
    """Return the content of a file of `torch.save`, if that is a checkpoint.

    Raises:
        NoCheckpointError: If it is not.
    """
    if not isinstance(content, dict) or "state_dict" not in content:
        raise NoCheckpointError(path, "is not a checkpoint: it holds no `state_dict`. Give one that `fit` wrote.")
    return content


def read_settings(path: Path, *, weights_only: bool | None = True) -> dict[str, Any]:
    """Read a checkpoint without what a folder holds in other files; of a single file, no tensor is read.

    Raises:
        DamagedFileError: If it can't be read, or a folder's settings are not as they were written.
        FileNotFoundError: If there is nothing at the path.
        NoCheckpointError: If there is something else.
    """
    with naming_another(path):
        if (known := format_of(path)) is not None:
            return load_settings(known.settings_of(path), weights_only=weights_only)
        return as_checkpoint(path, load_file(path, weights_only=weights_only, mmap=True, checks=False))


def open_folder(path: Path) -> CheckedReader:
    """Return the reader of what ranks have written into a folder.

    Raises:
        DamagedFileError: If its small files are not as they were written; it names the newest whole checkpoint.
        NoCheckpointError: If there is something else.
    """
    with naming_another(path):
        if (known := format_of(path)) is None:
            raise NoCheckpointError(path, "is a file, not the folder of several ranks.")
        return CheckedReader(known.settings_of(path))


@contextmanager
def naming_another(path: Path) -> Iterator[None]:
    """Within it a checkpoint is read; an error for a damaged file says which checkpoint to use instead.

    Raises:
        DamagedFileError: If a file is not as it was written.
    """
    try:
        yield
    except DamagedFileError as error:
        raise DamagedFileError(error.path, f"{error.what} {_advice(path)}") from error


def _advice(path: Path) -> str:
    if (other := newest_whole(path)) is None:
        return f"No other whole checkpoint lies in `{path.parent}`."
    return f"The newest whole checkpoint beside it is `{other}`: give that as `ckpt_path`."


def newest_whole(path: Path) -> Path | None:
    """The checkpoint of the most steps beside one that is damaged, every byte of which is as it was written.

    Of folders above `MAX_CHECKED_BYTES` the contents are compared when they are loaded. None if there is none.
    """
    steps: dict[Path, tuple[int, float]] = {}
    for other in path.absolute().parent.iterdir():
        if other.name.startswith(".") or other == path.absolute() or _is_link_to(other, path):
            continue
        try:
            file = other if (known := format_of(other)) is None else known.settings_of(other)
            step = int(load_file(file, mmap=True, checks=False)["global_step"])
        except (ValueError, KeyError, TypeError, OSError):  # something else, or damaged
            continue
        steps[path.parent / other.name] = (step, file.stat().st_mtime)
    newest_first = sorted(steps, key=lambda other: steps[other], reverse=True)
    return next((other for other in newest_first if is_whole(other)), None)


def _is_link_to(other: Path, path: Path) -> bool:
    return other.is_symlink() and other.resolve() == path.resolve()


def is_whole(path: Path) -> bool:
    """Tell whether every file of a checkpoint is as it was written, within the limit of `MAX_CHECKED_BYTES`."""
    try:
        if (known := format_of(path)) is None:
            check_sealed(path)
            return True
        reader = CheckedReader(known.settings_of(path))
        is_large = sum(file.stat().st_size for file in path.iterdir()) > MAX_CHECKED_BYTES
        reader.check_sizes() if is_large else reader.check()
    except DamagedFileError:
        return False
    return True
