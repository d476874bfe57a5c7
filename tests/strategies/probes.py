"""Measures losses and gradients in the middle of a run, without a step: of given micro-batches, and of any lengths."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from verl_lightning.functional.masking import masked_sum
from verl_lightning.metrics import Metric
from verl_lightning.modules import PPOModule
from verl_lightning.modules.micro_batches import BatchSplitter
from verl_lightning.types import TokenBatch

MAX_TOKENS = 36
"""Budget of a micro-batch."""


def measure(module: PPOModule, batches: list[Any], objective: Callable[..., Any]) -> tuple[float, float]:
    """Loss and gradient norm of micro-batches of all ranks; no step is taken."""

    def loss_fn(scores: Any, batch: Any) -> Any:
        share, metrics = objective(scores, batch)
        return share, {**metrics, "share": Metric("sum", share.detach().clone())}

    results = module.contract.forward_backward(module.policy, batches, loss_fn, with_entropy=True)
    optimizer: Any = module.optimizers()
    norm = module.contract.prepare_step(optimizer.optimizer, 0.0)
    optimizer.zero_grad()
    total = torch.tensor(sum(float(part["share"].total) for part in results))
    return float(module.contract.sum_over_data_parallel(total)), float(norm)


class LengthProbe(Callback):
    """Measures loss and gradient of packed rows of many sampled lengths, dealt out to the ranks."""

    def __init__(self) -> None:
        self.measured: dict[str, tuple[float, float]] = {}

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step > 0:
            return
        contract = pl_module.contract
        for kind, lengths in sampled_lengths().items():
            own = rows_of(lengths).select(slice(contract.data_parallel_rank, None, contract.data_parallel_size))
            splitter = BatchSplitter(contract=contract, micro_batch_size=1, max_tokens=MAX_TOKENS)
            (split,) = splitter.split(pl_module.policy, [own])
            scores = split.join(contract.forward(pl_module.policy, split.parts, with_entropy=True))
            scored = contract.sum_over_data_parallel(masked_sum(scores.log_probs, own.response_mask))
            objective = partial(mean_log_prob, num_tokens=sum(lengths))
            self.measured[kind] = (float(scored), *measure(pl_module, split.parts, objective))


def sampled_lengths() -> dict[str, list[int]]:
    """Response lengths that are hard to share out; rows are taken from the left to the right."""
    generator = torch.Generator().manual_seed(0)
    tail = [1 + int((MAX_TOKENS - 4) * draw**4) for draw in torch.rand(24, generator=generator).tolist()]
    return {
        "all for one rank": [MAX_TOKENS - 2, 1] * 4,
        "one long": [MAX_TOKENS - 2, *[1] * 13],
        "half the budget and a bit": [MAX_TOKENS // 2] * 5,
        "a row for each rank": [1, 1, 1, 1],
        "long tail": tail,
        "longer and longer": sorted(tail),
    }


def rows_of(lengths: list[int]) -> TokenBatch:
    """Prompts of two tokens and responses of these lengths."""
    response = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    mask = torch.cat([torch.ones(len(lengths), 2, dtype=torch.bool), response], dim=1)
    ids = torch.arange(mask.numel()).view_as(mask) * 7 % 17
    return TokenBatch(input_ids=ids, attention_mask=mask, response_mask=response)


def mean_log_prob(scores: Any, batch: TokenBatch, *, num_tokens: int) -> tuple[Tensor, dict[str, Metric]]:
    """Over all tokens of all ranks."""
    return -masked_sum(scores.log_probs - 0.1 * scores.entropy, batch.response_mask) / num_tokens, {}
