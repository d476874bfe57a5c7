"""Supervised fine-tuning on chats, under Lightning's automatic optimization."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities import rank_zero_info, rank_zero_warn
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from verl_lightning.compat.lightning import hide_accumulation_warning
from verl_lightning.faults import RunError, told_of
from verl_lightning.functional.masking import masked_sum
from verl_lightning.metrics import Metric, MetricTable, masked_mean
from verl_lightning.models.config import ModelConfig, check_no_rollout
from verl_lightning.models.scorer import TokenScorer
from verl_lightning.modules.base import PostTrainingModule
from verl_lightning.modules.micro_batches import BatchSplitter
from verl_lightning.strategies.base import with_gradient
from verl_lightning.telemetry.step_log import log_step
from verl_lightning.types import Scores, TokenBatch


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


class SFTModule(PostTrainingModule):
    """Trains a language model to say what assistants said in chats.

    The loss is the mean over supervised tokens of the whole optimizer step: ``accumulate_grad_batches`` and the number
    of ranks change its speed, never its gradient.

    Args:
        actor: The model in training. ``trainer.gradient_clip_val``, when given, takes the place of its
            ``optim.max_grad_norm``.
        max_tokens_per_micro_batch: Most tokens of one forward and backward pass: a batch with more makes several, of
            about equal compute. Changes speed and memory, never the gradient. Null makes one pass of a batch.
    """

    def __init__(self, actor: ModelConfig, max_tokens_per_micro_batch: int | None = None) -> None:
        super().__init__(actor)
        check_no_rollout(actor.lora, "model.actor.lora")
        if max_tokens_per_micro_batch is not None and max_tokens_per_micro_batch < 1:
            raise ValueError(f"`max_tokens_per_micro_batch` must be at least 1, got {max_tokens_per_micro_batch}.")
        self.max_tokens_per_micro_batch = max_tokens_per_micro_batch
        self.actor: TokenScorer | None = None
        self._unit_tokens: Tensor | None = None  # tokens of the first batch of the optimizer step at work
        self._step_tokens: Tensor | None = None  # tokens of all its batches whose gradients are there
        self._batch_tokens: Tensor | None = None  # of the batch at work; None within its later micro-batches
        self._log_prob_sums: list[Tensor] = []  # of its micro-batches so far
        self._rest: list[TokenBatch] = []  # its micro-batches that `backward` is to make
        self._accumulation: AccumulationPlan | None = None  # of the epoch before
        self._evaluation = MetricTable()
        hide_accumulation_warning()

    @property
    @override
    def policy(self) -> TokenScorer:
        assert self.actor is not None
        return self.actor

    @property
    @override
    def validation_metrics(self) -> set[str] | None:
        return {"val/loss"}

    pass_key = "model.max_tokens_per_micro_batch"

    @property
    @override
    def tokens_per_pass(self) -> int | None:
        data = getattr(self.trainer, "datamodule", None)
        rows, longest = getattr(data, "batch_size", None), getattr(data, "max_length", None)
        whole = None if rows is None or longest is None else int(rows * longest)
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
                self.actor = self.contract.make_model(self.policy_config, "policy", trainable=True)

    @override
    def configure_optimizers(self) -> Any:
        return self.optimizer_config(self.roles[0])

    @override
    def on_train_start(self) -> None:
        longest = getattr(getattr(self.trainer, "datamodule", None), "max_length", None)
        budget = self.max_tokens_per_micro_batch
        if budget is not None and longest is not None and longest > budget:
            raise ValueError(
                f"`max_tokens_per_micro_batch` ({budget}) is less than one chat may have (`data.max_length`,"
                f" {longest}). Raise it, or shorten chats."
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
        tokens = self.contract.sum_over_data_parallel(batch.response_mask.sum())
        if self._unit_tokens is None:
            self._unit_tokens = tokens.clamp(min=1)
        self._batch_tokens, self._log_prob_sums = tokens, []
        first, *self._rest = self._micro_batches(batch)
        with self._unless_last():
            loss, metrics = self.contract.train_loss(self.policy, first, self._loss)
        self._log_prob_sums.append(torch.as_tensor(metrics["log_prob_sum"].total, device=self.device))
        return loss * self.trainer.accumulate_grad_batches  # by which Lightning divides what it is returned

    def _loss(self, scores: Scores, batch: TokenBatch) -> tuple[Tensor, Mapping[str, Metric]]:
        assert scores.log_probs is not None
        assert self._unit_tokens is not None
        log_prob_sum = masked_sum(scores.log_probs, batch.response_mask)
        # In units of the step's first batch; `on_before_optimizer_step` ends it.
        return -log_prob_sum / self._unit_tokens, {"log_prob_sum": Metric("sum", log_prob_sum.detach())}

    @override
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Adds the gradient of the batch: of the micro-batch that `training_step` has scored, then of all others."""
        with self._unless_last():
            super().backward(loss, *args, **kwargs)
        if not self._rest:
            return
        rest, self._rest, tokens, self._batch_tokens = self._rest, [], self._batch_tokens, None
        # Where Lightning runs their backward passes, each comes back here with no rest.
        for metrics in self.contract.forward_backward(self.policy, rest, self._loss):
            self._log_prob_sums.append(torch.as_tensor(metrics["log_prob_sum"].total, device=self.device))
        self._batch_tokens = tokens

    @override
    def on_after_backward(self) -> None:
        if (tokens := self._batch_tokens) is None:  # one of several micro-batches
            return
        self._step_tokens = tokens if self._step_tokens is None else self._step_tokens + tokens
        token_sum = self.contract.sum_over_data_parallel(-torch.stack(self._log_prob_sums).sum())
        # Not `prog_bar`: Lightning would wait for the device at each batch. Our progress bar reads it when it redraws.
        log_step(self, {"train/loss": token_sum / tokens.clamp(min=1), "train/global_tokens": tokens.float()})

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
        unit, total = self._unit_tokens, self._step_tokens
        self._unit_tokens = self._step_tokens = None
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
        parts = self._micro_batches(batch)
        for part, scores in zip(parts, self.contract.forward(self.policy, parts), strict=True):
            assert scores.log_probs is not None
            self._evaluation.add({"loss": masked_mean(-scores.log_probs, part.response_mask)})

    def _log_evaluation(self, stage: str) -> None:
        metrics = self._evaluation.reduce(self.contract.gather_over_data_parallel)
        if "loss" not in metrics:
            raise RunError(f"the {stage} loader gave no supervised token. Check its files.")
        self.log(f"{stage}/loss", metrics["loss"], prog_bar=True, batch_size=1)
