"""Requests shared out among equal actors: the least loaded is asked first, and the dead are done without."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from verl_lightning.faults import RunError
from verl_lightning.ray.actors import START_SECONDS, ActorsLostError

MAX_DEATHS = 3
"""Number of deaths of actors over the same request at which it is given up, as the request's fault."""

_MAX_IN_FLIGHT = 2  # one in hand, and one that hides the way there and back

logger = logging.getLogger(__name__)


class ActorPool:
    """Gives each request to the living actor with the least cost outstanding.

    A request whose actor dies goes to another one. Ray starts a dead actor anew, on another node if need be; it is
    asked again when it is ready, and done without if that never comes. For use in one event loop.

    Args:
        actors: Each with a method ``ready``.
        max_in_flight: Most requests that an actor holds.
        patience: Seconds after which an actor that has not answered counts as hung, and is killed; None waits forever.
        may_come_late: True if actors may still be without a place; whoever gets one takes part from then on.
    """

    def __init__(
        self,
        actors: Sequence[Any],
        max_in_flight: int = _MAX_IN_FLIGHT,
        patience: float | None = None,
        *,
        may_come_late: bool = False,
    ) -> None:
        self.actors = actors
        self._patience = patience
        self._start_seconds = None if may_come_late else START_SECONDS
        self._awaits_all = may_come_late  # before the first request
        self._max_in_flight = max_in_flight
        self._held: list[list[float]] = [[] for _ in actors]  # costs of what each was asked
        self._down: dict[int, asyncio.Task[None]] = {}  # those that died, with who waits for their successors
        self._lost: dict[int, BaseException] = {}  # those of them that nobody waits for any more
        self._changed = asyncio.Event()

    async def ask(self, cost: float, send: Callable[[Any], Any]) -> Any:
        """Returns an actor's answer to one request.

        Args:
            cost: Cost of the request, in any unit, such as tokens.
            send: Function that asks an actor and gives the reference of its answer.

        Raises:
            RunError: If each actor that is asked dies.
            ActorsLostError: If none is left.
            Exception: Whatever an actor raises.
        """
        import ray

        self._await_late_ones()
        for _ in range(MAX_DEATHS):
            index = await self._take(cost)
            try:
                return await asyncio.wait_for(send(self.actors[index]), self._patience)
            except ray.exceptions.RayActorError as error:
                self._lose(index)
                death: Exception = error
            except ray.exceptions.RayTaskError as error:  # also a `TimeoutError` of the actor's own
                raise error.cause from None
            except TimeoutError as error:
                self._end(index)
                death = error
            finally:
                self._held[index].remove(cost)
                self._changed.set()
        raise RunError(
            f"{MAX_DEATHS} Ray actors died over the same request, so it was given up; `ray logs` has their last words."
            f" The last death: {death or 'it was hung'}"
        )

    async def tell_all(self, send: Callable[[Any], Any]) -> None:
        """Asks every living actor the same; those that die meanwhile are left out.

        Raises:
            Exception: Whatever an actor raises.
        """
        self._await_late_ones()
        await asyncio.gather(*[self._tell(index, send) for index in range(len(self.actors)) if index not in self._down])

    async def _tell(self, index: int, send: Callable[[Any], Any]) -> None:
        import ray

        try:
            await asyncio.wait_for(send(self.actors[index]), self._patience)
        except ray.exceptions.RayActorError:
            self._lose(index)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except TimeoutError:
            self._end(index)

    async def _take(self, cost: float) -> int:
        while not (free := [index for index in range(len(self.actors)) if self._is_free(index)]):
            if len(self._lost) == len(self.actors):
                message = f"All {len(self.actors)} actors died and could not be replaced; see `ray status`."
                raise ActorsLostError(message) from self._lost[0]
            self._changed.clear()
            await self._changed.wait()
        index = min(free, key=lambda index: sum(self._held[index]))
        self._held[index].append(cost)
        return index

    def _is_free(self, index: int) -> bool:
        return index not in self._down and len(self._held[index]) < self._max_in_flight

    def _await_late_ones(self) -> None:
        """Ask none before it is ready."""
        if self._awaits_all:
            self._awaits_all = False
            for index in range(len(self.actors)):
                self._lose(index)

    def _end(self, index: int) -> None:
        """Have Ray kill a hung actor and start it anew."""
        import ray

        if index not in self._down:
            ray.kill(self.actors[index], no_restart=False)
        self._lose(index)

    def _lose(self, index: int) -> None:
        if index not in self._down:
            self._down[index] = asyncio.get_running_loop().create_task(self._await_successor(index))

    async def _await_successor(self, index: int) -> None:
        import ray

        # Endless retries: until it is there, Ray answers each call at once with the death of its predecessor.
        call = self.actors[index].ready.options(max_task_retries=-1).remote()
        try:
            await asyncio.wait_for(call, self._start_seconds)
        except (TimeoutError, ray.exceptions.RayError) as error:
            logger.warning("a Ray actor died and could not be replaced; the others go on without it: %s", error)
            self._lost[index] = error
        else:
            del self._down[index]
        self._changed.set()


def share_out(actors: Sequence[Any], costs: Sequence[float], ask: Callable[[Any, int], Any]) -> list[Any]:
    """Has actors answer requests, as an `ActorPool` does.

    Args:
        actors: Actors that answer.
        costs: Cost of each request, in any unit, such as tokens.
        ask: Function that sends an actor the request of an index and gives the reference of its answer.

    Returns:
        The answers, in the order of the requests.

    Raises:
        RunError: If each actor that is asked the same dies.
        ActorsLostError: If none is left.
        Exception: Whatever an actor raises.
    """

    def sender(index: int) -> Callable[[Any], Any]:
        return lambda actor: ask(actor, index)

    async def answers() -> list[Any]:
        pool = ActorPool(actors)
        return await asyncio.gather(*[pool.ask(cost, sender(index)) for index, cost in enumerate(costs)])

    return asyncio.run(answers())
