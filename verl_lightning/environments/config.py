"""Environments by name, and the limits in which their episodes run."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from verl_lightning.environments.agents import Agent
from verl_lightning.environments.base import Environment
from verl_lightning.environments.chat import History
from verl_lightning.environments.tool_use import ToolEnvironment
from verl_lightning.faults import closest
from verl_lightning.options import Options
from verl_lightning.rewards.loading import find_object

Make = Callable[[], Environment]
"""Function that makes the environment of one episode."""

Given = str | dict[str, Any] | Callable[..., Any]
"""Environments as they are given: one or several by name; a place in the code, one with ``arguments``, or a class.

A dictionary with a list of ``tools`` is `ToolEnvironment` with these arguments; one with an ``agent`` is `Agent`."""

COLUMN = "environment"
"""Column of a row that names its environment, where there are several."""


_WAYS_OUT = (
    "Give the import path of a class such as `package.module.Game`, or a file such as `path/to/file.py:Game`; several"
    " by name, as `{game: path/to/file.py:Game}`."
)


@dataclass(frozen=True, kw_only=True)
class EpisodesConfig(Options, key="episodes"):
    """Limits of episodes, for all environments alike."""

    max_turns: int = 16
    """Most turns of the policy in an episode; all that follows the prompt shares ``sampling.max_new_tokens``."""

    max_concurrency: int = 256
    """Most episodes that a rank has open at once, each with a thread for its environment."""

    timeout: float = 60.0
    """Seconds that one ``reset``, ``step`` or ``close`` may take; the episode is left out otherwise."""

    max_error_share: float = 0.1
    """Share of a batch's episodes, in ``[0, 1]``, that may be left out for errors and timeouts; above it the run
    stops."""

    history: History = "refuse"
    """Treatment of chat templates that write earlier turns anew, such as those that drop earlier thoughts: ``refuse``
    stops before the first step and says what is changed; ``split`` goes on in a further trajectory of the episode, as
    the template writes it; ``keep`` has the policy read what it said, as it said it."""

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_concurrency"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")
        if not 0 < self.timeout < math.inf:
            raise ValueError(f"`timeout` must be a positive number of seconds, got {self.timeout}.")
        if not 0 <= self.max_error_share <= 1:
            raise ValueError(f"`max_error_share` must be between 0 and 1, got {self.max_error_share}.")


class Environments:
    """The environments of a run.

    Args:
        given: One environment, or several by the names that rows have in their column ``environment``.

    Raises:
        ValueError: If one does not import, is no environment, or does not take its arguments.
    """

    def __init__(self, given: Given) -> None:
        self._only: str | None = None
        if isinstance(given, dict) and not _is_one(given):
            self.makers: dict[str, Make | Agent] = {
                name: _maker(each, f"rollout.environment.{name}") for name, each in given.items()
            }
            if not self.makers:
                raise ValueError("`rollout.environment` names no environment. Give one, or leave it out.")
        else:
            make = _maker(given, "rollout.environment")
            self._only = _label(given)
            self.makers = {self._only: make}

    def name_of(self, row: Mapping[str, Any]) -> str:
        """Return the name of a row's environment.

        Raises:
            ValueError: If the row names none, or one that is not there.
        """
        if self._only is not None:
            return self._only
        name = row.get(COLUMN)
        if name not in self.makers:
            raise ValueError(
                f"a row's column `{COLUMN}` is {name!r}, but `rollout.environment` has"
                f" {', '.join(f'`{known}`' for known in self.makers)}.{closest(str(name), self.makers)}"
            )
        return str(name)


def _is_one(given: Mapping[str, Any]) -> bool:
    """Tells whether a dictionary describes one environment, and not several by name."""
    named = any(key in given and not isinstance(given[key], dict) for key in ("path", "agent"))
    return named or isinstance(given.get("tools"), list)


def _label(given: Given) -> str:
    """Returns the name of an environment that has been given none."""
    place = given.get("path") or given.get("agent", "tools") if isinstance(given, dict) else given
    if isinstance(place, str):
        return place.rpartition(":")[2].rpartition(".")[2]
    return str(getattr(place, "__name__", type(place).__name__))


def _maker(given: Any, key: str) -> Make | Agent:
    """Returns the function that makes an environment, or the agent."""
    arguments: dict[str, Any] = {}
    if isinstance(given, dict) and "agent" in given:
        if unknown := given.keys() - {"agent", "timeout", "tool_calls", "variables"}:
            raise ValueError(f"`{key}` has `agent`, `timeout`, `tool_calls` and `variables`, not `{min(unknown)}`.")
        return Agent(**given, key=key)
    if isinstance(given, dict) and "tools" in given:
        given = {"path": ToolEnvironment, "arguments": given}
    if isinstance(given, dict):
        if unknown := given.keys() - {"path", "arguments"}:
            raise ValueError(f"`{key}` has `path` and `arguments`, not `{min(unknown)}`.")
        given, arguments = given["path"], given.get("arguments") or {}
    found = find_object(given, f"`{key}: {given}`", _WAYS_OUT) if isinstance(given, str) else given
    if not callable(found):
        raise ValueError(
            f"`{key}` must be a class of environments, or a function that makes one, since each episode has one of its"
            f" own; got {found!r}."
        )
    if inspect.isabstract(found):
        missing = ", ".join(f"`{name}`" for name in sorted(found.__abstractmethods__))
        raise ValueError(f"`{key}` can't be `{found.__name__}`, which lacks {missing}.")
    try:
        inspect.signature(found).bind(**arguments)
    except TypeError as error:
        raise ValueError(f"`{key}.arguments` don't fit `{_label(found)}`: {error}.") from None
    return partial(found, **arguments)
