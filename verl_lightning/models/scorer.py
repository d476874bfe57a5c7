"""A Hugging Face model that scores response tokens: log-probabilities, values, or both from one trunk."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from verl_lightning.compat.transformers import attention_of
from verl_lightning.functional.linear_log_probs import linear_log_probs
from verl_lightning.functional.log_probs import (
    log_probs_and_entropy,
    response_logits,
    token_log_probs,
    token_sum_squared_probs,
)
from verl_lightning.models.attention import (
    VARLEN,
)
from verl_lightning.models.blocks import attention_heads
from verl_lightning.models.fingerprint import base_fingerprint
from verl_lightning.models.lora import adapters_off
from verl_lightning.models.packing import PackedTokens, pack, position_ids, true_positions
from verl_lightning.models.router_replay import ReadTokens, RouterReplay
from verl_lightning.models.teaching import Comparison, Lesson, output_weight
from verl_lightning.models.vision import (
    PACKED,
    image_arguments,
    own_text_embedded,
    packed_image_arguments,
    tower_weights,
)
from verl_lightning.types import Scores, TokenBatch

T = TypeVar("T")
Head = Literal["policy", "value", "policy_and_value"]

PLAIN_HEADS = frozenset({"llama", "mistral", "mixtral", "olmo2", "qwen2", "qwen3", "qwen3_moe", "smollm3"})
"""Model types whose logits are ``lm_head(last_hidden_state)``, neither capped nor scaled: they are made in chunks."""


class TokenScorer(nn.Module):
    """Scores each response token of a batch.

    Args:
        backbone: A causal language model, or its trunk alone for the head ``value``.
        value_head: Maps hidden states to values; None for a policy alone.
        head: Scores that the model gives: log-probs, values or both.
        packs: True if batches are scored without their padding, all sequences in one row.
    """

    def __init__(
        self, backbone: PreTrainedModel, value_head: nn.Linear | None, head: Head, *, packs: bool = False
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.value_head = value_head
        self.head = head
        self.packs = packs
        self.is_compiled = False  # whether log-probs come from fused kernels; the strategy says
        self.sequence_group: dist.ProcessGroup | None = None  # ranks that share each packed row; the strategy says
        self.trains_tower = False  # whether the weights that read images are in training; `assemble` says
        self.scores_squares = False  # set by modules whose advantages read `Scores.sum_squared_probs`
        self.router_replay: RouterReplay | None = None  # set by modules that replay the experts of a mixture
        self.lesson: Lesson | None = None  # of a teacher, set by modules that distil
        self.comparison: Comparison | None = None  # of a student, likewise; read for batches with a teacher's words

    def forward(self, batch: TokenBatch, with_entropy: bool = False) -> Scores:
        """Score the response tokens, each predicted from the position before it.

        Args:
            batch: Batch on the model's device.
            with_entropy: True also returns the entropy of each token's distribution.
        """
        scores = self._scored(batch, with_entropy)
        return self._touching_tower(scores) if self.trains_tower and torch.is_grad_enabled() else scores

    def packs_batch(self, batch: TokenBatch) -> bool:
        """Tell whether a batch is packed: one with images is not by all models."""
        return self.packs and (batch.images is None or self.backbone.config.model_type in PACKED)

    def _scored(self, batch: TokenBatch, with_entropy: bool) -> Scores:
        """Score the response tokens, and send them to the experts that they were sent to before."""
        score = self._packed if self.packs_batch(batch) else self._padded
        if self.router_replay is None:
            return score(batch, with_entropy)
        with self.router_replay.scoring(batch, self._read_tokens(batch)) as recorded:
            scores = score(batch, with_entropy)
        return replace(scores, experts=recorded[0]) if recorded else scores

    def _read_tokens(self, batch: TokenBatch) -> ReadTokens:
        if self.packs_batch(batch):
            positions = true_positions(batch.attention_mask, sum(row.tokens for row in batch.known_lengths()))
        else:
            positions = torch.arange(batch.input_ids.numel(), device=batch.input_ids.device)
        places = torch.arange(len(positions), device=positions.device)
        return ReadTokens(positions=positions, places=places, total=len(positions))

    def _padded(self, batch: TokenBatch, with_entropy: bool) -> Scores:
        positions = position_ids(batch.attention_mask)
        inputs = {"attention_mask": batch.attention_mask, "position_ids": positions, "use_cache": False}
        if batch.images is None:
            return self._from_padded(batch, {"input_ids": batch.input_ids, **inputs}, with_entropy)
        inputs |= image_arguments(self.backbone, batch, positions)
        with own_text_embedded(self.backbone, batch) as input_ids:
            return self._from_padded(batch, {"input_ids": input_ids, **inputs}, with_entropy)

    def _from_padded(self, batch: TokenBatch, inputs: dict[str, Any], with_entropy: bool) -> Scores:
        num_positions = batch.response_mask.shape[1] + 1
        if self.head == "value":
            hidden = self.backbone(**inputs).last_hidden_state[:, -num_positions:-1]
            return Scores(values=self._values(hidden))
        if (output_head := self._linear_head()) is not None:
            hidden = self.backbone.base_model(**inputs).last_hidden_state[:, -num_positions:-1]
            scores = self._from_hidden(hidden, output_head, batch.response_ids, batch, None, with_entropy)
        else:
            needs_hidden = self.value_head is not None
            output = self.backbone(**inputs, logits_to_keep=num_positions, output_hidden_states=needs_hidden)
            hidden = output.hidden_states[-1][:, -num_positions:-1] if needs_hidden else None
            logits = response_logits(output.logits, num_positions - 1)
            scores = self._from_logits(logits, batch.response_ids, batch.temperature, with_entropy)
        return scores if self.value_head is None else replace(scores, values=self._values(hidden))

    def _touching_tower(self, scores: Scores) -> Scores:
        """Gives all weights of a tower in training a gradient, for which other ranks wait: used by this one or not."""
        nothing = sum((weight.sum() for weight in tower_weights(self.backbone)), start=torch.zeros(())) * 0
        floats = {name: part for name, part in vars(scores).items() if part is not None and part.is_floating_point()}
        return replace(scores, **{name: part + nothing for name, part in floats.items()})

    def _packed(self, batch: TokenBatch, with_entropy: bool) -> Scores:
        """Score the real tokens alone, in one row; 0 where ``response_mask`` is False."""
        packed, output_head = pack(batch), None if self.head == "value" else self._linear_head()
        if self.sequence_group is not None:
            packed = packed.shared_by(self.sequence_group, balances=output_head is not None)
        inputs = packed.model_inputs(has_kernel=attention_of(self.backbone) == VARLEN)
        if batch.images is None:
            return self._from_packed(packed, inputs, batch, output_head, with_entropy)
        inputs |= packed_image_arguments(self.backbone, batch, packed)
        with own_text_embedded(self.backbone, batch, packed) as input_ids:
            return self._from_packed(packed, inputs | {"input_ids": input_ids}, batch, output_head, with_entropy)

    def _from_packed(
        self,
        packed: PackedTokens,
        inputs: dict[str, Any],
        batch: TokenBatch,
        output_head: nn.Linear | None,
        with_entropy: bool,
    ) -> Scores:
        hidden: Tensor | None
        if self.head == "value":
            hidden = packed.predicting(self.backbone(**inputs).last_hidden_state)
            return Scores(values=packed.unpack(self._values(hidden)))
        if output_head is not None:
            hidden = packed.predicting(self.backbone.base_model(**inputs).last_hidden_state)
            scores = self._from_hidden(hidden, output_head, packed.labels, batch, packed.target, with_entropy)
        else:
            needs_hidden = self.value_head is not None
            output = self.backbone(**inputs, logits_to_keep=packed.predictors, output_hidden_states=needs_hidden)
            hidden = packed.predicting(output.hidden_states[-1]) if needs_hidden else None
            scores = self._from_logits(output.logits, packed.labels, batch.temperature, with_entropy)
        if hidden is not None and self.value_head is not None:
            scores = replace(scores, values=self._values(hidden))
        return Scores(**{name: None if part is None else packed.unpack(part) for name, part in vars(scores).items()})

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Switch the adapters off within the context, so that the base alone answers; a no-op without adapters."""
        with adapters_off(self.backbone):
            yield

    @property
    def attention_cost(self) -> float:
        """Compute of causal attention to one token, as a share of all other compute of a token.

        A pass takes ``2 * parameters`` operations a token for matrix products and ``4 * layers * heads * head_dim``
        for a pair of tokens, of which causal attention computes half::

            layers * heads * head_dim / parameters
        """
        heads, head_dim = attention_heads(self.backbone)
        layers = self.backbone.config.get_text_config().num_hidden_layers
        return float(layers * heads * head_dim / sum(weight.numel() for weight in self.parameters()))

    def disable_dropout(self) -> None:
        """Score alike in training and evaluation, but for the dropout of adapters, which is an option of ours.

        Reinforcement learning compares the probabilities of a token before and after a step; dropout of a model's own
        config would part them.
        """
        configs: dict[int, PreTrainedConfig] = {}
        for name, module in self.named_modules():
            if ".lora_" in name or ".adapter" in name:
                continue
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            set_dropouts(module, 0.0)
            config = getattr(module, "config", None)  # which some families read in each pass
            if isinstance(config, PreTrainedConfig) and module is not self.backbone:  # whose own is exported
                if id(config) not in configs:
                    configs[id(config)] = set_dropouts(copy.copy(config), 0.0)
                module.config = configs[id(config)]

    def base_fingerprint(self) -> str:
        """Return a short text that tells the weights under adapters from others. Collective."""
        return base_fingerprint(self.backbone)

    def weight_shapes(self) -> dict[str, list[int]]:
        """Return the shape of each whole weight, by name."""
        return {name: list(weight.shape) for name, weight in self.named_parameters()}

    def _linear_head(self) -> nn.Linear | None:
        """Return the output head if log-probs follow from hidden states and its weight alone; see `PLAIN_HEADS`."""
        head = self.backbone.get_output_embeddings()  # type: ignore[no-untyped-call]
        is_plain = type(head) is nn.Linear and head.bias is None and not self.scores_squares
        return head if is_plain and self.backbone.config.model_type in PLAIN_HEADS else None

    def _from_hidden(
        self,
        hidden: Tensor,
        head: nn.Linear,
        labels: Tensor,
        batch: TokenBatch,
        target: tuple[Tensor, Tensor] | None,
        with_entropy: bool,
    ) -> Scores:
        hidden, weight = output_weight(head, hidden)
        log_probs, entropy = linear_log_probs(
            hidden,
            weight,
            labels,
            temperature=batch.temperature,
            with_entropy=with_entropy,
            compiled=self.is_compiled,
        )
        scores = Scores(log_probs=log_probs, entropy=entropy if with_entropy else None)
        if self.lesson is not None:
            scores = self.lesson.added(scores, hidden, weight, batch.temperature)
        if self.comparison is not None and batch.teacher_index is not None:
            scores = replace(scores, divergence=self.comparison.divergence(hidden, weight, batch, target))
        return scores

    def _from_logits(self, logits: Tensor, labels: Tensor, temperature: float, with_entropy: bool) -> Scores:
        compiled = self.is_compiled
        if not with_entropy:
            return Scores(log_probs=token_log_probs(logits, labels, temperature=temperature, compiled=compiled))
        log_probs, entropy = log_probs_and_entropy(logits, labels, temperature=temperature, compiled=compiled)
        squares = None
        if self.scores_squares and not torch.is_grad_enabled():
            squares = token_sum_squared_probs(logits, temperature=temperature)
        return Scores(log_probs=log_probs, entropy=entropy, sum_squared_probs=squares)

    def _values(self, hidden: Float[Tensor, "batch response hidden"]) -> Float[Tensor, "batch response"]:
        assert self.value_head is not None
        values: Tensor = self.value_head(hidden)
        # A copy: FSDP2 hangs its backward hooks on what is returned, and cannot on a view.
        return values.squeeze(-1).to(torch.float32, copy=True)


def set_dropouts(owner: T, value: float) -> T:
    """Set all numbers of an object that are named dropouts, and return the object."""
    for name, number in list(vars(owner).items()):
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(number, float):
            setattr(owner, name, value)
    return owner
