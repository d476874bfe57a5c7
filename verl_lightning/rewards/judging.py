"""Judgements of one unit of samples by one or several reward functions, in a worker."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verl_lightning.rewards.base import RewardSample
from verl_lightning.rewards.returned import RewardMistakeError, check_reward
from verl_lightning.rewards.signatures import BoundReward

_MAX_TRACEBACK = 20_000  # characters

Outcome = dict[str, Any]
"""Outcome of a sample: ``{"reward": float or None, "components": {name: float}, "unlogged": [name]}``, ``{"error":
traceback, "is_mistake": bool}``, or ``{"timeout": seconds}``."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One function, and its place in the reward."""

    function: BoundReward
    """The user's function."""

    label: str
    """Name of its reward in the metrics."""

    weight: float
    """Factor of its reward in the sum."""


class Judges:
    """The functions of a reward, each called in its own way.

    Args:
        parts: The functions.
        is_sum: True if the reward is the weighted sum of theirs; False if it is the only one's.
        timeout: Seconds that an ``async`` function may take for a sample.
    """

    def __init__(self, parts: Sequence[Part], *, is_sum: bool, timeout: float) -> None:
        self._parts = parts
        self._is_sum = is_sum
        self._timeout = timeout
        self.is_batched = any(part.function.is_batched for part in parts)
        self.is_async = any(part.function.is_async for part in parts)

    def judge(self, samples: Sequence[RewardSample]) -> list[list[Outcome]]:
        """Calls the functions that aren't ``async``.

        Args:
            samples: Samples of a unit.

        Returns:
            Outcomes of the samples for each function, none for one that is ``async``.
        """
        return [
            [] if part.function.is_async else [o for call in _calls(part, samples) for o in _judge(part.function, call)]
            for part in self._parts
        ]

    async def judge_async(self, samples: Sequence[RewardSample], outcomes: list[list[Outcome]]) -> list[list[Outcome]]:
        """Calls the functions that are ``async``, all at once.

        Args:
            samples: Samples of a unit.
            outcomes: Outcomes that `judge` returned for them.
        """
        from asyncio import gather  # late: importing it takes as long as all else that a worker needs

        return list(await gather(*map(self._complete, self._parts, [samples] * len(outcomes), outcomes)))

    def total(self, outcomes: Sequence[Sequence[Outcome]]) -> list[Outcome]:
        """Returns one outcome for each sample from those of the functions."""
        if not self._is_sum:
            return list(outcomes[0])
        return [weighted_sum(self._parts, of_sample) for of_sample in zip(*outcomes, strict=True)]

    async def _complete(self, part: Part, samples: Sequence[RewardSample], known: list[Outcome]) -> list[Outcome]:
        if not part.function.is_async:
            return known
        from asyncio import gather

        calls = [_judge_async(part.function, call, self._timeout) for call in _calls(part, samples)]
        return [outcome for outcomes in await gather(*calls) for outcome in outcomes]


def weighted_sum(parts: Sequence[Part], outcomes: Sequence[Outcome]) -> Outcome:
    """Adds up what several functions gave a sample.

    Functions without a reward for it (None) are left out of the sum; if none has one, there is none. If one of them
    fails, the sample has failed.
    """
    for part, outcome in zip(parts, outcomes, strict=True):
        if "error" in outcome:
            return outcome | {"error": f"In the reward `{part.label}`:\n{outcome['error']}"}
        if "timeout" in outcome:
            return outcome
    judged = [(part, outcome) for part, outcome in zip(parts, outcomes, strict=True) if outcome["reward"] is not None]
    total = sum(part.weight * outcome["reward"] for part, outcome in judged) if judged else None
    values = {part.label: outcome["reward"] for part, outcome in judged}
    for part, outcome in zip(parts, outcomes, strict=True):
        values |= {f"{part.label}/{name}": value for name, value in outcome["components"].items()}
    unlogged = [f"{p.label}/{name}" for p, outcome in zip(parts, outcomes, strict=True) for name in outcome["unlogged"]]
    try:
        return {"reward": check_reward(total)["reward"], "components": values, "unlogged": unlogged}
    except ValueError as error:  # too large for float32
        return failure(error)


def failure(error: BaseException) -> Outcome:
    """Returns the outcome of a call that raised; to be called while the exception is handled."""
    # What another response would not change; the last is of a function that takes its sample for something else.
    is_mistake = isinstance(error, RewardMistakeError | ImportError) or type(error) is NameError
    return {"error": traceback_text(), "is_mistake": is_mistake or "'RewardSample'" in str(error)}


def traceback_text() -> str:
    """Returns the traceback of the exception that is handled, without its middle if it is long."""
    text = traceback.format_exc()
    if len(text) <= _MAX_TRACEBACK:
        return text
    half = _MAX_TRACEBACK // 2
    return f"{text[:half]}\n... ({len(text) - 2 * half} characters) ...\n{text[-half:]}"


def _calls(part: Part, samples: Sequence[RewardSample]) -> list[Sequence[RewardSample]]:
    return [samples] if part.function.is_batched else [[sample] for sample in samples]


def _judge(function: BoundReward, samples: Sequence[RewardSample]) -> list[Outcome]:
    try:
        returned = function.judge(samples)
    except BaseException as error:  # user code may raise anything, `sys.exit` included, and must cost no other sample
        return [failure(error)] * len(samples)
    return [_checked(function, value) for value in returned]


async def _judge_async(function: BoundReward, samples: Sequence[RewardSample], timeout: float) -> list[Outcome]:
    from asyncio import timeout as time_limit

    seconds = timeout * len(samples)
    try:
        async with time_limit(seconds) as limit:
            returned = await function.judge_async(samples)
    except BaseException as error:  # as above
        return [{"timeout": seconds} if limit.expired() else failure(error)] * len(samples)
    return [_checked(function, value) for value in returned]


def _checked(function: BoundReward, returned: Any) -> Outcome:
    try:
        return function.check(returned)
    except BaseException as error:  # of a user's class, whose methods may raise anything
        return failure(error)
