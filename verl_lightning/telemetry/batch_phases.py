"""Phases of modules whose forward and backward passes are Lightning's business, and how fast they are."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from verl_lightning.metrics import MetricTable, total
from verl_lightning.ranges import named_range
from verl_lightning.strategies.base import PostTrainingStrategy
from verl_lightning.telemetry.phases import TimedModule, span_metrics
from verl_lightning.telemetry.speed import SQUARED_LENGTHS, Work, speed_metrics
from verl_lightning.telemetry.step_log import log_step

FORWARD_BACKWARD = "forward_backward"
OPTIMIZER = "optimizer"


class MeasuredModule(TimedModule, Protocol):
    """A module that knows what its phases compute."""

    device: torch.device
    work: Sequence[Work]

    @property
    def contract(self) -> PostTrainingStrategy:
        """The strategy's operations."""


class BatchPhases(Callback):
    """Makes each batch the phases ``forward_backward`` and ``optimizer``, and logs what they took.

    Within them lie the ranges ``forward`` and ``backward``, around them ``mini_batch`` (an optimizer step). Nothing is
    read back from the device but in steps that are logged.
    """

    def __init__(self) -> None:
        self._mini_batch, self._phase, self._pass = ExitStack(), ExitStack(), ExitStack()
        self._mini_batch_step = -1  # `global_step` when the mini-batch at work began
        self._table = MetricTable()
        self._steps = 0  # since the last report

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        module: MeasuredModule = pl_module  # type: ignore[assignment]
        if self._mini_batch_step != trainer.global_step:
            self._mini_batch_step = trainer.global_step
            self._mini_batch.enter_context(named_range("mini_batch"))
        self._phase.enter_context(module.phase(FORWARD_BACKWARD))
        self._phase.enter_context(named_range("micro_batch"))
        self._pass.enter_context(named_range("forward"))
        if isinstance(mask := getattr(batch, "attention_mask", None), Tensor):
            lengths = mask.sum(-1)
            squares = lengths.double().square().sum()
            self._table.add({"perf/total_num_tokens": total(lengths.sum()), SQUARED_LENGTHS: total(squares)})

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._pass.close()
        self._pass.enter_context(named_range("backward"))

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._pass.close()

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        module: MeasuredModule = pl_module  # type: ignore[assignment]
        self._phase.close()
        self._phase.enter_context(module.phase(OPTIMIZER))

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        module: MeasuredModule = pl_module  # type: ignore[assignment]
        self._phase.close()
        if self._mini_batch_step == trainer.global_step:  # more batches are to come
            return
        self._mini_batch.close()
        self._steps += 1
        log_every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if not log_every:
            self._forget(module)
        elif trainer.global_step % log_every == 0:
            self._report(pl_module)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        for stack in (self._pass, self._phase, self._mini_batch):
            stack.close()

    def _forget(self, module: MeasuredModule) -> None:
        module.clock.forget()
        self._table, self._steps = MetricTable(), 0

    def _report(self, pl_module: LightningModule) -> None:
        """Log means over the steps since the last report. Collective; waits for the device, as loggers do."""
        module: MeasuredModule = pl_module  # type: ignore[assignment]
        self._table.add(span_metrics(module.clock.take(), steps=self._steps))
        metrics = self._table.reduce(module.contract.gather_over_data_parallel)
        for name in ("perf/total_num_tokens", SQUARED_LENGTHS):
            if name in metrics:
                metrics[name] /= self._steps
        self._forget(module)
        metrics = speed_metrics(
            metrics,
            ranks=module.contract.data_parallel_size,
            devices=module.trainer.world_size,
            device=module.device,
            work=module.work,
            peak_memory=module.clock.peak_memory(),
        )
        log_step(pl_module, metrics)
