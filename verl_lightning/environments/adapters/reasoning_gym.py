"""Tasks of the package `reasoning-gym`, drawn from its generators and judged by them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from verl_lightning.environments.base import Environment, Message, Row, Step
from verl_lightning.needs import missing_package


class ReasoningGym(Environment):
    """One question of a generator, answered in one turn.

    The row's column ``index`` says which question; the row's prompt is not used.

    Args:
        task: Name of the generator, such as ``basic_arithmetic``.
        size: Number of its questions.
        seed: Seed of the generator.
        tag: Tag around the answer, as in ``<answer>5</answer>``; empty takes the whole turn.
        settings: Further settings of the generator.
    """

    def __init__(
        self,
        task: str,
        size: int = 10_000,
        seed: int = 0,
        tag: str = "answer",
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self._data = _dataset(task, size, seed, tuple(sorted((settings or {}).items())))
        self._size, self._tag = size, tag

    async def reset(self, row: Row) -> str:
        """Ask the question that the row names."""
        self._entry = self._data[int(row["index"]) % self._size]
        wanted = f" Write the answer alone between <{self._tag}> and </{self._tag}>." if self._tag else ""
        return f"{self._entry['question']}{wanted}"

    async def step(self, message: Message) -> Step:
        """Judge the answer as the generator does."""
        text = message["content"]
        if self._tag:
            _, found, rest = text.rpartition(f"<{self._tag}>")
            text = rest.partition(f"</{self._tag}>")[0].strip() if found else None
        return Step(reward=float(self._data.score_answer(text, self._entry)), done=True)


@cache
def _dataset(task: str, size: int, seed: int, settings: tuple[tuple[str, Any], ...]) -> Any:
    """Returns a generator's questions; made once for all episodes."""
    if (complaint := missing_package("`ReasoningGym`", "reasoning_gym", "Install `reasoning-gym`.")) is not None:
        raise ValueError(complaint)
    import reasoning_gym

    return reasoning_gym.create_dataset(task, size=size, seed=seed, **dict(settings))
