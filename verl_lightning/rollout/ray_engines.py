"""Rollout engines in Ray actors, anywhere in the cluster, behind the interface of one engine."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from verl_lightning.ray.actor_pool import MAX_DEATHS
from verl_lightning.ray.actors import (
    RuntimeEnvironment,
    await_actors,
    await_answer,
    on_this_node,
    start_actors,
    stop_actors,
    take_answer,
)
from verl_lightning.ray.cluster import Demand, connect_like
from verl_lightning.rollout.base import Completion, Request
from verl_lightning.rollout.dispatcher import Dispatcher
from verl_lightning.rollout.engine_actor import EngineActor
from verl_lightning.rollout.stepping import GRACE, SteppingEngine, late_message
from verl_lightning.rollout.stored_weights import store_weights
from verl_lightning.rollout.weight_sums import WeightSums

_NAMESPACE = "verl_lightning"
_MAX_PART = 64  # requests of a part: a late one keeps few others waiting


@dataclass(frozen=True, kw_only=True)
class Caller:
    """One of the processes that share the replicas."""

    rank: int = 0
    """Among all processes; the first one starts the replicas and sends them weights."""

    broadcast: Callable[[Any], Any] = lambda value: value
    """Gives the first one's value to all. Collective."""


class RayEngines:
    """Replicas of an engine in Ray actors that answer the prompts of all training processes.

    There may be more or fewer replicas than processes: a `Dispatcher`, an actor too, shares out the requests of all by
    their tokens. It does without a replica that dies, and asks another; Ray starts the dead one anew, which then loads
    the newest weights first. These are sent once, by the first process, and are kept in Ray's object store, from which
    all replicas of a node read them.

    Args:
        engine: Engine that each replica runs; not started.
        demand: The number of replicas, and the resources of each.
        caller: This process among those that share the replicas.
        grace: Seconds beyond the engine's deadline after which one that says nothing counts as hung: it is started
            anew, and another one is asked.
        at_least: Number of replicas with which the run begins, while others wait for a place; None for all.
    """

    def __init__(
        self,
        engine: SteppingEngine,
        demand: Demand,
        *,
        caller: Caller = Caller(),
        grace: float = GRACE,
        at_least: int | None = None,
    ) -> None:
        self.engine = engine
        self.demand = demand
        self.caller = caller
        self.deadline = engine.recipe().deadline
        self.grace = grace
        self.at_least = at_least
        self._actors: list[Any] = []  # only the first process has them
        self._dispatcher: Any = None
        self._weights: list[Any] = []  # Ray keeps them as long as these references
        self._version = 0
        self._outbox: list[tuple[Request, asyncio.Future[Completion]]] = []
        self._parts: set[asyncio.Task[None]] = set()

    def start(self, device: torch.device) -> None:
        """Start the replicas, on GPUs if they have some. Collective.

        Args:
            device: The trainer's, which the replicas leave alone.

        Raises:
            PlacementError: If the cluster has no room.
            RuntimeError: If they are started already.
        """
        import ray

        del device
        if self._dispatcher is not None:
            raise RuntimeError("`RayEngines.start` was called twice. Call `stop` in between.")
        is_first = self.caller.rank == 0
        name, address = self.caller.broadcast(self._start_actors() if is_first else None)
        if not is_first:
            connect_like(address)
            self._dispatcher = ray.get_actor(name, namespace=_NAMESPACE)
            return
        await_actors(self._actors, self.demand, self.at_least)  # the others go on meanwhile, until weights are sent

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Send the policy's weights to all replicas at once; of the processes but the first, nothing is sent.

        All must have been answered before one calls it, and none may ask until all have.

        Raises:
            ValueError: If the names are not exactly those of the engine's model.
        """
        self._version = version
        if self.caller.rank != 0:
            for _ in weights:  # gathering them is collective
                pass
            return
        self._weights = []
        take_answer(self._dispatcher.forget_weights.remote())  # or the object store would hold the old ones too
        self._weights = store_weights(weights)
        take_answer(self._dispatcher.load_weights.remote(version, self._weights))

    async def generate(self, request: Request) -> Completion:
        """Sample one response; what is asked at once goes to the replicas in parts of whole groups.

        Raises:
            RunError: If replicas die each time.
            ActorsLostError: If all of them or their dispatcher are gone.
        """
        loop = asyncio.get_running_loop()
        if not self._outbox:
            loop.call_soon(lambda: self._flush(loop))
        answer: asyncio.Future[Completion] = loop.create_future()
        self._outbox.append((request, answer))
        return await answer

    def _flush(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send the requests that were asked since the last turn of the event loop."""
        outbox, self._outbox = self._outbox, []
        size = min(_MAX_PART, -(-len(outbox) // self.demand.count))
        groups = [list(same) for _, same in groupby(outbox, lambda pair: pair[0].prompt_ids)]
        part: list[tuple[Request, asyncio.Future[Completion]]] = []
        for number, group in enumerate(groups, start=1):
            part += group
            if len(part) >= size or number == len(groups):
                self._parts.add(task := loop.create_task(self._ask(part)))
                task.add_done_callback(self._parts.discard)
                part = []

    async def _ask(self, part: list[tuple[Request, asyncio.Future[Completion]]]) -> None:
        """Have the dispatcher answer some requests, and tell those who wait."""
        question = self._dispatcher.generate.remote(self._version, [request for request, _ in part])
        answers = asyncio.ensure_future(await_answer(question))
        await asyncio.wait([answers], timeout=(MAX_DEATHS + 1) * (self.deadline + self.grace))
        error: BaseException | None
        if answers.done():
            error = answers.exception()
        else:
            answers.cancel()
            error = TimeoutError(late_message([request.name for request, _ in part], self.deadline))
        for place, (_, answer) in enumerate(part):
            if answer.done():  # nobody waits any more
                continue
            if error is None:
                answer.set_result(answers.result()[place])
            else:
                answer.set_exception(error)

    def drop_caches(self) -> None:
        """Have all replicas forget what they kept of prompts; on the first process."""
        if self.caller.rank == 0:
            take_answer(self._dispatcher.drop_caches.remote())

    def weight_sums(self) -> WeightSums:
        """Sum the weights that one of the replicas holds; on the other processes than the first, none."""
        if self.caller.rank != 0:
            return {}
        sums: WeightSums = take_answer(self._dispatcher.weight_sums.remote())
        return sums

    def stop(self) -> None:
        """End the replicas, by the process that started them; may be called twice."""
        if self._actors:
            stop_actors([self._dispatcher, *self._actors])
        self._dispatcher, self._actors, self._weights = None, [], []

    def _start_actors(self) -> tuple[str, str]:
        """Starts the replicas and their dispatcher; gives its name, and the address of the cluster."""
        import ray

        own_device = torch.device("cuda", 0) if self.demand.gpus else torch.device("cpu")
        arguments = self.engine, own_device, RuntimeEnvironment.here()
        self._actors = start_actors(EngineActor, self.demand, *arguments, at_least=self.at_least)
        options: dict[str, Any] = {
            "name": f"dispatcher-{uuid.uuid4().hex}",
            "namespace": _NAMESPACE,
            "scheduling_strategy": on_this_node(),
        }
        remote: Any = ray.remote(num_cpus=0)(Dispatcher)
        patience, may_come_late = self.deadline + self.grace, self.at_least is not None
        self._dispatcher = remote.options(**options).remote(self._actors, patience, may_come_late=may_come_late)
        return options["name"], ray.get_runtime_context().gcs_address
