"""A reward worker's process: ``python -m verl_lightning.rewards.worker``, started and spoken to by the pool.

Reads from its stdin one line that names the function, then one line for each call of it; answers each on its stdout,
with the tag that stands before the line.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import sys
import traceback
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from verl_lightning.rewards.environment import resolve_references
from verl_lightning.rewards.loading import load_reward_function
from verl_lightning.rewards.returned import RewardMistakeError
from verl_lightning.rewards.signatures import BoundReward
from verl_lightning.rewards.wire import add_tag, decode_samples, encode_line, split_tag

_LOWEST_FD = 200  # of the pipes: user code that closes all files it might have got opens its own below
_MAX_TRACEBACK = 20_000  # characters


def main() -> None:
    """Loads the function, says so, then scores samples until the pool closes the pipe."""
    pipes = Pipes()
    for start in pipes.requests():
        function = load(json.loads(start), pipes)
        break
    else:
        return
    folder = os.getcwd()
    for line in pipes.requests():
        pipes.answer(score(function, line))
        undo_changes(folder)


class Pipes:
    """The pool's lines and the answers to them, away from stdin and stdout, which user code may read and write."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._requests, self._answers = _moved(0, "rb"), _moved(1, "wb")
        self._tag = b""
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        sys.stdout = sys.stderr

    def requests(self) -> Iterator[bytes]:
        """Yields lines without their tags, until the pool closes the pipe."""
        for line in self._requests:
            self._tag, request = split_tag(line)
            yield request

    def answer(self, value: Any) -> None:
        """Answers the last request; ends the process if it is a fork that user code made and that came back."""
        if os.getpid() != self._pid:
            os._exit(1)
        self._answers.write(add_tag(self._tag, encode_line(value)))
        self._answers.flush()


def load(start: dict[str, Any], pipes: Pipes) -> BoundReward:
    """The function that the pool names; ends the process if there is none."""
    sys.path.extend(path for path in start["sys_path"] if path not in sys.path)
    try:
        arguments = resolve_references(start["arguments"], os.environ)
        function = load_reward_function(start["function"], arguments)
    except ValueError as error:
        pipes.answer({"failed": str(error), "traceback": _traceback()})
        sys.exit()
    pipes.answer({"is_batched": function.is_batched})
    return function


def score(function: BoundReward, line: bytes) -> list[dict[str, Any]]:
    """Scores the samples of one call.

    Args:
        function: The user's function.
        line: The samples, as the pool encoded them.

    Returns:
        For each ``{"reward": float or None, "components": {name: float}, "unlogged": [name]}``, or
        ``{"error": traceback, "is_mistake": bool}``.
    """
    seed_random_state(line)
    samples = decode_samples(line)
    try:
        returned = function.judge(samples)
    except BaseException as error:  # user code may raise anything, `sys.exit` included, and must cost no other sample
        return [_failure(error)] * len(samples)
    return [_checked(function, value) for value in returned]


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


def _checked(function: BoundReward, returned: Any) -> dict[str, Any]:
    try:
        return function.check(returned)
    except BaseException as error:  # of a user's class, whose methods may raise anything
        return _failure(error)


def _failure(error: BaseException) -> dict[str, Any]:
    # What another response would not change; the last is of a function that takes its sample for something else.
    is_mistake = isinstance(error, RewardMistakeError | ImportError) or type(error) is NameError
    return {"error": _traceback(), "is_mistake": is_mistake or "'RewardSample'" in str(error)}


def _traceback() -> str:
    text = traceback.format_exc()
    if len(text) <= _MAX_TRACEBACK:
        return text
    half = _MAX_TRACEBACK // 2
    return f"{text[:half]}\n... ({len(text) - 2 * half} characters) ...\n{text[-half:]}"


if __name__ == "__main__":
    main()
