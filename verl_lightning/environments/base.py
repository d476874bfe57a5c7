"""The world of one task, in which the policy acts turn by turn, and what it answers to a turn."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, ClassVar

Message = dict[str, Any]
"""A message of a chat: ``role``, ``content``, and ``tool_calls`` where an assistant calls tools."""

Row = Mapping[str, Any]
"""All columns of a data row, such as ``prompt``, ``data_source`` and ``reward_model``."""


_OWN_METRICS = {"episodes", "errors", "timeouts", "reward", "turns", "trajectories", "tokens/own", "tokens/read"}
"""Names under ``env/<environment>/`` that are counted for every environment."""


@dataclass(frozen=True)
class Step:
    """An environment's answer to one turn of the policy."""

    messages: str | Sequence[Message] = ()
    """Messages that the policy reads next; a text is what the user says."""

    reward: float = 0.0
    """Reward of the turn; an episode's reward is the sum of those of its turns."""

    done: bool = False
    """True if the episode is over."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers by name, which are added up over the episode and logged as ``env/<environment>/<name>``."""


class Environment(ABC):
    """One task's world; each episode has one of its own, and runs in a thread of its own.

    A class is made anew for each episode, with the arguments of the configuration. What it says must depend only on the
    row and on what it is told, so that a run that is resumed goes on as before.
    """

    tools: Sequence[Any] = ()
    """Typed and documented functions, or names of such, that the policy may call; methods of the environment too.

    The chat template gets their schemas. Functions run in a process of their own, methods where the environment does.
    """

    tool_timeout: float = 30.0
    """Seconds that a call of a tool may take; the policy reads that it took longer."""

    tool_calls: Any = "auto"
    """Format in which the policy writes calls: a name in `FORMATS`, a `ToolCallFormat`, or ``auto``."""

    tool_variables: Sequence[str] | None = None
    """Names of the environment variables that functions see beside the basic ones; None for all."""

    is_quick: ClassVar[bool] = False
    """True for a world that computes its answers at once and waits for nothing: sampling then always waits for it, so
    that runs are the same bit for bit on any machine. Others are waited for as long as they answer at once."""

    async def reset(self, row: Row) -> str | Sequence[Message]:
        """Begin an episode; return what the policy reads first.

        Args:
            row: Row of the data that the episode is about.

        Returns:
            Messages, or a text that the user says; the row's own ``prompt`` unless overridden.
        """
        messages: Sequence[Message] = row["prompt"]
        return messages

    @abstractmethod
    async def step(self, message: Message) -> Step:
        """Answer the policy's turn.

        Args:
            message: Turn of the policy: ``role`` and ``content``, without special tokens.
        """

    async def after_tools(self, answers: Sequence[Message]) -> Step:
        """Answer a turn in which the policy has called tools; `step` is for its other turns.

        Args:
            answers: Message of each call, with the role ``tool``; the policy reads them unless overridden.
        """
        return Step(answers)

    async def close(self) -> None:  # noqa: B027
        """Give back what the episode holds; called once for each that has begun, failed or not."""


def as_messages(messages: str | Sequence[Message]) -> list[Message]:
    """Returns messages as a list; a text is what the user says.

    Raises:
        ValueError: If they are neither.
    """
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if not isinstance(messages, list | tuple):
        raise ValueError(f"expected a text or a list of messages, got {messages!r:.80}.")
    return list(messages)


def complaint_about(step: object) -> str | None:
    """Says what is wrong with what an environment's ``step`` has returned; None if nothing is."""
    if not isinstance(step, Step):
        return f"`step` must return a `Step`, got {step!r:.80}."
    numbers = {"reward": step.reward, **{f"metrics[{name!r}]": value for name, value in step.metrics.items()}}
    for name, value in numbers.items():
        if not isinstance(value, Real) or not math.isfinite(value):
            return f"`Step.{name}` must be a finite number, got {value!r:.80}."
    if taken := sorted(_OWN_METRICS & step.metrics.keys()):
        return f"`Step.metrics` may not have `{taken[0]}`, which each environment has of its own. Rename it."
    return None
