"""Groups of equal actors: how they start, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl_lightning.faults import RunError
from verl_lightning.processes.module_path import follow_module_path
from verl_lightning.ray.cluster import Demand, PlacementError, connect, require

START_SECONDS = 600.0
"""Seconds that actors may take to be placed and to load what they hold."""

_MAX_DEATHS = 2  # of an actor that starts


class ActorsLostError(RunError):
    """Actors died that a run can't do without; it is nobody's mistake, so the run may be started again."""


@dataclass(frozen=True, kw_only=True)
class RuntimeEnvironment:
    """Folder and module path of the caller, so that relative paths and the user's modules mean the same in an actor."""

    folder: str
    """The working directory."""

    sys_path: tuple[str, ...]
    """Folders in which modules are searched for."""

    @classmethod
    def here(cls) -> RuntimeEnvironment:
        """Returns the environment of this process."""
        return cls(folder=os.getcwd(), sys_path=tuple(sys.path))

    def enter(self) -> None:
        """Makes it the environment of this process, as far as this node has it."""
        if os.path.isdir(self.folder):
            os.chdir(self.folder)
        follow_module_path(self.sys_path)


def on_this_node() -> Any:
    """Scheduling of an actor that must not die before its caller does: beside it, or nowhere."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def start_actors(kind: type, demand: Demand, *arguments: object, at_least: int | None = None) -> list[Any]:
    """Starts one actor for each bundle of a demand; `await_actors` says when they are ready.

    Args:
        kind: Class of the actors, with a method ``ready``.
        demand: Number of actors, and the resources of each.
        arguments: Arguments of the constructor.
        at_least: Number of actors that the cluster must have room for now; None for all.

    Raises:
        PlacementError: If the cluster can't hold them.
    """
    import ray

    connect()
    require(demand if at_least is None else replace(demand, count=at_least))
    remote: Any = ray.remote(num_cpus=demand.cpus, num_gpus=demand.gpus, max_restarts=-1)(kind)
    return [remote.remote(*arguments) for _ in range(demand.count)]


def await_actors(actors: Sequence[Any], demand: Demand, at_least: int | None = None) -> list[Any]:
    """Waits until actors say that they are ready; ends all if one can't be.

    Args:
        actors: Actors that `start_actors` returned.
        demand: Demand that they were started for.
        at_least: Number of actors to wait for; None for all.

    Returns:
        The value that each ready actor's ``ready`` returned.

    Raises:
        PlacementError: If they are not ready in time.
        ActorsLostError: If one dies each time that it starts.
        Exception: Whatever ``ready`` raises.
    """
    import ray

    calls = [actor.ready.options(max_task_retries=_MAX_DEATHS).remote() for actor in actors]
    try:
        if at_least is None:
            return list(ray.get(calls, timeout=START_SECONDS))
        ready, waiting = ray.wait(calls, num_returns=at_least, timeout=START_SECONDS)
        return list(ray.get([*ready, *waiting][:at_least], timeout=0))
    except ray.exceptions.RayError as error:
        stop_actors(actors)
        if isinstance(error, ray.exceptions.RayTaskError):
            raise error.cause from None
        if isinstance(error, ray.exceptions.GetTimeoutError):
            what = f"are not ready after {START_SECONDS:g} seconds. Look at `ray status` for what they wait for."
            raise PlacementError(f"The {demand.count} actors of `{demand.option}` {what}") from None
        raise ActorsLostError(
            f"An actor of `{demand.option}` died each time that it started; `ray logs` has its last words. {error}"
        ) from None


def stop_actors(actors: Sequence[Any]) -> None:
    """Ends actors at once, and what they hold."""
    import ray

    for actor in actors:
        ray.kill(actor)


def take_answer(reference: Any) -> Any:
    """Returns an actor's answer, or raises the actor's own error as itself.

    Raises:
        ActorsLostError: If the actor died.
        Exception: Whatever the actor raised.
    """
    import ray

    with own_errors():
        return ray.get(reference)


async def await_answer(reference: Any) -> Any:
    """Returns an actor's answer in an event loop; raises what `take_answer` raises."""
    with own_errors():
        return await asyncio.wrap_future(reference.future())


@contextlib.contextmanager
def own_errors() -> Iterator[None]:
    """Raises an actor's own error as itself, and its death as `ActorsLostError`."""
    import ray

    try:
        yield
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayActorError as error:
        raise ActorsLostError(
            f"A Ray actor on which this run depends died; `ray logs` has its last words. {error}"
        ) from None
