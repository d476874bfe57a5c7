"""The policy of a run, as programs ask for it that evaluate models."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from verl_lightning.modules.sampling import SamplingModule
from verl_lightning.rollout.base import Completion, Request, SamplingConfig
from verl_lightning.rollout.completions import answer, token_fields, wait_for
from verl_lightning.seeding import derive_seed, run_seed
from verl_lightning.types import TokenBatch

PAIRS_PER_PASS = 16
"""Sequences that are scored at once."""


@dataclass(frozen=True)
class Score:
    """A metric of a task."""

    task: str
    """Name of the task."""

    metric: str
    """Name of the metric, with lm-eval's filter of answers or inspect's scorer."""

    value: float
    """Its value."""

    stderr: float | None
    """Its standard error; None where it has none."""

    samples: int
    """Number of samples."""


class Answer(NamedTuple):
    """A response as text."""

    text: str
    """The response, without special tokens, up to the first text that ends it."""

    num_tokens: int
    """Number of sampled tokens."""

    is_truncated: bool
    """True if it met the length limit."""


class Policy:
    """A policy that the run's engine samples from and the trainer's model scores with.

    Args:
        module: Module whose policy it is.
        generate: Function that has the engine, which holds the policy's weights, answer a request.
    """

    def __init__(self, module: SamplingModule, generate: Callable[[Request], Awaitable[Completion]]) -> None:
        self.module = module
        self.tokenizer = module.tokenizer
        self._generate = generate
        self._num_asked = 0

    @property
    def max_length(self) -> int:
        """Longest prompt and response, in tokens, that the model reads."""
        config = self.module.policy.backbone.config.get_text_config()
        return int(getattr(config, "max_position_embeddings", None) or 2048)

    async def respond(self, prompt_ids: Sequence[int], sampling: SamplingConfig, until: Sequence[str] = ()) -> Answer:
        """Samples a response; of a prompt that is too long, its last tokens count.

        Args:
            prompt_ids: Tokens that the response follows.
            sampling: Settings of the sampling.
            until: Texts that end the response, and are left out of it.
        """
        room = self.max_length - sampling.max_new_tokens
        if room < 1:
            raise ValueError(
                f"a task asks for {sampling.max_new_tokens} tokens, but the model reads {self.max_length} together with"
                " the prompt."
            )
        self._num_asked += 1
        seed = derive_seed(run_seed(), "evaluate", self._num_asked)
        name = f"question {self._num_asked} of the evaluation"
        request = Request(prompt_ids=list(prompt_ids)[-room:], sampling=sampling, seed=seed, name=name)
        completion = await self._generate(request)
        text = str(self.tokenizer.decode(completion.token_ids, skip_special_tokens=True))
        for end in filter(None, until):
            text = text.partition(end)[0]
        return Answer(text, len(completion.token_ids), completion.is_truncated)

    def scored(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[float]:
        """Returns the log-prob, in nats, of the second tokens of each pair after the first ones."""
        found: list[float] = []
        for start in range(0, len(pairs), PAIRS_PER_PASS):
            batch = self._batch(pairs[start : start + PAIRS_PER_PASS])
            (scores,) = self.module.contract.forward(self.module.policy, [batch])
            assert scores.log_probs is not None
            found += torch.where(batch.response_mask, scores.log_probs.float(), 0.0).sum(1).tolist()
        return found

    def _batch(self, pairs: Sequence[tuple[list[int], list[int]]]) -> TokenBatch:
        """The pairs as rows on the model's device."""
        prompts, responses = zip(*pairs, strict=True)
        fields = token_fields(prompts, responses, self.tokenizer.pad_token_id)
        is_real = fields["attention_mask"][:, max(map(len, prompts)) :]
        return TokenBatch(**fields, response_mask=is_real).to(self.module.device)

    def are_greedy(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[bool]:
        """Tells of each pair whether the engine's most probable tokens after the first ones are the second.

        A prompt is asked once, for the longest of the responses that are compared.
        """
        longest: dict[tuple[int, ...], int] = {}
        for prompt, response in pairs:
            longest[tuple(prompt)] = max(len(response), longest.get(tuple(prompt), 0))
        requests = [
            Request(
                prompt_ids=list(prompt),
                sampling=SamplingConfig(temperature=0.0, max_new_tokens=length),
                seed=0,
                name="a choice of the evaluation",
            )
            for prompt, length in longest.items()
        ]
        greedy = dict(zip(longest, wait_for(answer(self._generate, requests)), strict=True))
        return [greedy[tuple(prompt)].token_ids[: len(response)] == response for prompt, response in pairs]

    def with_template(self, messages: Sequence[Any], **options: Any) -> str:
        """Returns a conversation in the policy's chat template."""
        return str(self.tokenizer.apply_chat_template(list(messages), tokenize=False, **options))
