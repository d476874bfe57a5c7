"""Weights that are read a layer at a time are those that `build_scorer` has, and nobody holds them all."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from tests.runs import make_model_config
from verl_lightning.models import weight_files
from verl_lightning.models.build import build_scorer
from verl_lightning.models.config import LoraConfig
from verl_lightning.models.lora import adapter_weights, write_adapter
from verl_lightning.models.streaming import stream_scorer

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL = LlamaConfig(**SIZES, num_hidden_layers=3, vocab_size=64, tie_word_embeddings=True)
EXPERTS = Qwen3MoeConfig(**SIZES, moe_intermediate_size=16, num_experts=4, num_hidden_layers=2, vocab_size=64)


def write(folder: Path, config: Any = SMALL, *, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """A random model."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(folder, **options)
    return folder


def as_bin(folder: Path) -> Path:
    """The same in the pickled files of old models."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return folder


def read(config: Any, head: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Everything that is streamed, and what `build_scorer` has, with each name of tied weights."""
    torch.manual_seed(1)
    streamed = {name: value for part in stream_scorer(config, head, trainable=True) for name, value in part.items()}
    torch.manual_seed(1)
    whole = build_scorer(config, head, trainable=True)
    expected = dict(whole.named_parameters(remove_duplicate=False)) | dict(whole.named_buffers())
    names = {id(tensor): name for name, tensor in expected.items() if name in streamed}
    assert {id(tensor) for tensor in expected.values()} == names.keys()  # one name of each suffices
    return streamed, {name: expected[name].detach() for name in streamed}


@pytest.mark.parametrize("head", ["policy", "value", "policy_and_value"])
@pytest.mark.parametrize(
    ("config", "options"),
    [(SMALL, {}), (SMALL, {"max_shard_size": "10KB"}), (EXPERTS, {}), (SMALL, {"dtype": torch.bfloat16})],
)
def test_files_are_read_as_from_pretrained_reads_them(
    tmp_path: Path, config: Any, options: dict[str, Any], head: Any
) -> None:
    """Tied weights, several files, experts that transformers fuses, another type."""
    streamed, expected = read(make_model_config(write(tmp_path, config, **options)), head)
    assert_close(streamed, expected, rtol=0, atol=0)


def test_pickled_files_are_read_too(tmp_path: Path) -> None:
    streamed, expected = read(make_model_config(as_bin(write(tmp_path))), "policy")
    assert_close(streamed, expected, rtol=0, atol=0)


@pytest.mark.parametrize("saved", [[], ["down_proj"]])
def test_adapters_start_with_the_numbers_of_a_whole_model(tmp_path: Path, saved: list[str]) -> None:
    lora = LoraConfig(rank=2, target_modules=["q_proj", "v_proj"], modules_to_save=saved)
    streamed, expected = read(make_model_config(write(tmp_path), lora=lora), "policy")
    assert_close(streamed, expected, rtol=0, atol=0)


def test_adapters_go_on_beside_their_own_base_only(tmp_path: Path) -> None:
    lora = LoraConfig(rank=2, target_modules=["q_proj"], modules_to_save=["down_proj"])
    trained = build_scorer(make_model_config(write(tmp_path / "base"), lora=lora), "policy", trainable=True)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter += parameter.requires_grad
    (tmp_path / "adapter").mkdir()
    weights = adapter_weights(trained.backbone)
    untrained = build_scorer(make_model_config(tmp_path / "base"), "policy", trainable=True)
    write_adapter(tmp_path / "adapter", trained.backbone, weights, untrained.base_fingerprint())
    lora = LoraConfig(
        rank=2, target_modules=["q_proj"], modules_to_save=["down_proj"], adapter_path=str(tmp_path / "adapter")
    )

    with patch.object(weight_files, "_convert", wraps=weight_files._convert) as convert:
        streamed, expected = read(make_model_config(tmp_path / "base", lora=lora), "policy")
    assert_close(streamed, expected, rtol=0, atol=0)
    assert convert.call_count == 3 + 2  # each layer, embeddings and norm are read once
    other = write(tmp_path / "other", LlamaConfig(**SIZES, num_hidden_layers=3, vocab_size=64))
    with pytest.raises(ValueError, match="was trained on another base"):
        list(stream_scorer(make_model_config(other, lora=lora), "policy", trainable=True))


def test_one_layer_is_held_at_a_time(tmp_path: Path) -> None:
    """Each part, once it is let go, is gone; the largest is a layer or the embeddings."""
    config = LlamaConfig(**SIZES, num_hidden_layers=6, vocab_size=64)
    sizes, held = [], []
    for part in stream_scorer(make_model_config(write(tmp_path, config)), "policy", trainable=True):
        assert [reference for reference in held if reference() is not None] == []
        held = [weakref.ref(tensor) for tensor in part.values()]
        sizes.append(sum(tensor.numel() for tensor in part.values()))
        part.clear()
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32
    assert max(sizes) == layer
    assert sizes.count(layer) == 6


def test_a_folder_without_weights_is_told_of(tmp_path: Path) -> None:
    (write(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="no model could be loaded from `path: .*` .the folder holds no weights"):
        stream_scorer(make_model_config(tmp_path), "policy", trainable=True)
    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(ValueError, match="no model could be loaded|Unrecognized model"):
        stream_scorer(make_model_config(tmp_path), "policy", trainable=True)
