"""Checks of what a reward function returned."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

_LARGEST = (2 - 2**-23) * 2.0**127  # of float32, in which rewards are trained on
_MAX_REPR = 200  # characters of a value in a message


class RewardMistakeError(TypeError):
    """A fault of a reward function or its settings that no response is to blame for."""


def check_reward(returned: Any, *, key: str = "reward") -> dict[str, Any]:
    """Splits what a function returned for one sample into the reward and the other values.

    Args:
        returned: A number; None for no reward; or a mapping with either of them under ``key`` or ``reward``, and other
            values, of which numbers are logged. Anything that ``float`` takes but text is a number.
        key: Another name of the reward.

    Returns:
        ``{"reward": float or None, "components": {name: float}, "unlogged": [name]}``.

    Raises:
        RewardMistakeError: If the reward is no number, or the mapping has none.
        ValueError: If a number is not finite or does not fit into float32.
    """
    if not isinstance(returned, Mapping):
        return {"reward": _reward("reward", returned), "components": {}, "unlogged": []}
    key = "reward" if "reward" in returned else key
    if key not in returned:
        raise RewardMistakeError(
            f"A reward function's mapping must have the key `{key}`, got {_brief(list(returned))}."
        )
    others = {str(name): value for name, value in returned.items() if name != key and value is not None}
    numbers = {name: number for name, value in others.items() if (number := _to_number(value)) is not None}
    return {
        "reward": _reward(key, returned[key]),
        "components": {name: _checked(name, others[name], number) for name, number in numbers.items()},
        "unlogged": [name for name in others if name not in numbers],
    }


def check_list(returned: Any, length: int) -> list[Any]:
    """The rewards that a function of lists returned, which are not checked yet.

    Args:
        returned: As many rewards as samples; anything to iterate over but text and mappings.
        length: Number of samples.

    Raises:
        RewardMistakeError: If it is something else.
    """
    needed = f"A reward function of lists must return a list with one reward for each of its {length} responses"
    if hasattr(returned, "tolist"):  # NumPy's arrays, tensors
        returned = returned.tolist()
    if not isinstance(returned, Iterable) or isinstance(returned, str | bytes | Mapping):
        raise RewardMistakeError(f"{needed}, got {_brief(returned)}.")
    rewards = list(returned)
    if len(rewards) != length:
        raise RewardMistakeError(f"{needed}, got {len(rewards)} rewards.")
    return rewards


def _reward(name: str, value: Any) -> float | None:
    if value is None:
        return None
    number = _to_number(value)
    if number is None:
        raise RewardMistakeError(f"A reward function must return a number or None, got `{name}` = {_brief(value)}.")
    return _checked(name, value, number)


def _to_number(value: Any) -> float | None:
    """The value as a float, infinite if it has no room there; None for what is no number."""
    if not hasattr(value, "__float__"):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError, RuntimeError):  # arrays and tensors of several numbers
        return None


def _checked(name: str, value: Any, number: float) -> float:
    if not abs(number) <= _LARGEST:
        raise ValueError(
            "A reward function must return finite numbers of at most 3.4e38, the largest of float32, got"
            f" `{name}` = {_brief(value)}."
        )
    return number


def _brief(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python prints no integer of more than 4300 digits
        return f"a `{type(value).__name__}` that is too long to print"
    return text if len(text) <= _MAX_REPR else f"{text[:_MAX_REPR]}..."
