"""Which actor of a pool is asked, and what becomes of a request whose actor dies."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from verl_lightning.ray.actor_pool import ActorPool, share_out
from verl_lightning.ray.actors import await_actors, start_actors, stop_actors
from verl_lightning.ray.cluster import Demand


class Worker:
    """Says who it is; the successor of a dead one is not ready before the test wants it.

    Args:
        folder: Where each leaves its name.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def ready(self) -> None:
        while (self._folder / "killed").exists() and not (self._folder / "over").exists():
            time.sleep(0.1)
        (self._folder / str(os.getpid())).touch()

    def work(self, kills: bool, fails: bool = False) -> int:
        """This process, unless it ends."""
        if kills and not (self._folder / "killed").exists():
            (self._folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if fails:
            raise ValueError("not mine")
        return os.getpid()


def test_the_actor_with_the_least_cost_outstanding_is_asked():
    asked = []

    async def run() -> None:
        pool, done = ActorPool(["first", "second"]), asyncio.Event()

        async def answer(actor: str) -> None:
            asked.append(actor)
            await done.wait()

        calls = [asyncio.create_task(pool.ask(cost, answer)) for cost in (5.0, 1.0, 3.0, 1.0, 1.0)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert asked == ["first", "second", "second", "first"]  # and each holds two, so the last one waits
        done.set()
        await asyncio.gather(*calls)

    asyncio.run(run())
    assert len(asked) == 5


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="starts a Ray cluster")
def test_a_request_goes_to_the_living_while_the_dead_is_replaced(joined_cluster, tmp_path):
    demand = Demand(option="workers", count=2, cpus=1.0)
    actors = start_actors(Worker, demand, tmp_path)
    await_actors(actors, demand)
    first, second = sorted(int(path.name) for path in tmp_path.iterdir())

    answers = share_out(actors, [1.0] * 8, lambda actor, index: actor.work.remote(index == 1))

    assert (tmp_path / "killed").exists()
    assert answers[1] in (first, second)
    (tmp_path / "over").touch()
    with pytest.raises(ValueError, match="not mine"):
        share_out(actors, [1.0] * 3, lambda actor, index: actor.work.remote(False, fails=True))
    stop_actors(actors)
