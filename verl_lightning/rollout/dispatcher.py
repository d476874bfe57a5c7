"""The Ray actors behind `RayEngines`: replicas of an engine, and the one that shares out prompts among them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch

from verl_lightning.ray.actor_pool import ActorPool
from verl_lightning.ray.actors import RuntimeEnvironment
from verl_lightning.rollout.base import Prompts, RolloutEngine, SamplingConfig
from verl_lightning.rollout.joining import join_rollouts
from verl_lightning.rollout.stored_weights import read_weights
from verl_lightning.types import Rollout

_MAX_SEQUENCES = 256  # of one request: it fills an engine, and a late one is not waited for long
_LINGER_SECONDS = 0.2  # to wait for the other callers' prompts, so that an engine gets them as one batch


class EngineActor:
    """One replica.

    Args:
        engine: Not started.
        device: On which it starts.
        environment: The caller's folder and modules.
    """

    def __init__(self, engine: RolloutEngine, device: torch.device, environment: RuntimeEnvironment) -> None:
        environment.enter()
        self._engine = engine
        self._device = device
        self._version: int | None = None  # None before the engine has weights
        self._has_started = False

    def ready(self) -> None:
        """Starts the engine, unless it runs."""
        if not self._has_started:
            self._engine.start(self._device)
            self._has_started = True

    def load_weights(self, version: int, weights: Sequence[Any]) -> None:
        """Loads the policy's weights.

        Args:
            version: Number of this version of the weights.
            weights: References from `store_weights`.
        """
        self.ready()  # again, if Ray has replaced this actor
        self._version = None
        self._engine.load_weights(read_weights(weights))
        self._version = version

    def generate(
        self, version: int, weights: Sequence[Any], prompts: Prompts, sampling: SamplingConfig
    ) -> tuple[int, Rollout]:
        """Samples with weights of this version, which are loaded if it has others.

        Returns:
            The version that it has sampled with, and the responses.
        """
        if self._version != version:
            self.load_weights(version, weights)
        rollout = self._engine.generate(prompts, sampling)
        assert self._version is not None
        return self._version, rollout.to(torch.device("cpu"))


class Batch:
    """Prompts of some callers that are answered together.

    Args:
        version: Version of the weights that the callers want.
        sampling: Settings of sampling that they want.
    """

    def __init__(self, version: int, sampling: SamplingConfig) -> None:
        self.version = version
        self.sampling = sampling
        self.prompts: list[Prompts] = []
        self.is_whole = asyncio.Event()
        self.answers: asyncio.Task[list[Rollout]] | None = None


class Dispatcher:
    """Shares out the prompts of all training processes among the replicas of an engine.

    What the processes ask at the same time becomes one batch, which is cut into requests of whole prompts. Each goes to
    the replica with the fewest tokens outstanding, and to another one if that dies; see `ActorPool`.

    Args:
        replicas: `EngineActor` actors.
        num_callers: Processes that ask.
        pad_token_id: Token that fills the end of shorter responses.
    """

    def __init__(self, replicas: Sequence[Any], num_callers: int, pad_token_id: int) -> None:
        self._pool = ActorPool(replicas)
        self._num_callers = num_callers
        self._pad_token_id = pad_token_id
        self._version = 0
        self._weights: Sequence[Any] = []
        self._open: Batch | None = None

    async def forget_weights(self) -> None:
        """Lets Ray free the weights, which new ones are about to replace."""
        self._weights = []

    async def load_weights(self, version: int, weights: Sequence[Any]) -> None:
        """Has all replicas load the policy's weights, those that start later too.

        Args:
            version: Number of this version of the weights.
            weights: References from `store_weights`.
        """
        self._version, self._weights = version, weights
        await self._pool.tell_all(lambda replica: replica.load_weights.remote(version, weights))

    async def generate(self, version: int, prompts: Prompts, sampling: SamplingConfig) -> tuple[int, Rollout]:
        """Samples responses to one caller's prompts.

        Returns:
            The version of the weights that they were sampled with, and the responses.

        Raises:
            RuntimeError: If this version is not the newest, or replicas die each time or answer with another one.
        """
        if version != self._version:
            raise RuntimeError(version_message(self._version, version))
        batch = self._batch(version, sampling)
        place = len(batch.prompts)
        batch.prompts.append(prompts)
        if len(batch.prompts) == self._num_callers:
            batch.is_whole.set()
        assert batch.answers is not None
        return batch.version, (await batch.answers)[place]

    def _batch(self, version: int, sampling: SamplingConfig) -> Batch:
        """The batch that others wait in already, or else a new one."""
        if self._open is None or (self._open.version, self._open.sampling) != (version, sampling):
            self._open = Batch(version, sampling)
            self._open.answers = asyncio.get_running_loop().create_task(self._answer(self._open))
        return self._open

    async def _answer(self, batch: Batch) -> list[Rollout]:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(batch.is_whole.wait(), _LINGER_SECONDS)
        if self._open is batch:
            self._open = None
        prompts, sampling = join_prompts(batch.prompts), batch.sampling
        num_requests = max(len(self._pool.actors), math.ceil(len(prompts) * sampling.num_samples / _MAX_SEQUENCES))
        parts = split_prompts(prompts, num_requests)
        answers = await asyncio.gather(*[self._ask(batch.version, part, sampling) for part in parts])
        rollout = join_rollouts(answers, pad_token_id=self._pad_token_id)
        return split_rollout(rollout, batch.prompts)

    async def _ask(self, version: int, prompts: Prompts, sampling: SamplingConfig) -> Rollout:
        rollout: Rollout
        weights = self._weights
        sampled_with, rollout = await self._pool.ask(
            num_tokens(prompts, sampling), lambda replica: replica.generate.remote(version, weights, prompts, sampling)
        )
        if sampled_with != version:
            raise RuntimeError(version_message(sampled_with, version))
        return rollout


def version_message(found: int, expected: int) -> str:
    """Says why a run stops whose engines have other weights than its trainer."""
    return (
        f"A rollout engine has version {found} of the weights, but {expected} was asked for. The run stops, for it"
        " would learn from another policy; please report this."
    )


def join_prompts(parts: Sequence[Prompts]) -> Prompts:
    """Prompts of several callers, as wide as the longest of all needs."""
    tokens = [row for part in parts for row in part.tokens()]
    return Prompts.from_tokens(tokens, [seeds for part in parts for seeds in part.seeds])


def split_prompts(prompts: Prompts, num_parts: int) -> list[Prompts]:
    """Prompts in at most so many parts, whose sizes differ by one at most."""
    num_parts = min(num_parts, len(prompts))
    edges = [len(prompts) * part // num_parts for part in range(num_parts + 1)]
    return [
        Prompts(
            prompt_ids=prompts.prompt_ids[start:end],
            prompt_mask=prompts.prompt_mask[start:end],
            seeds=prompts.seeds[start:end],
        )
        for start, end in zip(edges, edges[1:], strict=False)
    ]


def split_rollout(rollout: Rollout, parts: Sequence[Prompts]) -> list[Rollout]:
    """Each caller's responses, as an engine of its own would have padded them.

    Args:
        rollout: Responses to all prompts.
        parts: The callers' prompts.
    """
    sizes = [sum(len(seeds) for seeds in part.seeds) for part in parts]
    ends = torch.tensor(sizes).cumsum(0).tolist()
    rows = [rollout.select(slice(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    return [_pad_like(part, prompts) for part, prompts in zip(rows, parts, strict=True)]


def _pad_like(rollout: Rollout, prompts: Prompts) -> Rollout:
    width = rollout.input_ids.shape[1] - rollout.response_mask.shape[1]
    is_real = rollout.attention_mask[:, width:]
    longest = int(is_real.sum(-1).max())
    rows = rollout.prompt_index - rollout.prompt_index[0]
    return dataclasses.replace(
        rollout,
        input_ids=torch.cat([prompts.prompt_ids[rows], rollout.response_ids[:, :longest]], 1),
        attention_mask=torch.cat([prompts.prompt_mask[rows], is_real[:, :longest]], 1),
        response_mask=rollout.response_mask[:, :longest],
        rollout_log_probs=rollout.rollout_log_probs[:, :longest],
        prompt_index=rows,
    )


def num_tokens(prompts: Prompts, sampling: SamplingConfig) -> float:
    """Tokens that an engine reads and, at most, writes for these prompts."""
    return float(prompts.prompt_mask.sum()) + len(prompts) * sampling.num_samples * sampling.max_new_tokens
