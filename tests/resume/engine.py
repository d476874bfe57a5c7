"""An engine beside the trainer, without vLLM: it samples as `HFEngine` does, in a process below real supervisors."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from typing import Any

from tests.rollout.mortal_engine import Fork
from verl_lightning.callbacks import HFRollout
from verl_lightning.callbacks.placement import Beside
from verl_lightning.processes.supervisor import SupervisedProcess, supervise
from verl_lightning.rollout.base import SamplingConfig
from verl_lightning.rollout.hf import HFEngine
from verl_lightning.rollout.process import ProcessEngine
from verl_lightning.rollout.worker import Worker


class SupervisedWorker(Worker):
    """Serves as the last of three processes, whose supervisors end it with the trainer."""

    def run(self) -> None:
        supervise(os.getppid())
        super().run()


class SupervisedEngine(ProcessEngine):
    """A `ProcessEngine` whose process is a fork, which starts at once."""

    def _spawn(self, connection: Connection) -> SupervisedProcess:
        return Fork(SupervisedWorker(connection), self._open)


class SupervisedBeside(Beside):
    """Runs it."""

    def place(self, engine: HFEngine, module: Any) -> SupervisedEngine:
        return SupervisedEngine(engine.recipe())


def make_supervised_rollout(sampling: SamplingConfig) -> HFRollout:
    """A callback whose engine is beside the trainer."""
    return HFRollout(sampling, sampling, placement=SupervisedBeside())
