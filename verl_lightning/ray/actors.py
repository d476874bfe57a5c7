"""Equal actors that share out the requests of one caller, the least loaded first.

Ray itself replaces an actor that dies, on another node if need be, and sends it its unanswered requests once more.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from verl_lightning.ray.cluster import Demand, PlacementError, connect, require

T = TypeVar("T")

MAX_RETRIES = 2
"""How often a request is sent again because its actor died with it; then it is the request's fault."""

_MAX_IN_FLIGHT = 2  # requests that an actor holds: one in hand, and one that hides the way there and back
_START_SECONDS = 600.0  # to place the actors and load what they hold


@dataclass(frozen=True, kw_only=True)
class Home:
    """Where the caller runs, so that relative paths and the user's own modules mean the same in an actor."""

    folder: str
    """The working directory."""

    sys_path: tuple[str, ...]
    """Where modules are searched for."""

    @classmethod
    def here(cls) -> Home:
        """This process's."""
        return cls(folder=os.getcwd(), sys_path=tuple(sys.path))

    def enter(self) -> None:
        """Makes it this process's, as far as this node has it."""
        if os.path.isdir(self.folder):
            os.chdir(self.folder)
        sys.path.extend(path for path in self.sys_path if path not in sys.path)


def start_actors(kind: type, demand: Demand, *arguments: object) -> list[Any]:
    """Starts one actor for each bundle of a demand, and waits until all say that they are ready.

    Args:
        kind: Class of the actors, with a method ``ready``.
        demand: How many, and the resources of each.
        arguments: Of the constructor.

    Raises:
        PlacementError: If the cluster can't hold them.
        Exception: Whatever ``ready`` raises.
    """
    import ray

    connect()
    require(demand)
    remote: Any = ray.remote(num_cpus=demand.cpus, num_gpus=demand.gpus, max_restarts=-1, max_task_retries=MAX_RETRIES)(
        kind
    )
    actors = [remote.remote(*arguments) for _ in range(demand.count)]
    try:
        ray.get([actor.ready.remote() for actor in actors], timeout=_START_SECONDS)
    except ray.exceptions.GetTimeoutError:
        stop_actors(actors)
        raise PlacementError(
            f"The {demand.count} actors of `{demand.option}` are not ready after {_START_SECONDS:g} seconds."
            " Look at `ray status` for what they wait for."
        ) from None
    except ray.exceptions.RayTaskError as error:
        stop_actors(actors)
        raise error.cause from None
    return actors


def stop_actors(actors: Sequence[Any]) -> None:
    """Ends actors at once, and what they hold."""
    import ray

    for actor in actors:
        ray.kill(actor)


def share_out(actors: Sequence[Any], costs: Sequence[float], ask: Callable[[Any, int], Any]) -> list[Any]:
    """Has actors answer requests, each given to the one with the least cost outstanding.

    Args:
        actors: Who answers.
        costs: Of each request, in any unit, such as tokens.
        ask: Sends an actor the request of this index, and gives the reference of its answer.

    Returns:
        The answers, in the order of the requests.

    Raises:
        RuntimeError: If a request's actor dies each time.
        Exception: Whatever an actor raises.
    """
    import ray

    waiting = list(reversed(range(len(costs))))
    running: dict[Any, tuple[int, int]] = {}
    answers: list[Any] = [None] * len(costs)
    while waiting or running:
        held = [[costs[index] for owner, index in running.values() if owner == actor] for actor in range(len(actors))]
        free = [actor for actor, requests in enumerate(held) if len(requests) < _MAX_IN_FLIGHT]
        if waiting and free:
            actor, index = min(free, key=lambda actor: sum(held[actor])), waiting.pop()
            running[ask(actors[actor], index)] = actor, index
            continue
        (done,), _ = ray.wait(list(running), num_returns=1)
        answers[running.pop(done)[1]] = take_answer(done)
    return answers


def take_answer(reference: Any) -> Any:
    """What an actor answered, or the error that it raised as itself.

    Raises:
        RuntimeError: If its actor died each time that it was asked.
        Exception: Whatever the actor raised.
    """
    import ray

    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayActorError as error:
        raise RuntimeError(
            f"A Ray actor died {MAX_RETRIES + 1} times over the same request, so it was given up; `ray logs` has its"
            f" last words. The last death: {error}"
        ) from None
