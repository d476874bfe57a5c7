"""Threads with event loops of their own, in which environments run: code that blocks holds up its own episode alone."""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")

PATIENCE = 0.2
"""Seconds that sampling spends on waiting for code that blocks, before it no longer waits for its like."""

_AT_ONCE = 0.01
"""Seconds within which code that only computes answers."""

_GRACE = 1.0
"""Seconds in which a call that is cancelled may end."""


class OwnThread:
    """A thread that runs one coroutine after another."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="environment", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], Awaitable[T]]) -> Call[T]:
        """Begin to run a coroutine."""
        call: Call[T] = Call()
        self._loop.call_soon_threadsafe(call.begin, self._loop, work)
        return call

    def cancel(self, call: Call[Any]) -> None:
        """Cancel a coroutine, which hears of it once it waits for something."""
        self._loop.call_soon_threadsafe(call.cancel)

    def interrupt(self) -> None:
        """End code that computes without end; code that waits in a library hears of it once it comes back."""
        interrupt(self._thread)

    def stop(self) -> None:
        """End the thread, which is free, and wait for its end."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        with (
            suppress(Interrupted),  # one that comes too late for its call
            asyncio.Runner(loop_factory=lambda: self._loop) as runner,  # which closes what environments left open
        ):
            runner.get_loop().run_forever()


class Interrupted(BaseException):
    """An exception that comes from outside to code that does not end; no `except Exception` of such code keeps it."""


def interrupt(thread: threading.Thread) -> None:
    """Raise `Interrupted` in a thread as soon as it runs Python code."""
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Interrupted))


async def run_in_thread(work: Callable[[], T]) -> T:
    """Run a function in a thread of its own, which is interrupted where nobody waits for it any more.

    Unlike those of `asyncio.to_thread`, it holds up no end of the process.

    Args:
        work: Function without arguments.
    """
    result = Future[T]()
    result.set_running_or_notify_cancel()  # a late result must find it open

    def run() -> None:
        try:
            value = work()
        except BaseException as error:
            result.set_exception(error)
        else:
            result.set_result(value)

    thread = threading.Thread(target=run, name="tool", daemon=True)
    thread.start()
    try:
        return await asyncio.wrap_future(result)
    except asyncio.CancelledError:
        interrupt(thread)
        raise


class Call(Future[T]):
    """A coroutine that runs in another thread."""

    def __init__(self) -> None:
        super().__init__()
        self.has_paused = threading.Event()
        """Set once the coroutine has ended, or waits for something for the first time."""
        self._task: asyncio.Task[T] | None = None

    def begin(self, loop: asyncio.AbstractEventLoop, work: Callable[[], Awaitable[T]]) -> None:
        """Start in the thread's loop."""
        self._task = loop.create_task(_survivable(work))
        self._task.add_done_callback(self._settle)
        loop.call_soon(self._look)  # comes just after the task's first step

    def cancel(self) -> bool:
        """Cancel the coroutine; in the thread's loop."""
        return self._task is not None and self._task.cancel()

    def _look(self) -> None:
        assert self._task is not None
        if self._task.done():
            self._settle(self._task)
        self.has_paused.set()

    def _settle(self, task: asyncio.Task[T]) -> None:
        if self.done():
            return
        error = TimeoutError("cancelled") if task.cancelled() else task.exception()
        if error is not None:
            self.set_exception(error)
        else:
            self.set_result(task.result())


async def _survivable(work: Callable[[], Awaitable[T]]) -> T:
    """Runs a coroutine whose `sys.exit` is an error like others and does not end the thread."""
    try:
        return await work()
    except SystemExit as error:
        raise RuntimeError(f"SystemExit: {error}") from error


class Threads:
    """The threads of a run's environments, made when they are needed and used again.

    An environment's call that waits for nothing, such as a game's, is waited for at once: what is sampled together then
    depends on no clock, and runs are the same bit for bit. Calls that wait, for a network or in a process, go on beside
    sampling, and so do those that block, once they have been found to.
    """

    def __init__(self) -> None:
        self._free: list[OwnThread] = []
        self._waited: dict[str, float] = {}  # seconds that sampling lately spent on calls of each kind

    def take(self) -> OwnThread:
        """Return a thread that nobody uses."""
        return self._free.pop() if self._free else OwnThread()

    def give_back(self, thread: OwnThread) -> None:
        """Take a thread back whose calls have all ended."""
        self._free.append(thread)

    async def run(
        self, thread: OwnThread, work: Callable[[], Awaitable[T]], *, kind: str, is_quick: bool, timeout: float
    ) -> Future[T]:
        """Run a coroutine in a thread until it has a result or has raised something.

        Args:
            thread: Thread that runs it.
            work: Function that makes it.
            kind: Name of those whose calls are alike.
            is_quick: True to wait for it at once in any case.
            timeout: Most seconds that it may take.

        Raises:
            LateError: If it has not ended in time.
        """
        call = thread.submit(work)
        if is_quick:
            call.has_paused.wait(timeout)
        elif (left := PATIENCE - self._waited.get(kind, 0.0)) > 0:
            begin = time.monotonic()
            call.has_paused.wait(min(left, timeout))
            self._note(kind, time.monotonic() - begin)
        if not call.done() and not await _ends(call, timeout):
            thread.cancel(call)
            if not await _ends(call, _GRACE):
                thread.interrupt()
            raise LateError(is_stuck=not await _ends(call, _GRACE))
        return call

    def _note(self, kind: str, seconds: float) -> None:
        """Note how long sampling has waited; what answers at once makes good for an interruption by the machine."""
        before = self._waited.get(kind, 0.0)
        self._waited[kind] = before + seconds if seconds > _AT_ONCE else before / 2

    def stop(self) -> None:
        """End all threads that are free."""
        for thread in self._free:
            thread.stop()
        self._free = []


class LateError(Exception):
    """A call that has not ended in time.

    Args:
        is_stuck: True if it goes on in its thread, though it was cancelled and interrupted; nobody can end it then.
    """

    def __init__(self, *, is_stuck: bool) -> None:
        super().__init__()
        self.is_stuck = is_stuck


async def _ends(call: Future[Any], timeout: float) -> bool:
    """Waits until a call has ended, and tells whether it has."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()

    def tell(_: Future[Any]) -> None:
        with suppress(RuntimeError):  # a late call may end after the loop of its batch
            loop.call_soon_threadsafe(ended.set)

    call.add_done_callback(tell)
    try:
        await asyncio.wait_for(ended.wait(), timeout)
    except TimeoutError:
        return call.done()
    return True
