"""The base of modules that learn from examples in files, under Lightning's automatic optimization."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from lightning.fabric.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from verl_lightning.compat.lightning import hide_accumulation_warning
from verl_lightning.faults import RunError, told_of
from verl_lightning.metrics import Metric, MetricTable, mean
from verl_lightning.models.config import ModelConfig, check_no_rollout
from verl_lightning.models.scorer import Head, TokenScorer
from verl_lightning.models.size import ModelRole
from verl_lightning.modules.base import PostTrainingModule
from verl_lightning.modules.checkpoint_contents import TASK_KEY
from verl_lightning.modules.micro_batches import BatchSplitter
from verl_lightning.strategies.base import with_gradient
from verl_lightning.telemetry.step_log import log_step
from verl_lightning.types import Scores, TokenBatch

NumberT = TypeVar("NumberT", Tensor, float)


class AccumulationPlan(NamedTuple):
    """Batches of an epoch and of an optimizer step, which Lightning ends at an epoch's end in any case."""

    epoch: float
    step: int

    def tell(self, steps_left: float) -> None:
        """Tells where steps have fewer batches than asked for.

        Args:
            steps_left: Optimizer steps that the run has left.
        """
        if self.epoch % self.step == 0 or self.epoch == float("inf") or self.step * steps_left <= self.epoch:
            return
        says = (
            f"`trainer.accumulate_grad_batches` is {self.step}, but an epoch has {self.epoch:g} batches on each rank:"
        )
        if self.epoch < self.step:
            rank_zero_warn(f"{says} every optimizer step takes {self.epoch:g}. Set it to {self.epoch:g} at the most.")
        else:
            rank_zero_info(f"{says} the last optimizer step of an epoch takes {self.epoch % self.step:g}.")


class OfflineModule(PostTrainingModule):
    """One model that learns from the examples of files.

    Its loss is a mean over the examples of the whole optimizer step, of whatever kind a subclass counts:
    ``accumulate_grad_batches`` and the number of ranks change its speed, never its gradient.

    Args:
        actor: The model in training. ``trainer.gradient_clip_val``, when given, takes the place of its
            ``optim.max_grad_norm``.
        max_tokens_per_micro_batch: Most tokens of one forward and backward pass; null makes one pass of a batch.
    """

    head: ClassVar[Head] = "policy"
    """Scores that the model gives."""

    task: ClassVar[str] = "SFT"
    """Name of what is learnt, for checkpoints."""

    counted: ClassVar[str]
    """Plural name of what the loss is a mean over, for the metric ``train/global_<name>``."""

    def __init__(self, actor: ModelConfig, max_tokens_per_micro_batch: int | None = None) -> None:
        super().__init__(actor)
        check_no_rollout(actor.lora, "model.actor.lora")
        if max_tokens_per_micro_batch is not None and max_tokens_per_micro_batch < 1:
            raise ValueError(
                f"`model.max_tokens_per_micro_batch` must be at least 1, got {max_tokens_per_micro_batch}."
            )
        self.max_tokens_per_micro_batch = max_tokens_per_micro_batch
        self.actor: TokenScorer | None = None
        self._unit: Tensor | None = None  # examples of the first batch of the optimizer step at work
        self._step_count: Tensor | None = None  # examples of all its batches whose gradients are there
        self._batch_count: Tensor | None = None  # of the batch at work; None within its later micro-batches
        self._table = MetricTable()  # of its micro-batches so far
        self._rest: list[TokenBatch] = []  # its micro-batches that `backward` is to make
        self._accumulation: AccumulationPlan | None = None  # of the epoch before
        self._evaluation = MetricTable()
        hide_accumulation_warning()

    @abstractmethod
    def count(self, batch: TokenBatch) -> Tensor:
        """Counts what the loss is a mean over, on this rank."""

    @abstractmethod
    def losses(self, scores: Scores, batch: TokenBatch) -> tuple[Tensor, dict[str, Metric]]:
        """The sum of the losses of a micro-batch, and its metrics: means, of the same names on every rank."""

    def prepared(self, batch: TokenBatch) -> TokenBatch:
        """Returns a batch with what its losses need to know of it as a whole. Collective."""
        return batch

    @property
    @override
    def policy(self) -> TokenScorer:
        assert self.actor is not None
        return self.actor

    @property
    @override
    def validation_metrics(self) -> set[str] | None:
        return {f"val/{name}" for name in ("loss", *self.example_metrics)}

    @property
    def example_metrics(self) -> tuple[str, ...]:
        """Names of the metrics that come with `losses`."""
        return ()

    @property
    @override
    def roles(self) -> list[ModelRole]:
        return [ModelRole("actor", self.policy_config, self.head, trainable=True)]

    @property
    def rows_per_example(self) -> int:
        """Sequences of one example that are scored in one pass."""
        return 1

    def with_derived(self, metrics: Mapping[str, NumberT]) -> dict[str, NumberT]:
        """Returns metrics over all ranks with those that follow from them."""
        return dict(metrics)

    pass_key = "model.max_tokens_per_micro_batch"

    @property
    @override
    def tokens_per_pass(self) -> int | None:
        data = getattr(self.trainer, "datamodule", None)
        rows, longest = getattr(data, "batch_size", None), getattr(data, "max_length", None)
        whole = None if rows is None or longest is None else int(rows * longest * self.rows_per_example)
        budget = self.max_tokens_per_micro_batch
        return whole if budget is None else min(budget, whole or budget)

    @property
    @override
    def accumulates(self) -> bool:
        return self.trainer.accumulate_grad_batches > 1 or self.max_tokens_per_micro_batch is not None

    @override
    def configure_model(self) -> None:
        if self.actor is None:
            with told_of("model.actor"):
                self.actor = self.contract.make_model(self.policy_config, self.head, trainable=True)

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint[TASK_KEY] = self.task

    @override
    def configure_optimizers(self) -> Any:
        return self.optimizer_config(self.roles[0])

    @override
    def setup(self, stage: str) -> None:
        super().setup(stage)
        longest = getattr(getattr(self.trainer, "datamodule", None), "max_length", None)
        budget, rows = self.max_tokens_per_micro_batch, self.rows_per_example
        if budget is not None and longest is not None and rows * longest > budget:
            example = "one chat" if rows == 1 else f"the {rows} sequences of one example"
            raise ValueError(
                f"`model.max_tokens_per_micro_batch` ({budget}) is less than {example} may have (`data.max_length`,"
                f" {longest}{' each' if rows > 1 else ''}). Raise it, or shorten chats."
            )

    @override
    def on_train_epoch_start(self) -> None:
        trainer = self.trainer  # a `GradientAccumulationScheduler` has set this epoch's number
        plan = AccumulationPlan(trainer.num_training_batches, trainer.accumulate_grad_batches)
        steps_left = float("inf") if trainer.max_steps == -1 else trainer.max_steps - trainer.global_step
        if plan != self._accumulation:
            plan.tell(steps_left)
        self._accumulation = plan

    @override
    def training_step(self, batch: TokenBatch, batch_idx: int) -> Tensor:
        batch = self.prepared(batch)
        count = self.contract.sum_over_data_parallel(self.count(batch))
        if self._unit is None:
            self._unit = count.clamp(min=1)
        self._batch_count, self._table = count, MetricTable()
        first, *self._rest = self._micro_batches(batch)
        with self._unless_last():
            loss, metrics = self.contract.train_loss(self.policy, first, self._share)
        self._table.add(metrics)
        return loss * self.trainer.accumulate_grad_batches  # by which Lightning divides what it is returned

    def _share(self, scores: Scores, batch: TokenBatch) -> tuple[Tensor, Mapping[str, Metric]]:
        assert self._unit is not None
        loss_sum, metrics = self.losses(scores, batch)
        # In units of the step's first batch; `on_before_optimizer_step` ends it.
        return loss_sum / self._unit, {"loss": mean(loss_sum.detach(), self.count(batch)), **metrics}

    @override
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Adds the gradient of the batch: of the micro-batch that `training_step` has scored, then of all others."""
        with self._unless_last():
            super().backward(loss, *args, **kwargs)
        if not self._rest:
            return
        rest, self._rest, count, self._batch_count = self._rest, [], self._batch_count, None
        # Where Lightning runs their backward passes, each comes back here with no rest.
        for metrics in self.contract.forward_backward(self.policy, rest, self._share):
            self._table.add(metrics)
        self._batch_count = count

    @override
    def on_after_backward(self) -> None:
        if (count := self._batch_count) is None:  # one of several micro-batches
            return
        self._step_count = count if self._step_count is None else self._step_count + count
        metrics = self.with_derived(self._over_ranks(self._table.merged))
        # Not `prog_bar`: Lightning would wait for the device at each batch. Our progress bar reads it when it redraws.
        log_step(self, {"train/loss": metrics.pop("loss"), f"train/global_{self.counted}": count.float(), **metrics})

    def _over_ranks(self, metrics: Mapping[str, Metric]) -> dict[str, Tensor]:
        """Means over all ranks, for none of which the host waits; 0 where nothing counts. Collective."""
        parts = [number for metric in metrics.values() for number in (metric.total, metric.weight)]
        numbers = torch.stack([torch.as_tensor(part, dtype=torch.float32, device=self.device) for part in parts])
        totals, weights = self.contract.sum_over_data_parallel(numbers).view(-1, 2).unbind(-1)
        return dict(zip(metrics, totals / weights.clamp(min=1), strict=True))

    def _micro_batches(self, batch: TokenBatch) -> list[TokenBatch]:
        """Within the budget; as many on every rank. Collective."""
        if self.max_tokens_per_micro_batch is None:
            return [batch]
        splitter = BatchSplitter(
            contract=self.contract, micro_batch_size=len(batch), max_tokens=self.max_tokens_per_micro_batch
        )
        (split,) = splitter.split(self.policy, [batch])
        return split.parts

    def _unless_last(self) -> AbstractContextManager[None]:
        """Keeps gradients on this rank while micro-batches of the batch are left."""
        return self.contract.no_gradient_sync(self.policy) if self._rest else nullcontext()

    @override
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        unit, total = self._unit, self._step_count
        self._unit = self._step_count = None
        if unit is None or total is None:  # each `training_step` of a subclass returned None: there are no gradients
            return
        scale = unit / total.clamp(min=1)
        if self._clips_values:  # by Lightning, which must find the gradients as they are
            gradients = [p.grad for p in with_gradient(optimizer) if p.grad is not None]
            for gradient in gradients:
                gradient.mul_(scale.to(gradient.device))
            norm = self.contract.prepare_step(optimizer, 0.0)
        else:
            norm = self.contract.prepare_step(optimizer, self._max_norm, scale=scale)
        log_step(self, {"train/grad_norm": norm, "train/lr": optimizer.param_groups[0]["lr"]})
        log_step(self, {"train/skipped_updates": (~norm.isfinite()).float()}, reduce_fx="sum")

    @override
    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        if self._clips_values:  # norms are clipped already: see `on_before_optimizer_step`
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    @override
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Done after each step: where the strategy runs the backward pass in `training_step`, it is too late here."""

    @override
    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Optimizer | LightningOptimizer, optimizer_closure: Any = None
    ) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        optimizer.zero_grad()

    @property
    def _clips_values(self) -> bool:
        return self.trainer.gradient_clip_val is not None and self.trainer.gradient_clip_algorithm == "value"

    @property
    def _max_norm(self) -> float:
        chosen = self.trainer.gradient_clip_val
        return self.policy_config.optim.max_grad_norm if chosen is None else float(chosen)

    @override
    def on_validation_epoch_start(self) -> None:
        self._evaluation = MetricTable()

    @override
    def validation_step(self, batch: TokenBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate(batch)

    @override
    def on_validation_epoch_end(self) -> None:
        self._log_evaluation("val")

    @override
    def on_test_epoch_start(self) -> None:
        self._evaluation = MetricTable()

    @override
    def test_step(self, batch: TokenBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate(batch)

    @override
    def on_test_epoch_end(self) -> None:
        self._log_evaluation("test")

    def _evaluate(self, batch: TokenBatch) -> None:
        parts = self._micro_batches(self.prepared(batch))
        for part, scores in zip(parts, self.contract.forward(self.policy, parts), strict=True):
            loss_sum, metrics = self.losses(scores, part)
            self._evaluation.add({"loss": mean(loss_sum, self.count(part)), **metrics})

    def _log_evaluation(self, stage: str) -> None:
        metrics = self.with_derived(self._evaluation.reduce(self.contract.gather_over_data_parallel))
        if "loss" not in metrics:
            raise RunError(f"the {stage} loader gave nothing to measure. Check its files.")
        self.log(f"{stage}/loss", metrics.pop("loss"), prog_bar=True, batch_size=1)
        self.log_dict({f"{stage}/{name}": value for name, value in metrics.items()}, batch_size=1)
