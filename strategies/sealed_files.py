"""Files of `torch.save` that hold their own digest, in the comment of the ZIP archive that such a file is."""

from __future__ import annotations

import json
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.utilities import rank_zero_info

from verl_lightning.models.digests import DamagedFileError, Digest, DigestedFile, digest_of
from verl_lightning.models.torch_files import load_values

END = b"PK\x05\x06"
"""First bytes of a ZIP archive's last record, which is followed by the comment alone."""

END_BYTES = 22
LENGTH_BYTES = 2  # the end of that record: how long the comment is
MAX_COMMENT = 2**16 - 1

WAY_OUT = " If a callback of your own stored it, and you trust the file: `--weights_only false`."


def write_sealed(
    path: Path, write: Callable[[DigestedFile], object], beside: Mapping[str, Digest] | None = None
) -> None:
    """Write a file of `torch.save` with its digest, and wait until it is on the disk.

    Args:
        path: The file.
        write: Function that writes the content to a file such as `torch.save` takes.
        beside: Digests of other files by their names, to keep too.
    """
    with path.open("wb") as file:
        digested = DigestedFile(file)
        write(digested)
        comment = _comment(digested.digest, beside or {})
        file.seek(-LENGTH_BYTES, os.SEEK_END)
        file.write(struct.pack("<H", len(comment)) + comment)
        file.flush()
        os.fsync(file.fileno())


def _comment(digest: Digest, beside: Mapping[str, Digest]) -> bytes:
    """Write a seal as bytes, which end with their own CRC. A block of 2**28 bytes takes 12 of them: a terabyte fits."""
    files = {name: each.to_json() for name, each in beside.items()}
    text = json.dumps({"archive": digest.to_json(), "files": files}).encode()
    return text + b" %08x" % zlib.crc32(text)


def read_seal(path: Path) -> tuple[Digest, dict[str, Digest]] | None:
    """Read from a file of `torch.save` the digests of itself and of files beside it; None if it has no seal.

    Raises:
        DamagedFileError: If the end of the file is not as it was written.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - END_BYTES - MAX_COMMENT))
        tail = file.read()
    start = tail.rfind(END)
    end = tail[start : start + END_BYTES]
    if start < 0 or len(end) < END_BYTES:
        raise DamagedFileError(path, "is not a checkpoint, or not the whole of one. Give one that `fit` wrote.")
    comment = tail[start + END_BYTES :]
    if len(comment) != struct.unpack("<H", end[-LENGTH_BYTES:])[0]:
        raise DamagedFileError(path, "is damaged: it does not end where it was written to end.")
    if not comment:
        return None
    text, _, crc = comment.rpartition(b" ")
    if b"%08x" % zlib.crc32(text) != crc:
        raise DamagedFileError(path, "is damaged: the digest at its end is not as it was written.")
    content = json.loads(text)
    files = {name: Digest.from_json(each) for name, each in content["files"].items()}
    return Digest.from_json(content["archive"]), files


def check_sealed(path: Path) -> dict[str, Digest] | None:
    """Compare a file of `torch.save` with what was written; one without a seal by the archive's own CRCs.

    Returns:
        Digests of files beside it; None without a seal.

    Raises:
        DamagedFileError: If it differs.
        FileNotFoundError: If it is not there.
    """
    seal = read_seal(path)
    if seal is None:
        _check_archive(path)
        return None
    digest, files = seal
    if digest != digest_of(path, digest.size, num_blank=LENGTH_BYTES):
        raise DamagedFileError(path, "is damaged: its CRC is not that of what was written.")
    return files


def _check_archive(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            record = archive.testzip()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError, EOFError) as error:
        raise DamagedFileError(path, f"is damaged ({error}).") from error
    if record is not None:
        raise DamagedFileError(path, f"is damaged: the CRC of its part `{record}` is wrong.")


def load_file(
    path: Path, *, weights_only: bool | None = True, mmap: bool = False, map_location: Any = "cpu", checks: bool = True
) -> Any:
    """Read a file of `torch.save`, by default such that nothing in it can run.

    Args:
        path: A local file.
        weights_only: False reads any object, which may run code; None is True.
        mmap: Map tensors into memory instead of reading them.
        map_location: Device for the tensors, as `torch.load` takes it.
        checks: Whether to compare the file with its digest first, for which all of it is read.

    Raises:
        DamagedFileError: If it is not as it was written, or holds objects that could run code.
        FileNotFoundError: If it is not there.
    """
    if checks and check_sealed(path) is None:
        rank_zero_info(f"`{path}` holds no digests, as older versions wrote it: not all damage to it would be noticed.")
    options = {"mmap": mmap, "map_location": map_location, "way_out": WAY_OUT}
    return load_values(path, path, weights_only=weights_only is not False, **options)


def load_settings(path: Path, *, weights_only: bool | None) -> dict[str, Any]:
    """Read what a checkpoint folder holds beside tensors.

    Args:
        path: Settings file of the folder.
        weights_only: Option of `load_file`.

    Raises:
        DamagedFileError: If it is not as it was written, or holds no settings.
    """
    settings = load_file(path, weights_only=weights_only)
    if not isinstance(settings, dict):
        raise DamagedFileError(path, "is not the settings of a checkpoint.")
    return settings
