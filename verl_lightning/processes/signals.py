"""SIGTERM and SIGUSR1, heard at once: also while the main thread waits inside of a library, where no handler runs."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import ClassVar, NoReturn, Protocol

from verl_lightning.processes import peers
from verl_lightning.processes.exit_codes import ExitCode

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that schedulers send before they end a job: the second is SLURM's usual warning."""

LAST_SECONDS = 10.0
"""Seconds that a process which must end may take to do it in good order."""

SAME_SECONDS = 1.0
"""Seconds after a first signal in which others count as the same: launchers pass on what their processes get, too."""

_STDERR = 2


class Listener(Protocol):
    """Object that signals are passed on to."""

    def hear(self, signum: signal.Signals) -> None:
        """Handles a signal at once; called in a thread of its own."""

    def meet(self, signum: signal.Signals) -> None:
        """Handles a signal in the main thread, as soon as that runs Python; what it raises comes up there."""


class EndSoon:
    """Ends a process that has nothing to save yet: in good order, or without if it can't."""

    def hear(self, signum: signal.Signals) -> None:
        """Gives the main thread `LAST_SECONDS` to end the process, then ends it at once."""
        end_after(LAST_SECONDS, f"the process is stuck, and ends at once ({signum.name}).")

    def meet(self, signum: signal.Signals) -> None:
        """Ends the process.

        Raises:
            SystemExit: Always.
        """
        say(f"{signum.name}: the run ends before it has begun, with nothing to save.")
        raise SystemExit(ExitCode.PREEMPTED)


class _Watch:
    """The thread of this process that waits for signals."""

    made: ClassVar[_Watch | None] = None

    def __init__(self) -> None:
        self.listener: Listener | None = None
        self._reader, self.writer = socket.socketpair()
        self.writer.setblocking(False)  # Python's handler must not wait
        threading.Thread(target=self._run, name="signals", daemon=True).start()

    def meet(self, signum: int, frame: object) -> None:
        del frame
        if self.listener is not None:
            self.listener.meet(signal.Signals(signum))

    def _run(self) -> None:
        while numbers := self._reader.recv(64):
            for number in numbers:
                if number in SIGNALS and self.listener is not None:
                    self.listener.hear(signal.Signals(number))


def listen(listener: Listener) -> Callable[[], None]:
    """Has signals told to a listener; in another thread than the main one, which alone may, nothing changes.

    Returns:
        A function that undoes it.
    """
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    if _Watch.made is None:
        _Watch.made = _Watch()
    watch, before = _Watch.made, _Watch.made.listener
    watch.listener = listener
    descriptor = signal.set_wakeup_fd(watch.writer.fileno(), warn_on_full_buffer=False)
    handlers = {signum: signal.signal(signum, watch.meet) for signum in SIGNALS}

    def undo() -> None:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
        watch.listener = before

    return undo


def end_after(seconds: float, message: str) -> threading.Timer:
    """Ends this process with the code of a preempted one, whatever it does then, unless the timer is cancelled."""
    timer = threading.Timer(seconds, end_now, (message,))
    timer.daemon = True
    timer.start()
    return timer


def end_now(message: str) -> NoReturn:
    """Ends this process at once, with the code of a preempted one."""
    say(message)
    peers.fail(ExitCode.PREEMPTED)
    os._exit(ExitCode.PREEMPTED)


def say(message: str) -> None:
    """Tells the user what a signal does; not through `sys.stderr`, in which a handler may have interrupted a write."""
    os.write(_STDERR, f"verl-fit: {message}\n".encode())


def _forget() -> None:
    """Gives signals in a fork their default effect, so that the parent does not hear of them."""
    if _Watch.made is not None:
        _Watch.made = None
        signal.set_wakeup_fd(-1)
        for signum in SIGNALS:
            signal.signal(signum, signal.SIG_DFL)


os.register_at_fork(after_in_child=_forget)
