"""Games with Gymnasium's interface whose observations are texts, or can be written as such."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from verl_lightning.environments.base import Environment, Message, Row, Step
from verl_lightning.environments.own_thread import run_in_thread
from verl_lightning.needs import missing_package


class GymnasiumText(Environment):
    """One episode of a Gymnasium environment: the policy says an action, and reads the observation.

    The row's column ``seed``, or its ``index``, seeds the game, so that a resumed run plays the same. An action in a
    discrete space is the name that ``actions`` gives it, or its number; in a text space it is the turn as it is. Any
    other turn costs ``wrong_reward`` and is answered by the actions that there are.

    Args:
        game: Id of the environment, such as ``FrozenLake-v1``; ``module:Id`` imports the module first.
        arguments: Arguments of `gymnasium.make`.
        instruction: First text for the policy, before the first observation.
        actions: Name of each action of a discrete space, by its number.
        wrong_reward: Reward of a turn that is no action.
    """

    def __init__(
        self,
        game: str,
        arguments: Mapping[str, Any] | None = None,
        instruction: str = "",
        actions: list[str] | None = None,
        wrong_reward: float = 0.0,
    ) -> None:
        if (complaint := missing_package("`GymnasiumText`", "gymnasium", "Install `gymnasium`.")) is not None:
            raise ValueError(complaint)
        import gymnasium

        self._game = gymnasium.make(game, **(arguments or {}))
        self._instruction, self._actions, self._wrong_reward = instruction, actions or [], wrong_reward

    async def reset(self, row: Row) -> str:
        """Begin the game."""
        seed = row.get("seed", row.get("index", 0))
        observation, _ = await run_in_thread(partial(self._game.reset, seed=int(seed)))
        return "\n".join(filter(None, [self._instruction, self._shown(observation)]))

    async def step(self, message: Message) -> Step:
        """Take the action that the policy has named."""
        action = self._action(message["content"].strip())
        if action is None:
            names = ", ".join(self._actions) or str(self._game.action_space)
            return Step(f"That is no action. The actions are {names}.", reward=self._wrong_reward)
        observation, reward, is_over, is_cut, _ = await run_in_thread(partial(self._game.step, action))
        return Step(self._shown(observation), reward=float(reward), done=bool(is_over or is_cut))

    async def close(self) -> None:
        """End the game."""
        self._game.close()

    def _action(self, text: str) -> Any:
        """Returns the action of a text; None if it is none."""
        space = self._game.action_space
        if text in self._actions:
            return self._actions.index(text) + int(getattr(space, "start", 0))
        value: Any = int(text) if hasattr(space, "n") and text.lstrip("-").isdecimal() else text
        return value if space.contains(value) else None

    def _shown(self, observation: Any) -> str:
        """Returns an observation as text: itself, what the game draws (`render_mode: ansi`), or what Python shows."""
        if isinstance(observation, str):
            return observation
        if self._game.render_mode == "ansi":
            return str(self._game.render())
        return str(observation)
