"""The vLLM engine against the HF engine and the trainer's own scores; one engine for all tests."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from tests.rollout.asking import sample
from tests.rollout.vllm_parts import make_prompts, make_vllm_engine, weights_of, write_sharp_folder
from verl_lightning.models.build import build_scorer
from verl_lightning.models.config import LoraConfig, ModelConfig
from verl_lightning.models.lora import adapter_weights
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


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_log_probs_are_those_of_the_trainer(engine, folder, temperature):
    sampling = SamplingConfig(num_samples=4, max_new_tokens=12, temperature=temperature)

    rollout = sample(engine, make_prompts(num_samples=4), sampling)

    scorer = build_scorer(ModelConfig(path=str(folder)), "policy", trainable=False)
    expected = scorer(rollout).log_probs.where(rollout.response_mask, 0.0)
    assert_close(rollout.rollout_log_probs, expected, atol=1e-4, rtol=0)
    assert rollout.prompt_index.tolist() == [0] * 4 + [1] * 4 + [2] * 4


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
    config = ModelConfig(path=str(folder), lora=LoraConfig(rank=4, alpha=12.0))
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
        weights = adapter_weights(scorer.backbone) if engine.holds_adapter else None
        if weights is not None:  # from memory; the file must not be read
            (tmp_path / str(std) / "adapter_model.safetensors").unlink()

        engine.load_adapter(tmp_path / str(std), 1, weights)

        rollout = sample(engine, make_prompts(), GREEDY)
        expected = scorer(rollout).log_probs.where(rollout.response_mask, 0.0).detach()
        gaps.append(float((rollout.rollout_log_probs - expected).abs().max()))
        responses.append(rollout.response_ids)
    served = set(engine._running.llm_engine.list_loras())
    engine.stop()

    assert served == {2}
    assert max(gaps) < 1e-3  # float32, beside the base in both, in another order
    assert not torch.equal(*responses)
