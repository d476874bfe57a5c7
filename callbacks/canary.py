"""Tells after each sync of weights whether engine and trainer have the same policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer

from verl_lightning.faults import RunError
from verl_lightning.functional.masking import masked_sum
from verl_lightning.modules.base import PostTrainingModule
from verl_lightning.rollout.base import Request, SamplingConfig
from verl_lightning.rollout.completions import make_requests
from verl_lightning.seeding import derive_seed
from verl_lightning.types import PromptBatch, PromptImages, Rollout

NUM_PROMPTS = 4
MAX_TOKENS = 16

LIMITS = {"float32": 0.0005, "float16": 0.02, "bfloat16": 0.05}
"""Largest gap of each type in which both sides compute, in nats per token: a few times what rounding makes of it."""

TF32_LIMIT = 0.02
"""Largest gap for float32 on GPUs, in nats per token: matrix products may round inputs to float16's precision."""


class Canary:
    """A few fixed prompts, the same for the whole run and all ranks, on which engine and trainer are compared.

    Args:
        limit: Largest gap, in nats per token; None takes that of the type in which both compute.
    """

    def __init__(self, limit: float | None) -> None:
        self._limit = limit
        self._tokens: list[list[int]] = []
        self._images: list[PromptImages | None] | None = None
        self.gap = 0.0

    def state(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps, so that a resumed run measures the same."""
        if self._images is None:
            return {"tokens": self._tokens}
        return {"tokens": self._tokens, "images": [own and own.state_dict() for own in self._images]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on with the prompts of an earlier run, as `state` gave them."""
        self._tokens, images = state["tokens"], state.get("images")
        self._images = images and [own and PromptImages.from_state_dict(own) for own in images]

    def forget(self) -> None:
        """Takes new prompts next, for a new run."""
        self._tokens, self._images = [], None

    def requests(self, trainer: Trainer, batch: PromptBatch, sampling: SamplingConfig) -> list[Request]:
        """Returns what the engine is asked. Collective.

        Args:
            trainer: Trainer of the run.
            batch: Batch whose first prompts on the first rank are taken, if there are none yet.
            sampling: Settings of training responses.
        """
        if not self._tokens:
            own = batch.prompts()[:NUM_PROMPTS], batch.images and batch.images[:NUM_PROMPTS]
            self._tokens, self._images = trainer.strategy.broadcast(own)
        # Without a guide, which takes tokens from the engine's distribution that the trainer's has.
        short = min(MAX_TOKENS, sampling.max_new_tokens)
        sampling = dataclasses.replace(sampling, num_samples=1, max_new_tokens=short, guide=None)
        seeds = [[derive_seed("canary", row)] for row in range(len(self._tokens))]
        return make_requests(self._tokens, seeds, sampling, self._images)

    def check(self, module: PostTrainingModule, rollout: Rollout, dtype: str, difference: Callable[[], str]) -> None:
        """Compares the engine's log-probs of its own responses with the trainer's. Collective.

        Args:
            module: Module whose policy is in training.
            rollout: The engine's responses to the prompts.
            dtype: Name of the type in which both compute.
            difference: Function that says which weights differ. Collective.

        Raises:
            RunError: If the log-probs differ by more than the limit.
        """
        self.gap = log_prob_gap(module, rollout)
        limit = default_limit(dtype, module.device) if self._limit is None else self._limit
        if not self.gap <= limit:
            raise RunError(gap_message(self.gap, limit, module.trainer.global_step, difference()))


def default_limit(dtype: str, device: torch.device) -> float:
    """Returns the largest gap that rounding explains, in nats per token.

    Args:
        dtype: Name of the type in which both sides compute.
        device: Device of the trainer.
    """
    return TF32_LIMIT if dtype == "float32" and device.type == "cuda" else LIMITS[dtype]


def log_prob_gap(module: PostTrainingModule, rollout: Rollout) -> float:
    """Averages ``|trainer's log-prob - engine's|`` over the response tokens of all ranks, in nats. Collective."""
    (scores,) = module.contract.forward(module.policy, [rollout])
    assert scores.log_probs is not None
    differences = (scores.log_probs - rollout.rollout_log_probs).abs()
    mask = rollout.response_mask
    sums = torch.stack([masked_sum(differences, mask), mask.sum().to(differences.dtype)])
    total, count = module.contract.sum_over_data_parallel(sums)
    return float(total / count)


def gap_message(gap: float, limit: float, step: int, difference: str) -> str:
    """Says why a run stops whose engine samples from another policy than the one in training."""
    return (
        f"after the sync of weights at step {step}, engine and trainer differ by {gap:.3g} nats per token on the"
        f" canary prompts, but `rollout.canary_limit` is {limit:g}. {difference} Likely causes: the engine lacks a"
        " weight or names it otherwise (tied embeddings, adapters, a new architecture), a cache outlived the old"
        " weights, or the two compute in different types (`trainer.precision`, `model.actor.dtype`). If"
        " `rollout: HFRollout` trains well from here, the sync is broken; if the gap grew slowly, or is as large in the"
        " first sync of a model that bfloat16 blurs (see docs/rollout.md), raise the limit or compute in float32."
    )
