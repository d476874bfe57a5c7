"""Callbacks that have a run end in some way, named on its command line."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class At(Callback):
    """Does something at some moment of a run, once: a second signal that comes a second later means another thing.

    Args:
        moment: ``setup``, ``fit``, ``train``, ``validation``, or the name of a phase.
        step: Finished steps.
        rank: On which rank.
    """

    def __init__(self, moment: str, step: int = 0, rank: int = 0) -> None:
        self.moment = moment
        self.step = step
        self.rank = rank
        self._has_met = False

    def act(self, trainer: Trainer) -> None:
        """What it does."""
        raise NotImplementedError

    def meet(self, moment: str, trainer: Trainer) -> None:
        """A moment has come."""
        is_it = (moment, trainer.global_step, trainer.global_rank) == (self.moment, self.step, self.rank)
        if is_it and not self._has_met:
            self._has_met = True
            self.act(trainer)

    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        self.meet("setup", trainer)

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.meet("fit", trainer)

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.meet("train", trainer)

    def on_validation_batch_start(self, trainer: Trainer, *args: Any) -> None:
        self.meet("validation", trainer)

    def on_phase_start(self, module: Any, phase: str) -> None:
        self.meet(phase, module.trainer)


class SignalAt(At):
    """Sends its process a signal.

    Args:
        moment: See `At`.
        step: See `At`.
        rank: See `At`.
        name: Of the signal.
    """

    def __init__(self, moment: str, step: int = 0, rank: int = 0, name: str = "SIGTERM") -> None:
        super().__init__(moment, step, rank)
        self.signal = signal.Signals[name]

    def act(self, trainer: Trainer) -> None:
        os.kill(os.getpid(), self.signal)


class HangAt(SignalAt):
    """Sends its process a signal, then never goes on; ``deaf``: nor runs Python in its main thread.

    Args:
        moment: See `At`.
        step: See `At`.
        deaf: Whether it waits in C.
    """

    def __init__(self, moment: str, step: int = 0, deaf: bool = False) -> None:
        super().__init__(moment, step)
        self.deaf = deaf

    def act(self, trainer: Trainer) -> None:
        super().act(trainer)
        Path("hangs").touch()
        if self.deaf:
            mutex, c = ctypes.create_string_buffer(64), ctypes.CDLL(None)
            c.pthread_mutex_lock(mutex)
            c.pthread_mutex_lock(mutex)
        while True:
            time.sleep(0.01)


class FailAt(At):
    """Raises an error, or what Ctrl-C raises.

    Args:
        moment: See `At`.
        step: See `At`.
        interrupt: Whether it is that.
    """

    def __init__(self, moment: str, step: int = 0, interrupt: bool = False) -> None:
        super().__init__(moment, step)
        self.interrupt = interrupt

    def act(self, trainer: Trainer) -> None:
        raise KeyboardInterrupt if self.interrupt else ZeroDivisionError("as planned")
