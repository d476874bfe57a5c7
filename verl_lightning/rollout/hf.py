"""The embedded engine: a transformers model that samples in the training process; simple, exact, on any device."""

from __future__ import annotations

import dataclasses
import inspect
from collections import deque
from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from verl_lightning.compat.transformers import causal_model_class
from verl_lightning.faults import InternalValueError
from verl_lightning.models.blocks import attention_heads
from verl_lightning.models.build import load_backbone
from verl_lightning.models.config import ModelConfig
from verl_lightning.rollout.base import Completion, Request
from verl_lightning.rollout.running_batch import Row, RunningBatch
from verl_lightning.rollout.stepping import Recipe, SteppingEngine
from verl_lightning.rollout.weight_sums import WeightSums, weight_sums


def check_cache(config: PreTrainedConfig) -> None:
    """Refuse a family that keeps what it has read in a cache of its own kind.

    Raises:
        ValueError: If so.
    """
    model = causal_model_class(config)
    if model is not None and "past_key_values" not in inspect.signature(model.forward).parameters:
        raise ValueError(
            f"`HFRollout` samples with transformers' key-value cache (`past_key_values`), which a `{config.model_type}`"
            " does not take. Sample with `VLLMRollout`."
        )


class HFEngine(SteppingEngine):
    """Batched sampling with a key-value cache.

    Each prompt is read once and its cache shared by its samples. When half of the sequences have ended, those that wait
    take their places. Every token is drawn with a random number that depends on its request's seed alone, so a response
    is the same in any batch, on any rank.

    Args:
        config: The policy's model.
        eos_token_ids: Tokens that end a response.
        pad_token_id: Token that fills the padding of shorter sequences.
        batch_size: Most sequences sampled at once.
        deadline: Most seconds from a request to its completion, where the engine is in another process.
        rereads: True has responses on their way read all that they have anew when weights change.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        eos_token_ids: list[int],
        pad_token_id: int,
        batch_size: int = 1024,
        deadline: float = 1800.0,
        rereads: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.eos_token_ids = eos_token_ids
        self.pad_token_id = pad_token_id
        self.batch_size = batch_size
        self.deadline = deadline
        self.rereads = rereads
        self._model: PreTrainedModel | None = None
        self._version = 0
        self._waiting: deque[Row] = deque()
        self._batch: RunningBatch | None = None

    def start(self, device: torch.device) -> None:
        """Load the model that will answer."""
        model: torch.nn.Module = load_backbone(self.config, AutoModelForCausalLM)
        self._model = cast(PreTrainedModel, model.to(device).eval().requires_grad_(False))

    def recipe(self) -> Recipe:
        """Tell another process how to make such an engine."""
        options = {
            "config": dataclasses.asdict(self.config),
            "eos_token_ids": self.eos_token_ids,
            "pad_token_id": self.pad_token_id,
            "batch_size": self.batch_size,
            "rereads": self.rereads,
        }
        return Recipe(kind="hf", options=options, deadline=self.deadline)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the engine's own copy of the policy, whole on the device and there while the policy learns."""
        return sum(weight.nbytes for weight in self._running.parameters())

    def cache_bytes(self, sequences: int, tokens: int) -> int:
        """Count the bytes of all layers' keys and values, for so many sequences of so many tokens, prompts included."""
        config = self._running.config.get_text_config()
        heads, head_dim = attention_heads(self._running)
        width = (getattr(config, "num_key_value_heads", None) or heads) * head_dim
        values = 2 * config.num_hidden_layers * width * tokens * min(sequences, self.batch_size)
        return int(values * self._running.dtype.itemsize)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy the policy's weights.

        Raises:
            InternalValueError: If the names are not exactly those of the model.
        """
        parameters, loaded = dict(self._running.named_parameters()), set()
        tensors: dict[str, Tensor] = dict(self._running.named_buffers()) | parameters
        for name, weight in weights:
            if name not in tensors:
                raise InternalValueError(f"the policy sent the weight `{name}`, which the rollout model does not have.")
            tensors[name].copy_(weight)
            loaded.add(name)
        if missing := parameters.keys() - loaded:
            raise InternalValueError(f"the policy did not send {len(missing)} weights, such as `{min(missing)}`.")
        self._version = version
        if self.rereads:
            self.drop_caches()

    def add(self, key: int, request: Request) -> None:
        """Let a request wait for its place; see `SteppingEngine.add`."""
        assert self._running
        if request.sampling.stop or request.sampling.guide is not None:
            raise ValueError("`stop` and `guide` need vLLM, but a request to `HFEngine` has one.")
        self._waiting.append(Row(key, request))

    @torch.no_grad()
    def step(self) -> list[tuple[int, Completion]]:
        """Give each sequence a token, once those that wait have taken free places."""
        ended = self._admit()
        if not ended and self._batch is not None:
            ended = self._batch.go_on(self._running, self._version)
        if self._batch is not None and not self._batch.num_open:
            self._batch = None
        return [(row.key, _completion(row)) for row in ended]

    def _admit(self) -> list[Row]:
        """Read the prompts of those that wait, as many as there are places; return the rows that end at once."""
        batch = self._batch
        num_open = 0 if batch is None else batch.num_open
        if batch is not None and (2 * num_open > self.batch_size or not batch.can_grow):
            return []
        method = None if batch is None else _method(batch.rows[0])
        rows: list[Row] = []
        while self._waiting and num_open + len(rows) < self.batch_size:
            if method not in (None, _method(self._waiting[0])):
                break
            rows.append(self._waiting.popleft())
            method = _method(rows[0])
        if rows:
            ends, pad = self.eos_token_ids, self.pad_token_id
            new = RunningBatch(rows, self._running, self._version, ends=ends, pad_token_id=pad)
            if batch is None:
                self._batch = new
            else:
                batch.join(new)
        return [row for row in rows if not row.is_open]

    def abort(self) -> None:
        """Give up all requests."""
        self._waiting.clear()
        self._batch = None

    def weight_sums(self) -> WeightSums:
        """Sum the weights that the engine holds."""
        return weight_sums(self._running.named_parameters())

    def drop_caches(self) -> None:
        """Have open sequences wait for their places anew; no prompt's cache outlives its responses."""
        if self._batch is not None:
            self._waiting.extendleft(row for row in reversed(self._batch.rows) if row.is_open)
            self._batch = None

    def stop(self) -> None:
        """Drop the model."""
        self.abort()
        self._model = None

    @property
    def _running(self) -> PreTrainedModel:
        if self._model is None:
            raise RuntimeError("`start` the engine before using it.")
        return self._model


def _completion(row: Row) -> Completion:
    is_mixed = row.versions[0] != row.versions[-1]
    versions = row.versions if is_mixed else None
    return Completion(row.tokens, row.log_probs, row.is_truncated, row.versions[-1], versions=versions)


def _method(row: Row) -> tuple[float, float, int]:
    """Returns what the rows of one batch have in common."""
    sampling = row.request.sampling
    return sampling.temperature, sampling.top_p, sampling.top_k
