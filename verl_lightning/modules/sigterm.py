"""Ends a run of several processes at one batch when any of them is told to stop."""

from __future__ import annotations

from functools import partial
from typing import Any

from lightning.fabric.utilities import rank_zero_info
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from verl_lightning.compat.lightning import note_sigterm, replace_sigterm, restore_sigterm
from verl_lightning.strategies.base import as_contract


class AgreeOnSigterm(Callback):
    """Has all processes end before the same batch once any of them got SIGTERM; hosts ask one another."""

    def __init__(self) -> None:
        self._is_told = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and trainer.world_size > 1:
            self._is_told = False
            replace_sigterm(trainer, partial(self._hear, trainer), partial(self._agree, trainer))

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        restore_sigterm(trainer)

    def _hear(self, trainer: Trainer, signum: Any, frame: Any) -> None:
        """The handler of the signal."""
        del frame
        if not self._is_told and trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(signum)
        self._is_told = True

    def _agree(self, trainer: Trainer) -> None:
        """What Lightning calls before each batch. Collective."""
        if as_contract(trainer.strategy).largest_over_ranks(int(self._is_told)):
            rank_zero_info("A process was told to stop (SIGTERM): the run ends before this batch.")
            note_sigterm(trainer)
            raise SIGTERMException
