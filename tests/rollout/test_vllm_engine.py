"""The vLLM engine against the HF engine and the trainer's own scores; one engine for all tests."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from tests.rollout.asking import Prompts, sample
from tests.rollout.vllm_parts import make_hf_engine, make_prompts, make_vllm_engine, weights_of, write_sharp_folder
from verl_lightning.models.config import LoraConfig, ModelConfig
from verl_lightning.models.scorer import build_scorer
from verl_lightning.models.weights import merged_weights
from verl_lightning.rollout.base import SamplingConfig

pytestmark = [pytest.mark.backend, pytest.mark.filterwarnings("ignore")]  # vLLM warns of many things

GREEDY = SamplingConfig(max_new_tokens=12, temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_sharp_folder(tmp_path_factory.mktemp("sharp"))


@pytest.fixture(scope="module")
def started(folder):
    engine = make_vllm_engine(folder)
    engine.start(torch.device("cpu"))
    yield engine
    engine.stop()


@pytest.fixture
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture
def engine(started, model):
    """The engine with the folder's weights."""
    started.load_weights(weights_of(model), 1)
    return started


def test_greedy_responses_are_those_of_the_hf_engine(engine, folder):
    ours, expected = (sample(each, make_prompts(), GREEDY) for each in (engine, make_hf_engine(folder)))

    assert_close(ours.input_ids, expected.input_ids)
    assert_close(ours.attention_mask, expected.attention_mask)
    assert_close(ours.response_mask, expected.response_mask)
    assert_close(ours.rollout_log_probs, expected.rollout_log_probs, atol=1e-4, rtol=0)
    assert_close(ours.is_truncated, expected.is_truncated)
    assert_close(ours.prompt_index, expected.prompt_index)


def test_responses_follow_an_optimizer_step(engine, model, folder):
    before = sample(engine, make_prompts(), GREEDY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(input_ids=before.input_ids, labels=before.input_ids).loss.backward()
    optimizer.step()
    reference = make_hf_engine(folder)

    for each in (engine, reference):
        each.load_weights(weights_of(model), 1)

    ours, expected = (sample(each, make_prompts(), GREEDY) for each in (engine, reference))
    assert not torch.equal(ours.response_ids, before.response_ids)
    assert_close(ours.input_ids, expected.input_ids)
    assert_close(ours.rollout_log_probs, expected.rollout_log_probs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_log_probs_are_those_of_the_trainer(engine, folder, temperature):
    sampling = SamplingConfig(num_samples=4, max_new_tokens=12, temperature=temperature)

    rollout = sample(engine, make_prompts(num_samples=4), sampling)

    scorer = build_scorer(ModelConfig(path=str(folder)), "policy", trainable=False)
    expected = scorer(rollout).log_probs.where(rollout.response_mask, 0.0)
    assert_close(rollout.rollout_log_probs, expected, atol=1e-4, rtol=0)
    assert rollout.prompt_index.tolist() == [0] * 4 + [1] * 4 + [2] * 4


def test_a_response_depends_on_its_seed_alone(engine):
    sampling = SamplingConfig(num_samples=2, max_new_tokens=12, temperature=2.0)
    prompts = make_prompts(num_samples=2)
    together = sample(engine, prompts, sampling)
    last = Prompts(prompts.tokens[2:], [prompts.seeds[2][::-1]])

    alone = sample(engine, last, sampling)

    width = alone.response_mask.shape[1]
    assert_close(alone.response_ids, together.response_ids[[5, 4], :width])
    assert not torch.equal(alone.response_ids[0], alone.response_ids[1])


def test_adapters_arrive_merged(engine, folder):
    base = sample(engine, make_prompts(), GREEDY)
    scorer = build_scorer(ModelConfig(path=str(folder), lora=LoraConfig(rank=4)), "policy", trainable=True).eval()
    with torch.no_grad():
        for name, parameter in scorer.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.5)

    engine.load_weights(merged_weights(scorer.backbone), 1)

    rollout = sample(engine, make_prompts(), GREEDY)
    expected = scorer(rollout).log_probs.where(rollout.response_mask, 0.0)
    assert_close(rollout.rollout_log_probs, expected.detach(), atol=1e-3, rtol=0)  # float32, merged against beside
    assert not torch.equal(rollout.response_ids, base.response_ids)


def test_a_response_ends_with_its_end_token(engine, monkeypatch):
    unended = sample(engine, make_prompts(), GREEDY)
    end = int(unended.response_ids[1, 3])
    length = unended.response_ids[1].tolist().index(end) + 1
    monkeypatch.setattr(engine, "config", dataclasses.replace(engine.config, eos_token_ids=[end]))

    rollout = sample(engine, make_prompts(), GREEDY)

    assert unended.is_truncated[1]
    assert not rollout.is_truncated[1]
    assert rollout.response_mask[1].sum() == length
    assert_close(rollout.response_ids[1, :length], unended.response_ids[1, :length])


def test_a_late_response_is_named_and_leaves_the_engine_usable(engine, monkeypatch):
    expected = sample(engine, make_prompts(), GREEDY)
    monkeypatch.setattr(engine, "config", dataclasses.replace(engine.config, deadline=1e-6))
    with pytest.raises(TimeoutError, match=r"3 responses .* that to prompt 0, sample 0"):
        sample(engine, make_prompts(), GREEDY)
    monkeypatch.undo()

    engine.drop_caches()

    assert_close(sample(engine, make_prompts(), GREEDY).input_ids, expected.input_ids)


def test_a_prompt_that_leaves_no_room_for_its_response_is_refused(engine):
    with pytest.raises(ValueError, match=r"a prompt of 60 tokens and a response of 12 don't fit .* 64"):
        sample(engine, make_prompts([60]), GREEDY)


def test_an_engine_that_was_not_started_says_so(folder):
    with pytest.raises(RuntimeError, match="`start` the engine"):
        sample(make_vllm_engine(folder), make_prompts(), GREEDY)


@pytest.mark.slow
def test_the_engine_serves_the_newest_adapter_alone(folder, tmp_path):
    config = ModelConfig(path=str(folder), lora=LoraConfig(rank=4))
    scorer = build_scorer(config, "policy", trainable=True).eval()
    engine = make_vllm_engine(folder, lora_rank=4)
    engine.start(torch.device("cpu"))
    gaps, responses = [], []
    for std in (0.5, 1.0):
        with torch.no_grad():
            for name, parameter in scorer.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=std)
        scorer.backbone.save_pretrained(tmp_path / str(std))

        engine.load_adapter(tmp_path / str(std), 1)

        rollout = sample(engine, make_prompts(), GREEDY)
        expected = scorer(rollout).log_probs.where(rollout.response_mask, 0.0).detach()
        gaps.append(float((rollout.rollout_log_probs - expected).abs().max()))
        responses.append(rollout.response_ids)
    served = set(engine._running.llm_engine.list_loras())
    engine.stop()

    assert served == {2}
    assert max(gaps) < 1e-3  # float32, beside the base in both, in another order
    assert not torch.equal(*responses)
