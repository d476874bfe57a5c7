"""Scores responses in Ray actors, anywhere in the cluster, behind the interface of the local pool."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from verl_lightning.ray.actor_pool import share_out
from verl_lightning.ray.actors import RuntimeEnvironment, await_actors, start_actors, stop_actors
from verl_lightning.ray.cluster import Demand
from verl_lightning.rewards.base import RewardSample
from verl_lightning.rewards.config import RewardConfig
from verl_lightning.rewards.pool import RewardPool, check_failures, with_error_share
from verl_lightning.rewards.scoring import RewardResults, units_of
from verl_lightning.rewards.wire import encode_samples

_MAX_CHUNK = 16  # samples of one request


class RewardActor:
    """One reward worker of the cluster: a local pool of one process, so that a stuck function can be killed.

    Args:
        config: The function and its limits.
        environment: The caller's folder and modules.
    """

    def __init__(self, config: RewardConfig, environment: RuntimeEnvironment) -> None:
        environment.enter()
        # The share of failures is judged over the whole batch, by the caller.
        limit = config.concurrency if config.max_concurrency is not None else None
        self._pool = RewardPool(dataclasses.replace(config, num_workers=1, max_concurrency=limit, max_error_share=1.0))
        self._is_ready = False

    def ready(self) -> tuple[bool, bool]:
        """Starts the process, unless it runs.

        Returns:
            True if a function judges the responses to a prompt at once; True if one is ``async``.

        Raises:
            ValueError: If a function does not import.
        """
        if not self._is_ready:
            self._pool.start()
            self._is_ready = True
        return self._pool.is_batched, self._pool.is_async

    def score(self, samples: Sequence[RewardSample]) -> RewardResults:
        """Scores some samples of a batch."""
        self.ready()  # again, if Ray has replaced this actor
        return self._pool.score(samples)


class RayRewardPool:
    """Ray actors of one CPU each that share out the samples of each batch.

    Like `RewardPool`, which each actor runs: a sample whose function fails gets no reward. An actor that dies is
    replaced and its samples are scored again, once for each.

    Args:
        config: The function and its limits.
    """

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self._is_batched = False  # both known once the functions are loaded
        self._is_async = False
        self._actors: list[Any] = []

    def start(self) -> None:
        """Starts the actors and waits until each has imported the function.

        Raises:
            ValueError: If the function does not import or does not take the arguments.
            PlacementError: If the cluster has no room.
            RuntimeError: If the pool is started already.
        """
        if self._actors:
            raise RuntimeError("`RayRewardPool.start` was called twice. Call `stop` in between.")
        demand = Demand(option="reward.num_workers", count=self.config.num_workers, cpus=1.0)
        actors = start_actors(RewardActor, demand, self.config, RuntimeEnvironment.here())
        self._is_batched, self._is_async = await_actors(actors, demand)[0]
        self._actors = actors

    def score(self, samples: Sequence[RewardSample], *, max_error_share: float | None = None) -> RewardResults:
        """Scores a batch.

        Args:
            samples: Samples, any number or none.
            max_error_share: Share of samples that may fail; None takes the configured one.

        Returns:
            One reward a sample, in order; None for samples to leave out.

        Raises:
            RunError: If more than ``max_error_share`` of the samples fail.
            RuntimeError: Before ``start``.
            TypeError: If a sample holds a value that JSON can't express.
        """
        if not self._actors:
            raise RuntimeError("`RayRewardPool.score` needs running actors. Call `start` first.")
        size = max(1, min(_MAX_CHUNK, len(samples) // (4 * len(self._actors))))
        if self._is_async:  # an actor waits for its whole share at once
            size = max(1, -(-len(samples) // len(self._actors)))
        chunks = join_units(units_of(samples, is_batched=self._is_batched), size=size)
        costs = [float(len(encode_samples(chunk))) for chunk in chunks]
        parts = share_out(self._actors, costs, lambda actor, index: actor.score.remote(chunks[index]))
        results = merge_results(parts, [len(chunk) for chunk in chunks])
        check_failures(with_error_share(self.config, max_error_share), results)
        return results

    def stop(self) -> None:
        """Ends the actors. Does nothing if there are none; ``start`` may follow."""
        stop_actors(self._actors)
        self._actors = []


def join_units(units: Sequence[Sequence[RewardSample]], *, size: int) -> list[list[RewardSample]]:
    """Puts units that follow each other together, up to the first with which they are so many samples."""
    chunks: list[list[RewardSample]] = []
    for unit in units:
        if not chunks or len(chunks[-1]) >= size:
            chunks.append([])
        chunks[-1] += unit
    return chunks


def merge_results(parts: Sequence[RewardResults], sizes: Sequence[int]) -> RewardResults:
    """Merges the results of a batch from those of its parts.

    Args:
        parts: Results of the parts, in the order of the samples.
        sizes: Number of samples of each part.
    """
    names = dict.fromkeys(name for part in parts for name in part.components)
    columns = {
        name: [value for part, size in zip(parts, sizes, strict=True) for value in _column(part, name, size)]
        for name in names
    }
    return RewardResults(
        rewards=[reward for part in parts for reward in part.rewards],
        components=columns,
        num_errors=sum(part.num_errors for part in parts),
        num_timeouts=sum(part.num_timeouts for part in parts),
        num_none=sum(part.num_none for part in parts),
        num_unjudged=sum(part.num_unjudged for part in parts),
        first_traceback=next((part.first_traceback for part in parts if part.first_traceback), None),
        first_mistake=next((part.first_mistake for part in parts if part.first_mistake), None),
        unlogged=tuple(dict.fromkeys(name for part in parts for name in part.unlogged)),
    )


def _column(part: RewardResults, name: str, size: int) -> list[float | None]:
    return part.components.get(name, [None] * size)
