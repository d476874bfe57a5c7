"""Reward models, learnt from pairs of responses."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from verl_lightning.functional.bradley_terry import bradley_terry_loss
from verl_lightning.metrics import Metric, masked_mean
from verl_lightning.models.classifier import classifier_class
from verl_lightning.models.config import ModelConfig
from verl_lightning.models.scorer import Head
from verl_lightning.modules.offline import OfflineModule
from verl_lightning.modules.reference import preference_sources
from verl_lightning.types import PreferenceBatch, RowLength, Scores, TokenBatch


class RewardModule(OfflineModule):
    """Trains a reward model on pairs of responses, by the likelihood of Bradley and Terry.

    The reward is a linear function of the last token's hidden state. `HFCheckpoint` writes a folder for transformers'
    ``AutoModelForSequenceClassification``. Pairs with a ``margin`` are to be told apart by that much.

    Args:
        actor: The model in training: a language model, whose reward starts at 0, or a reward model to go on from.
            ``trainer.gradient_clip_val``, when given, takes the place of its ``optim.max_grad_norm``.
        center_rewards_coefficient: Weight of the squared sum of a pair's rewards, which draws their mean to 0.
        max_tokens_per_micro_batch: Most tokens of one forward and backward pass: a batch with more makes several, of
            about equal compute, and never parts a pair. Changes speed and memory, never the gradient. Null makes one
            pass of a batch.
    """

    task: ClassVar[str] = "a reward model"
    head: ClassVar[Head] = "value"
    counted: ClassVar[str] = "examples"
    takes_pairs: ClassVar[bool] = True

    def __init__(
        self,
        actor: ModelConfig,
        center_rewards_coefficient: float = 0.0,
        max_tokens_per_micro_batch: int | None = None,
    ) -> None:
        super().__init__(actor, max_tokens_per_micro_batch)
        if center_rewards_coefficient < 0:
            raise ValueError(
                f"`model.center_rewards_coefficient` must not be negative, got {center_rewards_coefficient}."
            )
        self.center_rewards_coefficient = center_rewards_coefficient

    @override
    def image_obstacle(self) -> str | None:
        return "`RewardModule` is not tested with images. Leave such rows out."

    @property
    @override
    def rows_per_example(self) -> int:
        return 2

    @property
    @override
    def example_metrics(self) -> tuple[str, ...]:
        return ("accuracy", "margin", "mean_reward")

    @override
    def configure_model(self) -> None:
        preference_sources(self)
        super().configure_model()
        self.policy.disable_dropout()
        classifier_class(self.policy.backbone.config)

    @override
    def prepared(self, batch: TokenBatch) -> TokenBatch:
        return scored_at_the_end(batch, pad_token_id=int(self.tokenizer.pad_token_id))

    @override
    def count(self, batch: TokenBatch) -> Tensor:
        return batch.counts.sum()

    @override
    def losses(self, scores: Scores, batch: TokenBatch) -> tuple[Tensor, dict[str, Metric]]:
        assert isinstance(batch, PreferenceBatch)
        assert scores.values is not None
        rewards, counts = torch.where(batch.response_mask, scores.values, 0.0).sum(-1), batch.counts
        chosen, rejected = rewards[0::2], rewards[1::2]
        margins = 0.0 if batch.margins is None else batch.margins[0::2]
        losses = bradley_terry_loss(chosen, rejected, margins, center_coef=self.center_rewards_coefficient)
        return torch.where(counts, losses, 0.0).sum(), {
            "accuracy": masked_mean((chosen > rejected).float(), counts),
            "margin": masked_mean(chosen - rejected, counts),
            "mean_reward": masked_mean((chosen + rejected) / 2, counts),
        }


def scored_at_the_end(batch: TokenBatch, *, pad_token_id: int) -> TokenBatch:
    """The same sequences with one more token each, of which alone the value is asked: that after the last token.

    A value is predicted before its token, so it is that of the last token. Padding tokens at the end of a sequence
    don't count, as in transformers' sequence classification.

    Args:
        batch: Sequences that are padded on the right.
        pad_token_id: Token of the padding.
    """
    columns = torch.arange(batch.input_ids.shape[1] + 1, device=batch.input_ids.device)
    is_said = batch.attention_mask & (batch.input_ids != pad_token_id)
    ends = torch.where(is_said, columns[1:], 0).amax(-1, keepdim=True)
    counts = batch.response_mask.any(-1, keepdim=True)
    lengths = batch.row_lengths
    return replace(
        batch,
        input_ids=torch.where(columns < ends, F.pad(batch.input_ids, (0, 1)), pad_token_id),
        attention_mask=columns <= ends,
        response_mask=(columns[1:] == ends) & counts,
        row_lengths=None if lengths is None else tuple(map(_with_one_more, lengths)),
    )


def _with_one_more(row: RowLength) -> RowLength:
    return RowLength(tokens=row.tokens + 1, scored=min(1, row.scored), prompt=1, response=row.tokens)
