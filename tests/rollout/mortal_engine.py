"""An engine beside the trainer that kills itself at chosen moments.

It is the HF engine in a fork of the test's process, behind the real worker, pipe and callback.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl_lightning.callbacks.placement import Beside
from verl_lightning.models.config import ModelConfig
from verl_lightning.processes.supervisor import SupervisedProcess
from verl_lightning.rollout.hf import HFEngine
from verl_lightning.rollout.process import ProcessEngine
from verl_lightning.rollout.stepping import Recipe
from verl_lightning.rollout.worker import Worker, decode


class MortalWorker(Worker):
    """Kills its process at some of its events, such as ``generate 2``: the third such request of a run.

    Args:
        connection: To the trainer.
        placement: Placement that knows the events.
        folder: Where they are counted, over all engines that took the place of one another.
    """

    def __init__(self, connection: Connection, placement: MortalBeside, folder: Path) -> None:
        super().__init__(connection)
        self.placement = placement
        self.folder = folder

    def meet(self, event: str) -> None:
        """Something happens."""
        with (self.folder / event).open("a") as counter:
            number = counter.tell()
            counter.write("x")
        if f"{event} {number}" in self.placement.deaths:
            os.kill(os.getpid(), signal.SIGKILL)

    def _serve(self, do: str, message: dict[str, Any]) -> None:
        self.meet(do)
        super()._serve(do, message)
        if do != "generate":
            self.meet(f"{do} is done")

    def _step(self) -> None:
        super()._step()
        if not self._unfinished:
            self.meet("generate is done")

    def _answer(self, answer: dict[str, Any]) -> None:
        if "completion" in answer:
            self.meet("answer")
        super()._answer(answer)

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        for weight in super()._weights():
            self.meet("weight")
            yield weight

    def _make_engine(self, recipe: Recipe) -> HFEngine:
        options = recipe.options | {"config": decode(ModelConfig, recipe.options["config"])}
        return self.placement.engine_class(**options)


class Fork(SupervisedProcess):
    """A fork of this process, which starts at once, that serves its end of a pipe."""

    def __init__(self, worker: MortalWorker, trainers_end: Connection) -> None:
        self._waits = threading.Lock()  # several threads may end it, of which one alone gets its status
        self.pid, self.code = os.fork(), None
        if self.pid == 0:
            torch.set_num_threads(1)  # the threads of OpenMP are not in a fork
            trainers_end.close()
            worker.run()
            os._exit(0)

    @property
    def has_ended(self) -> bool:
        try:
            return bool(os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT))
        except ChildProcessError:  # somebody has waited for it
            return True

    def end(self, patience: float = 0.0) -> int:
        if self.code is None and not patience:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        with self._waits:
            if self.code is None:
                self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.code


class MortalEngine(ProcessEngine):
    """A `ProcessEngine` whose process is a `MortalWorker`."""

    placement: MortalBeside
    folder: Path

    def _spawn(self, connection: Connection) -> SupervisedProcess:
        return Fork(MortalWorker(connection, self.placement, self.folder), self._open)


@dataclass(frozen=True, kw_only=True)
class MortalBeside(Beside):
    """Runs engines that die at some events."""

    folder: Path
    deaths: Collection[str] = ()
    engine_class: type[HFEngine] = HFEngine

    def place(self, engine: HFEngine, module: Any) -> MortalEngine:
        placed = MortalEngine(engine.recipe())
        placed.placement, placed.folder = self, self.folder / f"rank {module.trainer.global_rank}"
        placed.folder.mkdir(parents=True)
        return placed
