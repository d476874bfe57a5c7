"""Supervised fine-tuning on chats."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from verl_lightning.data.own_rows import chat_batch
from verl_lightning.faults import told_of
from verl_lightning.functional.masking import masked_sum
from verl_lightning.metrics import Metric, mean
from verl_lightning.models.config import ModelConfig
from verl_lightning.models.size import ModelRole
from verl_lightning.modules.distillation import Distillation, TaughtModule, check_offline
from verl_lightning.modules.given import as_model
from verl_lightning.modules.micro_batches import BatchSplitter
from verl_lightning.modules.offline import OfflineModule
from verl_lightning.modules.teacher_config import TeacherConfig
from verl_lightning.options import typed
from verl_lightning.types import Scores, TokenBatch


class SFTModule(TaughtModule, OfflineModule):
    """Trains a language model to say what assistants said in chats.

    The loss is the mean over supervised tokens of the whole optimizer step: ``accumulate_grad_batches`` and the number
    of ranks change its speed, never its gradient.

    Args:
        actor: The model in training; a text is its ``path``. ``trainer.gradient_clip_val``, when given, takes the place
            of its ``optim.max_grad_norm``.
        max_tokens_per_micro_batch: Most tokens of one forward and backward pass: a batch with more makes several, of
            about equal compute. Changes speed and memory, never the gradient. Null makes one pass of a batch.
        teacher: A model to whose distributions the model is drawn at each supervised token (distillation from data).
        cross_entropy_coef: Weight of the tokens' own loss beside the teacher's; 0 learns from the teacher alone.
        lr: Short for ``actor.optim.lr``.
    """

    counted: ClassVar[str] = "tokens"

    @typed("model")
    def __init__(
        self,
        actor: ModelConfig | str,
        max_tokens_per_micro_batch: int | None = None,
        teacher: TeacherConfig | None = None,
        cross_entropy_coef: float = 1.0,
        *,
        lr: float | None = None,
    ) -> None:
        super().__init__(as_model(actor, lr), max_tokens_per_micro_batch)
        if teacher is not None:
            check_offline(teacher)
        if cross_entropy_coef < 0 or (cross_entropy_coef != 1 and teacher is None):
            raise ValueError(
                f"`model.cross_entropy_coef` ({cross_entropy_coef}) weighs the tokens' own loss beside that of"
                " `model.teacher`: set a teacher and at least 0, or leave it out."
            )
        self.distillation = Distillation(teacher, self.policy_config) if teacher else None
        self.cross_entropy_coef = cross_entropy_coef

    @property
    @override
    def roles(self) -> list[ModelRole]:
        return super().roles + (self.distillation.roles if self.distillation else [])

    @property
    @override
    def example_metrics(self) -> tuple[str, ...]:
        return () if self.distillation is None else ("cross_entropy", "distillation_loss")

    @override
    def configure_model(self) -> None:
        if self.actor is None and self.distillation is not None:
            self.distillation.check(self)
        is_new = self.actor is None
        super().configure_model()
        if is_new and self.distillation is not None:
            made = {}
            for role in self.distillation.roles:
                with told_of(role.key):
                    made[role.name] = self.contract.make_model(role.config, role.head, trainable=False)
            self.distillation.take(made, self.policy)

    @override
    def prepared(self, batch: TokenBatch) -> TokenBatch:
        if self.distillation is None:
            return batch
        splitter = BatchSplitter(
            contract=self.contract, micro_batch_size=len(batch), max_tokens=self.max_tokens_per_micro_batch
        )
        return self.distillation.teach(self, splitter, batch)

    @override
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> TokenBatch:
        if isinstance(batch, TokenBatch):
            return batch
        made = chat_batch(batch, self.tokenizer, self.processor)
        self.check_images(made.images)
        return made

    @override
    def count(self, batch: TokenBatch) -> Tensor:
        return batch.response_mask.sum()

    @override
    def losses(self, scores: Scores, batch: TokenBatch) -> tuple[Tensor, dict[str, Metric]]:
        assert scores.log_probs is not None
        cross_entropy = -masked_sum(scores.log_probs, batch.response_mask)
        if self.distillation is None:
            return cross_entropy, {}
        assert scores.divergence is not None
        divergence, count = masked_sum(scores.divergence, batch.response_mask), self.count(batch)
        return self.cross_entropy_coef * cross_entropy + self.distillation.config.coef * divergence, {
            "cross_entropy": mean(cross_entropy.detach(), count),
            "distillation_loss": mean(divergence.detach(), count),
        }
