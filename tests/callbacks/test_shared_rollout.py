"""Ranks that see the same data: each samples a part of the responses, and all learn from the same whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from torch.testing import assert_close

from tests.processes import on_ranks
from tests.runs import Recorder, make_ppo, make_prompts, make_reward, make_trainer
from tests.strategies.same_data import SameDataStrategy
from tests.tiny import write_prompt_file, write_tiny_folder
from tests.tolerances import assert_near
from verl_lightning.callbacks import HFRollout
from verl_lightning.modules.ppo_config import UpdateConfig
from verl_lightning.rollout.base import SamplingConfig


class CountingRollout(HFRollout):
    """Knows how many responses its engine was asked for."""

    def __init__(self) -> None:
        super().__init__(SamplingConfig(num_samples=2, max_new_tokens=6))
        self.asked: list[int] = []

    def complete(self, module, requests, hear=None):
        self.asked.append(len(requests))
        return super().complete(module, requests, hear)


class Witness(Callback):
    """What each step learns from."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []

    def on_experience(self, module, scored, experience, rows):
        names = ("input_ids", "response_mask", "rollout_log_probs", "prompt_index")
        tensors = {name: getattr(scored.rollout, name) for name in names}
        self.steps.append(tensors | {"rewards": scored.reward_result.rewards})


def train(folder, ranks, num_prompts, reward):
    """Two iterations: what they learnt from, the norms of their gradients, and how many prompts were asked."""
    seed_everything(0, verbose=False)
    witness, recorder, rollout = Witness(), Recorder(), CountingRollout()
    strategy = SameDataStrategy() if ranks > 1 else "auto"
    trainer = make_trainer(folder, rollout, witness, recorder, devices=ranks, strategy=strategy, max_steps=2)
    update = UpdateConfig(mini_batch_size=num_prompts, micro_batch_size=3)
    module = make_ppo(folder / "model", reward=make_reward(reward), update=update)
    trainer.fit(module, make_prompts(folder / "prompts.jsonl", prompts_per_step=num_prompts))
    return witness.steps, recorder.column("actor/grad_norm"), rollout.asked


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    write_tiny_folder(folder / "model")
    write_prompt_file(folder / "prompts.jsonl")
    return folder


@pytest.mark.parametrize(("num_prompts", "parts"), [(5, (3, 2)), (1, (1, 0))])
def test_ranks_share_the_sampling_and_learn_what_one_process_learns(folder, num_prompts, parts):
    steps, norms, _ = train(folder, 1, num_prompts, "even_share")
    ranks = on_ranks(2, train, folder, 2, num_prompts, "even_share")
    for (their_steps, their_norms, asked), part in zip(ranks, parts, strict=True):
        assert asked == [2 * part] * 2
        assert_near((their_steps, their_norms), (steps, norms))


def test_a_reward_that_differs_by_process_is_the_same_on_all_ranks(folder):
    (first, *_), (second, *_) = on_ranks(2, train, folder, 2, 4, "differs_by_process")
    assert_close(first, second, rtol=0, atol=0)
    assert torch.unique(first[0]["rewards"]).numel() > 1
