"""The rollout of a batch, made from an engine's answers to single requests."""

from __future__ import annotations

from typing import NamedTuple

import torch

from verl_lightning.rollout.base import Prompts, SamplingConfig
from verl_lightning.types import Rollout


class Completion(NamedTuple):
    """An engine's answer to one request, as plain values that can cross to another process."""

    token_ids: list[int]
    """The response, its end token included."""

    log_probs: list[float]
    """Log-probs of these tokens under the engine's policy, in nats."""

    is_truncated: bool
    """True if the response met the length limit before its end."""

    is_own: list[bool] | None = None
    """False on tokens that the policy read from others in the middle of it; None where all are its own."""


def request_name(prompts: Prompts, row: int) -> str:
    """Returns the user's name for a row of a rollout: its prompt and sample, counted from 0."""
    samples = len(prompts.seeds[0])
    return f"prompt {row // samples}, sample {row % samples}"


def to_rollout(
    prompts: Prompts, sampling: SamplingConfig, completions: list[Completion], *, pad_token_id: int
) -> Rollout:
    """Makes the rollout of a batch: rows padded to the longest response, on the prompts' device.

    Args:
        prompts: Prompts that were answered.
        sampling: Settings by which the responses were sampled.
        completions: One completion for each sample of each prompt; those of one prompt are adjacent.
        pad_token_id: Token that fills the end of shorter responses.
    """
    device = prompts.prompt_ids.device
    tokens = [torch.tensor(completion.token_ids) for completion in completions]
    log_probs = [torch.tensor(completion.log_probs) for completion in completions]
    lengths = torch.tensor([len(row) for row in tokens], device=device)
    pad = torch.nn.utils.rnn.pad_sequence
    response_ids = pad(tokens, batch_first=True, padding_value=pad_token_id).to(device)
    is_real = torch.arange(response_ids.shape[1], device=device) < lengths[:, None]
    is_own = [torch.tensor(completion.is_own or [True] * len(completion.token_ids)) for completion in completions]
    prompt_index = torch.arange(len(prompts), device=device).repeat_interleave(sampling.num_samples)
    return Rollout(
        input_ids=torch.cat([prompts.prompt_ids[prompt_index], response_ids], 1),
        attention_mask=torch.cat([prompts.prompt_mask[prompt_index], is_real], 1),
        response_mask=pad(is_own, batch_first=True).to(device),
        temperature=sampling.temperature or 1.0,
        rollout_log_probs=pad(log_probs, batch_first=True).to(device),
        is_truncated=torch.tensor([completion.is_truncated for completion in completions], device=device),
        prompt_index=prompt_index,
    )
