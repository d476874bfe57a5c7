"""One run that is never interrupted, and the same run gone on with from each of its checkpoints."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.runs import make_trainer
from verl_lightning.loggers import ResumableCSVLogger
from verl_lightning.types import PromptBatch

NUM_STEPS = 5
TIMINGS = ("timing_", "perf/t")


class OrderRecorder(Callback):
    """Keeps the rows and the tokens of each batch, and the metrics file as it is when a checkpoint is written."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []
        self.tokens: list[list[int]] = []

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if isinstance(batch, PromptBatch):
            self.rows.append(batch.row_index.tolist())
            self.tokens.append(batch.rollout.input_ids.flatten().tolist())
        else:
            self.rows.append([])
            self.tokens.append(batch.input_ids.flatten().tolist())

    def on_save_checkpoint(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        written = Path(trainer.log_dir, "metrics.csv")
        if written.exists():
            shutil.copy(written, written.with_name(f"metrics at step {trainer.global_step}.csv"))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a run leaves: its module and trainer, its batches, and its metrics file."""

    trainer: Trainer
    module: Any
    order: OrderRecorder
    metrics: list[dict[str, str]]


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """How to build the same run again and again."""

    folder: Path
    make_module: Callable[[], LightningModule]
    make_data: Callable[[], LightningDataModule]
    make_callbacks: Callable[[], list[Callback]]
    trainer: Mapping[str, Any]

    def resume(self, step: int, killed: str) -> Outcome:
        """Go on, in a new folder, from what the uninterrupted run had written after a step.

        Args:
            step: Of the checkpoint.
            killed: ``early``, just after the checkpoint, or ``late``, at the end: the run has logged what it had to.
        """
        name = f"{killed} {step}"
        (self.folder / name).mkdir()
        left = self.folder / "whole" / ("metrics.csv" if killed == "late" else f"metrics at step {step}.csv")
        if left.exists():
            shutil.copy(left, self.folder / name / "metrics.csv")
        return self.run(name, self.checkpoint("whole", step))

    def run(self, name: str, ckpt_path: Path | None = None) -> Outcome:
        """Train to the end in a folder of its own, from a checkpoint or from the start."""
        seed_everything(7)
        logger = ResumableCSVLogger(str(self.folder), version=name)
        saves = ModelCheckpoint(
            self.checkpoint(name, 0).parent,
            "{step}",
            every_n_train_steps=1,
            save_top_k=-1,
            enable_version_counter=False,
        )
        order = OrderRecorder()
        options = {"max_steps": NUM_STEPS, "enable_checkpointing": True, "log_every_n_steps": 1, "logger": logger}
        trainer = make_trainer(self.folder, *self.make_callbacks(), saves, order, **options | dict(self.trainer))
        module = self.make_module()
        torch.manual_seed(1234 if ckpt_path is None else 99)  # a new process has other random numbers
        trainer.fit(module, datamodule=self.make_data(), ckpt_path=None if ckpt_path is None else str(ckpt_path))
        return Outcome(trainer=trainer, module=module, order=order, metrics=read_metrics(Path(logger.log_dir)))

    def checkpoint(self, name: str, step: int) -> Path:
        """The file that a run wrote after a step."""
        return self.folder / name / "saved" / f"step={step}.ckpt"


def read_metrics(folder: Path) -> list[dict[str, str]]:
    """Rows of a metrics file as text, without times and empty cells."""
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{name: value for name, value in row.items() if value and not name.startswith(TIMINGS)} for row in rows]


def assert_same_state(left: Any, right: Any, where: str = "state") -> None:
    """Fails at the first number of two nested states that differs in any bit."""
    assert type(left) is type(right), where
    if isinstance(left, Mapping):
        assert left.keys() == right.keys(), where
        for key in left:
            assert_same_state(left[key], right[key], f"{where}.{key}")
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), where
        for index, pair in enumerate(zip(left, right, strict=True)):
            assert_same_state(*pair, f"{where}[{index}]")
    elif isinstance(left, torch.Tensor):
        assert torch.equal(left, right), where
    else:
        assert left == right, where
