"""How tests ask an engine: some prompts at once, and a padded rollout of what it says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tests.tiny import tiny_tokenizer
from verl_lightning.environments.config import EpisodesConfig
from verl_lightning.environments.episode import Generate
from verl_lightning.environments.runner import EpisodeRequest, EpisodeRunner, episode_requests
from verl_lightning.rollout.base import Completion, Engine, SamplingConfig
from verl_lightning.rollout.completions import answer, make_requests, to_rollout, wait_for
from verl_lightning.rollout.turns import TurnsConfig
from verl_lightning.types import Rollout

PAD = 0
ENDS = range(1, 200, 2)
"""Tokens that end a turn of a conversation: half of all."""


class Prompts(NamedTuple):
    """Prompts, and the seed of each sample of each."""

    tokens: list[list[int]]
    seeds: list[list[int]]


def play_all(runner: EpisodeRunner, generate: Generate, requests: Sequence[EpisodeRequest]) -> list[Completion]:
    """Plays the episodes of a batch, as a run does, and ends the runner."""
    completions = wait_for(runner.play(generate, requests))
    runner.check_errors(completions)
    runner.stop()
    return completions


def sample(engine: Engine, prompts: Prompts, sampling: SamplingConfig, turns: TurnsConfig | None = None) -> Rollout:
    """The engine's responses to all samples of all prompts, or its conversations."""
    requests = make_requests(prompts.tokens, prompts.seeds, sampling)
    if turns is None:
        completions = wait_for(answer(engine.generate, requests))
    else:
        runner = EpisodeRunner(
            environments=turns,
            config=EpisodesConfig(max_turns=turns.max_turns),
            tokenizer=tiny_tokenizer(),
            eos_token_ids=ENDS,
            max_prompt_length=None,
            enable_thinking=None,
        )
        rows = [{"prompt": []}] * len(prompts.tokens)
        asked = episode_requests(requests, rows, num_samples=len(prompts.seeds[0]))
        completions = play_all(runner, engine.generate, asked)
    return to_rollout(
        requests,
        completions,
        num_samples=len(prompts.seeds[0]),
        pad_token_id=PAD,
        device=torch.device("cpu"),
    )
