"""Keeps a run's record and its report while it lasts, and says where everything lies."""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities import rank_zero_info
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from verl_lightning.callbacks.hf_checkpoint import HFCheckpoint
from verl_lightning.callbacks.report_page import PAGE_FILE, write_report
from verl_lightning.callbacks.run_phase import first_step, phase_of
from verl_lightning.callbacks.samples_table import SamplesTable
from verl_lightning.modules.ending import ending_of
from verl_lightning.needs import NOT_INSTALLED, installed_version
from verl_lightning.run_folders import shared_run_folder
from verl_lightning.run_records import LOSSES, REWARDS, RUNNING, RunRecord, now, read_record, write_record

PACKAGES = ("verl-lightning", "torch", "lightning", "transformers", "peft", "vllm", "megatron-core", "ray")
"""Distributions whose versions a record has."""

LARGEST_SHARE = 0.01
"""Largest share of a run's time that its report may take."""


class RunReport(Callback):
    """Writes ``report.html`` and ``run.json`` into a run's folder while it lasts, and says where its files are.

    The report shows curves, settings, versions, timings and the newest responses in any browser, without a network.
    Reload it to see more: it is written after each validation, and every so many seconds. `verl-fit` adds this
    callback to every run that has a logger; `verl-fit runs` reads the record.

    Args:
        every_seconds: Least time between two reports, in seconds; writing one takes at most a hundredth of a run.

    Raises:
        ValueError: If the time is negative.
    """

    def __init__(self, every_seconds: float = 30.0) -> None:
        if every_seconds < 0:
            raise ValueError(f"`every_seconds` must not be negative, got {every_seconds}.")
        self.every_seconds = every_seconds
        self._path: Path | None = None  # None where nothing is written
        self._record = RunRecord(name="")
        self._due = 0.0

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit" or trainer.fast_dev_run or not trainer.loggers:  # type: ignore[attr-defined]
            self._path = None
            return
        folder = shared_run_folder(trainer)
        self._path = folder if trainer.is_global_zero and "://" not in str(folder) else None
        if self._path is not None:
            old = read_record(self._path)
            self._record = RunRecord(
                name=folder.absolute().name,
                started=(old and old.started) or now(),
                max_steps=trainer.max_steps if trainer.max_steps == -1 else first_step(trainer) + trainer.max_steps,
                host=socket.gethostname(),
                pid=os.getpid(),
                command=[Path(sys.argv[0]).name, *sys.argv[1:]],
                environment=environment(trainer),
            )
            self._write(trainer)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._path is not None:
            rank_zero_info(f"Run `{self._record.name}` begins.{_lines(self._places(trainer, is_over=False))}")

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if time.monotonic() >= self._due:
            self._write(trainer)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._write(trainer)

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._end(trainer, exception)

    def _end(self, trainer: Trainer, exception: BaseException | None = None) -> None:
        if self._path is None or self._record.state != RUNNING:
            return
        ending, phase = ending_of(trainer, exception), phase_of(trainer)
        if phase is not None and phase.finished is not None and not phase.is_last:
            rank_zero_info(f"Phase `{phase.name}` ended after {trainer.global_step} steps: {ending.words}.")
            return
        state = ending.code.name.lower()
        self._record = replace(self._record, state=state, ended_by=ending.words, exit_code=int(ending.code))
        self._write(trainer)
        rank_zero_info(
            f"Run `{self._record.name}` ended after step {self._record.step}: {ending.words}."
            f"{_lines(self._places(trainer, is_over=True))}"
        )

    def _write(self, trainer: Trainer) -> None:
        if self._path is None:
            return
        start = time.monotonic()
        known = {name: trainer.callback_metrics.get(name) for name in (*REWARDS, *LOSSES)}
        newest = {name: float(value) for name, value in known.items() if value is not None}
        step, metrics = first_step(trainer) + trainer.global_step, self._record.metrics | newest
        self._record = write_record(self._path, replace(self._record, step=step, metrics=metrics))
        write_report(self._path, self._record)
        end = time.monotonic()
        self._due = end + max(self.every_seconds, (end - start) / LARGEST_SHARE)

    def _places(self, trainer: Trainer, *, is_over: bool) -> dict[str, Path]:
        """Paths that people look for by what is there; at the end of a run only those that exist."""
        assert self._path is not None
        places = {"curves": self._path / PAGE_FILE}
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined] # set by a connector
        for callback in callbacks:
            if isinstance(callback, SamplesTable):
                places["samples"] = callback.page
            elif isinstance(callback, HFCheckpoint) and callback.dirpath is not None:
                last, best = Path(callback.dirpath, "last"), callback.best_model_path
                places["model" if callback.role == "actor" else callback.role] = last
                places |= {f"best {callback.monitor}": Path(best)} if best and callback.monitor else {}
            elif isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
                places["checkpoint"] = Path(callback.last_model_path or callback.dirpath)
        return {name: path for name, path in places.items() if path.exists() or not is_over}


def environment(trainer: Trainer) -> dict[str, str]:
    """Versions of packages, and the devices and strategy of a run."""
    found = {"python": platform.python_version(), "platform": platform.platform(terse=True)}
    versions = {name: installed_version(name) for name in PACKAGES}
    found |= {name: version for name, version in versions.items() if version != NOT_INSTALLED}
    device = trainer.strategy.root_device
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    found["devices"] = f"{trainer.world_size} x {kind}"
    found["strategy"] = type(trainer.strategy).__name__
    return found | {"precision": str(trainer.precision)}


def _lines(places: dict[str, Path]) -> str:
    """Places one below the other, for people to copy."""
    return "".join(f"\n  {name}: {path}" for name, path in places.items())
