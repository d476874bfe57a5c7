"""Settings of sampling in vLLM's words, and refusals of those that it gets wrong."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import torch

from verl_lightning.compat import vllm as compat
from verl_lightning.rollout.base import Guide, SamplingConfig
from verl_lightning.rollout.vllm_config import VLLMConfig


def sampling_options(sampling: SamplingConfig, config: VLLMConfig) -> dict[str, Any]:
    """Return the arguments of ``vllm.SamplingParams``, but for the seed."""
    module = importlib.import_module("vllm.sampling_params")
    options = {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop_token_ids": config.eos_token_ids,
        "ignore_eos": True,  # the model's own end token; ours are in `stop_token_ids`
        "logprobs": 0,  # of the sampled token alone
        "flat_logprobs": True,
        "detokenize": bool(sampling.stop),
        "stop": sampling.stop,
        "output_kind": module.RequestOutputKind.FINAL_ONLY,
    }
    if sampling.guide is not None:
        options["structured_outputs"] = structured_outputs(sampling.guide)
    return options


def structured_outputs(guide: Guide) -> Any:
    """Convert a guide to the form in which vLLM takes it."""
    form = {name: value for name, value in dataclasses.asdict(guide).items() if value}
    return importlib.import_module("vllm.sampling_params").StructuredOutputsParams(**form)


def check_guide(key: str, guide: Guide) -> None:
    """Refuse a form that neither of vLLM's two back ends understands.

    Raises:
        ValueError: If neither does, with what they say.
    """
    reasons = compat.guide_complaints(structured_outputs(guide))
    if not reasons:
        return
    [(field, value)] = [pair for pair in dataclasses.asdict(guide).items() if pair[1]]
    raise ValueError(f"`{key}.{field}` is nothing that vLLM can guide by, got {value!r}. " + " ".join(reasons))


def check_speculation(device: torch.device, sampling: SamplingConfig) -> None:
    """Refuse what vLLM gets wrong: on CPUs, it divides the logits of guessed tokens by temperatures that it never sets.

    Raises:
        ValueError: If responses would not come from the policy.
    """
    if device.type == "cpu" and sampling.temperature > 0:
        raise ValueError(
            "`rollout.speculation` on a CPU can decode greedily alone: vLLM's CPU build does not sample from the policy"
            f" there. Got `temperature: {sampling.temperature}`; set it to 0, or take `speculation` out."
        )
