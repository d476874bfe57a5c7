"""The process in which tools and agents run: ``python -m verl_lightning.environments.worker``, started by `Workers`.

Reads from its stdin a line that names the functions, then one for each call; answers each on its stdout, with the tag
that stands before the line. Functions that aren't ``async`` run in threads, the others in one event loop.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from verl_lightning.processes.module_path import follow_module_path
from verl_lightning.rewards.given import from_wire
from verl_lightning.rewards.loading import find_object
from verl_lightning.rewards.wire import encode_line
from verl_lightning.rewards.worker import Pipes, start_loop

_MAX_THREADS = 256  # calls of functions that aren't `async` at once; more wait, at the cost of their time


def main() -> None:
    """Loads the functions, says so, then answers calls until the pipe is closed."""
    pipes = Pipes()
    for tag, start in pipes.requests():
        functions = load(json.loads(start), pipes, tag)
        break
    else:
        return
    loop, calls = start_loop(), Calls(functions, pipes)
    for tag, line in pipes.requests():
        asyncio.run_coroutine_threadsafe(calls.answer(tag, json.loads(line)), loop)


def load(start: Mapping[str, Any], pipes: Pipes, tag: bytes) -> list[Callable[..., Any]]:
    """Loads the functions that the parent names; ends the process if one is not there."""
    follow_module_path(start["sys_path"])
    try:
        functions = [load_function(name) for name in start["functions"]]
    except ValueError as error:
        pipes.answer(tag, {"failed": str(error)})
        sys.exit()
    pipes.answer(tag, {"ready": True})
    return functions


def load_function(name: str | dict[str, str]) -> Callable[..., Any]:
    """Imports a function, or takes it from what the parent has sent.

    Raises:
        ValueError: If it does not import.
    """
    found = from_wire(name)[1] if isinstance(name, dict) else find_object(name, f"`{name}`", "")
    if not callable(found):
        raise ValueError(f"`{name}` must be a function, got {found!r:.80}.")
    function: Callable[..., Any] = found
    return function


class Calls:
    """Calls of functions, each answered when it ends.

    Args:
        functions: Functions by their number.
        pipes: Pipes to the parent.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]], pipes: Pipes) -> None:
        self._functions = functions
        self._pipes = pipes
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(_MAX_THREADS)

    async def answer(self, tag: bytes, call: Mapping[str, Any]) -> None:
        """Calls a function and writes what it returns, or why it returns nothing."""
        is_async = inspect.iscoroutinefunction(self._functions[call["function"]])
        try:
            async with asyncio.timeout(call["timeout"]) as limit:
                answer = {"value": plain(await self._run(call, is_async=is_async))}
        except (Exception, SystemExit) as error:  # of the user's code
            answer = {"error": f"{type(error).__name__}: {error}"}
            if limit.expired():
                # A thread can't be ended: the parent ends this process when nobody else needs it.
                answer = {"timeout": True, "is_stuck": not is_async}
        with self._lock:
            self._pipes.answer(tag, answer)

    async def _run(self, call: Mapping[str, Any], *, is_async: bool) -> Any:
        function, positional, keywords = self._functions[call["function"]], call["positional"], call["keywords"]
        if "client" in call:
            async with openai_client(call["client"]) as client:
                return await function(client, *positional, **keywords)
        if is_async:
            return await function(*positional, **keywords)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: function(*positional, **keywords))


def plain(value: Any) -> Any:
    """Returns a value that JSON can hold: itself, or the text that Python makes of it."""
    try:
        encode_line(value)
    except (TypeError, ValueError, RecursionError):
        return str(value)
    return value


def openai_client(settings: Mapping[str, str]) -> Any:
    """Returns a client of the run's own server.

    Args:
        settings: ``base_url`` and ``api_key``.
    """
    from openai import AsyncOpenAI  # late: tools need none

    return AsyncOpenAI(base_url=settings["base_url"], api_key=settings["api_key"], max_retries=0, timeout=None)


if __name__ == "__main__":
    main()
