"""Calls of users' functions, such as tools and agents, in a process of their own that ends with the run."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from verl_lightning.processes.module_path import module_path
from verl_lightning.processes.supervisor import SupervisedProcess
from verl_lightning.rewards.environment import worker_environment
from verl_lightning.rewards.given import given_function, to_wire
from verl_lightning.rewards.wire import add_tag, encode_line, split_tag

_GRACE_SECONDS = 2.0  # beyond its time, for the process to say that a call is late, before it counts as stuck
_START_SECONDS = 120.0  # for importing what the functions need


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Answer to a call of a function."""

    value: Any = None
    """Value that was returned, in plain JSON types."""

    error: str = ""
    """Type and text of the exception that was raised instead; empty if none was."""

    is_timeout: bool = False
    """True if the function ran out of time."""

    is_lost: bool = False
    """True if the process ended before the call did, maybe by the fault of another call."""


class Workers:
    """Functions in a process of their own, any number of calls at once.

    A function that hangs costs its own call alone: the process is replaced for later calls, and ended when the others
    in it are done.

    Args:
        functions: Functions, or their names as `find_object` takes them.
        variables: Names of the environment variables that the process gets beside the basic ones; None gives it all.
        key: Option under which the functions were given, for messages.
    """

    def __init__(
        self, functions: Sequence[str | Callable[..., Any]], *, variables: Collection[str] | None, key: str
    ) -> None:
        self._functions = [
            each if isinstance(each, str) else given_function(each, key, "workers") for each in functions
        ]
        self._variables = variables
        self._lock = threading.Lock()  # calls come from the threads of many episodes
        self._process: _Process | None = None

    async def call(
        self,
        function: int,
        *positional: Any,
        keywords: Mapping[str, Any] | None = None,
        timeout: float,
        client: Mapping[str, str] | None = None,
    ) -> Answer:
        """Call a function and wait for its answer; every failure of it is an answer too.

        Args:
            function: Its number.
            positional: Arguments without names, as JSON can hold them.
            keywords: Arguments by name, as JSON can hold them.
            timeout: Most seconds that it may take.
            client: ``base_url`` and ``api_key`` of an OpenAI client that it gets as first argument; None for no client.
        """
        call = {"function": function, "positional": positional, "keywords": keywords or {}, "timeout": timeout}
        process = self._process  # once it has started, nobody waits for a thread
        if process is None or process.has_ended:
            process = await asyncio.to_thread(self._ready)
        answer = process.send(call if client is None else {**call, "client": client})
        try:
            told = await asyncio.wait_for(asyncio.wrap_future(answer), timeout + _GRACE_SECONDS)
        except TimeoutError:
            self._retire(process, at_once=True)
            return Answer(is_timeout=True)
        if told.get("is_stuck"):
            self._retire(process, at_once=False)
        return Answer(
            value=told.get("value"),
            error=told.get("error", ""),
            is_timeout="timeout" in told,
            is_lost="is_lost" in told,
        )

    def stop(self) -> None:
        """End the process; a later call starts another."""
        if (process := self._process) is not None:
            self._retire(process, at_once=True)
            process.wait()

    def _ready(self) -> _Process:
        with self._lock:
            if self._process is None or self._process.has_ended:
                self._process = _Process([to_wire(each) for each in self._functions], self._variables)
            return self._process

    def _retire(self, process: _Process, *, at_once: bool) -> None:
        """Send a process no more calls, and end it, at once or when it holds none."""
        with self._lock:
            if self._process is process:
                self._process = None
        process.end(at_once=at_once)


class _Process:
    """One process with functions.

    Args:
        functions: Names of the functions, or what `to_wire` makes of given ones.
        variables: See `Workers`.

    Raises:
        ValueError: If a function does not load there.
    """

    def __init__(self, functions: Sequence[Any], variables: Collection[str] | None) -> None:
        self._environment = {**worker_environment(os.environ, variables), "PYTHONHASHSEED": "0"}
        self._waiting: dict[bytes, Future[dict[str, Any]]] = {}
        self._lock = threading.Lock()
        self.has_ended = False
        self._is_retired = False
        # Linux ends the process with the thread that has started it, so that is the one which goes on until its end.
        self._has_begun = Future[SupervisedProcess]()
        self._reader = threading.Thread(target=self._run, name="tools", daemon=True)
        self._reader.start()
        self._process = self._has_begun.result()
        started = self.send({"functions": functions, "sys_path": module_path()})
        try:
            failed = started.result(_START_SECONDS).get("failed") or started.result().get("error")
        except TimeoutError:
            failed = f"The tools' modules were not imported after {_START_SECONDS:g} s."
        if failed:
            self.end(at_once=True)
            raise ValueError(failed)

    def send(self, request: Mapping[str, Any]) -> Future[dict[str, Any]]:
        """Send a request; the result is the process's answer, or an error if it ends before."""
        tag, answer = secrets.token_hex(8).encode(), Future[dict[str, Any]]()
        answer.set_running_or_notify_cancel()  # who gives up waiting must not cancel it under the reader's hands
        line = add_tag(tag, encode_line(request))
        pipe = self._process.popen.stdin
        assert pipe is not None
        with self._lock:
            self._waiting[tag] = answer
            if self.has_ended:
                self._lose_all()
                return answer
            with suppress(BrokenPipeError):  # the end of its answers will say so
                pipe.write(line)
                pipe.flush()
        return answer

    def end(self, *, at_once: bool) -> None:
        """End the process with all that it has started: at once, or when it holds no calls."""
        with self._lock:
            self._is_retired = True
            is_idle = not self._waiting
        if at_once or is_idle:
            self._process.begin_end()

    def wait(self) -> None:
        """Wait for the end of the process, which was told to end."""
        self._reader.join()

    def _run(self) -> None:
        """Start the process and read its answers until it ends."""
        try:
            process = SupervisedProcess(
                "verl_lightning.environments.worker",
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=self._environment,
            )
        except OSError as error:
            self._has_begun.set_exception(error)
            return
        self._has_begun.set_result(process)
        pipe = process.popen.stdout
        assert pipe is not None
        for line in pipe:
            tag, text = split_tag(line)
            with self._lock:
                answer, is_last = self._waiting.pop(tag, None), self._is_retired and not self._waiting
            if answer is not None:
                answer.set_result(_decoded(text))
            if is_last:
                process.begin_end()
        process.end()
        with self._lock:
            self.has_ended = True
            self._lose_all()
            pipe.close()
            with suppress(BrokenPipeError):
                if process.popen.stdin is not None:
                    process.popen.stdin.close()

    def _lose_all(self) -> None:
        """Answer the calls that the process holds no more."""
        for answer in self._waiting.values():
            answer.set_result({"error": "RuntimeError: the process in which it ran has ended", "is_lost": True})
        self._waiting.clear()


def _decoded(text: bytes) -> dict[str, Any]:
    """Reads an answer; what user code wrote in between makes it one of an error."""
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError, RecursionError):
        return {"error": "RuntimeError: its answer could not be read"}
