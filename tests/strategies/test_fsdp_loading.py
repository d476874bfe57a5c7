"""A folder becomes shards: no rank holds a whole copy, and what goes wrong on rank 0 is told to all."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.processes import on_ranks
from tests.runs import make_model_config, make_sft, make_trainer
from verl_lightning.strategies import FSDPStrategy

MIB = 2**20


def memory(field: str) -> int:
    """Bytes of this process as Linux counts them: `VmRSS` now, `VmHWM` at most."""
    return 1024 * int(re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def load(folder: Path, path: Path) -> int:
    """Bytes by which this rank has grown at most, once it has its part of the model; all ranks load at once."""
    strategy, module = FSDPStrategy(), make_sft(folder)
    module.trainer = make_trainer(path, devices=2, strategy=strategy)
    strategy.connect(module)
    strategy.setup_environment()
    Path("/proc/self/clear_refs").write_text("5")  # forgets the most so far
    before = memory("VmRSS")
    model = strategy.make_model(make_model_config(folder), "policy", trainable=True)
    grown = memory("VmHWM") - before
    backbone = model.backbone
    assert backbone.lm_head.weight is backbone.model.embed_tokens.weight
    return grown


def write_large(folder: Path) -> int:
    """A model of twelve equal layers; returns its bytes in float32."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "vocab_size": 64}
    config = LlamaConfig(**sizes, num_hidden_layers=12, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return 4 * model.num_parameters()


def test_no_rank_holds_a_whole_copy(tmp_path: Path) -> None:
    """A rank grows by its half and a few of twelve layers; a copy on rank 0 would make it grow by three halves."""
    size = write_large(tmp_path / "model")
    assert size > 190 * MIB

    for grown in on_ranks(2, load, tmp_path / "model", tmp_path):
        assert size / 2 < grown < size / 2 + 4 * size / 12


def fail_to_load(folder: Path, path: Path) -> str:
    """What each rank hears."""
    with pytest.raises(Exception) as caught:  # noqa: PT011  the caller compares the message
        load(folder, path)
    return str(caught.value)


@pytest.mark.parametrize(
    ("harm", "expected"),
    [
        ("missing", ["lacks 1 weights of the model, such as `backbone.model.layers.1.mlp.up_proj.weight`"] * 2),
        (
            "shape",
            [
                "up_proj.weight` with shape .63, 32., but by `config.json` it is .64, 32.",
                "rank 0 could not load `path: ",
            ],
        ),
    ],
)
def test_a_folder_that_is_not_whole_is_told_of(
    harm: str, expected: list[str], tiny_folder: Path, tmp_path: Path
) -> None:
    weights: dict[str, Any] = load_file(tiny_folder / "model.safetensors")
    removed = weights.pop("model.layers.1.mlp.up_proj.weight")
    if harm == "shape":
        weights["model.layers.1.mlp.up_proj.weight"] = removed[1:].clone()
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in tiny_folder.iterdir():
        if file.suffix != ".safetensors":
            (broken / file.name).write_bytes(file.read_bytes())
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})

    for said, words in zip(on_ranks(2, fail_to_load, broken, tmp_path), expected, strict=True):
        assert re.search(words, said)
