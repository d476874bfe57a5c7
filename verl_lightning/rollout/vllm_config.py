"""Settings of a vLLM engine; plain values, so that they can cross to another process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from verl_lightning.rollout.base import Guide
from verl_lightning.rollout.weight_transfer import Transfer

LogProbsMode = Literal["processed_logprobs", "raw_logprobs"]
SpeculationMethod = Literal["ngram", "draft_model", "eagle", "eagle3", "mtp"]

MAX_MATCH, MIN_MATCH = 4, 2


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """Speculative decoding: tokens are guessed cheaply, and the policy keeps those that it would have said.

    Responses still come from the policy alone. What guesses is never trained: it helps less as the policy leaves it.
    """

    method: SpeculationMethod = "ngram"
    """Source of the guesses: ``ngram`` takes what followed the last tokens before, in the prompt or the response;
    ``draft_model``, ``eagle`` and ``eagle3`` ask the model or head at ``path``; ``mtp`` asks the policy's own heads for
    several tokens."""

    num_tokens: int = 4
    """Number of tokens guessed at a time."""

    path: str = ""
    """Hugging Face folder of the draft model or head, whose vocabulary is the policy's."""

    max_match: int = MAX_MATCH
    """Most last tokens that ``ngram`` looks for."""

    min_match: int = MIN_MATCH
    """Fewest last tokens that ``ngram`` looks for."""

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise ValueError(f"`speculation.num_tokens` must be at least 1, got {self.num_tokens}.")
        if not 1 <= self.min_match <= self.max_match:
            raise ValueError(
                "`speculation.min_match` must lie between 1 and `max_match`, got"
                f" {self.min_match} and {self.max_match}."
            )
        if self.method != "ngram" and (self.max_match, self.min_match) != (MAX_MATCH, MIN_MATCH):
            raise ValueError(f"`speculation.max_match` and `min_match` are for `ngram`, got `method: {self.method}`.")
        if bool(self.path) != (self.method in ("draft_model", "eagle", "eagle3")):
            needs = "needs a `path`" if not self.path else "takes no `path`"
            raise ValueError(f"`speculation.method: {self.method}` {needs}, got {self.path!r}.")

    def vllm_options(self) -> dict[str, Any]:
        """Returns vLLM's ``speculative_config``."""
        options: dict[str, Any] = {"method": self.method, "num_speculative_tokens": self.num_tokens}
        if self.method == "ngram":
            return options | {"prompt_lookup_max": self.max_match, "prompt_lookup_min": self.min_match}
        source = {"model": self.path} if self.path else {}
        # The policy's own weights are dummies until they are sent; those of what guesses are read.
        return options | source | {"draft_load_config": {"load_format": "auto"}}


@dataclass(frozen=True, kw_only=True)
class VLLMConfig:
    """Settings of one engine."""

    path: str
    """Hugging Face folder of the policy."""

    eos_token_ids: list[int]
    """Tokens that end a response."""

    pad_token_id: int
    """Token that fills the end of shorter responses."""

    max_model_len: int | None
    """Longest prompt and response together, in tokens; None is the most that the model can read."""

    dtype: str = "bfloat16"
    """Type of weights and activations, such as ``bfloat16``."""

    log_probs_mode: LogProbsMode = "processed_logprobs"
    """``processed_logprobs`` are at the sampling temperature, after top-p and top-k; ``raw_logprobs`` at temperature 1,
    over the whole vocabulary."""

    gpu_memory_utilization: float = 0.5
    """Share of a GPU's memory for weights and key-value cache, in ``(0, 1]``."""

    enforce_eager: bool = False
    """Do without CUDA graphs and compilation."""

    lora_rank: int | None = None
    """Take adapters of this rank from `load_adapter`, beside base weights that vLLM reads from ``path``. None takes
    whole weights from `load_weights`."""

    deadline: float = 1800.0
    """Most seconds of one `generate`."""

    tensor_parallel_size: int = 1
    """Training processes that share one engine, each with a part of every layer; neighbours by rank."""

    makes_text: bool = False
    """True if vLLM follows responses as text too, for stop strings and guided decoding."""

    guides: dict[str, Guide] = field(default_factory=dict)
    """Forms that `generate` may be asked to hold responses to, by the user's key."""

    speculation: SpeculationConfig | None = None
    """Settings of speculative decoding; None guesses no tokens ahead."""

    rereads: bool = False
    """True has responses on their way read all that they have anew when weights change."""

    transfer: Transfer = "host"
    """Route of the weights from another process; ``host`` takes them from `VLLMEngine.load_weights`."""
