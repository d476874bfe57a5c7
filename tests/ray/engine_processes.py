"""The processes of engines in Ray actors, for tests that kill them."""

from __future__ import annotations

import os
import signal
import time

import psutil
from lightning.pytorch import Callback, Trainer

from verl_lightning.callbacks import RayRollout
from verl_lightning.rollout.ray_engines import RayEngines


def engine_pids(engines: RayEngines) -> list[int]:
    """Of each replica."""
    import ray

    return ray.get([actor.__ray_call__.remote(lambda _: os.getpid()) for actor in engines._actors])


def kill_at_work(pids: list[int], killed: list[int]) -> None:
    """SIGKILL for the first of these processes that is seen to sample; it is put into the second list."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        for pid in pids:
            if " ".join(psutil.Process(pid).cmdline()).startswith("ray::EngineActor.generate"):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
                return
        time.sleep(0.02)


class EngineKiller(Callback):
    """Kills the first engine of a `RayRollout`, if there is one, when some steps are over.

    Args:
        step: How many.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self.killed: int | None = None

    def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
        for rollout in trainer.callbacks:
            if isinstance(rollout, RayRollout) and trainer.global_step == self.step:
                self.killed = engine_pids(rollout._engine)[0]
                os.kill(self.killed, signal.SIGKILL)
