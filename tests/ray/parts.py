"""Callbacks for test runs, named on the command line."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import ray
from lightning.pytorch import Callback, LightningModule, Trainer

from verl_lightning.launch.reporter import Reporter


class KillOnce(Callback):
    """Kills one rank's process in the middle of a step, the first time that the run comes there.

    Args:
        step: Finished steps.
        rank: Whose process.
    """

    def __init__(self, step: int, rank: int = 1) -> None:
        self.step = step
        self.rank = rank

    def on_phase_start(self, module: Any, phase: str) -> None:
        if (
            phase != "update_actor"
            or module.trainer.global_step != self.step
            or module.trainer.global_rank != self.rank
        ):
            return
        marker = Path("killed")
        if not marker.exists():
            marker.touch()
            wait_for_reports(module.trainer)
            os.kill(os.getpid(), signal.SIGKILL)


def wait_for_reports(trainer: Trainer) -> None:
    """Until the board has heard what this rank told it; a process that is killed at once takes that along."""
    [reporter] = [callback for callback in trainer.callbacks if isinstance(callback, Reporter)]
    ray.get(reporter.board.describe.remote(trainer.global_rank))  # an actor hears each caller in the caller's order


class StepMarker(Callback):
    """Writes a letter into a file of each step that is over: how far the run is, and whether it did a step twice."""

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        if trainer.is_global_zero:
            with Path(f"step {trainer.global_step}").open("a") as marker:
                marker.write("x")
