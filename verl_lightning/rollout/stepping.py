"""What engines of this process have in common: requests join at any time, and all go on step by step."""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from verl_lightning.rollout.base import Completion, Request
from verl_lightning.rollout.weight_sums import WeightSums

GRACE = 60.0
"""Seconds beyond its deadline that an engine gets to say that it is late, before it counts as stuck."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How another process makes an engine, in values as JSON has them."""

    kind: Literal["hf", "vllm"]
    """Class of the engine."""

    options: dict[str, Any]
    """Arguments of the engine, dataclasses as dictionaries."""

    deadline: float
    """Most seconds from a request to its completion."""


class SteppingEngine(ABC):
    """An engine whose steps each give every unfinished response about one more token.

    `add`, `step` and `abort` are for who drives it by himself, as another process does; `generate` drives it too, in
    the event loop of the first who asks. All requests that wait when a step begins take part in it, so what is asked at
    once is sampled alike each time.
    """

    def __init__(self) -> None:
        self._keys = itertools.count()
        self._answers: dict[int, asyncio.Future[Completion]] = {}
        self._driver: asyncio.Task[None] | None = None

    @abstractmethod
    def start(self, device: torch.device) -> None:
        """Take memory and load what never changes."""

    @abstractmethod
    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace the policy's weights, see `Engine.load_weights`."""

    @abstractmethod
    def drop_caches(self) -> None:
        """Forget what was kept of prompts and responses so far, see `Engine.drop_caches`."""

    @abstractmethod
    def weight_sums(self) -> WeightSums:
        """Sum the weights that the engine holds."""

    @abstractmethod
    def stop(self) -> None:
        """Give back all memory and end all processes."""

    @abstractmethod
    def recipe(self) -> Recipe:
        """Tell another process how to make such an engine."""

    @abstractmethod
    def add(self, key: int, request: Request) -> None:
        """Take a request.

        Args:
            key: Number by which `step` returns its completion.
            request: Request to answer.

        Raises:
            ValueError: If the engine can't answer it.
            RuntimeError: If the engine has not started, or has no weights.
        """

    @abstractmethod
    def step(self) -> list[tuple[int, Completion]]:
        """Go on with all requests by about a token; returns those that are finished.

        Raises:
            TimeoutError: If some are late; all are given up then.
        """

    @abstractmethod
    def abort(self) -> None:
        """Give up all requests."""

    async def generate(self, request: Request) -> Completion:
        """Sample one response, together with all others that are asked for; raises what `add` and `step` raise."""
        key = next(self._keys)
        self.add(key, request)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Completion] = loop.create_future()
        self._answers[key] = answer
        if self._driver is None:
            self._driver = loop.create_task(self._drive())
        return await answer

    async def _drive(self) -> None:
        """Step as long as somebody waits, who may ask more between two steps.

        No turn of the event loop lies between the last look at who waits and the end: whoever asks later is not
        overlooked, but drives anew.
        """
        try:
            while self._answers:
                for key, completion in self.step():
                    answer = self._answers.pop(key)
                    if not answer.done():  # else nobody waits any more
                        answer.set_result(completion)
                await asyncio.sleep(0)
        except BaseException as error:  # of whatever kind, it is the waiting ones who must hear of it
            answers, self._answers = self._answers, {}
            for answer in answers.values():
                if not answer.done():
                    answer.set_exception(error)
            self.abort()
            if not isinstance(error, Exception):
                raise
        finally:
            self._driver = None


def late_message(names: Sequence[str], deadline: float) -> str:
    """Say that responses were not finished in time.

    Args:
        names: The user's names for them, in the order in which they were asked.
        deadline: Most seconds that they may take.
    """
    return (
        f"{len(names)} responses were not finished after `rollout.deadline` = {deadline:g} s; the first is that to"
        f" {names[0]} of this rank's batch. Sample shorter or fewer responses, give the engine more memory, or raise"
        " the deadline."
    )
