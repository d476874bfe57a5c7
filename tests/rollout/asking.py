"""How tests ask an engine: some prompts at once, and a padded rollout of what it says."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from tests.tiny import tiny_tokenizer
from verl_lightning.rollout.base import Engine, SamplingConfig
from verl_lightning.rollout.completions import answer, make_requests, to_rollout, wait_for
from verl_lightning.rollout.turns import TurnsConfig, converse
from verl_lightning.types import Rollout

PAD = 0


class Prompts(NamedTuple):
    """Prompts, and the seed of each sample of each."""

    tokens: list[list[int]]
    seeds: list[list[int]]


def sample(engine: Engine, prompts: Prompts, sampling: SamplingConfig, turns: TurnsConfig | None = None) -> Rollout:
    """The engine's responses to all samples of all prompts, or its conversations."""
    requests = make_requests(prompts.tokens, prompts.seeds, sampling)
    ask = engine.generate
    if turns is not None:
        ask = partial(converse, ask, turns=turns, tokenizer=tiny_tokenizer())
    completions = wait_for(answer(ask, requests))
    return to_rollout(
        requests,
        completions,
        num_samples=len(prompts.seeds[0]),
        pad_token_id=PAD,
        device=torch.device("cpu"),
    )
