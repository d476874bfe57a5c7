"""Rollout engines in Ray actors, anywhere in the cluster, behind the interface of one engine."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl_lightning.ray.actors import (
    RuntimeEnvironment,
    await_actors,
    on_this_node,
    start_actors,
    stop_actors,
    take_answer,
)
from verl_lightning.ray.cluster import Demand, connect_like
from verl_lightning.rollout.base import Prompts, RolloutEngine, SamplingConfig
from verl_lightning.rollout.dispatcher import Dispatcher, EngineActor, version_message
from verl_lightning.rollout.stored_weights import store_weights
from verl_lightning.types import Rollout

_NAMESPACE = "verl_lightning"


@dataclass(frozen=True, kw_only=True)
class Caller:
    """One of the processes that share the replicas."""

    rank: int = 0
    """Among all processes; the first one starts the replicas and sends them weights."""

    count: int = 1
    """Processes that ask at the same time."""

    broadcast: Callable[[Any], Any] = lambda value: value
    """Gives the first one's value to all. Collective."""


class RayEngines:
    """Replicas of an engine in Ray actors that answer the prompts of all training processes.

    There may be more or fewer replicas than processes: a `Dispatcher`, an actor too, shares out the prompts of all by
    their tokens. It does without a replica that dies, and asks another; Ray starts the dead one anew, which then loads
    the newest weights first. These are sent once, by the first process, and are kept in Ray's object store, from which
    all replicas of a node read them. Every answer says with which version of the weights it was sampled, and another
    one than the newest is an error.

    Args:
        engine: Engine that each replica runs; not started.
        demand: The number of replicas, and the resources of each.
        pad_token_id: Token that fills the end of shorter responses.
        caller: This process among those that share the replicas.
    """

    def __init__(self, engine: RolloutEngine, demand: Demand, *, pad_token_id: int, caller: Caller = Caller()) -> None:
        self.engine = engine
        self.demand = demand
        self.pad_token_id = pad_token_id
        self.caller = caller
        self._actors: list[Any] = []  # only the first process has them
        self._dispatcher: Any = None
        self._weights: list[Any] = []  # Ray keeps them as long as these references
        self._version = 0
        self._device = torch.device("cpu")

    def start(self, device: torch.device) -> None:
        """Start the replicas, on GPUs if they have some. Collective.

        Args:
            device: The trainer's, on which the responses will lie; the replicas leave it alone.

        Raises:
            PlacementError: If the cluster has no room.
            RuntimeError: If they are started already.
        """
        import ray

        if self._dispatcher is not None:
            raise RuntimeError("`RayEngines.start` was called twice. Call `stop` in between.")
        self._device = device
        is_first = self.caller.rank == 0
        name, address = self.caller.broadcast(self._start_actors() if is_first else None)
        if not is_first:
            connect_like(address)
            self._dispatcher = ray.get_actor(name, namespace=_NAMESPACE)
            return
        await_actors(self._actors, self.demand)  # the others go on meanwhile, until weights are sent

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Send the policy's weights to all replicas at once; of the processes but the first, nothing is sent.

        All must have been answered before one calls it, and none may ask until all have.

        Raises:
            ValueError: If the names are not exactly those of the engine's model.
        """
        self._version += 1
        if self.caller.rank != 0:
            for _ in weights:  # gathering them is collective
                pass
            return
        self._weights = []
        take_answer(self._dispatcher.forget_weights.remote())  # or the object store would hold the old ones too
        self._weights = store_weights(weights)
        take_answer(self._dispatcher.load_weights.remote(self._version, self._weights))

    def generate(self, prompts: Prompts, sampling: SamplingConfig) -> Rollout:
        """Sample ``sampling.num_samples`` responses to each prompt; those of one prompt are adjacent rows.

        Raises:
            RuntimeError: If replicas die each time, or answer with other weights than the newest.
            ActorsLostError: If all of them or their dispatcher are gone.
        """
        question = self._dispatcher.generate.remote(self._version, prompts.to(torch.device("cpu")), sampling)
        rollout: Rollout
        version, rollout = take_answer(question)
        if version != self._version:
            raise RuntimeError(version_message(version, self._version))
        return rollout.to(self._device)

    def stop(self) -> None:
        """End the replicas, by the process that started them; may be called twice."""
        if self._actors:
            stop_actors([self._dispatcher, *self._actors])
        self._dispatcher, self._actors, self._weights = None, [], []

    def _start_actors(self) -> tuple[str, str]:
        """Starts the replicas and their dispatcher; gives its name, and the address of the cluster."""
        import ray

        own_device = torch.device("cuda", 0) if self.demand.gpus else torch.device("cpu")
        self._actors = start_actors(EngineActor, self.demand, self.engine, own_device, RuntimeEnvironment.here())
        options: dict[str, Any] = {
            "name": f"dispatcher-{uuid.uuid4().hex}",
            "namespace": _NAMESPACE,
            "scheduling_strategy": on_this_node(),
        }
        remote: Any = ray.remote(num_cpus=0)(Dispatcher)
        self._dispatcher = remote.options(**options).remote(self._actors, self.caller.count, self.pad_token_id)
        return options["name"], ray.get_runtime_context().gcs_address
