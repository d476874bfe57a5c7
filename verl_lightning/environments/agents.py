"""Agents: programs of the user that ask the policy by OpenAI's API, and give their episode its reward."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_lightning.environments.agent_server import AgentServer
from verl_lightning.environments.agent_session import AgentSession, Speaker
from verl_lightning.environments.workers import Answer, Workers
from verl_lightning.episodes import Episode
from verl_lightning.needs import INSTALL_AGENTS, missing_package
from verl_lightning.rewards.loading import find_object
from verl_lightning.rollout.base import Request

_WAYS_OUT = "Give an import path such as `package.module.agent`, or a file such as `path/to/file.py:agent`."


@dataclass(kw_only=True)
class Agent:
    """A user's agent, of which every episode is one call.

    Args:
        agent: ``async def agent(client, row) -> float``, or its name.
        timeout: Most seconds of an episode.
        tool_calls: Format in which the policy writes calls; ``auto`` is that of its chat template.
        variables: Names of the environment variables that agents see beside the basic ones; None for all.

    Raises:
        ValueError: If it does not import, or is not ``async``.
    """

    agent: str | Callable[..., Any]
    timeout: float = 600.0
    tool_calls: Any = "auto"
    variables: Sequence[str] | None = None
    key: str = "rollout.environment"
    workers: Workers = field(init=False)

    def __post_init__(self) -> None:
        if not 0 < self.timeout < math.inf:
            raise ValueError(f"`{self.key}.timeout` must be a positive number of seconds, got {self.timeout}.")
        given = self.agent
        found = find_object(given, f"`{self.key}.agent: {given}`", _WAYS_OUT) if isinstance(given, str) else given
        if not inspect.iscoroutinefunction(found):
            raise ValueError(f"`{self.key}.agent` must be `async def agent(client, row)`, got {found!r:.80}.")
        try:
            inspect.signature(found).bind(None, None)
        except TypeError as error:
            raise ValueError(f"`{self.key}.agent` must take a client and a row: {error}.") from None
        if (complaint := missing_package(f"`{self.key}.agent`", "openai", INSTALL_AGENTS)) is not None:
            raise ValueError(complaint)
        self.workers = Workers([given], variables=self.variables, key=f"{self.key}.agent")

    async def play(self, server: AgentServer, speaker: Speaker, row: Mapping[str, Any], request: Request) -> Outcome:
        """Run one episode; if its process ends meanwhile, maybe by the fault of another episode, it is run once more.

        Args:
            server: Server of the batch.
            speaker: Policy.
            row: Data row, as JSON can hold it.
            request: Request for the episode.
        """
        outcome = await self._play_once(server, speaker, row, request)
        return await self._play_once(server, speaker, row, request) if outcome.answer.is_lost else outcome

    async def _play_once(
        self, server: AgentServer, speaker: Speaker, row: Mapping[str, Any], request: Request
    ) -> Outcome:
        session, begin = AgentSession(speaker=speaker, request=request), time.monotonic()
        key = server.open(session)
        try:
            client = {"base_url": server.base_url, "api_key": key}
            answer = await self.workers.call(0, dict(row), timeout=self.timeout, client=client)
        finally:
            server.close(key)
        return Outcome(session=session, answer=answer, seconds=time.monotonic() - begin)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of an agent's episode."""

    session: AgentSession
    """Histories of the episode."""

    answer: Answer
    """Reward, or a failure."""

    seconds: float
    """Seconds of the episode."""

    def error(self, name: str) -> str:
        """Say why the episode counts for nothing; empty if it counts.

        Args:
            name: Name of the episode.
        """
        if self.answer.is_timeout:
            return f"{name}: the agent took longer than its `timeout`."
        if self.answer.error:
            return f"{name}: the agent raised {self.answer.error}."
        if self.answer.value is not None and not _is_number(self.answer.value):
            return f"{name}: the agent must return its reward, a finite number, or None; got {self.answer.value!r:.80}."
        if not self.session.learnt_from():
            return f"{name}: the agent asked the policy nothing."
        return ""

    def episode(self, kind: str, name: str) -> Episode:
        """Return the episode beside its tokens; its reward stands at the last turn of its last history.

        Args:
            kind: Name of the agent.
            name: Name of the episode.
        """
        error, histories = self.error(name), self.session.learnt_from()
        turns = histories[-1].ends if histories else []
        reward = 0.0 if error or self.answer.value is None else float(self.answer.value)
        return Episode(
            environment=kind,
            messages=list(histories[-1].messages) if histories else [],
            turn_ends=turns,
            rewards=[0.0] * (len(turns) - 1) + [reward] if turns else [],
            metrics={},
            seconds=[self.seconds],
            past=[] if error else [history.as_past() for history in histories[:-1]],
            error=error,
            is_timeout=self.answer.is_timeout,
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
