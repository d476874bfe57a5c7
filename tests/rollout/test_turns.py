"""Conversations with an environment: tokens stay what they were, and only the policy's own are trained on."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.rollout.asking import ENDS, Prompts, sample
from tests.rollout.vllm_parts import PAD, make_prompts
from tests.runs import Recorder, make_ppo, make_rollout, make_trainer
from tests.runs import make_prompts as make_prompt_data
from tests.tiny import tiny_tokenizer
from tests.tolerances import assert_near
from verl_lightning.models.build import build_scorer
from verl_lightning.models.config import ModelConfig
from verl_lightning.rollout.base import SamplingConfig
from verl_lightning.rollout.hf import HFEngine
from verl_lightning.rollout.turns import Environment, TurnsConfig

SAMPLING = SamplingConfig(num_samples=4, max_new_tokens=20)


class Clerk(Environment):
    """Replies ``12`` until it has heard two responses."""

    def respond(self, conversation):
        assert len(conversation.responses) == len(conversation.observations) + 1
        return "12" if len(conversation.responses) < 3 else None


@pytest.fixture(scope="module")
def engine(tiny_folder):
    """Ends a response at half of all tokens."""
    engine = HFEngine(ModelConfig(path=str(tiny_folder)), eos_token_ids=list(ENDS), pad_token_id=PAD)
    engine.start(torch.device("cpu"))
    return engine


@pytest.fixture(scope="module")
def rollout(engine):
    return sample(engine, make_prompts(num_samples=4), SAMPLING, TurnsConfig(environment=Clerk(), max_turns=4))


def runs_of(values):
    """Lengths of the stretches of equal values, with the values."""
    stretches = []
    for value in values:
        if stretches and stretches[-1][0] == value:
            stretches[-1][1] += 1
        else:
            stretches.append([value, 1])
    return stretches


def test_replies_are_read_and_not_trained_on(rollout):
    reply = tiny_tokenizer()("12", add_special_tokens=False).input_ids
    width = rollout.response_mask.shape[1]
    is_read = rollout.attention_mask[:, -width:] & ~rollout.response_mask

    heard = [ids[mask].tolist() for ids, mask in zip(rollout.response_ids, is_read, strict=True)]

    assert len(rollout) == 12
    assert all(row in ([], reply, 2 * reply) for row in heard)
    assert 2 * reply in heard
    assert rollout.rollout_log_probs[~rollout.response_mask].abs().max() == 0


def test_log_probs_are_those_of_the_whole_conversation(rollout, tiny_folder):
    scorer = build_scorer(ModelConfig(path=str(tiny_folder)), "policy", trainable=False)

    expected = scorer(rollout).log_probs.where(rollout.response_mask, 0.0)

    assert_near(rollout.rollout_log_probs, expected)


def test_a_turn_is_what_the_engine_says_to_the_same_tokens(engine):
    greedy = dataclasses.replace(SAMPLING, num_samples=1, temperature=0.0)
    turns = TurnsConfig(environment=Clerk(), max_turns=2)
    rollout = sample(engine, make_prompts([5]), greedy, turns)
    stretches = runs_of(rollout.response_mask[0].tolist())
    assert [is_own for is_own, _ in stretches] == [True, False, True]
    said = stretches[0][1] + stretches[1][1]
    prompt = rollout.input_ids[:, : 5 + said]

    rest = dataclasses.replace(greedy, max_new_tokens=20 - said)
    again = sample(engine, Prompts(prompt.tolist(), [[0]]), rest)

    assert rollout.response_ids[0, said:].tolist() == again.response_ids[0].tolist()


def test_a_run_learns_from_conversations(tmp_path, tiny_folder, prompt_file):
    recorder = Recorder()
    rollout = make_rollout(max_new_tokens=24, turns=TurnsConfig(environment=Clerk(), max_turns=3))

    make_trainer(tmp_path, rollout, recorder).fit(make_ppo(tiny_folder), make_prompt_data(prompt_file))

    assert len(recorder.steps) == 3
    assert min(recorder.column("actor/grad_norm")) > 0
    assert recorder.column("rollout_corr/abs_log_prob_gap")[0] < 1e-4


def test_a_single_turn_is_no_conversation():
    with pytest.raises(ValueError, match="`max_turns` must be at least 2, got 1"):
        TurnsConfig(environment=Clerk(), max_turns=1)
