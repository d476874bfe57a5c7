"""Runs of several phases: SFT, then a reward model, then GRPO, each an ordinary fit that begins where others ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.fabric.utilities import rank_zero_info
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger

from verl_lightning.callbacks.resume_wandb import ResumeWandb
from verl_lightning.callbacks.run_phase import PHASE_KEY, FinishedPhase, RunPhase, read_progress
from verl_lightning.faults import RunError
from verl_lightning.loggers import ResumableCSVLogger, count_steps_from
from verl_lightning.run_folders import CHECKPOINTS, PHASES, checkpoints_of, rank
from verl_lightning.run_records import NAME, version_of
from verl_lightning.seeding import reseed, run_seed
from verl_lightning.strategies.checkpoints import read_settings

DEFAULT_NAME = "lightning_logs"
"""Name of the logger that a trainer makes where it is given none."""


class Phases:
    """A run of several phases, which share its folder, its loggers and their count of steps.

    ```python
    phases = Phases("runs/first")
    sft = phases.fit("sft", Trainer(max_steps=100), SFTModule("base"), datamodule=chats)
    rl = Trainer(max_steps=200, callbacks=[HFRollout(num_samples=8)])
    phases.fit("grpo", rl, PPOModule(sft, reward="exact_match", advantage="GRPO"), datamodule=prompts)
    ```

    The same script goes on with a run that was killed: phases that are over are not run again, and the one that was at
    work goes on from its newest checkpoint. The result equals that of the uninterrupted run bit for bit.

    Args:
        folder: Folder of the run.
        loggers: Loggers of the run, beside its ``metrics.csv``; the trainers of phases have none of their own.
    """

    def __init__(self, folder: str | Path, loggers: Sequence[Logger] = ()) -> None:
        path = Path(folder)
        own = ResumableCSVLogger(str(path.parent), version=version_of(path.name))
        self._begin(path, [own, *loggers], read_progress(path))

    @classmethod
    def of(cls, folder: Path | None, loggers: Sequence[Logger], done: Sequence[FinishedPhase]) -> Phases:
        """Makes a run of what is known of it already.

        Args:
            folder: Folder of the run; None for a new one, of which the first rank's logger alone knows the name.
            loggers: All loggers of the run.
            done: Its finished phases.
        """
        phases = cls.__new__(cls)
        phases._begin(folder, loggers, done)
        return phases

    def _begin(self, folder: Path | None, loggers: Sequence[Logger], done: Sequence[FinishedPhase]) -> None:
        self.folder = folder
        self.loggers = list(loggers)
        self.done = list(done)
        self._begun: set[str] = set()

    @property
    def models(self) -> dict[str, str]:
        """Folder of the model of each finished phase."""
        return {phase.name: str((self.folder or Path()).absolute() / phase.model) for phase in self.done}

    def fit(
        self,
        name: str,
        trainer: Trainer,
        module: LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
    ) -> str:
        """Runs a phase to its end, or what is left of it.

        Args:
            name: Name of the phase.
            trainer: Trainer of this phase alone, without a logger of its own.
            module: Module in training.
            train_dataloaders: Training data, where there is no data module.
            val_dataloaders: Validation data, where there is no data module.
            datamodule: Data module.

        Returns:
            The folder of the Hugging Face model in which the phase ended.

        Raises:
            RunError: If something has ended it before its time.
        """
        if name in self._begun:
            raise ValueError(f"there are two phases `{name}`. Give one of them another name.")
        self._begun.add(name)
        if name not in self.models:
            check_loggers(trainer, self.loggers)
            phase = self.prepare(name, trainer)
            trainer.fit(
                module,
                train_dataloaders,
                val_dataloaders,
                datamodule,
                ckpt_path=self.last_checkpoint(name, trainer),
                weights_only=True,
            )
            if not self.finish(phase):
                raise RunError(f"the phase `{name}` has ended before its time. The same script goes on with it.")
        return self.models[name]

    def prepare(self, name: str, trainer: Trainer, *, is_last: bool = True) -> RunPhase:
        """Makes a trainer that of a phase.

        Args:
            name: Name of the phase.
            trainer: Trainer without a logger of its own.
            is_last: False where others are to follow in this process.
        """
        if NAME.fullmatch(name) is None:
            raise ValueError(f"`{name}` is no name of a phase: expected a letter, then letters, digits, `.`, `_`, `-`.")
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined] # set by a connector
        if any(isinstance(callback, RunPhase) for callback in callbacks):
            raise ValueError(f"the phase `{name}` has the trainer of an earlier one. Give it one of its own.")
        trainer.loggers = self.loggers
        phase = RunPhase(name, self.done, is_last=is_last)
        callbacks.insert(0, phase)
        has_wandb = any(isinstance(logger, WandbLogger) for logger in self.loggers)
        if has_wandb and not any(isinstance(callback, ResumeWandb) for callback in callbacks):
            callbacks.insert(0, ResumeWandb())
        if has_wandb and self.folder is not None and (found := checkpoints_of(self.folder)):
            ResumeWandb().continue_from(trainer, max(found, key=rank))
        for logger in self.loggers:
            count_steps_from(logger, phase.first_step)
        # A phase begins alike whether an earlier one has run in this process or in one before.
        reseed(run_seed(), PHASE_KEY, name)
        rank_zero_info(f"Phase `{name}` begins, after {phase.first_step} steps of earlier ones.")
        return phase

    def finish(self, phase: RunPhase) -> bool:
        """Notes the end of a phase; returns False where something has ended it before its time."""
        if phase.finished is None:
            return False
        self.folder = phase.run
        self.done.append(phase.finished)
        return True

    def last_checkpoint(self, name: str, trainer: Trainer) -> Path | None:
        """Finds the checkpoint from which a phase that had begun goes on; None if there is none.

        Args:
            name: Name of the phase.
            trainer: Its trainer, whose checkpoint callbacks may have a ``dirpath``.
        """
        if self.folder is None:
            return None
        callbacks = [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
        own = self.folder / PHASES / name / CHECKPOINTS
        folders = {Path(each.dirpath or own) for each in callbacks if each.FILE_EXTENSION}
        found = sorted((path for folder in folders for path in folder.glob("[!.]*.ckpt")), key=rank, reverse=True)
        return next((path for path in found if saved_phase(path).get("name") == name), None)


def saved_phase(checkpoint: Path) -> Mapping[str, Any]:
    """Reads what a checkpoint keeps of the phase that wrote it; empty for one of a run without phases."""
    found: Mapping[str, Any] = read_settings(checkpoint).get(PHASE_KEY, {})
    return found


def check_loggers(trainer: Trainer, ours: Sequence[Logger]) -> None:
    """Refuses a logger that a phase's trainer has for itself; the one that Lightning makes by default is left out.

    Raises:
        ValueError: If there is one.
    """
    for logger in trainer.loggers:
        is_default = isinstance(logger, CSVLogger | TensorBoardLogger) and logger.name == DEFAULT_NAME
        if not is_default and logger not in ours:
            raise ValueError(
                f"the trainer of a phase has a `{type(logger).__name__}` of its own, but phases share their loggers:"
                " `Phases(folder, loggers=[...])`."
            )
