"""Ends a run that is told to stop, with a checkpoint, in the time that is left."""

from __future__ import annotations

import _thread
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from verl_lightning.compat.lightning import is_accumulating, note_sigterm, replace_signals, restore_signals
from verl_lightning.compat.lightning_checkpoint import has_saved_last, save_last_checkpoint
from verl_lightning.modules.weight_averaging import averaged_weights
from verl_lightning.processes import peers
from verl_lightning.processes.exit_codes import ExitCode
from verl_lightning.processes.signals import LAST_SECONDS, SAME_SECONDS, end_after, end_now, listen, say
from verl_lightning.strategies.base import as_contract


class Preempted(SIGTERMException):
    """The run was told to stop, and ends; a `SystemExit`, with the code of a preempted run.

    Args:
        words: Report of what was saved and what to do next.
        code: 0 on ranks that end because others do: launchers make a failure of whatever else comes first.
    """

    def __init__(self, words: str, code: int = ExitCode.PREEMPTED) -> None:
        super().__init__(code)
        self.words = words


class Preemption(Callback):
    """Ends a run with a checkpoint when SIGTERM or SIGUSR1 tells any of its processes to stop, or Ray the whole.

    The iteration in progress is finished, a validation is broken off between two batches, and every `ModelCheckpoint`
    writes its ``last``; a run that is not in training yet ends at once. A second signal ends it at once in any case.
    Every run has this callback, with its defaults if no other is given.

    Args:
        grace: Seconds in which the run must have ended. One that has not then, as its iteration or a write takes
            longer, ends with the checkpoint that it had; after 10 more seconds, without cleaning up.

    Raises:
        ValueError: If the time is not positive.
    """

    def __init__(self, grace: float = 300.0) -> None:
        if not 0 < grace < float("inf"):
            raise ValueError(f"`preemption.grace` must be a number of seconds above 0, got {grace}.")
        self.grace = grace
        self._reason: str | None = None
        self._since = 0.0
        self._finishes = False  # what is going on, before it ends
        self._has_trained = False  # on a batch, since it started
        self._timer: threading.Timer | None = None  # at most one
        self._lock = threading.Lock()

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._reason, self._finishes, self._has_trained = None, False, False
        self.teardown(trainer, pl_module, stage)  # after an error in an earlier fit, nobody called it
        replace_signals(trainer, self._listen)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finishes = True

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: object) -> None:
        self._has_trained = True

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        restore_signals(trainer)

    @property
    def reason(self) -> str | None:
        """Cause of the order to stop, such as ``SIGTERM``; None while the run goes on."""
        return self._reason

    def hear(self, signum: signal.Signals) -> None:
        """Reacts to a signal; called in a thread of its own."""
        if self._reason is None:
            self.tell(signum.name)
        elif time.monotonic() - self._since > SAME_SECONDS:
            end_now(f"{signum.name}, after {self._reason}: the run ends at once. {self._way_on}")

    def meet(self, signum: signal.Signals) -> None:
        """Reacts, in the main thread, to its interruption by a signal.

        Raises:
            Preempted: Unless the run is to finish an iteration.
        """
        if not self._finishes:
            raise Preempted(f"{self._reason or signum.name}: the run ends here. {self._way_on}")

    def tell(self, reason: str) -> None:
        """Has the run end soon, unless it was told before; may be called in any thread.

        Args:
            reason: Cause of the order to stop, such as ``SIGTERM``.
        """
        with self._lock:
            if self._reason is not None:
                return
            self._since, self._reason = time.monotonic(), reason
        if self._finishes:
            say(
                f"{reason}: the run saves and ends after this iteration, within {self.grace:g} s (`preemption.grace`)."
                " A second signal ends it at once."
            )
            self._timer = threading.Timer(self.grace, self._give_up)
            self._timer.daemon = True
            self._timer.start()
        else:
            self._timer = end_after(LAST_SECONDS, f"{reason}: the process is stuck, and ends at once.")

    def end_if_told(self, trainer: Trainer) -> None:
        """Saves and ends the run if any process was told to stop; before training or between two steps. Collective.

        Raises:
            Preempted: With what was saved.
        """
        if trainer.lightning_module.automatic_optimization and is_accumulating(trainer):
            return  # gradients of half a step are in no checkpoint
        if not as_contract(trainer.strategy).largest_over_ranks(int(self._reason is not None)):
            return
        note_sigterm(trainer)
        if not self._has_trained:
            self._end(trainer, "the run ends here, with nothing new to save")
        is_over = not trainer.validating and _is_done(trainer)
        with _before_validation(trainer) if trainer.validating else nullcontext():
            saved = save_last(trainer)
        if not is_over:
            self._end(trainer, saved)

    def _end(self, trainer: Trainer, words: str) -> NoReturn:
        """Ends the run in agreement with all other processes."""
        peers.leave()
        code = ExitCode.PREEMPTED if trainer.is_global_zero else ExitCode.FINISHED
        raise Preempted(f"{words}. {self._way_on}", code)

    _way_on = "Go on with the same command and `--ckpt_path last`."

    def _give_up(self) -> None:
        """Breaks off the main thread's work when ``grace`` is over, and ends the process if that fails."""
        say(f"the run has not ended within `preemption.grace` = {self.grace:g} s, and is broken off. {self._way_on}")
        self._finishes = False
        self._since = time.monotonic()  # the main thread is interrupted as if by a signal
        self._timer = end_after(LAST_SECONDS, "the process is stuck, and ends at once.")
        _thread.interrupt_main(signal.SIGTERM)

    def _listen(self) -> Callable[[], None]:
        undo = listen(self)

        def stop() -> None:
            if self._timer is not None:
                self._timer.cancel()
            undo()

        return stop


def preemption_of(trainer: Trainer) -> Preemption | None:
    """Returns the callback that ends the runs of a trainer; None before its fit is set up."""
    callbacks: Sequence[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return next((callback for callback in callbacks if isinstance(callback, Preemption)), None)


def _is_done(trainer: Trainer) -> bool:
    """Tells whether training ends by itself after this batch."""
    return trainer.should_stop or 0 <= trainer.max_steps <= trainer.global_step


def _before_validation(trainer: Trainer) -> AbstractContextManager[None]:
    """Takes loops back to the end of the batch before a validation, which is still to come then, and weights with them.

    Those in training are aside during a validation where a callback averages.
    """
    loop = trainer.fit_loop.epoch_loop
    training, validation = loop.batch_progress, loop.val_loop.batch_progress
    for counts in (training.current, training.total):
        counts.completed -= 1
    for name in ("ready", "started", "processed", "completed"):
        seen = getattr(validation.current, name)
        setattr(validation.total, name, getattr(validation.total, name) - seen)
        setattr(validation.current, name, 0)
    trainer.training = True
    return averaged_weights(trainer)


def save_last(trainer: Trainer) -> str:
    """Writes all `last` checkpoints that are not there yet, and says where. Collective."""
    paths = []
    for callback in last_checkpoint_callbacks(trainer):
        is_there = has_saved_last(callback, trainer.global_step)
        paths.append(callback.last_model_path if is_there else save_last_checkpoint(callback, trainer))
    where = f"saved in `{paths[0]}`" if paths else "nothing saved, for there is no `ModelCheckpoint`"
    return f"stopped after step {trainer.global_step}, {where}"


def last_checkpoint_callbacks(trainer: Trainer) -> list[ModelCheckpoint]:
    """The callbacks that keep a `last` checkpoint; where none does, the first that could."""
    callbacks: Sequence[Callback] = trainer.checkpoint_callbacks
    # An `HFCheckpoint` writes folders, which have no extension and can't resume a run.
    able = [each for each in callbacks if isinstance(each, ModelCheckpoint) and each.FILE_EXTENSION]
    return [callback for callback in able if callback.save_last] or able[:1]
