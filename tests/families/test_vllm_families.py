"""Mixtures of experts in vLLM: what the trainer sends is what the model's own folder holds, and all of it."""

from __future__ import annotations

import pytest
import torch

from tests.families.catalog import write_folder
from tests.families.family_parts import gap_of, transformers_log_probs
from tests.rollout.asking import sample
from tests.rollout.vllm_parts import make_prompts, make_vllm_engine
from verl_lightning.faults import RunError
from verl_lightning.models.build import build_scorer
from verl_lightning.models.config import ModelConfig
from verl_lightning.models.hf_folder import stored_weights
from verl_lightning.models.weights import merged_weights
from verl_lightning.rollout.base import SamplingConfig

pytestmark = [pytest.mark.backend, pytest.mark.filterwarnings("ignore")]  # vLLM warns of many things


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_experts_and_buffers_arrive_and_missing_ones_are_told(family, tmp_path):
    folder = write_folder(tmp_path, family)
    backbone = build_scorer(ModelConfig(path=str(folder)), "policy", trainable=True).backbone
    engine = make_vllm_engine(folder)
    engine.start(torch.device("cpu"))
    try:
        engine.load_weights(stored_weights(backbone, merged_weights(backbone)), 1)
        rollout = sample(engine, make_prompts(), SamplingConfig(max_new_tokens=12))
        kept = [each for each in stored_weights(backbone, merged_weights(backbone)) if "layers.1.mlp" not in each[0]]
        with pytest.raises(RunError, match=r"did not get \d+ of its weights .*, such as `model\.layers\.1\.mlp"):
            engine.load_weights(kept, 2)
    finally:
        engine.stop()
    assert gap_of(rollout.rollout_log_probs, transformers_log_probs(folder, rollout)) < 1e-4
