"""Folders that are whole or not there, and names as transformers stores them."""

from __future__ import annotations

import json
import os
import shutil
import signal

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from tests.processes import start
from verl_lightning.models import hf_folder
from verl_lightning.models.build import build_skeleton
from verl_lightning.models.config import ModelConfig
from verl_lightning.models.hf_folder import (
    ShardWriter,
    atomic_folder,
    clear_partial_folders,
    layer_of,
    remove_folder,
    write_model,
)
from verl_lightning.models.pretrained import read_generation_config
from verl_lightning.models.weights import merged_weights


def make_folder(path, text):
    with atomic_folder(path) as folder:
        (folder / "config.json").write_text(text)


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_folder_takes_the_place_of_the_old_one(tmp_path, monkeypatch, can_exchange):
    if not can_exchange:
        monkeypatch.setattr(hf_folder, "_exchange", lambda one, other: False)
    make_folder(tmp_path / "last", "old")
    (tmp_path / "last" / "extra").touch()

    make_folder(tmp_path / "last", "new")

    assert (tmp_path / "last" / "config.json").read_text() == "new"
    assert not (tmp_path / "last" / "extra").exists()
    assert os.listdir(tmp_path) == ["last"]


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_folder_takes_the_place_of_a_file_again_and_again(tmp_path, monkeypatch, can_exchange):
    """A run that changes its strategy writes folders where it wrote files."""
    if not can_exchange:
        monkeypatch.setattr(hf_folder, "_exchange", lambda one, other: False)
    (tmp_path / "last").write_text("a checkpoint")
    (tmp_path / ".last.partial").write_text("what a kill left of another")

    make_folder(tmp_path / "last", "new")
    make_folder(tmp_path / "last", "newer")

    assert (tmp_path / "last" / "config.json").read_text() == "newer"
    assert os.listdir(tmp_path) == ["last"]


def fail(folder):
    (folder / "config.json").write_text("half")
    raise OSError("disk full")


def test_an_error_while_writing_leaves_the_old_folder(tmp_path):
    make_folder(tmp_path / "last", "old")

    with pytest.raises(OSError, match="disk full"), atomic_folder(tmp_path / "last") as folder:
        fail(folder)

    assert (tmp_path / "last" / "config.json").read_text() == "old"
    assert os.listdir(tmp_path) == ["last"]


def write_and_die(source, target, writes):
    """Write a model in small shards; a SIGKILL comes after some of them."""

    class DyingWriter(ShardWriter):
        def _flush(self):
            super()._flush()
            if len(self._names) == writes:
                os.kill(os.getpid(), signal.SIGKILL)

    hf_folder.ShardWriter = DyingWriter
    model = AutoModelForCausalLM.from_pretrained(source)
    with atomic_folder(target) as folder:
        write_model(folder, model, model.named_parameters(), max_shard_bytes=20_000)


@pytest.mark.parametrize("writes", [1, 3])
def test_a_kill_while_writing_leaves_the_old_folder(tmp_path, tiny_folder, writes):
    models = tmp_path / "models"
    make_folder(models / "last", "old")

    with start(write_and_die, tiny_folder, models / "last", writes, folder=tmp_path / "process") as process:
        process.wait(code=-signal.SIGKILL)

    assert (models / "last" / "config.json").read_text() == "old"
    (half,) = models.glob(".*")
    with pytest.raises(ValueError, match="config.json"):
        AutoModelForCausalLM.from_pretrained(half)
    clear_partial_folders(models)
    assert os.listdir(models) == ["last"]


def test_removal_of_a_folder_that_is_gone_is_fine(tmp_path):
    make_folder(tmp_path / "old", "old")

    remove_folder(tmp_path / "old")
    remove_folder(tmp_path / "old")

    assert os.listdir(tmp_path) == []


def test_fused_experts_are_stored_as_transformers_stores_them(tmp_path):
    """Transformers 5 holds the experts of a layer as one tensor; files and other engines know them one by one."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 32}
    MixtralForCausalLM(MixtralConfig(**sizes, **heads)).save_pretrained(tmp_path / "source")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "source").eval()
    (tmp_path / "ours").mkdir()

    write_model(tmp_path / "ours", model, merged_weights(model))

    expected, ours = (load_file(tmp_path / name / "model.safetensors") for name in ("source", "ours"))
    assert "model.layers.0.block_sparse_moe.experts.3.w1.weight" in ours
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], weight) for name, weight in expected.items())
    tokens = torch.arange(8)[None]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert_close(again(tokens).logits, model(tokens).logits, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "layer"),
    [("model.layers.11.mlp.experts.3.w1", "model.layers.11."), ("model.norm.weight", ""), ("h.0.attn.bias", "h.0.")],
)
def test_a_weights_layer_is_read_from_its_name(name, layer):
    assert layer_of(name) == layer


def test_the_generation_config_is_the_folders_even_if_the_model_did_not_read_it(tmp_path, tiny_folder):
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(settings | {"top_k": 7, "do_sample": True}))
    skeleton = build_skeleton(ModelConfig(path=str(folder)), "policy", trainable=True).backbone

    assert skeleton.generation_config.top_k != 7
    assert read_generation_config(str(skeleton.name_or_path)).top_k == 7
