"""Finds out why a run has ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, Timer

from verl_lightning.modules.preemption import Preempted, preemption_of
from verl_lightning.processes.exit_codes import FINISHED, Ending, ExitCode


@runtime_checkable
class EndsRuns(Protocol):
    """A callback that stops runs for a reason of its own."""

    @property
    def ending(self) -> Ending | None:
        """Reason for which the callback has stopped this run; None if it has not."""


def ending_of(trainer: Trainer, error: BaseException | None = None) -> Ending:
    """Tells why a fit has ended.

    Args:
        trainer: Trainer of the fit.
        error: Exception that ended the fit; None if it came to its end.
    """
    if isinstance(error, Preempted):
        told = preemption_of(trainer)
        reason = (told and told.reason) or "another process was told to stop"
        return Ending(f"preempted ({reason})", ExitCode.PREEMPTED)
    if error is not None:
        code = ExitCode.INTERRUPTED if isinstance(error, KeyboardInterrupt) else ExitCode.FAILED
        return Ending(f"{type(error).__name__}: {error}".removesuffix(": "), code)
    callbacks: Sequence[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for callback in callbacks:
        if isinstance(callback, EndsRuns) and callback.ending is not None:
            return callback.ending
    if not trainer.should_stop or 0 <= trainer.max_steps <= trainer.global_step or _is_out_of_time(callbacks):
        return FINISHED
    names = [type(each).__name__ for each in callbacks if isinstance(each, EarlyStopping) and _has_stopped(each)]
    return Ending(f"stopped by {names[0] if names else 'a callback'}", ExitCode.STOPPED)


def _is_out_of_time(callbacks: Sequence[Callback]) -> bool:
    """Tells whether the run has taken ``trainer.max_time``, which is an end as planned as ``max_steps``."""
    timers = [callback.time_remaining() for callback in callbacks if isinstance(callback, Timer)]
    return any(seconds is not None and seconds <= 0 for seconds in timers)


def _has_stopped(callback: EarlyStopping) -> bool:
    return callback.stopping_reason != type(callback.stopping_reason).NOT_STOPPED
