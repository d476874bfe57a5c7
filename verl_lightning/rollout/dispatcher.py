"""The Ray actors behind `RayEngines`: replicas of an engine, and the one that shares out requests among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from verl_lightning.ray.actor_pool import ActorPool
from verl_lightning.ray.actors import RuntimeEnvironment
from verl_lightning.rollout.base import Completion, Engine, Request
from verl_lightning.rollout.completions import answer, version_message
from verl_lightning.rollout.stored_weights import read_weights
from verl_lightning.rollout.weight_sums import WeightSums

_MAX_PARTS = 8  # that a replica holds at once: it samples them together


class EngineActor:
    """One replica.

    Args:
        engine: Not started.
        device: On which it starts.
        environment: The caller's folder and modules.
    """

    def __init__(self, engine: Engine, device: torch.device, environment: RuntimeEnvironment) -> None:
        environment.enter()
        self._engine = engine
        self._device = device
        self._version: int | None = None  # None before the engine has weights
        self._has_started = False

    def ready(self) -> None:
        """Starts the engine, unless it runs."""
        if not self._has_started:
            self._engine.start(self._device)
            self._has_started = True

    def load_weights(self, version: int, weights: Sequence[Any]) -> None:
        """Loads the policy's weights.

        Args:
            version: Number of this version of the weights.
            weights: References from `store_weights`.
        """
        self.ready()  # again, if Ray has replaced this actor
        self._version = None
        self._engine.load_weights(read_weights(weights), version)
        self._version = version

    async def generate(self, version: int, weights: Sequence[Any], requests: Sequence[Request]) -> list[Completion]:
        """Samples with weights of this version, which are loaded if it has others."""
        if self._version != version:
            self.load_weights(version, weights)
        return await answer(self._engine.generate, requests)

    def drop_caches(self) -> None:
        """Forgets what was kept of prompts so far."""
        self._engine.drop_caches()

    def weight_sums(self) -> WeightSums:
        """Sums the weights that the engine holds."""
        return self._engine.weight_sums()


class Dispatcher:
    """Shares out the requests of all training processes among the replicas of an engine.

    Each part goes to the replica with the fewest tokens outstanding, and to another one if that dies; see `ActorPool`.

    Args:
        replicas: `EngineActor` actors.
        patience: Seconds after which a replica that says nothing counts as hung, and is started anew.
        may_come_late: True if replicas may still be without a place.
    """

    def __init__(self, replicas: Sequence[Any], patience: float | None = None, *, may_come_late: bool = False) -> None:
        self._pool = ActorPool(replicas, _MAX_PARTS, patience, may_come_late=may_come_late)
        self._version = 0
        self._weights: Sequence[Any] = []
        self._num_asked = 0  # parts that are not answered yet

    async def forget_weights(self) -> None:
        """Lets Ray free the weights, which new ones are about to replace, unless a new replica may need them."""
        if not self._num_asked:
            self._weights = []

    async def load_weights(self, version: int, weights: Sequence[Any]) -> None:
        """Has all replicas load the policy's weights, those that start later too.

        Args:
            version: Number of this version of the weights.
            weights: References from `store_weights`.
        """
        self._version, self._weights = version, weights
        await self._pool.tell_all(lambda replica: replica.load_weights.remote(version, weights))

    async def drop_caches(self) -> None:
        """Has all replicas forget what they kept of prompts."""
        await self._pool.tell_all(lambda replica: replica.drop_caches.remote())

    async def weight_sums(self) -> WeightSums:
        """Sums the weights of a replica."""
        sums: WeightSums = await self._pool.ask(1.0, lambda replica: replica.weight_sums.remote())
        return sums

    async def generate(self, version: int, requests: Sequence[Request]) -> list[Completion]:
        """Samples a part of one caller's responses, from the newest weights when a replica takes it.

        Raises:
            RuntimeError: If this version is not the newest.
            RunError: If replicas die each time.
        """
        if version != self._version:
            raise RuntimeError(version_message(self._version, version))
        self._num_asked += 1
        try:
            completions: list[Completion] = await self._pool.ask(
                num_tokens(requests), lambda replica: replica.generate.remote(self._version, self._weights, requests)
            )
        finally:
            self._num_asked -= 1
        return completions


def num_tokens(requests: Sequence[Request]) -> float:
    """Tokens that an engine reads and, at most, writes for these requests, which share the reading of a prompt."""
    prompts = {tuple(request.prompt_ids) for request in requests}
    return float(sum(map(len, prompts)) + sum(request.sampling.max_new_tokens for request in requests))
