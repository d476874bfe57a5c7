"""One reward worker as the pool sees it: a process, two pipes, and the units of samples it holds."""

from __future__ import annotations

import json
import math
import os
import secrets
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from verl_lightning.processes.supervisor import SupervisedProcess
from verl_lightning.rewards.wire import add_tag, split_tag

_STOP_SECONDS = 1.0  # an idle worker leaves at once when its pipe closes, unless user code holds it
_MAX_LINE = 2**26  # bytes of an answer, far above any that a worker gives


@dataclass(frozen=True)
class Assignment:
    """A request that a worker was sent."""

    unit: int
    """Number of the unit of samples in the batch; -1 for the first request, to load the function."""

    timeout: float
    """Seconds that the request may take."""

    tag: bytes = field(default_factory=lambda: secrets.token_hex(8).encode())
    """Beginning of its answer, and of nothing else that user code might write into the pipe."""


class WorkerProcess:
    """A worker process, spoken to without ever blocking.

    Args:
        first_line: Line that names the function to load, see ``verl_lightning.rewards.worker``.
        environment: Environment variables of the worker.
        start_timeout: Seconds that loading the function may take.
    """

    def __init__(self, first_line: bytes, *, environment: Mapping[str, str], start_timeout: float) -> None:
        self._process = SupervisedProcess(
            "verl_lightning.rewards.worker",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**environment, "PYTHONHASHSEED": "0"},  # the order of a set must not depend on the process
        )
        requests, answers = self._process.popen.stdin, self._process.popen.stdout
        assert requests is not None
        assert answers is not None
        self._pipes = requests, answers
        self.requests, self.answers = requests.fileno(), answers.fileno()
        os.set_blocking(self.requests, False)
        self.queue: deque[Assignment] = deque()  # what it holds, those in hand first
        self.capacity = 1  # assignments that it has in hand at once
        self.is_ready = False
        self.is_at_end = False  # the answers' pipe is closed
        self.is_garbled = False  # something else than answers came out of it
        self.deadline = math.inf
        self._outgoing = bytearray()
        self._incoming = bytearray()
        self._assign([Assignment(unit=-1, timeout=start_timeout)], [first_line])

    @property
    def has_backlog(self) -> bool:
        """True while lines wait for room in the pipe."""
        return bool(self._outgoing)

    @property
    def is_dead(self) -> bool:
        """True if the process has ended."""
        return self._process.has_ended

    def assign(self, units: Sequence[int], requests: Sequence[bytes], *, timeouts: Sequence[float]) -> None:
        """Hands over units of samples; the time of those in hand starts now.

        Args:
            units: Numbers of the units in the batch.
            requests: Encoded samples of each unit.
            timeouts: Seconds that each unit may take.
        """
        self._assign([Assignment(unit, timeout) for unit, timeout in zip(units, timeouts, strict=True)], requests)

    def take_in_hand(self) -> list[int]:
        """Takes the units in hand out of the queue, and returns their numbers."""
        return [self.queue.popleft().unit for _ in range(min(self.capacity, len(self.queue)))]

    def flush(self) -> None:
        """Writes as much of the backlog as the pipe takes."""
        while self._outgoing:
            try:
                del self._outgoing[: os.write(self.requests, self._outgoing)]
            except BlockingIOError:
                return
            except BrokenPipeError:
                self._outgoing.clear()  # it is dead, and the end of its answers will say so

    def receive(self) -> list[tuple[int, Any]]:
        """Reads the answers that have come, takes their units out of the queue, and starts the next ones' time.

        Returns:
            Units and their answers; none if a line is incomplete or the pipe is at its end. They end where something
            else than the answer to a request in hand has come.
        """
        received = os.read(self.answers, 1 << 16)
        self.is_at_end = not received
        *lines, rest = (self._incoming + received).split(b"\n")
        self._incoming = bytearray(rest)
        is_no_answer = self.is_at_end and bool(rest) and not any(rest.startswith(held.tag) for held in self.queue)
        self.is_garbled = len(lines) + bool(rest) > len(self.queue) or len(rest) > _MAX_LINE or is_no_answer
        answers = []
        for line in lines:
            tag, text = split_tag(bytes(line))
            assignment = next((held for held in self._in_hand() if held.tag == tag), None)
            try:
                answers += [] if assignment is None else [(assignment.unit, json.loads(text))]
            except (ValueError, RecursionError):  # a thread of the user's wrote in between
                assignment = None
            if assignment is None:
                self.is_garbled = True
                break
            self.queue.remove(assignment)
            self._start_clock()
        return answers

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
            patience: Seconds in which the process may end by itself.

        Returns:
            End of the worker in words, such as ``exit code 3`` or ``SIGSEGV``.
        """
        code = self._process.end(patience)
        for pipe in self._pipes:
            pipe.close()
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name

    def _assign(self, assignments: Sequence[Assignment], requests: Sequence[bytes]) -> None:
        self.queue.extend(assignments)
        self._start_clock()
        for assignment, request in zip(assignments, requests, strict=True):
            self._outgoing += add_tag(assignment.tag, request)
        self.flush()

    def _in_hand(self) -> list[Assignment]:
        return list(islice(self.queue, self.capacity))

    def _start_clock(self) -> None:
        """Starts the time until the next answer must come, of whichever assignment in hand."""
        longest = max((assignment.timeout for assignment in self._in_hand()), default=math.inf)
        self.deadline = time.monotonic() + longest


def stop_workers(workers: Sequence[WorkerProcess]) -> None:
    """Lets idle workers leave by themselves, all at once; kills those that don't, and any others."""
    for worker in workers:
        worker.begin_stop()
    deadline = time.monotonic() + _STOP_SECONDS
    for worker in workers:
        worker.end_stop(deadline)
