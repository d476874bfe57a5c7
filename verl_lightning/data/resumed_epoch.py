"""Lightning's counters of a resumed run, set by where its training rows go on."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from verl_lightning.compat.lightning import log_under_step
from verl_lightning.data.loader import TrainLoader


class ResumeEpoch(Callback):
    """Has Lightning count epochs, batches and logged steps on from where the training rows do.

    Its own counters assume that an epoch has as many batches as before, and fewer save moments than there are: resumed
    at the end of an epoch with more batches than before, it runs through empty epochs; resumed after the validation at
    an epoch's end, it logs each step under the next one's number.

    Rewrites the loops' state of lightning>=2.6.4,<2.7 before Lightning reads it, to what it would be just after the
    last batch; `test_the_loops_state_has_the_names_that_are_rewritten` watches the names.

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


def is_within_validation(loops: dict[str, Any]) -> bool:
    """Whether a validation had begun and not ended when the loops were saved, which Lightning then finishes first."""
    batches = loops["epoch_loop.val_loop.batch_progress"]["total"]
    return bool(batches["ready"] == batches["started"] == batches["completed"] + 1 == batches["processed"] + 1)


def count_from(loops: dict[str, Any], *, epoch: int, num_done: int) -> None:
    """Set the counters to those of a checkpoint that was saved by a callback at the end of a batch.

    Args:
        loops: State of the loops of `fit`; changed in place.
        epoch: Finished epochs.
        num_done: Batches of the epoch that are done.
    """
    begun = epoch + (num_done > 0)
    for progress in loops["epoch_progress"].values():
        progress.update(ready=begun, started=begun, processed=epoch, completed=epoch)
    batches = loops["epoch_loop.batch_progress"]
    for progress, count in ((batches["total"], batches["total"]["ready"]), (batches["current"], num_done)):
        progress.update(ready=count, started=count, processed=count, completed=count - 1)
    batches["is_last_batch"] = False
