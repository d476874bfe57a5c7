"""The Ray actor behind `RayEngines` that shares out requests among replicas; it starts without Lightning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl_lightning.ray.actor_pool import ActorPool
from verl_lightning.rollout.base import Completion, Request
from verl_lightning.rollout.completions import version_message
from verl_lightning.rollout.weight_sums import WeightSums

_MAX_PARTS = 8  # that a replica holds at once: it samples them together


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
