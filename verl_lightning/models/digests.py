"""Sizes and CRCs of files: kept when they are written, compared when they are read.

A CRC tells what a disk, a copy or a broken transfer has changed. It does not tell who wrote a file.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

BLOCK_BYTES = 2**28
"""Bytes of a block; each block of a file has a CRC of its own, so that several threads can compute them."""

PIECE_BYTES = 2**24
"""Bytes that are read at once."""

THREADS = 4

DIGESTS_FILE = "digests.json"
"""File in a Hugging Face folder of ours that holds the digests of the others."""

WEIGHTS_SUFFIX = ".safetensors"


class DamagedFileError(ValueError):
    """A file that is not as it was written.

    Args:
        path: The file.
        what: Damage of the file, as the rest of a sentence that begins with its path.
    """

    def __init__(self, path: str | Path, what: str) -> None:
        super().__init__(str(path), what)  # in this form other ranks can be sent it
        self.path = str(path)
        self.what = what

    def __str__(self) -> str:
        return f"`{self.path}` {self.what}"


@dataclass(frozen=True)
class Digest:
    """Size and CRCs that a file must have."""

    size: int
    """Size of the file in bytes."""

    crcs: tuple[int, ...]
    """CRC-32 of each `BLOCK_BYTES` bytes."""

    def to_json(self) -> dict[str, Any]:
        """Convert to plain types, as JSON has them."""
        return {"size": self.size, "crc32": [f"{crc:08x}" for crc in self.crcs]}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Digest:
        """Rebuild a digest from what `to_json` gave.

        Raises:
            KeyError: If `to_json` did not give this.
            TypeError: Likewise.
            ValueError: Likewise.
        """
        return cls(int(content["size"]), tuple(int(crc, 16) for crc in content["crc32"]))


class DigestedFile:
    """Writes to a file and keeps the digest of what was written.

    Args:
        file: File that is open for writing bytes.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._size = 0
        self._crcs: list[int] = []

    @property
    def digest(self) -> Digest:
        """Digest of all that was written through this object."""
        return Digest(self._size, tuple(self._crcs))

    def write(self, data: Any) -> int:
        """Write bytes, or anything that holds them."""
        left = memoryview(data).cast("B")
        self._file.write(left)
        count = len(left)
        while left:
            part = left[: BLOCK_BYTES - self._size % BLOCK_BYTES]
            if self._size % BLOCK_BYTES == 0:
                self._crcs.append(0)
            self._crcs[-1] = zlib.crc32(part, self._crcs[-1])
            self._size += len(part)
            left = left[len(part) :]
        return count

    def tell(self) -> int:
        """Return the position in the file, in bytes."""
        return self._file.tell()

    def flush(self) -> None:
        """Hand what was written to the system."""
        self._file.flush()


def crcs_of(content: bytes) -> tuple[int, ...]:
    """Compute the CRC-32 of each block of bytes in memory."""
    view = memoryview(content)
    return tuple(zlib.crc32(view[start : start + BLOCK_BYTES]) for start in range(0, len(view), BLOCK_BYTES))


def digest_of(path: Path, size: int | None = None, *, num_blank: int = 0) -> Digest:
    """Compute the digest of a file, several blocks at a time.

    Args:
        path: The file.
        size: Bytes to read from the start of the file; None reads all.
        num_blank: Number of bytes at the end of these that count as zeros, whatever they are.
    """
    size = path.stat().st_size if size is None else size
    with ThreadPoolExecutor(THREADS) as pool:
        crcs = pool.map(partial(_block_crc, path, size, num_blank), range(0, size, BLOCK_BYTES))
        return Digest(size, tuple(crcs))


def _block_crc(path: Path, size: int, num_blank: int, start: int) -> int:
    end, crc = min(start + BLOCK_BYTES, size), 0
    with path.open("rb") as file:
        file.seek(start)
        while start < end:
            piece = file.read(min(PIECE_BYTES, end - start))
            if not piece:  # shorter than it was a moment ago
                break
            num_kept = min(len(piece), max(0, size - num_blank - start))
            crc = zlib.crc32(piece[:num_kept] + bytes(len(piece) - num_kept), crc)
            start += len(piece)
    return crc


def check_file(path: Path, expected: Digest) -> None:
    """Compare a file with its digest from when it was written.

    Raises:
        DamagedFileError: If it differs, or is not there.
    """
    if not path.is_file():
        raise DamagedFileError(path, "is missing.")
    size = path.stat().st_size
    if size != expected.size:
        raise DamagedFileError(path, f"is damaged: it has {size} bytes, but {expected.size} were written.")
    if digest_of(path) != expected:
        raise DamagedFileError(path, "is damaged: its CRC is not that of what was written.")


def write_digests(folder: Path) -> None:
    """Add the digests of a folder's files to it, as the last file of all."""
    files = {path.name: digest_of(path) for path in sorted(folder.iterdir()) if path.is_file()}
    (folder / DIGESTS_FILE).write_text(_dump(files))


def check_folder(folder: Path, names: Iterable[str] | None = None) -> None:
    """Compare files of a folder with the digests of `write_digests`; a folder without digests passes.

    Args:
        folder: Folder of a model or an adapter.
        names: Names of the files to read; None reads all but weights. Others must be there with their size.

    Raises:
        DamagedFileError: If one differs, or is not there.
    """
    path = folder / DIGESTS_FILE
    if not path.is_file():
        return
    way_out = f" If it was changed on purpose, delete `{path}`."
    for name, digest in _load(path).items():
        is_read = name in names if names is not None else not name.endswith(WEIGHTS_SUFFIX)
        try:
            if is_read or not (folder / name).is_file() or (folder / name).stat().st_size != digest.size:
                check_file(folder / name, digest)
        except DamagedFileError as error:
            raise DamagedFileError(error.path, error.what + way_out) from error


def _dump(files: Mapping[str, Digest]) -> str:
    return json.dumps({name: digest.to_json() for name, digest in files.items()}, indent=1) + "\n"


def _load(path: Path) -> dict[str, Digest]:
    try:
        text = path.read_text()
        files = {name: Digest.from_json(content) for name, content in json.loads(text).items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedFileError(path, f"is damaged: it does not hold digests ({error!r}).") from error
    if _dump(files) != text:
        raise DamagedFileError(path, "is damaged: it is not as it was written.")
    return files
