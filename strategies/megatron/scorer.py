"""A Megatron model that scores response tokens, spread over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from typing_extensions import override

from verl_lightning.functional.linear_log_probs import linear_log_probs
from verl_lightning.functional.log_probs import token_sum_squared_probs
from verl_lightning.models.fingerprint import fingerprint
from verl_lightning.models.scorer import TokenScorer
from verl_lightning.models.sequence_parallel import sum_over_group
from verl_lightning.strategies.megatron.tokens import ModelTokens, Slicing
from verl_lightning.strategies.megatron.vocab_parallel import VocabPart, vocab_parallel_log_probs
from verl_lightning.strategies.megatron.weights import exported_weights
from verl_lightning.types import Scores, TokenBatch

if TYPE_CHECKING:
    from megatron.bridge import AutoBridge

    from verl_lightning.strategies.megatron.mbridge import MBridge

VALUE_HEAD = "value_head"
"""Attribute of the last piece that maps hidden states to values beside log-probs."""


class MegatronScorer(TokenScorer):
    """This rank's pieces of a model; driven by a schedule, never called.

    Args:
        chunks: Megatron's models, wrapped for training or not; one, or several with a virtual pipeline.
        skeleton: The same model as transformers builds it, on the meta device: names, shapes and configs.
        bridge: Megatron-Bridge's map between the two.
        mbridge: Map of mbridge that built the model and exports its weights; None where ``bridge`` did.
        slicing: Part of each sequence that this rank holds.
        packs: Whether sequences lie in one row.
    """

    def __init__(
        self,
        chunks: list[nn.Module],
        skeleton: TokenScorer,
        bridge: AutoBridge,
        *,
        mbridge: MBridge | None,
        slicing: Slicing,
        packs: bool,
    ) -> None:
        nn.Module.__init__(self)
        self.chunks = nn.ModuleList(chunks)
        self.head = skeleton.head
        self.bridge = bridge
        self.mbridge = mbridge
        self.slicing = slicing
        self.packs = packs
        self.scores_squares = False
        self.router_replay = None
        self.recorded_experts: list[Tensor] = []
        """`Scores.experts` of the micro-batches of the newest schedule, if they were recorded."""

        self._skeleton = (skeleton,)  # a tuple hides it from state dicts and devices

    @property
    @override
    def backbone(self) -> PreTrainedModel:  # type: ignore[override]
        """The model as transformers would build it, without memory."""
        return self._skeleton[0].backbone

    @property
    @override
    def value_head(self) -> nn.Linear | None:  # type: ignore[override]
        """A copy of the value head, which lives on the last stage. Collective; None without one."""
        return None if self.head == "policy" else self._copy_of_value_head()

    @override
    def forward(self, batch: TokenBatch, with_entropy: bool = False) -> Scores:
        raise RuntimeError("a Megatron model is driven by a schedule: call the strategy's `forward`.")

    @override
    def weight_shapes(self) -> dict[str, list[int]]:
        return self._skeleton[0].weight_shapes()

    @property
    @override
    def attention_cost(self) -> float:
        return self._skeleton[0].attention_cost

    @override
    def base_fingerprint(self) -> str:
        return fingerprint(exported_weights(self, merges_adapters=False))

    @override
    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        adapted: list[Any] = [module for module in self.modules() if hasattr(module, "disable_adapter_layers")]
        for module in adapted:
            module.disable_adapter_layers()
        try:
            yield
        finally:
            for module in adapted:
                module.enable_adapter_layers()

    @property
    def skeleton(self) -> TokenScorer:
        """The same model as transformers builds it, without memory."""
        return self._skeleton[0]

    @property
    def local_value_head(self) -> nn.Linear | None:
        """The value head on this rank's last piece; None where there is none."""
        name = "output_layer" if self.head == "value" else VALUE_HEAD
        found = getattr(self.pieces[-1], name, None)
        return found if isinstance(found, nn.Linear) else None

    @property
    def pieces(self) -> list[nn.Module]:
        """The chunks without their wrappers."""
        from megatron.core.utils import unwrap_model

        return [unwrap_model(chunk) for chunk in self.chunks]

    def score_names(self, *, with_entropy: bool) -> tuple[str, ...]:
        """Fields of `Scores` that the last stage gives, in its order."""
        names: list[str] = []
        if self.head != "value":
            names.append("log_probs")
            names += ["entropy"] if with_entropy else []
            names += ["sum_squared_probs"] if with_entropy and self.scores_squares else []
        if self.head != "policy":
            names.append("values")
        return tuple(names)

    def _copy_of_value_head(self) -> nn.Linear:
        from megatron.core import parallel_state

        head = self._skeleton[0].value_head
        assert head is not None
        weight = head.weight
        own = self.local_value_head
        device = next(self.parameters()).device
        value = torch.empty_like(weight, device=device) if own is None else own.weight.detach().to(weight.dtype).clone()
        source = parallel_state.get_pipeline_model_parallel_last_rank()
        torch.distributed.broadcast(value, source, group=parallel_state.get_pipeline_model_parallel_group())
        copied = nn.Linear(weight.shape[1], 1, bias=False, device="meta")
        copied.weight = nn.Parameter(value, requires_grad=False)
        return copied


@dataclass(frozen=True, kw_only=True)
class ScoreTokens:
    """Turns the last stage's hidden states into scores; Megatron calls it in place of its output layer."""

    model: MegatronScorer
    """Model whose hidden states are scored."""

    tokens: ModelTokens
    """Tokens of the batch, with those that are scored."""

    temperature: float
    """Softmax temperature of the tokens' distributions, dimensionless."""

    with_entropy: bool
    """True to score the entropy too."""

    def __call__(
        self, *, hidden_states: Tensor, output_layer: nn.Module, output_weight: Tensor | None, config: Any, **_: Any
    ) -> Tensor:
        """Scores ``[kind, row, response column]``, 0 where nothing is scored; the same on all ranks of the stage."""
        scores: list[Tensor] = []
        if self.model.head != "value":
            weight = cast(Tensor, output_layer.weight) if output_weight is None else output_weight
            scores += self._of_policy(hidden_states, weight, config)
        head = self.model.local_value_head
        if head is not None:
            hidden = self._chosen(_whole_sequence(hidden_states, config, is_split_later=False))
            scores.append(head(hidden.to(head.weight.dtype)).squeeze(-1).float())
        return self._in_columns(torch.stack(scores))

    def _of_policy(self, hidden_states: Tensor, weight: Tensor, config: Any) -> list[Tensor]:
        from megatron.core import parallel_state

        hidden = self._chosen(_whole_sequence(hidden_states, config, is_split_later=True))
        if config.tensor_model_parallel_size == 1:
            return self._of_whole_vocabulary(hidden[None], weight[: config.vocab_size])
        logits, labels = F.linear(hidden, weight), self.tokens.labels
        start = parallel_state.get_tensor_model_parallel_rank() * len(weight)
        part = VocabPart(
            group=parallel_state.get_tensor_model_parallel_group(),
            start=start,
            size=max(0, min(len(weight), config.vocab_size - start)),
        )
        results = vocab_parallel_log_probs(logits, labels, temperature=self.temperature, part=part)
        return list(results[: len(self._policy_names())])

    def _of_whole_vocabulary(self, hidden: Tensor, weight: Tensor) -> list[Tensor]:
        names = self._policy_names()
        log_probs, entropy = linear_log_probs(
            hidden,
            weight,
            self.tokens.labels[None],
            temperature=self.temperature,
            with_entropy=self.with_entropy,
            compiled=hidden.is_cuda,
        )
        scores = [log_probs[0], entropy[0]][: 1 + self.with_entropy]
        if "sum_squared_probs" in names:
            scores.append(token_sum_squared_probs(F.linear(hidden, weight), temperature=self.temperature)[0])
        return scores

    def _policy_names(self) -> tuple[str, ...]:
        return tuple(n for n in self.model.score_names(with_entropy=self.with_entropy) if n != "values")

    def _chosen(self, hidden: Tensor) -> Tensor:
        """Hidden states that predict scored tokens, from ``[column, row, feature]``."""
        rows, columns = self.tokens.source
        return hidden[columns, rows]

    def _in_columns(self, scores: Tensor) -> Tensor:
        from megatron.core import parallel_state

        rows, columns = self.tokens.target
        kinds = torch.arange(len(scores), device=scores.device)[:, None]
        placed = scores.new_zeros(len(scores), *self.tokens.shape).index_put((kinds, rows, columns), scores)
        if self.model.slicing.context_size > 1:
            placed = sum_over_group(placed, parallel_state.get_context_parallel_group())
        return placed


def _whole_sequence(hidden: Tensor, config: Any, *, is_split_later: bool) -> Tensor:
    """Hidden states of all of this rank's columns, whose gradient reaches the layers below right.

    Args:
        hidden: Hidden states of the last layer; with sequence parallelism, of a part of the columns.
        config: Megatron's.
        is_split_later: Whether each tensor-parallel rank goes on with its own part of the vocabulary, so that their
            gradients are parts of a sum; else all of them have the same gradient.
    """
    from megatron.core.tensor_parallel import (
        copy_to_tensor_model_parallel_region,
        gather_from_sequence_parallel_region,
    )

    if config.sequence_parallel:
        gathered: Tensor = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=is_split_later)
        return gathered
    copied: Tensor = copy_to_tensor_model_parallel_region(hidden) if is_split_later else hidden
    return copied
