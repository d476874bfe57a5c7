"""Teachers of a policy: their distributions of the tokens that it learns from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl_lightning.algorithms.advantages.base import AdvantageEstimator, AdvantageInputs, AdvantageOutputs
from verl_lightning.data.files import Row
from verl_lightning.data.prompts import tokenize_prompts
from verl_lightning.models.scorer import PLAIN_HEADS, TokenScorer
from verl_lightning.models.teaching import Comparison, Lesson
from verl_lightning.models.tokenizer import load_tokenizer
from verl_lightning.modules.micro_batches import BatchSplitter
from verl_lightning.modules.remote_teacher import RemoteTeacher
from verl_lightning.modules.teacher_config import TeacherConfig
from verl_lightning.rollout.completions import pad_left
from verl_lightning.strategies.base import PostTrainingStrategy, blank
from verl_lightning.types import BatchT, Scores, TokenBatch

Rows = Sequence[Mapping[str, Any]]


class NoAdvantages(AdvantageEstimator):
    """Gives every token advantage 0, for a policy that learns from its teacher alone."""

    def __call__(self, inputs: AdvantageInputs) -> AdvantageOutputs:
        """Zeros."""
        return inputs.on_each_token(torch.zeros_like(inputs.rewards))


@dataclass(frozen=True, kw_only=True)
class Teachers:
    """Teachers of one policy, under its strategy."""

    config: TeacherConfig
    """Options."""

    contract: PostTrainingStrategy
    """Runs the models."""

    policy: TokenScorer
    """The student."""

    models: Mapping[str, TokenScorer]
    """Models that teach and are not the policy, by the names of `TeacherConfig.models`."""

    tokenizer: PreTrainedTokenizerBase
    """The policy's."""

    splitter: BatchSplitter
    """Cuts what is scored at once on a rank."""

    enable_thinking: bool | None = None
    """Value for the chat template of prompts with ``context``."""

    def teach(self, batch: BatchT, rows: Rows = ()) -> BatchT:
        """Returns a batch with the teachers' distributions, and has the policy compare with them. Collective.

        Args:
            batch: Sequences to learn.
            rows: Data row of each sequence; empty if neither data sources nor ``context`` matter.
        """
        if self.config.base_url is not None:
            fields = self._ask(self._shown(batch, rows))
            self.policy.comparison = Comparison(beta=self.config.beta)
            return replace(batch, **fields)
        teachers = self._teachers()
        index = self._index(len(batch), rows, list(teachers)).to(batch.input_ids.device)
        taught = [
            self._score(model, self._part(self._shown(batch, rows), index == position))
            for position, model in enumerate(teachers.values())
        ]
        is_whole = self.config.top_k is None
        heads = [self._head(model) for model in teachers.values()] if is_whole else []
        self.policy.comparison = Comparison(beta=self.config.beta, heads=tuple(heads))
        names = {"teacher_hidden": "hidden"} if is_whole else {f"teacher_{n}": n for n in ("top_ids", "top_log_probs")}
        told = {name: [getattr(scores, of) for scores in taught] for name, of in names.items()}
        columns: dict[str, Any] = {
            name: _in_rows(parts, index) if self.config.by_source else parts[0] for name, parts in told.items()
        }
        return replace(batch, teacher_index=index, **columns)

    def update(self, step: int) -> None:
        """Makes the teacher the policy as it is, where that is due.

        Args:
            step: Iterations that are done.
        """
        if self.config.update_every is None or step % self.config.update_every:
            return
        pairs = zip(self.models["teacher"].parameters(), self.policy.parameters(), strict=True)
        with torch.no_grad():
            for theirs, own in pairs:
                theirs.copy_(own)

    def _teachers(self) -> dict[str, TokenScorer]:
        own = {"teacher": self.policy} if self.config.is_policy else {}
        return own | dict(self.models)

    def _index(self, count: int, rows: Rows, names: list[str]) -> Tensor:
        """Position of each sequence's teacher; -1 for none."""
        usual = names.index("teacher") if "teacher" in names else -1
        if not self.config.by_source:
            return torch.full((count,), usual)
        chosen = {source: names.index(f"teacher of {source}") for source in self.config.by_source}
        return torch.tensor([chosen.get(str(row["data_source"]), usual) for row in rows])

    def _part(self, batch: BatchT, is_chosen: Tensor) -> BatchT:
        """The chosen sequences, or a blank one where there are none: all ranks make the same passes."""
        if not self.config.by_source:
            return batch
        rows = is_chosen.nonzero().squeeze(-1)
        return batch.select(rows) if len(rows) else blank(batch)

    def _score(self, model: TokenScorer, batch: TokenBatch) -> Scores:
        (split,) = self.splitter.split(model, [batch])
        with telling(model, Lesson(top_k=self.config.top_k)):
            return split.join(self.contract.forward(model, split.parts))

    def _head(self, model: TokenScorer) -> Tensor:
        head = self.contract.output_head(model)
        return head.clone() if model is self.policy else head  # which goes on learning

    def _shown(self, batch: BatchT, rows: Rows) -> BatchT:
        """The batch as teachers read it: with ``context`` in its prompts."""
        if self.config.context is None:
            return batch
        found = [Row(values=self._with_context(row), name="a prompt", file="data") for row in rows]
        prompts = [prompt.ids for prompt in tokenize_prompts(found, self.tokenizer, self.enable_thinking)]
        return with_prompts(batch, prompts, pad_token_id=int(self.tokenizer.pad_token_id))

    def _with_context(self, row: Mapping[str, Any]) -> dict[str, Any]:
        assert self.config.context is not None
        try:
            text = self.config.context.format_map(row)
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(
                f"`model.teacher.context` names {error}, which a row lacks; its columns are {', '.join(row)}."
            ) from None
        *before, last = row["prompt"]
        return {**row, "prompt": [*before, {**last, "content": f"{last['content']}\n\n{text}"}]}

    def _ask(self, batch: TokenBatch) -> dict[str, Any]:
        """What the teacher at ``base_url`` says; asked by one of the ranks that see the same data. Collective."""
        own = RemoteTeacher(self.config).top_log_probs(batch) if self.contract.model_parallel_rank == 0 else None
        if self.contract.model_parallel_size > 1:
            own = self.contract.gather_over_model_parallel(own)[0]
        assert own is not None
        device = batch.input_ids.device
        ids, log_probs = (part.to(device) for part in own)
        index = torch.zeros(len(batch), dtype=torch.long, device=device)
        return {"teacher_index": index, "teacher_top_ids": ids, "teacher_top_log_probs": log_probs}


@contextmanager
def telling(model: TokenScorer, lesson: Lesson) -> Iterator[None]:
    """Within it, a model tells its distributions beside its scores."""
    model.lesson = lesson
    try:
        yield
    finally:
        model.lesson = None


def with_prompts(batch: BatchT, prompts: Sequence[Sequence[int]], *, pad_token_id: int) -> BatchT:
    """The same responses after other prompts.

    Args:
        batch: Sequences with a prompt and a response each.
        prompts: Tokens of the other prompts.
        pad_token_id: Token that fills the padding.
    """
    device, responses = batch.input_ids.device, batch.response_mask.shape[1]
    ids = pad_left(prompts, pad_token_id)
    is_real = pad_left([[True] * len(prompt) for prompt in prompts], False)
    return replace(
        batch,
        input_ids=torch.cat([ids.to(device), batch.input_ids[:, -responses:]], dim=1),
        attention_mask=torch.cat([is_real.to(device), batch.attention_mask[:, -responses:]], dim=1),
        experts=None,  # of other prompts
        row_lengths=None,
    )


def check_teachers(config: TeacherConfig, policy: str, tokenizer: PreTrainedTokenizerBase, *, can_distil: bool) -> None:
    """Refuses teachers that the policy can't be compared with, before any is loaded.

    Args:
        config: Options.
        policy: Path of the policy.
        tokenizer: The policy's.
        can_distil: True if the strategy's models tell their distributions.

    Raises:
        MisconfigurationException: If the strategy can't.
        ValueError: If a teacher has other tokens.
    """
    if not can_distil:
        raise MisconfigurationException(
            "`model.teacher` compares distributions over the vocabulary, which models under `trainer.strategy:"
            " megatron` don't tell yet. Use `fsdp`, `ddp` or `auto`."
        )
    places = {"model.teacher.path": config.path} if config.path is not None else {}
    places |= {f"model.teacher.by_source.{source}": path for source, path in config.by_source.items()}
    for key, path in places.items():
        if path != policy and load_tokenizer(path).get_vocab() != tokenizer.get_vocab():
            raise ValueError(
                f"`{key}: {path}` has another vocabulary than the policy `{policy}`, so their distributions can't be"
                " compared. Choose a teacher of the same family."
            )


def check_heads(models: Mapping[str, TokenScorer]) -> None:
    """Refuses models whose logits are not those of a plain output head.

    Args:
        models: Student and teachers by the names of their roles.

    Raises:
        ValueError: With the kinds that can be compared.
    """
    for name, model in models.items():
        if model.backbone.config.model_type not in PLAIN_HEADS:
            raise ValueError(
                f"`model.teacher`: the {name} is a `{model.backbone.config.model_type}`, whose logits can't be made a"
                f" part at a time. Distillation knows {', '.join(sorted(PLAIN_HEADS))}."
            )


def _in_rows(parts: Sequence[Tensor], index: Tensor) -> Tensor:
    """Puts each teacher's part in the rows of its sequences."""
    widths = [max(part.shape[axis] for part in parts) for axis in (1, 2)]
    joined = parts[0].new_zeros(len(index), *widths)
    for position, part in enumerate(parts):
        rows = (index == position).nonzero().squeeze(-1)
        padded = F.pad(part, (0, widths[1] - part.shape[2], 0, widths[0] - part.shape[1]))
        joined[rows] = padded[: len(rows)].to(joined.dtype)
    return joined
