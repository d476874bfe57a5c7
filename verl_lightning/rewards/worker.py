"""A reward worker's process: ``python -m verl_lightning.rewards.worker``, started and spoken to by the pool.

Reads from its stdin one line that names the functions, then one line for each unit of samples; answers each on its
stdout, with the tag that stands before the line. Functions that aren't ``async`` are called in the main thread, one
line after another; the others wait together in an event loop beside it.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import sys
import threading
import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

from verl_lightning.processes.module_path import follow_module_path
from verl_lightning.rewards.base import RewardSample
from verl_lightning.rewards.environment import resolve_references
from verl_lightning.rewards.judging import Judges, Outcome, Part, traceback_text
from verl_lightning.rewards.loading import load_reward_function
from verl_lightning.rewards.wire import add_tag, decode_samples, encode_line, split_tag

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

_LOWEST_FD = 200  # of the pipes: user code that closes all files it might have got opens its own below


def main() -> None:
    """Loads the functions, says so, then scores samples until the pool closes the pipe."""
    pipes = Pipes()
    for tag, start in pipes.requests():
        judges = load(json.loads(start), pipes, tag)
        break
    else:
        return
    folder = os.getcwd()
    loop = start_loop() if judges.is_async else None
    for tag, line in pipes.requests():
        seed_random_state(line)
        samples = decode_samples(line)
        outcomes = judges.judge(samples)
        undo_changes(folder)
        if loop is None:
            pipes.answer(tag, judges.total(outcomes))
        else:
            from asyncio import run_coroutine_threadsafe

            run_coroutine_threadsafe(finish(judges, samples, outcomes, pipes, tag), loop)


def start_loop() -> AbstractEventLoop:
    """Starts an event loop that ends with the process; one for all calls, so that they can share a connection."""
    import asyncio  # late: importing it takes as long as all the rest, and few workers need it

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


async def finish(
    judges: Judges, samples: Sequence[RewardSample], outcomes: list[list[Outcome]], pipes: Pipes, tag: bytes
) -> None:
    """Waits for the functions that are ``async``, and answers."""
    pipes.answer(tag, judges.total(await judges.judge_async(samples, outcomes)))


class Pipes:
    """The pool's lines and the answers to them, away from stdin and stdout, which user code may read and write."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._requests, self._answers = _moved(0, "rb"), _moved(1, "wb")
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        sys.stdout = sys.stderr

    def requests(self) -> Iterator[tuple[bytes, bytes]]:
        """Yields tags and the lines behind them, until the pool closes the pipe."""
        for line in self._requests:
            yield split_tag(line)

    def answer(self, tag: bytes, value: Any) -> None:
        """Answers a request; ends the process if it is a fork that user code made and that came back."""
        if os.getpid() != self._pid:
            os._exit(1)
        self._answers.write(add_tag(tag, encode_line(value)))
        self._answers.flush()


def load(start: dict[str, Any], pipes: Pipes, tag: bytes) -> Judges:
    """Loads the functions that the pool names; ends the process if one is not there."""
    follow_module_path(start["sys_path"])
    try:
        parts = [load_part(part) for part in start["parts"]]
    except ValueError as error:
        pipes.answer(tag, {"failed": str(error), "traceback": traceback_text()})
        sys.exit()
    judges = Judges(parts, is_sum=start["is_sum"], timeout=start["timeout"])
    pipes.answer(tag, {"is_batched": judges.is_batched, "is_async": judges.is_async})
    return judges


def load_part(part: dict[str, Any]) -> Part:
    """Loads one function.

    Raises:
        ValueError: If it does not import, or its arguments do not fit.
    """
    arguments = resolve_references(part["arguments"], os.environ)
    function = load_reward_function(part["function"], arguments)
    return Part(function=function, label=part["label"], weight=part["weight"])


def seed_random_state(line: bytes) -> None:
    """Seeds `random`, and NumPy's global state if imported, from the sample: which worker gets it must not matter."""
    random.seed(line)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(zlib.crc32(line))


def undo_changes(folder: str) -> None:
    """Takes back what a call would leave to the next one: an alarm that is set, and another working directory."""
    signal.alarm(0)
    if os.path.isdir(folder):
        os.chdir(folder)


def _moved(fd: int, mode: str) -> BinaryIO:
    """The same file under another number, which programs that this process starts don't inherit."""
    return os.fdopen(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _LOWEST_FD), mode)  # type: ignore[return-value]


if __name__ == "__main__":
    main()
