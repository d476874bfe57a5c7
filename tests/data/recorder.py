"""A module that trains nothing and remembers the rows it saw, and how to drive it."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from tests.tiny import tiny_tokenizer
from verl_lightning.types import PromptBatch


class Recorder(LightningModule):
    """Remembers ``row_index`` of each training batch, and each validation batch."""

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer = tiny_tokenizer()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.train_rows: list[list[int]] = []
        self.val_batches: list[Any] = []
        self.train_batches: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.train_batches.append(batch)
        if isinstance(batch, PromptBatch):
            self.train_rows.append(batch.row_index.tolist())
        return self.weight.sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.val_batches.append(batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.val_batches.append(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Counters(Callback):
    """Keeps epoch, logged step and finished steps of each training step."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, int]] = []

    def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
        logged = trainer.fit_loop.epoch_loop._batches_that_stepped
        self.seen.append((trainer.current_epoch, logged, trainer.global_step))


class Killed(Exception):
    """Stands for a kill: the run ends without any more hook."""


class SaveAndDie(Callback):
    """Saves a checkpoint after some steps, then raises."""

    def __init__(self, step: int, path: str, hook: str) -> None:
        self.step = step
        self.path = path
        self.hook = hook

    def on_train_batch_end(self, trainer: Trainer, *args: object) -> None:
        if self.hook == "on_train_batch_end":
            self._die(trainer)

    def on_validation_end(self, trainer: Trainer, *args: object) -> None:
        if self.hook == "on_validation_end":
            self._die(trainer)

    def on_train_epoch_end(self, trainer: Trainer, *args: object) -> None:
        if self.hook == "on_train_epoch_end":
            self._die(trainer)

    def _die(self, trainer: Trainer) -> None:
        if trainer.global_step == self.step and not trainer.sanity_checking:
            trainer.save_checkpoint(self.path)
            raise Killed


def make_trainer(**options: Any) -> Trainer:
    """A CPU trainer that writes nothing."""
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return Trainer(**{"accelerator": "cpu", "devices": 1, "logger": False, **quiet, **options})
