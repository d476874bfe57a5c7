"""What mbridge is not asked to map, and what it is shown of the rest; no Megatron is needed."""

from __future__ import annotations

import importlib.metadata

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from transformers import GemmaConfig, LlamaConfig, Qwen2Config, Qwen3MoeConfig

from verl_lightning.strategies.megatron.mbridge import import_mbridge, readable_config

SCALED = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
REFUSED = {
    "a `gemma` was not compared": GemmaConfig(),
    "rotary positions of the type `linear` for plain ones": LlamaConfig(rope_parameters=SCALED),
    "it knows no biases of dense layers": LlamaConfig(mlp_bias=True),
    "it knows no sliding window": Qwen2Config(use_sliding_window=True),
    "it always normalises the weights of the chosen experts": Qwen3MoeConfig(norm_topk_prob=False),
    "it knows no dense layers among those with experts": Qwen3MoeConfig(norm_topk_prob=True, mlp_only_layers=[0]),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_model_that_it_would_build_otherwise_is_refused(tmp_path, reason):
    REFUSED[reason].save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"`path: .*{reason}.*Use `bridge: megatron_bridge`"):
        readable_config(str(tmp_path))


def test_the_config_has_the_form_from_before_transformers_5(tmp_path):
    LlamaConfig(rope_parameters={"rope_type": "default", "rope_theta": 5e5}).save_pretrained(tmp_path)
    assert readable_config(str(tmp_path)).rope_theta == 5e5


def test_a_missing_package_is_told_of(monkeypatch):
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(MisconfigurationException, match="needs `mbridge` 0.15.x, found none. Run `pip install"):
        import_mbridge()
