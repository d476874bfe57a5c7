"""A thread in which an engine samples while the policy learns."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

END_SECONDS = 30.0
"""Seconds that work which is given up may take to end."""


class Background:
    """An event loop in a thread of its own, which does all work of an engine as long as it lives."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._is_paused = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout", daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin some work; what is submitted while the loop is `paused` begins together."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Have the loop stand still between two steps of its work, so that the engine is this thread's."""
        if self._is_paused:
            yield
            return
        stands, goes_on = threading.Event(), threading.Event()

        def stand() -> None:
            stands.set()
            goes_on.wait()

        self._loop.call_soon_threadsafe(stand)
        stands.wait()
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False
            goes_on.set()

    def stop(self) -> None:
        """Give up all work and end the thread."""
        asyncio.run_coroutine_threadsafe(_give_up_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _give_up_others() -> None:
    """Cancel all other work of this loop."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=END_SECONDS)
