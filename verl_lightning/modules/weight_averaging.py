"""Lightning's weight averaging, made whole: validated, saved and exported weights are equal."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.utilities import rank_zero_info
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn
from typing_extensions import override

from verl_lightning.compat import lightning as compat
from verl_lightning.models.fingerprint import with_frozen, without_frozen

CURRENT_KEY = "current_model_state"
"""Key under which Lightning's callback saves the weights in training; ``state_dict`` holds the averaged ones then."""


class CompleteAveraging(Callback):
    """Does for a `WeightAveraging` callback what Lightning leaves out.

    Rounding makes the average of equal numbers another number, so what is not trained is copied from the module after
    each average. A test after a fit reads the checkpoint's averaged weights, as a validation does.

    Args:
        averaging: The callback, which comes before this one.
    """

    def __init__(self, averaging: WeightAveraging) -> None:
        self._averaging = averaging
        self._step = -1  # `global_step` of the last look

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            compat.restart_averaging(self._averaging)
        else:
            compat.forget_average(self._averaging)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step != self._step:
            self._step = trainer.global_step
            self._keep_frozen(pl_module)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._keep_frozen(pl_module)

    @torch.no_grad()
    def _keep_frozen(self, module: LightningModule) -> None:
        averaged = compat.average_of(self._averaging)
        assert averaged is not None
        for average, current in zip(_tensors(averaged), _tensors(module), strict=True):
            if not current.requires_grad:
                average.copy_(current)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    return itertools.chain(module.parameters(), module.buffers())


@contextmanager
def averaged_weights(trainer: Trainer) -> Iterator[None]:
    """Gives the module, for a while, the weights that are validated: averaged ones where a callback averages."""
    averaging = next(iter(averaging_callbacks(trainer)), None)
    if averaging is None or compat.average_of(averaging) is None:
        yield
        return
    compat.swap_average(averaging, trainer.lightning_module)
    try:
        yield
    finally:
        compat.swap_average(averaging, trainer.lightning_module)


def averaging_callbacks(trainer: Trainer) -> list[WeightAveraging]:
    """The trainer's callbacks that average weights."""
    callbacks: Sequence[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [callback for callback in callbacks if isinstance(callback, WeightAveraging)]


def complete_averaging(trainer: Trainer, *, holds_whole_models: bool) -> list[CompleteAveraging]:
    """Makes the callback that a `WeightAveraging` callback needs beside it; none without one.

    Args:
        trainer: Trainer whose callbacks are looked at.
        holds_whole_models: True if each rank has all weights.

    Raises:
        MisconfigurationException: If several average, each of which would validate and save what the other made, or if
            ranks hold parts of the weights, which the callback can't copy.
    """
    found = averaging_callbacks(trainer)
    names = [f"`{type(callback).__name__}`" for callback in found]
    if len(found) > 1:
        raise MisconfigurationException(
            f"{' and '.join(names)} both put their averages in the place of the weights. Keep one of them."
        )
    if found and trainer.training and not holds_whole_models:
        raise MisconfigurationException(
            f"{names[0]} copies whole models, but under `{type(trainer.strategy).__name__}` each process holds a part"
            " of the weights. Use `--strategy ddp`, or take the callback out."
        )
    compat.hide_averaging_warnings()
    return [CompleteAveraging(callback) for callback in found]


def drop_frozen_current(module: nn.Module, checkpoint: dict[str, Any]) -> None:
    """Leaves the frozen weights out of those in training that a checkpoint has beside the averaged ones."""
    if CURRENT_KEY in checkpoint:
        checkpoint[CURRENT_KEY] = without_frozen(module, checkpoint[CURRENT_KEY])


def choose_weights(module: LightningModule, checkpoint: dict[str, Any]) -> None:
    """Has training go on from the weights in training of a checkpoint that has averaged ones too."""
    if CURRENT_KEY not in checkpoint:
        return
    if module.trainer.training and not averaging_callbacks(module.trainer):
        checkpoint["state_dict"] = checkpoint.pop(CURRENT_KEY)
        rank_zero_info(
            "The checkpoint is of a run with a `WeightAveraging` callback, which this run has not: training goes on"
            " from the weights in training, and the average is dropped."
        )
    else:
        checkpoint[CURRENT_KEY] = with_frozen(module, checkpoint[CURRENT_KEY])
