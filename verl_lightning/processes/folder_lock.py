"""A lock that keeps two runs out of one folder, and that the system takes back however its process ends."""

from __future__ import annotations

import errno
import os
import re
import socket
import sys
import time
from pathlib import Path

from verl_lightning.faults import RunError

if sys.platform != "win32":
    import fcntl

HELD = (errno.EACCES, errno.EAGAIN)
"""Error codes by which a system tells that another process has a lock."""


class FolderInUseError(RunError):
    """Another process writes to a folder."""


class FolderLock:
    """A lock on a folder, by the file ``.NAME.lock`` beside it; the system takes it back however the process ends.

    It is a record lock of ``fcntl``, which works over NFS too, and which the processes that this one starts do not
    hold: those that outlive a killed run would keep its successor out.

    Args:
        folder: Folder to lock; it need not exist.

    Raises:
        FolderInUseError: If another process has the lock.
        OSError: If the file system knows no locks, or the file can't be made.
    """

    def __init__(self, folder: Path) -> None:
        self._path = lock_file(folder)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = -1
        while not self._try_to_lock(folder):  # the holder has taken the file away
            pass
        os.ftruncate(self._descriptor, 0)
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        os.pwrite(self._descriptor, f"process {os.getpid()} on `{socket.gethostname()}` since {since}".encode(), 0)

    def release(self) -> None:
        """Give the lock back and leave no file."""
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)

    def _try_to_lock(self, folder: Path) -> bool:
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._path.exists() and os.path.samestat(os.fstat(descriptor), self._path.stat()):
                self._descriptor = descriptor
                return True
        except OSError as error:
            if error.errno in HELD:
                holder = _read(descriptor) or "a process that has just begun"
                raise FolderInUseError(f"`{folder}` is in use by another run: {holder}.") from None
            raise
        finally:
            if self._descriptor != descriptor:
                os.close(descriptor)
        return False


def lock_file(folder: Path) -> Path:
    """The file by which a folder is locked."""
    return folder.with_name(f".{folder.name}.lock")


def is_held(folder: Path) -> bool | None:
    """Tells whether a process holds a folder's lock, without taking it; None where there is no file to tell by."""
    try:
        descriptor = os.open(lock_file(folder), os.O_RDONLY)
    except OSError:
        return None
    try:
        # Closing the file would take the lock back, were it this process's own.
        if re.match(rf"process {os.getpid()} on `{re.escape(socket.gethostname())}`", _read(descriptor)):
            return True
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in HELD
    finally:
        os.close(descriptor)
    return False


def _read(descriptor: int) -> str:
    return os.pread(descriptor, 1000, 0).decode()
