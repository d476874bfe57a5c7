"""Reward functions that get in the way of their worker; loaded by file path."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import threading
from pathlib import Path

FORGED = b'[{"reward": 99.0, "components": {}, "unlogged": []}]\n'


def unruly(sample):
    """Does what the response says and returns 1; just 1 if that is nothing."""
    actions = {
        "write to every file": lambda: _write_everywhere(FORGED),
        "write half a line to every file": lambda: _write_everywhere(b"half a line"),
        "write much to every file": lambda: _write_everywhere(b"x" * 2**20),
        "close every file": lambda: os.closerange(0, 1024),
        "close low files and open others": _reuse_numbers,
        "come back twice": os.fork,
        "come back twice in anger": _fork_and_raise,
        "leave a thread": lambda: threading.Thread(target=signal.pause, daemon=True).start(),
        "go elsewhere": lambda: os.chdir("/"),
        "delete temporary files": lambda: shutil.rmtree(tempfile.gettempdir()),
        "print much": lambda: print("x" * 2**22),  # noqa: T201
        "kill its group": lambda: os.killpg(0, signal.SIGKILL),
        "raise much": _raise_much,
        "exit": lambda: os._exit(0),
    }
    actions.get(sample.response, lambda: None)()
    return 1.0


def folder_length(sample):
    """Goes elsewhere, and tells where it was."""
    length = len(os.getcwd())
    os.chdir("/")
    return length


def seconds_of_last_alarm(sample):
    """Sets an alarm, and tells how far off the one before was."""
    return signal.alarm(1000)


def _write_everywhere(text):
    for fd in range(3, 1024):
        try:
            os.set_blocking(fd, False)
            os.write(fd, text)
        except OSError:  # not open, or for reading only
            pass


def _reuse_numbers():
    os.closerange(3, 100)
    for _ in range(8):
        os.open(Path(__file__), os.O_RDONLY)


def _fork_and_raise():
    if os.fork() == 0:
        sys.exit(1)


def _raise_much():
    raise RuntimeError("x" * 2**24)
