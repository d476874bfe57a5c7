"""Engines in Ray actors that are killed."""

from __future__ import annotations

import os
import signal

from lightning.pytorch import Callback, Trainer

from verl_lightning.callbacks import RayRollout
from verl_lightning.rollout.ray_engines import RayEngines


def engine_pids(engines: RayEngines) -> list[int]:
    """Of each replica."""
    import ray

    calls = [actor.__ray_call__.options(max_task_retries=-1) for actor in engines._actors]  # one may be starting anew
    return ray.get([call.remote(lambda _: os.getpid()) for call in calls])


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
