"""What a vLLM engine is started with; plain values, so that they can cross to another process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

LogProbsMode = Literal["processed_logprobs", "raw_logprobs"]


@dataclass(frozen=True, kw_only=True)
class VLLMConfig:
    """One engine."""

    path: str
    """Hugging Face folder of the policy."""

    eos_token_ids: list[int]
    """Tokens that end a response."""

    pad_token_id: int
    """Fills the end of shorter responses."""

    max_model_len: int | None
    """Longest prompt and response together, in tokens; None is what the model can read."""

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
    """Whether vLLM follows responses as text too, for stop strings and guided decoding."""


@dataclass(frozen=True, kw_only=True)
class BesideConfig:
    """Engines in processes of their own, one for each training process."""

    gpus: list[int] = field(default_factory=list)
    """GPU of each local rank's engine, as an index among those that the trainer sees; empty runs engines on the CPU."""

    max_restarts: int = 3
    """How often dead engines are replaced in a run before it stops."""

    def __post_init__(self) -> None:
        if len(set(self.gpus)) < len(self.gpus) or any(gpu < 0 for gpu in self.gpus):
            raise ValueError(f"`gpus` must name a GPU of its own for each local rank, got {self.gpus}.")
        if self.max_restarts < 0:
            raise ValueError(f"`max_restarts` must not be negative, got {self.max_restarts}.")
