"""Supervised fine-tuning on chats."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from verl_lightning.data.own_rows import chat_batch
from verl_lightning.functional.masking import masked_sum
from verl_lightning.metrics import Metric
from verl_lightning.models.config import ModelConfig
from verl_lightning.modules.given import as_model
from verl_lightning.modules.offline import OfflineModule
from verl_lightning.options import typed
from verl_lightning.types import Scores, TokenBatch


class SFTModule(OfflineModule):
    """Trains a language model to say what assistants said in chats.

    The loss is the mean over supervised tokens of the whole optimizer step: ``accumulate_grad_batches`` and the number
    of ranks change its speed, never its gradient.

    Args:
        actor: The model in training; a text is its ``path``. ``trainer.gradient_clip_val``, when given, takes the place
            of its ``optim.max_grad_norm``.
        max_tokens_per_micro_batch: Most tokens of one forward and backward pass: a batch with more makes several, of
            about equal compute. Changes speed and memory, never the gradient. Null makes one pass of a batch.
        lr: Short for ``actor.optim.lr``.
    """

    counted: ClassVar[str] = "tokens"

    @typed("model")
    def __init__(
        self, actor: ModelConfig | str, max_tokens_per_micro_batch: int | None = None, *, lr: float | None = None
    ) -> None:
        super().__init__(as_model(actor, lr), max_tokens_per_micro_batch)

    @override
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> TokenBatch:
        return batch if isinstance(batch, TokenBatch) else chat_batch(batch, self.tokenizer)

    @override
    def count(self, batch: TokenBatch) -> Tensor:
        return batch.response_mask.sum()

    @override
    def losses(self, scores: Scores, batch: TokenBatch) -> tuple[Tensor, dict[str, Metric]]:
        assert scores.log_probs is not None
        return -masked_sum(scores.log_probs, batch.response_mask), {}
