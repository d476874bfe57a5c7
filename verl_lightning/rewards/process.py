"""One reward worker as the pool sees it: a process, two pipes, and the samples it holds."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

_STOP_SECONDS = 1.0  # an idle worker leaves at once when its pipe closes, unless user code holds it
_KILL_SECONDS = 3.0  # its supervisor takes one at the most, unless user code has stopped it


class WorkerProcess:
    """A worker process, spoken to without ever blocking.

    Made by `exec`, not `fork`: the parent may hold CUDA contexts and threads. What is held here is the worker's
    supervisor, which ends when the worker and all that it started have ended.

    Args:
        first_line: What the worker is to load, see ``verl_lightning.rewards.worker``.
        start_timeout: Until it must have done so, in seconds.
    """

    def __init__(self, first_line: bytes, *, start_timeout: float) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "verl_lightning.rewards.worker", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for the parent
            env=os.environ | {"PYTHONHASHSEED": "0"},  # the order of a set must not depend on the process
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.requests = self._process.stdin.fileno()
        self.answers = self._process.stdout.fileno()
        os.set_blocking(self.requests, False)
        self.queue: deque[int] = deque()  # positions of the samples it holds, the one in hand first
        self.is_ready = False
        self.is_at_end = False  # the answers' pipe is closed
        self._timeout = start_timeout
        self.deadline = time.monotonic() + start_timeout
        self._outgoing = bytearray()
        self._incoming = bytearray()
        self._send(first_line)

    @property
    def has_backlog(self) -> bool:
        """True while lines wait for room in the pipe."""
        return bool(self._outgoing)

    @property
    def is_dead(self) -> bool:
        """True if the process has ended."""
        return self._process.poll() is not None

    def assign(self, positions: Sequence[int], lines: Sequence[bytes], *, timeout: float) -> None:
        """Hands over samples; the first one's time starts now.

        Args:
            positions: Of the samples in the batch.
            lines: The same samples, encoded.
            timeout: For each of them, in seconds.
        """
        self.queue.extend(positions)
        self._timeout = timeout
        self.deadline = time.monotonic() + timeout
        self._send(b"".join(lines))

    def flush(self) -> None:
        """Writes as much of the backlog as the pipe takes."""
        while self._outgoing:
            try:
                del self._outgoing[: os.write(self.requests, self._outgoing)]
            except BlockingIOError:
                return
            except BrokenPipeError:
                self._outgoing.clear()  # it is dead, and the end of its answers will say so

    def receive(self) -> list[dict[str, Any]]:
        """Reads the answers that have come, and starts the time of the next sample.

        Returns:
            The answers in the order of the queue; none if a line is incomplete or the pipe is at its end.
        """
        received = os.read(self.answers, 1 << 16)
        self.is_at_end = not received
        *lines, rest = (self._incoming + received).split(b"\n")
        self._incoming = bytearray(rest)
        if lines:
            is_idle = len(lines) == len(self.queue) or not self.is_ready
            self.deadline = math.inf if is_idle else time.monotonic() + self._timeout
        return [json.loads(line) for line in lines]

    def begin_stop(self) -> None:
        """Closes the pipe, at which an idle worker leaves; has any other killed."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        if not self.is_ready or self.queue:
            self._process.terminate()

    def end_stop(self, deadline: float) -> None:
        """Waits for the worker's end until a time of the monotonic clock, and kills it then."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> str:
        """Kills the process, with all that user code started, and frees the pipes.

        Returns:
            How the worker ended, such as ``exit code 3`` or ``SIGSEGV``.
        """
        self._process.terminate()
        try:
            code = self._process.wait(_KILL_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        return _describe_end(code)

    def _send(self, lines: bytes) -> None:
        self._outgoing += lines
        self.flush()


def stop_workers(workers: Sequence[WorkerProcess]) -> None:
    """Lets idle workers leave by themselves, all at once; kills those that don't, and any others."""
    for worker in workers:
        worker.begin_stop()
    deadline = time.monotonic() + _STOP_SECONDS
    for worker in workers:
        worker.end_stop(deadline)


def _describe_end(code: int) -> str:
    """Names an exit code, which above 128 may be a signal's number plus 128, as in a shell."""
    with contextlib.suppress(ValueError):
        return signal.Signals(-code if code < 0 else code - 128).name
    return f"exit code {code}"
