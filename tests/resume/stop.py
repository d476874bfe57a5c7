"""A callback that ends a run as the out-of-memory killer would."""

from __future__ import annotations

import os
import signal
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer


class KillAfter(Callback):
    """Kills all processes of the run when a step's rollout is there and nothing has been learnt from it.

    Args:
        step: Finished steps.
    """

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            trainer.strategy.barrier()
            os.killpg(os.getpgid(0), signal.SIGKILL)
