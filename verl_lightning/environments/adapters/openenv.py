"""Environments that a server of OpenEnv (`openenv-core`) runs, with which the policy talks in words."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from verl_lightning.environments.base import Environment, Message, Row, Step
from verl_lightning.environments.own_thread import run_in_thread
from verl_lightning.needs import missing_package


class OpenEnv(Environment):
    """One session with a server: the policy's turn is a field of an action, and it reads the observation.

    The row's column ``seed``, or its ``index``, seeds the session, so that a resumed run plays the same.

    Args:
        url: Address of the server, such as ``http://127.0.0.1:8000``.
        action: Field of an action that takes the policy's turn.
        observation: Field of an observation that the policy reads; empty has it read all, as JSON.
    """

    def __init__(self, url: str, action: str = "message", observation: str = "") -> None:
        if (complaint := missing_package("`OpenEnv`", "openenv", "Install `openenv-core`.")) is not None:
            raise ValueError(complaint)
        from openenv.core.generic_client import GenericEnvClient

        self._client = GenericEnvClient(base_url=url)
        self._action, self._observation = action, observation

    async def reset(self, row: Row) -> str:
        """Begin a session."""
        seed = int(row.get("seed", row.get("index", 0)))
        result = await run_in_thread(partial(self._client.reset, seed=seed))
        return self._shown(result.observation)

    async def step(self, message: Message) -> Step:
        """Send the policy's turn."""
        result = await run_in_thread(partial(self._client.step, {self._action: message["content"]}))
        return Step(self._shown(result.observation), reward=float(result.reward or 0.0), done=bool(result.done))

    async def close(self) -> None:
        """End the session."""
        await run_in_thread(self._client.close)

    def _shown(self, observation: dict[str, Any]) -> str:
        return str(observation[self._observation]) if self._observation else json.dumps(observation)
