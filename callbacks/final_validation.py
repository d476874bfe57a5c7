"""Keeps the last validation of a run, however the run ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.fabric.utilities import rank_zero_info
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from verl_lightning.callbacks.json_files import to_json, write_whole
from verl_lightning.modules.ending import ending_of
from verl_lightning.run_folders import shared_run_folder

PREFIX = "final/"


class FinalValidation(Callback):
    """Writes and logs the newest validation metrics at the end of a fit, also when it fails or is interrupted.

    ``final_validation.json`` in the run's folder holds the step, the metrics, what ended the run and its exit code. The
    loggers get the metrics as ``final/val/...``.

    Args:
        folder: Folder for the file; null takes the first logger's folder.
    """

    def __init__(self, folder: str | None = None) -> None:
        self.folder = folder
        self._path = Path()
        self._step = -1  # of the newest validation; -1 before the first
        self._metrics: dict[str, float] = {}

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._path = Path(self.folder or shared_run_folder(trainer))

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._step = trainer.global_step
            found = trainer.callback_metrics.items()
            self._metrics = {name: float(value) for name, value in found if name.startswith("val/")}

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._write(trainer, exception)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._step, self._metrics = state_dict["step"], state_dict["metrics"]

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step, "metrics": self._metrics}

    def _write(self, trainer: Trainer, exception: BaseException | None = None) -> None:
        if not trainer.is_global_zero or not self._metrics:
            return
        self._path.mkdir(parents=True, exist_ok=True)
        file = self._path / "final_validation.json"
        ending = ending_of(trainer, exception)
        content = {"step": self._step, "ended_by": ending.words, "exit_code": ending.code, "metrics": self._metrics}
        write_whole(file, to_json(content, indent=2))
        for logger in trainer.loggers:
            logger.log_metrics(
                {PREFIX + name: value for name, value in self._metrics.items()}, step=trainer.global_step
            )
            logger.save()
        rank_zero_info(f"The last validation, after step {self._step}, is in {file}.")
