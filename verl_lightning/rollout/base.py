"""The protocol of rollout engines: a request, its completion, and the settings of sampling."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from itertools import compress
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from verl_lightning.episodes import Episode
from verl_lightning.options import Options
from verl_lightning.rollout.weight_sums import WeightSums
from verl_lightning.types import PromptImages


@dataclass(frozen=True, kw_only=True)
class Guide(Options, key="guide"):
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
class SamplingConfig(Options, key="sampling"):
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

    def with_short_forms(self, key: str, **given: Any) -> Self:
        """Return these settings with those that were given beside them, as `HFRollout(num_samples=8)` has them.

        Args:
            key: Key of these settings in messages.
            given: Values by name; None stands for one that was not given.

        Raises:
            ValueError: If one is set here too.
        """
        values = {name: value for name, value in given.items() if value is not None}
        defaults = {field.name: field.default for field in fields(self)}
        for name, value in values.items():
            if getattr(self, name) not in (defaults[name], value):
                raise ValueError(
                    f"`rollout.{name}` ({value}) and `{key}.{name}` ({getattr(self, name)}) are both set. Leave out the"
                    " first, which is short for the second."
                )
        return replace(self, **values)

    @property
    def is_truncated(self) -> bool:
        """True if some tokens can never be sampled."""
        return self.top_p < 1 or self.top_k > 0 or self.guide is not None


def with_short_forms(
    sampling: SamplingConfig, val_sampling: SamplingConfig, *, max_new_tokens: int | None, **of_training: Any
) -> tuple[SamplingConfig, SamplingConfig]:
    """Returns the settings of training and of validation, with the short forms that a rollout callback was given.

    Args:
        sampling: Settings of training responses.
        val_sampling: Settings of validation responses.
        max_new_tokens: Longest response of both; None if it was not given.
        of_training: Other settings of training responses; None stands for one that was not given.
    """
    return (
        sampling.with_short_forms("rollout.sampling", max_new_tokens=max_new_tokens, **of_training),
        val_sampling.with_short_forms("rollout.val_sampling", max_new_tokens=max_new_tokens),
    )


@dataclass(frozen=True, kw_only=True)
class Request:
    """One response that an engine is asked for."""

    prompt_ids: list[int]
    """Tokens that the response follows."""

    sampling: SamplingConfig
    """Settings of this response, so with one sample."""

    seed: int
    """Seed of all random numbers of the response, which so depends on neither batch nor rank."""

    name: str
    """The user's name for it, such as ``prompt 3, sample 0``."""

    images: PromptImages | None = None
    """Images of the prompt, whose tokens come first in ``prompt_ids``."""


class Completion(NamedTuple):
    """An engine's answer to one request, as plain values that can cross to another process."""

    token_ids: list[int]
    """The response, its end token included."""

    log_probs: list[float]
    """Log-probs of these tokens under the engine's policy, in nats."""

    is_truncated: bool
    """True if the response met the length limit before its end."""

    weights_version: int
    """Version of the weights that its last token was sampled with, as `Engine.load_weights` was told."""

    is_own: list[bool] | None = None
    """False on tokens that the policy read from others in the middle of it; None where all are its own."""

    prompt_ids: list[int] | None = None
    """Tokens that it follows; None for those of its request."""

    episode: Episode | None = None
    """Walk through an environment that it is; None for a single response."""
    versions: list[int] | None = None
    """Version of the weights that each token was sampled with, -1 where it was read; None where it is the last one's
    for all."""

    @property
    def own_versions(self) -> list[int]:
        """Version of the weights of each of the policy's own tokens, those of an episode's past trajectories first."""
        versions = self.versions or [self.weights_version] * len(self.token_ids)
        past = [] if self.episode is None else self.episode.past
        before = [version for each in past for version in compress(each.versions, each.is_own)]
        return before + (versions if self.is_own is None else list(compress(versions, self.is_own)))


class Engine(Protocol):
    """Samples responses from a copy of the policy, any number at once: token ids in, token ids out."""

    def start(self, device: torch.device) -> None:
        """Take memory and load what never changes."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace the policy's weights by these, under their Hugging Face names.

        Prompts that come later find nothing that was cached from the old weights. Responses that are on their way go
        on, with what they have read, or read it anew, as the engine was told when it was made.
        """

    async def generate(self, request: Request) -> Completion:
        """Sample one response. What is asked before the engine's first step is sampled together from the start."""

    def drop_caches(self) -> None:
        """Forget what was kept of prompts so far; responses on their way read all that they have anew."""

    def weight_sums(self) -> WeightSums:
        """Sum the weights that the engine holds, to be compared with those that it was sent."""

    def stop(self) -> None:
        """Give back all memory and end all processes."""
