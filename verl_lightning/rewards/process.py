"""One reward worker as the pool sees it: a process, two pipes, and the samples it holds."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from verl_lightning.supervisor import SupervisedProcess

_STOP_SECONDS = 1.0  # an idle worker leaves at once when its pipe closes, unless user code holds it


class WorkerProcess:
    """A worker process, spoken to without ever blocking.

    Args:
        first_line: What the worker is to load, see ``verl_lightning.rewards.worker``.
        start_timeout: Until it must have done so, in seconds.
    """

    def __init__(self, first_line: bytes, *, start_timeout: float) -> None:
        self._process = SupervisedProcess(
            "verl_lightning.rewards.worker",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=os.environ | {"PYTHONHASHSEED": "0"},  # the order of a set must not depend on the process
        )
        requests, answers = self._process.popen.stdin, self._process.popen.stdout
        assert requests is not None
        assert answers is not None
        self._pipes = requests, answers
        self.requests, self.answers = requests.fileno(), answers.fileno()
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
        return self._process.has_ended

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
        self._pipes[0].close()
        if not self.is_ready or self.queue:
            self._process.begin_end()

    def end_stop(self, deadline: float) -> None:
        """Waits for the worker's end until a time of the monotonic clock, and kills it then."""
        self.kill(patience=max(0.0, deadline - time.monotonic()))

    def kill(self, patience: float = 0.0) -> str:
        """Kills the process, with all that user code started, and frees the pipes.

        Args:
            patience: Seconds in which it may end by itself.

        Returns:
            How the worker ended, such as ``exit code 3`` or ``SIGSEGV``.
        """
        code = self._process.end(patience)
        for pipe in self._pipes:
            pipe.close()
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name

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
