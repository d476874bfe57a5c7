"""Direct preference optimization and its family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from verl_lightning.algorithms.preferences.base import PreferenceLoss, Responses, chosen, rejected
from verl_lightning.metrics import Metric, masked_mean
from verl_lightning.models.config import ModelConfig
from verl_lightning.models.lora import has_adapters
from verl_lightning.models.scorer import TokenScorer
from verl_lightning.modules.given import as_model, as_preference_loss
from verl_lightning.modules.offline import NumberT, OfflineModule
from verl_lightning.modules.reference import PreferenceSource, Reference, preference_sources
from verl_lightning.modules.resume_checks import config_text
from verl_lightning.options import typed
from verl_lightning.types import PreferenceBatch, Scores, TokenBatch


class DPOModule(OfflineModule):
    """Trains a language model on preferences, without a reward model: DPO and its family.

    The reference is the policy before its training, or without its adapters: no second model is kept. Its log-probs are
    computed once, before the first step, and kept on disk for runs with the same model and the same tokens. The loss is
    a mean over the examples of the whole optimizer step.

    Args:
        actor: The model in training; a text is its ``path``. ``trainer.gradient_clip_val``, when given, takes the place
            of its ``optim.max_grad_norm``.
        loss: Loss of a pair, such as ``DPO``, ``IPO`` or ``SimPO``, or of a single response, ``KTO``.
        max_tokens_per_micro_batch: Most tokens of one forward and backward pass: a batch with more makes several, of
            about equal compute, and never parts a pair. Changes speed and memory, never the gradient. Null makes one
            pass of a batch.
        reference_cache: Folder that keeps the reference's log-probs; null takes ``reference_log_probs`` in
            ``trainer.default_root_dir``.
        lr: Short for ``actor.optim.lr``.
    """

    task: ClassVar[str] = "DPO"
    counted: ClassVar[str] = "examples"

    @typed("model")
    def __init__(
        self,
        actor: ModelConfig | str,
        loss: PreferenceLoss | str | None = None,
        max_tokens_per_micro_batch: int | None = None,
        reference_cache: str | None = None,
        *,
        lr: float | None = None,
    ) -> None:
        super().__init__(as_model(actor, lr), max_tokens_per_micro_batch)
        self.loss = as_preference_loss(loss or "DPO")
        if reference_cache is not None and not self.loss.needs_reference:
            raise ValueError(
                f"`model.reference_cache` has no effect: `{type(self.loss).__name__}` compares with no reference."
                " Leave it out."
            )
        self.reference_cache = reference_cache

    @property
    def takes_pairs(self) -> bool:
        """True if an example is a pair of responses; asked by the data module."""
        return self.loss.is_paired

    @property
    @override
    def rows_per_example(self) -> int:
        return 2 if self.takes_pairs else 1

    @property
    @override
    def example_metrics(self) -> tuple[str, ...]:
        shared = ("rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected")
        return (*shared, *(["rewards/accuracies"] if self.takes_pairs else []), *self.loss.metrics)

    @property
    @override
    def has_reference(self) -> bool:
        return self.loss.needs_reference

    @override
    def configure_model(self) -> None:
        is_untrained = self.actor is None
        super().configure_model()
        self.policy.disable_dropout()
        self.note_start()
        sources, batch_size = preference_sources(self)
        if self.loss.needs_reference:
            self._score_with_reference(sources, batch_size, is_untrained=is_untrained)

    def _score_with_reference(
        self, sources: Sequence[PreferenceSource], batch_size: int, *, is_untrained: bool
    ) -> None:
        """Fills in the reference's log-probs: of the policy where it is what it was before training. Collective."""
        assert self._start is not None

        def reference_model() -> TokenScorer:
            if is_untrained or has_adapters(self.policy.backbone):
                return self.policy
            return self.contract.make_model(self.policy_config, "policy", trainable=False)

        folder = self.reference_cache or Path(self.trainer.default_root_dir) / "reference_log_probs"
        reference = Reference(
            trainer=self.trainer,
            model=reference_model,
            config=self.policy_config,
            fingerprint=self._start,
            architecture=config_text(self.policy.backbone.config),
            folder=Path(folder),
            max_tokens=self.max_tokens_per_micro_batch,
        )
        for source in sources:
            source.ref_log_probs = reference.log_probs(source, batch_size)

    @override
    def prepared(self, batch: TokenBatch) -> TokenBatch:
        if self.takes_pairs:
            return batch
        assert isinstance(batch, PreferenceBatch)
        own, others = (replace(batch.select(slice(start, None, 2)), rows_per_example=1) for start in (0, 1))
        parts = self._micro_batches(others)
        gaps = [
            (self._responses(scores, part).log_ratios, part.counts)
            for part, scores in zip(parts, self.contract.forward(self.policy, parts), strict=True)
        ]
        sums = torch.stack([torch.stack([gap[counts].sum(), counts.sum()]) for gap, counts in gaps]).sum(0)
        total, count = self.contract.sum_over_data_parallel(sums)
        kl = (total / count.clamp(min=1)).clamp(min=0)
        return replace(own, kl=kl.expand(len(own)).clone())

    @override
    def count(self, batch: TokenBatch) -> Tensor:
        return batch.counts.sum()

    def _responses(self, scores: Scores, batch: TokenBatch) -> Responses:
        assert isinstance(batch, PreferenceBatch)
        assert scores.log_probs is not None
        counts = batch.counts.repeat_interleave(batch.rows_per_example)
        log_probs = torch.where(batch.response_mask, scores.log_probs, 0.0).sum(-1)
        # Any number for what is not learnt from, as long as all losses and their gradients are finite there.
        return Responses(
            log_probs=torch.where(counts, log_probs, -1.0),
            lengths=batch.response_mask.sum(-1).clamp(min=1),
            ref_log_probs=None if batch.ref_log_probs is None else torch.where(counts, batch.ref_log_probs, -1.0),
            is_desirable=batch.is_desirable,
            kl=batch.kl,
        )

    @override
    def losses(self, scores: Scores, batch: TokenBatch) -> tuple[Tensor, dict[str, Metric]]:
        assert isinstance(batch, PreferenceBatch)
        responses, counts = self._responses(scores, batch), batch.counts
        losses, own = self.loss(responses)
        rewards = self.loss.rewards(responses).detach()
        log_probs = (responses.log_probs if self.loss.needs_reference else responses.mean_log_probs).detach()
        metrics = {name: masked_mean(values, counts) for name, values in own.items()}
        if responses.is_desirable is None:
            metrics["rewards/accuracies"] = masked_mean((chosen(rewards) > rejected(rewards)).float(), counts)
        for name, values in {"rewards": rewards, "logps": log_probs}.items():
            if (wanted := responses.is_desirable) is None:
                metrics[f"{name}/chosen"] = masked_mean(chosen(values), counts)
                metrics[f"{name}/rejected"] = masked_mean(rejected(values), counts)
            else:
                metrics[f"{name}/chosen"] = masked_mean(values, counts & wanted)
                metrics[f"{name}/rejected"] = masked_mean(values, counts & ~wanted)
        return torch.where(counts, losses, 0.0).sum(), metrics

    @override
    def with_derived(self, metrics: Mapping[str, NumberT]) -> dict[str, NumberT]:
        rewards = [metrics[name] for name in ("rewards/chosen", "rewards/rejected") if name in metrics]
        return {**metrics, **({"rewards/margins": rewards[0] - rewards[1]} if len(rewards) == 2 else {})}
