"""The protocol of rollout engines, their prompts, and the settings of sampling."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from verl_lightning.types import Rollout


@dataclass(frozen=True, kw_only=True)
class Guide:
    """A form that responses are held to, by allowing no token that would leave it.

    The engine's log-probs are then those among the allowed tokens, above the trainer's. Set one field.
    """

    regex: str = ""
    """Regular expression that the whole response matches."""

    choice: list[str] = field(default_factory=list)
    """Texts of which the response is one."""

    json: str = ""
    """JSON schema, itself written in JSON, that the response fits."""

    grammar: str = ""
    """Grammar, in extended Backus-Naur form, of which the response is a sentence."""

    def __post_init__(self) -> None:
        given = [name for name in ("regex", "choice", "json", "grammar") if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(f"`guide` must set one of `regex`, `choice`, `json` and `grammar`, got {given or 'none'}.")
        if self.json:
            try:
                json.loads(self.json)
            except json.JSONDecodeError as error:
                raise ValueError(f"`guide.json` must be a schema written in JSON, which it is not: {error}.") from None


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Settings for sampling responses from the policy."""

    num_samples: int = 1
    """Responses per prompt; the group size of group-relative advantages."""

    max_new_tokens: int = 512
    """Longest response, in tokens, end token included."""

    temperature: float = 1.0
    """Softmax temperature, dimensionless. 0 is greedy decoding."""

    top_p: float = 1.0
    """Sample from the smallest set of tokens with at least this probability, in ``(0, 1]``."""

    top_k: int = 0
    """Sample from this many most probable tokens; 0 from all."""

    stop: list[str] = field(default_factory=list)
    """Texts after which a response ends, besides its end token. Needs vLLM."""

    guide: Guide | None = None
    """Form that a response must have; None leaves it free. Needs vLLM."""

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ValueError(f"`num_samples` must be at least 1, got {self.num_samples}.")
        if self.max_new_tokens < 1:
            raise ValueError(f"`max_new_tokens` must be at least 1, got {self.max_new_tokens}.")
        if self.temperature < 0:
            raise ValueError(f"`temperature` must not be negative, got {self.temperature}.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"`top_p` must lie in (0, 1], got {self.top_p}.")
        if not all(self.stop):
            raise ValueError(f"`stop` must list texts that are not empty, got {self.stop}.")
        if self.top_k < 0:
            raise ValueError(f"`top_k` must not be negative (0 samples from all tokens), got {self.top_k}.")

    @property
    def is_truncated(self) -> bool:
        """True if some tokens can never be sampled."""
        return self.top_p < 1 or self.top_k > 0 or self.guide is not None


@dataclass(frozen=True, kw_only=True)
class Prompts:
    """Prompts to answer, and the seed of each answer."""

    prompt_ids: Int[Tensor, "prompts length"]
    """Left-padded tokens."""

    prompt_mask: Bool[Tensor, "prompts length"]
    """True on real tokens."""

    seeds: list[list[int]]
    """One seed for each sample of each prompt, so that answers depend on neither batch nor rank."""

    def __len__(self) -> int:
        """Number of prompts."""
        return len(self.prompt_ids)

    @classmethod
    def from_tokens(cls, tokens: Sequence[list[int]], seeds: list[list[int]]) -> Self:
        """Make prompts of these tokens, on the CPU."""
        rows = [torch.tensor(row).flip(0) for row in tokens]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).flip(1)
        mask = torch.arange(ids.shape[1]).flip(0) < torch.tensor([len(row) for row in rows])[:, None]
        return cls(prompt_ids=ids, prompt_mask=mask, seeds=seeds)

    def tokens(self) -> list[list[int]]:
        """Return each prompt's real tokens."""
        return [ids[mask].tolist() for ids, mask in zip(self.prompt_ids, self.prompt_mask, strict=True)]

    def to(self, device: torch.device) -> Self:
        """Return the prompts on another device."""
        return replace(self, prompt_ids=self.prompt_ids.to(device), prompt_mask=self.prompt_mask.to(device))


class RolloutEngine(Protocol):
    """Samples responses from a copy of the policy."""

    def start(self, device: torch.device) -> None:
        """Take memory and load what never changes."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the policy's weights by these, under their Hugging Face names; drop what was cached from the old."""

    def generate(self, prompts: Prompts, sampling: SamplingConfig) -> Rollout:
        """Sample ``sampling.num_samples`` responses to each prompt; those of one prompt are adjacent rows."""

    def stop(self) -> None:
        """Give back all memory and end all processes."""
