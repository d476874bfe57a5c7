"""Private names of `ModelCheckpoint` in lightning>=2.6.4,<2.7."""

from __future__ import annotations

import time

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint


def saves_by_time(callback: ModelCheckpoint) -> bool:
    """Tell whether a callback has a ``train_time_interval``."""
    return callback._train_time_interval is not None


def save_when_due(callback: ModelCheckpoint, trainer: Trainer) -> None:
    """Save by a callback's ``train_time_interval``, as Lightning does unless optimization is manual. Collective."""
    interval, now = callback._train_time_interval, time.monotonic()
    since = callback._last_time_checked
    is_due = interval is not None and since is not None and now - since >= interval.total_seconds()
    if not trainer.strategy.broadcast(is_due) or callback._should_skip_saving_checkpoint(trainer):
        return
    callback._last_time_checked = now
    candidates = callback._monitor_candidates(trainer)
    if callback.monitor is not None and callback.monitor not in candidates:
        callback._defer_save_until_validation = True
        return
    callback._save_topk_checkpoint(trainer, candidates)
    callback._save_last_checkpoint(trainer, candidates)


def has_saved_last(callback: ModelCheckpoint, step: int) -> bool:
    """Tell whether a callback has written its `last` checkpoint after a step."""
    return callback._last_global_step_saved == step and bool(callback.last_model_path)


def save_last_checkpoint(callback: ModelCheckpoint, trainer: Trainer) -> str:
    """Have a callback write its `last` checkpoint, whole and as a file, where it has others; returns its path.

    Also where the callback keeps none, or weights alone. Collective.
    """
    chosen = callback.save_last, callback.save_weights_only
    callback.save_last, callback.save_weights_only = True, False
    try:
        callback._save_last_checkpoint(trainer, callback._monitor_candidates(trainer))
    finally:
        callback.save_last, callback.save_weights_only = chosen
    return callback.last_model_path
