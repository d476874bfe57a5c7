"""Requests for a batch of prompts, and the rollout that is made of their completions."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from jaxtyping import Shaped
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from verl_lightning.episodes import Episode, PastTrajectory
from verl_lightning.rollout.base import Completion, Request, SamplingConfig
from verl_lightning.types import PromptImages, Rollout

T = TypeVar("T")

Listener = Callable[[int, Completion], None]
"""Hears of a completion and the position of its request among those that were asked at once."""


def make_requests(
    prompts: Sequence[list[int]],
    seeds: Sequence[Sequence[int]],
    sampling: SamplingConfig,
    images: Sequence[PromptImages | None] | None = None,
) -> list[Request]:
    """Makes a request for each sample of each prompt; those of one prompt are adjacent.

    Args:
        prompts: Tokens of each prompt.
        seeds: Seeds of each prompt's samples.
        sampling: Settings by which all are sampled.
        images: Images of each prompt; None without any.
    """
    single, shown = dataclasses.replace(sampling, num_samples=1), images or [None] * len(prompts)
    return [
        Request(prompt_ids=tokens, sampling=single, seed=seed, name=f"prompt {row}, sample {sample}", images=own)
        for row, (tokens, own_seeds, own) in enumerate(zip(prompts, seeds, shown, strict=True))
        for sample, seed in enumerate(own_seeds)
    ]


async def answer(
    generate: Callable[[Request], Awaitable[Completion]], requests: Sequence[Request], hear: Listener | None = None
) -> list[Completion]:
    """Returns the completions of some requests, which are asked all at once.

    Args:
        generate: Function that answers one request.
        requests: The requests.
        hear: Function that is told of each completion as soon as it is there.
    """

    async def one(position: int, request: Request) -> Completion:
        completion = await generate(request)
        if hear is not None:
            hear(position, completion)
        return completion

    return await asyncio.gather(*(one(*numbered) for numbered in enumerate(requests)))


def wait_for(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end, in a thread of its own where this one runs an event loop, as in a notebook."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


def to_rollout(
    requests: Sequence[Request],
    completions: Sequence[Completion],
    *,
    num_samples: int,
    pad_token_id: int,
    device: torch.device,
) -> Rollout:
    """Makes the rollout of a batch: prompts padded on the left, responses on the right, both to the longest.

    Args:
        requests: Requests for ``num_samples`` responses to each prompt, group after group.
        completions: Completion of each request.
        num_samples: Responses to each prompt.
        pad_token_id: Token that fills the padding.
        device: Device of the rollout.
    """
    asked = [
        request.prompt_ids if completion.prompt_ids is None else completion.prompt_ids
        for request, completion in zip(requests, completions, strict=True)
    ]
    episodes = tuple(completion.episode for completion in completions if completion.episode is not None)
    rollout = Rollout(
        **padded(asked, completions, pad_token_id),
        temperature=requests[0].sampling.temperature or 1.0,
        prompt_index=torch.arange(len(requests)) // num_samples,
        episodes=episodes or None,
        **image_fields(requests, list(map(len, asked)), max(len(each.token_ids) for each in completions)),
    )
    return rollout.to(device)


def token_fields(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], pad_token_id: int
) -> dict[str, Any]:
    """Returns the tokens of sequences and their mask, prompts padded on the left and responses on the right.

    Args:
        prompts: Tokens of each prompt.
        responses: Tokens after each prompt.
        pad_token_id: Token that fills the padding.
    """
    asked, prompt_mask = pad_left(prompts, pad_token_id), pad_left([[True] * len(ids) for ids in prompts], False)
    tokens = [torch.tensor(each) for each in responses]
    is_real = pad_sequence([torch.ones(len(row), dtype=torch.bool) for row in tokens], batch_first=True)
    return {
        "input_ids": torch.cat([asked, pad_sequence(tokens, batch_first=True, padding_value=pad_token_id)], 1),
        "attention_mask": torch.cat([prompt_mask, is_real], 1),
    }


def padded(
    prompts: Sequence[list[int]], answers: Sequence[Completion | PastTrajectory], pad_token_id: int
) -> dict[str, Any]:
    """Returns tokens with their masks and log-probs, prompts padded on the left and answers on the right.

    Args:
        prompts: Tokens of each prompt.
        answers: Answer to each prompt.
        pad_token_id: Token that fills the padding.
    """
    is_own = [torch.tensor(each.is_own or [True] * len(each.token_ids)) for each in answers]
    log_probs = [torch.tensor(each.log_probs) for each in answers]
    return {
        **token_fields(prompts, [each.token_ids for each in answers], pad_token_id),
        "response_mask": pad_sequence(is_own, batch_first=True),
        "rollout_log_probs": pad_sequence(log_probs, batch_first=True),
        "is_truncated": torch.tensor([each.is_truncated for each in answers]),
    }


def image_fields(requests: Sequence[Request], lengths: Sequence[int], response_width: int) -> dict[str, Any]:
    """Returns the fields of a token batch that tell of images; none without images.

    Args:
        requests: Request of each row.
        lengths: Tokens of each row's prompt.
        response_width: Columns of the responses.
    """
    if all(request.images is None for request in requests):
        return {}
    prompt_width = max(lengths)
    types = torch.zeros(len(requests), prompt_width + response_width, dtype=torch.long)
    for row, (request, length) in enumerate(zip(requests, lengths, strict=True)):
        if request.images is not None:
            own, start = request.images.mm_token_type_ids, prompt_width - length
            types[row, start : start + len(own)] = torch.tensor(own)
    return {
        "images": tuple(request.images and request.images.inputs for request in requests),
        "mm_token_type_ids": types,
    }


def pack_completions(completions: Sequence[Completion]) -> dict[str, Any]:
    """Packs responses into tensors and plain values for a checkpoint."""
    is_own = [each.is_own or [True] * len(each.token_ids) for each in completions]
    versions = [each.versions or [each.weights_version] * len(each.token_ids) for each in completions]
    return {
        "lengths": torch.tensor([len(each.token_ids) for each in completions], dtype=torch.long),
        "token_ids": joined([each.token_ids for each in completions], torch.long),
        "log_probs": joined([each.log_probs for each in completions], torch.float64),
        "is_own": joined(is_own, torch.bool),
        "versions": joined(versions, torch.long),
        "is_truncated": torch.tensor([each.is_truncated for each in completions], dtype=torch.bool),
        "weights_versions": torch.tensor([each.weights_version for each in completions], dtype=torch.long),
        "prompt_ids": [each.prompt_ids for each in completions],
        "episodes": [each.episode and dataclasses.asdict(each.episode) for each in completions],
    }


def joined(rows: Sequence[Sequence[Any]], dtype: torch.dtype) -> Shaped[Tensor, " values"]:
    """Returns rows of numbers one after another."""
    return torch.tensor([value for row in rows for value in row], dtype=dtype)


def unpack_completions(packed: Mapping[str, Any]) -> list[Completion]:
    """Restores the responses that `pack_completions` was given."""
    lengths = packed["lengths"].tolist()
    parts = [torch.split(packed[name], lengths) for name in ("token_ids", "log_probs", "is_own", "versions")]
    rows = zip(*parts, packed["is_truncated"], packed["weights_versions"], strict=True)
    tensors = [[value.tolist() for value in row] for row in rows]
    return [
        Completion(
            token_ids=ids,
            log_probs=log_probs,
            is_truncated=is_truncated,
            weights_version=version,
            is_own=is_own,
            prompt_ids=prompt_ids,
            episode=episode and Episode.from_state(episode),
            versions=versions,
        )
        for (ids, log_probs, is_own, versions, is_truncated, version), prompt_ids, episode in zip(
            tensors, packed["prompt_ids"], packed["episodes"], strict=True
        )
    ]


def version_message(found: int, expected: int) -> str:
    """Says why a run stops whose engines have other weights than its trainer."""
    return (
        f"A rollout engine has version {found} of the weights, but {expected} was asked for. The run stops, for it"
        " would learn from another policy; please report this."
    )


def pad_left(rows: Sequence[Sequence[Any]], value: Any) -> Shaped[Tensor, "rows columns"]:
    """Returns rows of numbers as one tensor, filled with ``value`` on the left."""
    return pad_sequence([torch.tensor(row) for row in rows], True, value, "left")
