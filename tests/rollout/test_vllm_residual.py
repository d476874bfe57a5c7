"""The residual stream of a vLLM engine in bfloat16 is summed in float32, as the trainer's under autocast is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config

from tests.rollout.asking import sample
from tests.rollout.vllm_parts import make_prompts, make_vllm_engine
from tests.tiny import tiny_model, tiny_tokenizer
from verl_lightning.compat import vllm as compat
from verl_lightning.models.build import build_scorer
from verl_lightning.models.config import ModelConfig
from verl_lightning.rollout.base import SamplingConfig
from verl_lightning.rollout.vllm_config import SpeculationConfig
from verl_lightning.rollout.vllm_launch import llm_options

SAMPLING = SamplingConfig(num_samples=4, max_new_tokens=32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A deep model: rounded after each of 48 layers, its stream errs most."""
    path = tmp_path_factory.mktemp("deep")
    tiny_model(hidden_size=256, num_layers=24, num_heads=4).bfloat16().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def gap(folder: Path) -> float:
    """Mean difference of log-probs between an engine in bfloat16 and the trainer under autocast, in nats."""
    engine = make_vllm_engine(folder, dtype="bfloat16")
    engine.start(torch.device("cpu"))
    scorer = build_scorer(ModelConfig(path=str(folder)), "policy", trainable=False)
    try:
        engine.load_weights(((name, weight.bfloat16()) for name, weight in scorer.backbone.named_parameters()), 1)
        rollout = sample(engine, make_prompts((9, 20, 30), num_samples=4), SAMPLING)
    finally:
        engine.stop()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        scores = scorer(rollout)
    assert scores.log_probs is not None
    return float((scores.log_probs - rollout.rollout_log_probs)[rollout.response_mask.bool()].abs().mean())


@pytest.mark.backend
@pytest.mark.filterwarnings("ignore")
def test_summing_in_float32_brings_engine_and_trainer_closer(folder, monkeypatch):
    summed = gap(folder)
    monkeypatch.setattr(compat, "residual_options", lambda model_type: {})
    rounded = gap(folder)
    assert 0 < summed < 0.8 * rounded


def test_an_engine_is_told_so_unless_a_draft_model_reads_the_stream(folder):
    ways = None, SpeculationConfig(), SpeculationConfig(method="eagle3", path="head")
    engines = [make_vllm_engine(folder, speculation=speculation) for speculation in ways]
    told = [llm_options(engine.config, torch.device("cpu"))["additional_config"] for engine in engines]
    assert told == [compat.RESIDUAL_OPTIONS, compat.RESIDUAL_OPTIONS, {}]


def test_models_that_were_not_read_keep_their_stream(tmp_path):
    Qwen2Config().save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"model_type": "qwen2"', '"model_type": "phi3"'))
    assert llm_options(make_vllm_engine(tmp_path).config, torch.device("cpu"))["additional_config"] == {}
