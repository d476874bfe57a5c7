"""Tools for tests; light, as a process of its own imports them."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Literal


def add(a: int, b: int = 0) -> int:
    """Adds numbers.

    Args:
        a: First number.
        b: Second number.
    """
    return a + b


def fail(how: str | None = None) -> str:
    """Fails.

    Args:
        how: Way to fail.
    """
    if how == "exit":
        os._exit(3)
    raise KeyError(how)


def hang(seconds: float) -> str:
    """Waits without letting anybody else.

    Args:
        seconds: Time to wait.
    """
    time.sleep(seconds)
    return "awake"


async def rest(seconds: float) -> str:
    """Waits.

    Args:
        seconds: Time to wait.
    """
    await asyncio.sleep(seconds)
    return f"rested in {os.getpid()}"


def choose(color: Literal["red", "blue"], items: list[int]) -> dict:
    """Chooses.

    Args:
        color: Color to choose.
        items: Numbers to give back.
    """
    return {"color": color, "items": items, "object": object()}


def untyped(a):
    """Has no types.

    Args:
        a: Anything.
    """


def write(text: str) -> str:
    """Writes on stdout.

    Args:
        text: Text to write.
    """
    print(text)  # noqa: T201
    return 100_000 * text
