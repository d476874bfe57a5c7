"""Rollout engines in Ray actors, anywhere in the cluster, behind the interface of one engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from verl_lightning.ray.actors import Home, share_out, start_actors, stop_actors
from verl_lightning.ray.cluster import Demand
from verl_lightning.rollout.base import Prompts, RolloutEngine, SamplingConfig
from verl_lightning.rollout.joining import join_rollouts
from verl_lightning.rollout.process import buckets
from verl_lightning.types import Rollout

_REQUESTS_PER_REPLICA = 2  # large enough to fill an engine, small enough that a late one is not waited for long


class EngineActor:
    """One replica.

    Args:
        engine: Not started.
        device: On which it starts.
        home: The caller's folder and modules.
    """

    def __init__(self, engine: RolloutEngine, device: torch.device, home: Home) -> None:
        home.enter()
        self._engine = engine
        self._device = device
        self._version: int | None = None  # None before the engine has started
        self._has_started = False

    def ready(self) -> None:
        """Starts the engine, unless it runs."""
        if not self._has_started:
            self._engine.start(self._device)
            self._has_started = True

    def load_weights(self, version: int, weights: Sequence[Any]) -> None:
        """Loads the policy's weights.

        Args:
            version: Their number.
            weights: References of messages in the safetensors format.
        """
        self.ready()  # again, if Ray has replaced this actor
        self._version = None
        self._engine.load_weights(_read_messages(weights))
        self._version = version

    def generate(
        self, version: int, weights: Sequence[Any], prompts: Prompts, sampling: SamplingConfig
    ) -> tuple[int, Rollout]:
        """Samples with weights of this version, which are loaded if it has others.

        Returns:
            The version that it has sampled with, and the responses.
        """
        if self._version != version:
            self.load_weights(version, weights)
        rollout = self._engine.generate(prompts, sampling)
        assert self._version is not None
        return self._version, rollout.to(torch.device("cpu"))


class RayEngines:
    """Replicas of an engine in Ray actors that share out the prompts of each batch by their tokens.

    Ray replaces a replica that dies and sends it what was unanswered; it then loads the newest weights first. These
    are kept once in Ray's object store, from which all replicas of a node read them. Every answer says with which
    version of the weights it was sampled, and another one than the newest is an error.

    Args:
        engine: What each replica runs; not started.
        demand: The number of replicas, and the resources of each.
        pad_token_id: Fills the end of shorter responses.
    """

    def __init__(self, engine: RolloutEngine, demand: Demand, *, pad_token_id: int) -> None:
        self.engine = engine
        self.demand = demand
        self.pad_token_id = pad_token_id
        self._actors: list[Any] = []
        self._weights: list[Any] = []
        self._version = 0
        self._device = torch.device("cpu")

    def start(self, device: torch.device) -> None:
        """Start the replicas, on GPUs if they have some.

        Args:
            device: The trainer's, on which the responses will lie; the replicas leave it alone.

        Raises:
            PlacementError: If the cluster has no room.
            RuntimeError: If they are started already.
        """
        if self._actors:
            raise RuntimeError("`RayEngines.start` was called twice. Call `stop` in between.")
        self._device = device
        own_device = torch.device("cuda", 0) if self.demand.gpus else torch.device("cpu")
        self._actors = start_actors(EngineActor, self.demand, self.engine, own_device, Home.here())

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Send the policy's weights to all replicas at once.

        Raises:
            ValueError: If the names are not exactly those of the engine's model.
        """
        import ray

        self._version += 1
        self._weights = [ray.put(message) for message in buckets(iter(weights))]
        share_out(
            self._actors,
            [1.0] * len(self._actors),
            lambda actor, _: actor.load_weights.remote(self._version, self._weights),
        )

    def generate(self, prompts: Prompts, sampling: SamplingConfig) -> Rollout:
        """Sample ``sampling.num_samples`` responses to each prompt; those of one prompt are adjacent rows.

        Raises:
            RuntimeError: If a replica dies each time, or answers with other weights than the newest.
        """
        parts = split_prompts(prompts, _REQUESTS_PER_REPLICA * len(self._actors))
        costs = [num_tokens(part, sampling) for part in parts]
        answers = share_out(
            self._actors,
            costs,
            lambda actor, index: actor.generate.remote(self._version, self._weights, parts[index], sampling),
        )
        if wrong := {version for version, _ in answers} - {self._version}:
            raise RuntimeError(
                f"A rollout engine answered with version {wrong.pop()} of the weights, but {self._version} is the"
                " newest. The run stops, for it would learn from another policy; please report this."
            )
        rollouts = [rollout for _, rollout in answers]
        return join_rollouts(rollouts, pad_token_id=self.pad_token_id).to(self._device)

    def stop(self) -> None:
        """End the replicas; may be called twice."""
        stop_actors(self._actors)
        self._actors, self._weights = [], []


def split_prompts(prompts: Prompts, num_parts: int) -> list[Prompts]:
    """Prompts in at most so many parts, whose sizes differ by one at most; on the CPU, where actors get them."""
    num_parts = min(num_parts, len(prompts))
    edges = [len(prompts) * part // num_parts for part in range(num_parts + 1)]
    return [
        Prompts(
            prompt_ids=prompts.prompt_ids[start:end].cpu(),
            prompt_mask=prompts.prompt_mask[start:end].cpu(),
            seeds=prompts.seeds[start:end],
        )
        for start, end in zip(edges, edges[1:], strict=False)
    ]


def num_tokens(prompts: Prompts, sampling: SamplingConfig) -> float:
    """Tokens that an engine reads and, at most, writes for these prompts."""
    return float(prompts.prompt_mask.sum()) + len(prompts) * sampling.num_samples * sampling.max_new_tokens


def _read_messages(references: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    import ray

    for reference in references:
        yield from safetensors.torch.load(ray.get(reference)).items()
