"""One phase of a run: it ends in a model on the disk, from which later phases begin."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import override

from verl_lightning.callbacks.hf_checkpoint import HFCheckpoint
from verl_lightning.callbacks.json_files import write_whole
from verl_lightning.modules.base import PostTrainingModule
from verl_lightning.modules.ending import ending_of
from verl_lightning.processes.exit_codes import ExitCode
from verl_lightning.run_folders import CHECKPOINTS, PHASES, shared_run_folder

PHASE_KEY = "phase"
"""Key under which checkpoints keep the phase that wrote them."""

PROGRESS_FILE = "phases.json"
"""File in a run's folder that lists its finished phases."""


@dataclass(frozen=True, kw_only=True)
class FinishedPhase:
    """A phase of a run that is over."""

    name: str
    """Name of the phase."""

    model: str
    """Folder of the model in which it ended; a relative one lies in the run's folder."""

    steps: int
    """Number of its steps."""

    ended_by: str
    """Reason for its end in words."""


def read_progress(run: Path) -> list[FinishedPhase]:
    """Reads the finished phases of a run, in their order; none where there is no such file."""
    file = run / PROGRESS_FILE
    return [FinishedPhase(**each) for each in json.loads(file.read_text())] if file.is_file() else []


def write_progress(run: Path, phases: Sequence[FinishedPhase]) -> None:
    """Writes the finished phases of a run; a kill leaves those that were there."""
    write_whole(run / PROGRESS_FILE, json.dumps([asdict(phase) for phase in phases], indent=2))


class RunPhase(Callback):
    """Marks a fit as one phase of a run: gives it a folder in the run's, and writes the model in which it ends.

    `Phases` adds it to trainers. Checkpoint callbacks without a ``dirpath`` write below ``phases/<name>``. The phase is
    over when its fit has come to its end, by ``max_steps`` and the like or because a callback has stopped it; only then
    its model is written and the run's progress, in this order, so that a kill at any moment leaves either the phase
    with its newest checkpoint or a finished one. A checkpoint keeps whether a callback has stopped the fit: a resumed
    phase that had been stopped trains no further.

    Args:
        name: Name of the phase.
        done: Finished phases before this one.
        is_last: False where others are to follow in this process.
    """

    def __init__(self, name: str, done: Sequence[FinishedPhase], *, is_last: bool = True) -> None:
        self.name = name
        self.done = list(done)
        self.is_last = is_last
        self.run: Path | None = None
        self.finished: FinishedPhase | None = None
        self._is_stopped = False

    @property
    def first_step(self) -> int:
        """Steps of all phases before this one."""
        return sum(phase.steps for phase in self.done)

    @property
    def folder(self) -> Path:
        """Folder of the phase; known from ``setup`` on."""
        assert self.run is not None
        return self.run / PHASES / self.name

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if not isinstance(pl_module, PostTrainingModule):
            raise MisconfigurationException(
                f"a phase ends in a model, but `{type(pl_module).__name__}` has none that can be written. Train a"
                " `PPOModule`, an `SFTModule`, a `DPOModule` or a `RewardModule`."
            )
        if trainer.fast_dev_run:  # type: ignore[attr-defined] # set by a connector
            raise MisconfigurationException(
                "`trainer.fast_dev_run` writes no model, from which the next of `phases` could begin. Set"
                " `trainer.max_steps: 1` in its place."
            )
        self.run = shared_run_folder(trainer)
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
                callback.dirpath = str((self.folder / CHECKPOINTS).absolute())
                if isinstance(callback, HFCheckpoint):
                    callback.dirpath = str((self.folder / "hf").absolute())

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.should_stop = trainer.should_stop or self._is_stopped

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not has_ended_well(trainer):
            return
        # Adapters are merged in: a later phase may train others on this model.
        HFCheckpoint(merge_adapters=True).write(trainer, self.folder / "model")
        self.finished = FinishedPhase(
            name=self.name,
            model=str(Path(PHASES, self.name, "model")),
            steps=trainer.global_step,
            ended_by=ending_of(trainer).words,
        )

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Other callbacks have written what they do at the end of training.
        if self.finished is not None and trainer.is_global_zero:
            assert self.run is not None
            write_progress(self.run, [*self.done, self.finished])

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        assert self.run is not None
        done = [asdict(phase) | {"model": str((self.run / phase.model).absolute())} for phase in self.done]
        is_stopped = trainer.should_stop and has_ended_well(trainer)
        checkpoint[PHASE_KEY] = {"name": self.name, "done": done, "is_stopped": is_stopped}

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint.get(PHASE_KEY, {})
        if (theirs := saved.get("name", self.name)) != self.name:
            raise ValueError(f"`ckpt_path` is of the phase `{theirs}`, with which `{self.name}` can't go on.")
        self._is_stopped = bool(saved.get("is_stopped", False))


def has_ended_well(trainer: Trainer) -> bool:
    """Tells whether a fit that is over has come to its end, or was stopped by a callback that finds nothing wrong."""
    return ending_of(trainer).code in (ExitCode.FINISHED, ExitCode.STOPPED)


def phase_of(trainer: Trainer) -> RunPhase | None:
    """Returns the phase that a trainer runs; None for a run without phases."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined] # set by a connector
    return next((callback for callback in callbacks if isinstance(callback, RunPhase)), None)


def first_step(trainer: Trainer) -> int:
    """Steps of the phases of a run before the one that a trainer runs; 0 for a run without phases."""
    phase = phase_of(trainer)
    return 0 if phase is None else phase.first_step
