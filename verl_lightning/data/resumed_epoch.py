"""Lightning's counters of a resumed run, set by where its training rows go on."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from verl_lightning.compat.lightning import count_from, is_within_validation, log_under_step
from verl_lightning.data.loader import TrainLoader


class ResumeEpoch(Callback):
    """Has Lightning count epochs, batches and logged steps on from where the training rows do.

    Its own counters assume that an epoch has as many batches as before, and fewer save moments than there are: resumed
    at the end of an epoch with more batches than before, it runs through empty epochs; resumed after the validation at
    an epoch's end, it logs each step under the next one's number.

    Args:
        loader: The training rows.
    """

    def __init__(self, loader: TrainLoader) -> None:
        self._loader = loader
        self._resumes = False

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return
        loops = checkpoint["loops"]["fit_loop"]
        states = loops["state_dict"].get("combined_loader", [])
        if len(states) != 1:  # of other loaders
            return
        self._resumes = True
        start = self._loader.start(states[0])
        is_same = not start.note and states[0].get("used_batches") == self._loader.used_batches
        if not (is_same and is_within_validation(loops)):
            count_from(loops, epoch=start.epoch, num_done=self._loader.num_done(start))

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._resumes:
            log_under_step(trainer, trainer.global_step)
            self._resumes = False
