"""Ends a process that is stuck inside of a library, where no exception can reach it."""

from __future__ import annotations

import faulthandler
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STDERR = 2

EXIT_CODE = 70
"""Exit code of a process that was ended; `EX_SOFTWARE` of BSD's sysexits."""

LAST_SECONDS = 30.0
"""Further seconds that a process is left which can't even say why it is stuck."""


@contextmanager
def end_if_stuck(seconds: float, culprit: Callable[[], str]) -> Iterator[None]:
    """Ends this process, with a message and the stacks of its threads, if the work inside takes longer.

    A library that also keeps Python's lock lets nobody tell who the culprit is: then the stacks alone are written, a
    little later. Python has one such timer; whoever else set it (`faulthandler.dump_traceback_later`) loses it.

    Args:
        seconds: Seconds that the work may take.
        culprit: Function that says what is stuck; called when something is.
    """
    timer = threading.Timer(seconds, _end, (culprit,))
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(seconds + LAST_SECONDS, exit=True, file=STDERR)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        timer.cancel()


@contextmanager
def end_if_frozen(seconds: float) -> Iterator[None]:
    """Ends this process, with the stacks of its threads, if one call inside keeps Python's lock for longer.

    Such a call, as of a regular expression that never comes to an end, stops all threads, those that would tell of it
    too. Python has one such timer; see `end_if_stuck`.

    Args:
        seconds: Seconds that a call may keep the lock; it is left `LAST_SECONDS` more.
    """
    seconds += LAST_SECONDS
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.is_set():
            faulthandler.dump_traceback_later(seconds, exit=True, file=STDERR)
            is_over.wait(seconds / 4)

    thread = threading.Thread(target=beat, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        faulthandler.cancel_dump_traceback_later()


def _end(culprit: Callable[[], str]) -> None:
    os.write(STDERR, f"\nThis process is stuck and ends: {culprit()}\n".encode())
    faulthandler.dump_traceback(STDERR)
    os._exit(EXIT_CODE)
