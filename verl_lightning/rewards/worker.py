"""A reward worker's process: ``python -m verl_lightning.rewards.worker``, started and spoken to by the pool.

Reads from its stdin one line that names the function, then one line a sample; answers each on its stdout.
"""

from __future__ import annotations

import json
import math
import numbers
import os
import random
import sys
import traceback
import zlib
from collections.abc import Mapping
from typing import Any, BinaryIO

from verl_lightning.rewards.base import RewardFn
from verl_lightning.rewards.loading import load_reward_function
from verl_lightning.rewards.wire import decode_sample, encode_line


def main() -> None:
    """Loads the function, says so, then scores samples until the pool closes the pipe."""
    requests, answers = take_over_pipes()
    first_line = requests.readline()
    if not first_line:
        return
    start = json.loads(first_line)
    sys.path.extend(path for path in start["sys_path"] if path not in sys.path)
    try:
        function = load_reward_function(start["function"], start["arguments"])
    except ValueError as error:
        _answer(answers, {"failed": str(error), "traceback": traceback.format_exc()})
        return
    _answer(answers, {"ready": True})
    for line in requests:
        _answer(answers, score(function, line))


def take_over_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Moves the protocol away from stdin and stdout, so that a user's `print` or `input` can't disturb it.

    Returns:
        Where the pool's lines come from, and where the answers go.
    """
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return requests, answers


def score(function: RewardFn, line: bytes) -> dict[str, Any]:
    """Scores one sample.

    Args:
        function: The user's function.
        line: The sample, as the pool encoded it.

    Returns:
        ``{"reward": float, "components": {name: float}}``, or ``{"error": traceback}``.
    """
    seed_random_state(line)
    try:
        return check_reward(function(decode_sample(line)))
    except BaseException:  # a user's function may raise anything, `sys.exit` included, and must cost one sample only
        return {"error": traceback.format_exc()}


def seed_random_state(line: bytes) -> None:
    """Seeds `random`, and NumPy's global state if imported, from the sample: which worker gets it must not matter."""
    random.seed(line)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(zlib.crc32(line))


def check_reward(returned: Any) -> dict[str, Any]:
    """Splits what a function returned into the reward and the other numbers.

    Args:
        returned: A finite number, or a mapping of finite numbers with the key ``reward``.

    Returns:
        ``{"reward": float, "components": {name: float}}``.

    Raises:
        TypeError: If it, or one of the mapping's values, is no number.
        ValueError: If a number is not finite, or the key is missing.
    """
    if not isinstance(returned, Mapping):
        return {"reward": _finite("reward", returned), "components": {}}
    if "reward" not in returned:
        raise ValueError(f"A reward function's mapping must have the key `reward`, got {list(returned)}.")
    components = {str(name): _finite(name, value) for name, value in returned.items() if name != "reward"}
    return {"reward": _finite("reward", returned["reward"]), "components": components}


def _finite(name: str, value: Any) -> float:
    if not isinstance(value, numbers.Real):
        hint = " Convert it with `float`." if hasattr(value, "__float__") else ""
        raise TypeError(f"A reward function must return numbers, got `{name}` = {value!r}.{hint}")
    if not math.isfinite(value):
        raise ValueError(f"A reward function must return finite numbers, got `{name}` = {value!r}.")
    return float(value)


def _answer(answers: BinaryIO, answer: dict[str, Any]) -> None:
    answers.write(encode_line(answer))
    answers.flush()


if __name__ == "__main__":
    main()
