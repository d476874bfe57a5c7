"""Ends a run of several processes at one batch when any of them is told to stop."""

from __future__ import annotations

from functools import partial
from typing import Any

from lightning.fabric.utilities import rank_zero_info
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from typing_extensions import override

from verl_lightning.strategies.base import as_contract


class AgreeOnSigterm(Callback):
    """Has all processes end before the same batch once any of them got SIGTERM; hosts ask one another.

    Lightning asks the devices: before each batch the host waits until its device has done all its work, and launches
    nothing meanwhile. Its handler begins a collective wherever the signal finds a process, in the middle of training's.

    Uses private names of lightning>=2.6.4,<2.7, which `test_lightnings_private_names_are_still_there` watches.
    """

    def __init__(self) -> None:
        self._is_told = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and trainer.world_size > 1:
            self._is_told = False
            trainer._signal_connector._sigterm_notifier_fn = partial(self._hear, trainer)  # type: ignore[method-assign]
            trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = partial(self._agree, trainer)  # type: ignore[method-assign]

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        connector, loop = trainer._signal_connector, trainer.fit_loop.epoch_loop
        if "_sigterm_notifier_fn" in vars(connector):  # over the methods of their classes
            del connector._sigterm_notifier_fn, loop._broadcast_sigterm_tensor

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
            trainer._signal_connector.received_sigterm = True
            raise SIGTERMException
