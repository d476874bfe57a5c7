"""The embedded engine: a transformers model that samples in the training process; simple, exact, on any device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from verl_lightning.faults import InternalValueError
from verl_lightning.models.config import ModelConfig
from verl_lightning.models.scorer import load_backbone, position_ids
from verl_lightning.rollout.base import Prompts, SamplingConfig
from verl_lightning.types import Rollout


class HFEngine:
    """Batched sampling with a key-value cache.

    Each prompt is read once and its cache shared by its samples. Every token is drawn with a random number that
    depends on its request's seed alone, so a response is the same in any batch, on any rank.

    Args:
        config: The policy's model.
        eos_token_ids: Tokens that end a response.
        pad_token_id: Token that fills the end of shorter responses.
        batch_size: Most sequences sampled at once.
    """

    def __init__(
        self, config: ModelConfig, *, eos_token_ids: list[int], pad_token_id: int, batch_size: int = 1024
    ) -> None:
        self.config = config
        self.eos_token_ids = eos_token_ids
        self.pad_token_id = pad_token_id
        self.batch_size = batch_size
        self._model: PreTrainedModel | None = None

    def start(self, device: torch.device) -> None:
        """Load the model that will answer."""
        model: torch.nn.Module = load_backbone(self.config, AutoModelForCausalLM)
        self._model = cast(PreTrainedModel, model.to(device).eval().requires_grad_(False))

    @property
    def weight_bytes(self) -> int:
        """Bytes of the engine's own copy of the policy, whole on the device and there while the policy learns."""
        return sum(weight.nbytes for weight in self._running.parameters())

    def cache_bytes(self, sequences: int, tokens: int) -> int:
        """Count the bytes of all layers' keys and values, for so many sequences of so many tokens, prompts included."""
        config = self._running.config.get_text_config()
        heads = config.num_attention_heads
        width = (getattr(config, "num_key_value_heads", None) or heads) * (
            getattr(config, "head_dim", None) or config.hidden_size // heads
        )
        values = 2 * config.num_hidden_layers * width * tokens * min(sequences, self.batch_size)
        return int(values * self._running.dtype.itemsize)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the policy's weights.

        Raises:
            InternalValueError: If the names are not exactly those of the model.
        """
        parameters = dict(self._running.named_parameters())
        loaded = set()
        for name, weight in weights:
            if name not in parameters:
                raise InternalValueError(f"the policy sent the weight `{name}`, which the rollout model does not have.")
            parameters[name].copy_(weight)
            loaded.add(name)
        if missing := parameters.keys() - loaded:
            raise InternalValueError(f"the policy did not send {len(missing)} weights, such as `{min(missing)}`.")

    @torch.no_grad()
    def generate(self, prompts: Prompts, sampling: SamplingConfig) -> Rollout:
        """Sample responses in chunks of whole groups, at most `batch_size` sequences each where groups allow it."""
        groups = max(1, self.batch_size // sampling.num_samples)
        chunks = [self._generate_chunk(prompts, sampling, rows) for rows in _chunks(len(prompts), groups)]
        columns = [torch.cat(column) for column in zip(*chunks, strict=True)]
        response_ids, response_mask, log_probs = columns
        length = int(response_mask.sum(-1).max())
        device = self._running.device
        prompt_index = torch.arange(len(prompts), device=device).repeat_interleave(sampling.num_samples)
        is_ended = self._is_end(response_ids).logical_and(response_mask).any(-1)
        response_mask = response_mask[:, :length]
        return Rollout(
            input_ids=torch.cat([prompts.prompt_ids.to(device)[prompt_index], response_ids[:, :length]], 1),
            attention_mask=torch.cat([prompts.prompt_mask.to(device)[prompt_index], response_mask], 1),
            response_mask=response_mask,
            temperature=sampling.temperature or 1.0,
            rollout_log_probs=log_probs[:, :length],
            is_truncated=~is_ended,
            prompt_index=prompt_index,
        )

    def stop(self) -> None:
        """Drop the model."""
        self._model = None

    @property
    def _running(self) -> PreTrainedModel:
        if self._model is None:
            raise RuntimeError("`start` the engine before using it.")
        return self._model

    def _is_end(self, tokens: Int[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
        return torch.isin(tokens, torch.tensor(self.eos_token_ids, device=tokens.device))

    def _generate_chunk(self, prompts: Prompts, sampling: SamplingConfig, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Sample one chunk's responses: tokens, mask and log-probs, each ``[sequences, max_new_tokens]``."""
        model, num_samples = self._running, sampling.num_samples
        mask = prompts.prompt_mask[rows].to(model.device)
        noise = _noise([seed for seeds in prompts.seeds[rows] for seed in seeds], sampling.max_new_tokens, model.device)
        cache = DynamicCache(config=model.config)
        inputs = {"input_ids": prompts.prompt_ids[rows].to(model.device), "position_ids": position_ids(mask)}
        positions = mask.sum(-1, keepdim=True).repeat_interleave(num_samples, 0)
        shape = (len(noise), sampling.max_new_tokens)
        tokens = torch.full(shape, self.pad_token_id, device=model.device)
        is_kept = torch.zeros(shape, dtype=torch.bool, device=model.device)
        log_probs = torch.zeros(shape, device=model.device)
        is_open = torch.ones(shape[0], dtype=torch.bool, device=model.device)
        for step in range(sampling.max_new_tokens):
            output = model(**inputs, attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1)
            logits = output.logits[:, -1].float()
            if step == 0:
                cache.batch_repeat_interleave(num_samples)
                logits, mask = (x.repeat_interleave(num_samples, 0) for x in (logits, mask))
            drawn, drawn_log_probs = sample_tokens(logits, noise[:, step], sampling)
            is_kept[:, step] = is_open
            tokens[:, step] = torch.where(is_open, drawn, self.pad_token_id)
            log_probs[:, step] = torch.where(is_open, drawn_log_probs, 0.0)
            is_open = is_open & ~self._is_end(drawn)
            if not is_open.any():
                break
            inputs = {"input_ids": tokens[:, step : step + 1], "position_ids": positions + step}
            mask = torch.cat([mask, is_kept[:, step : step + 1]], 1)
        return tokens, is_kept, log_probs


def sample_tokens(
    logits: Float[Tensor, "batch vocab"], noise: Float[Tensor, " batch"], sampling: SamplingConfig
) -> tuple[Int[Tensor, " batch"], Float[Tensor, " batch"]]:
    """Draw one token a row by inverting the cumulative distribution at ``noise``.

    Args:
        logits: Logits before the temperature, float32.
        noise: Random numbers, uniform in ``[0, 1)``, float64.
        sampling: Temperature and truncation.

    Returns:
        The tokens, and their log-probs at the temperature over the whole vocabulary, in nats (at temperature 0, of
        the distribution at temperature 1).
    """
    log_probs = torch.log_softmax(logits / (sampling.temperature or 1.0), -1)
    if sampling.temperature == 0:
        tokens = logits.argmax(-1)
    else:
        probs = _truncate(log_probs.exp(), sampling) if sampling.is_truncated else log_probs.exp()
        cumulative = probs.double().cumsum(-1)
        target = noise[:, None] * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp(max=logits.shape[-1] - 1)
    return tokens, log_probs.gather(-1, tokens[:, None]).squeeze(-1)


def _truncate(probs: Float[Tensor, "batch vocab"], sampling: SamplingConfig) -> Float[Tensor, "batch vocab"]:
    """Set the probabilities of tokens outside top-k and top-p to zero."""
    ordered, order = probs.sort(-1, descending=True)
    is_in = ordered.cumsum(-1) - ordered < sampling.top_p
    if sampling.top_k:
        is_in[:, sampling.top_k :] = False
    return torch.where(is_in.gather(-1, order.argsort(-1)), probs, 0.0)


def _noise(seeds: list[int], length: int, device: torch.device) -> Float[Tensor, "batch length"]:
    """Draw one row of uniform numbers for each seed, on the CPU so that devices agree."""
    generator = torch.Generator()
    rows = [torch.rand(length, generator=generator.manual_seed(seed), dtype=torch.float64) for seed in seeds]
    return torch.stack(rows).to(device)


def _chunks(length: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, length, size))
