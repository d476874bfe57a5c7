"""Folders that several ranks write together, and what they were made of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint
from peft import PeftModel
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, GenerationConfig

from tests.processes import on_ranks
from tests.runs import make_model_config, make_ppo, make_prompts, make_rollout, make_trainer
from tests.tolerances import assert_near
from verl_lightning.algorithms.advantages.gae import GAE
from verl_lightning.callbacks import HFCheckpoint
from verl_lightning.cli.export import export
from verl_lightning.models.config import LoraConfig
from verl_lightning.modules.ppo_config import CriticConfig, KLConfig
from verl_lightning.strategies import STRATEGIES

pytestmark = pytest.mark.slow


def train(folder: Path, prompts: Path, path: Path, strategy: str, with_lora: bool) -> dict[str, torch.Tensor]:
    """Two steps of PPO on two ranks; returns the policy's weights, adapters merged in."""
    lora = LoraConfig(rank=4, alpha=8.0) if with_lora else None
    actor = make_model_config(folder, lr=1e-2, lora=lora)
    module = make_ppo(folder, actor=actor, advantage=GAE(), critic=CriticConfig(), kl=KLConfig())
    checkpoints = [
        HFCheckpoint(str(path / "hf")),
        HFCheckpoint(str(path / "bf16"), dtype="bfloat16", merge_adapters=with_lora),
        ModelCheckpoint(path / "trainer", filename="last", every_n_train_steps=2),
    ]
    options = {"strategy": STRATEGIES[strategy](), "devices": 2, "max_steps": 2, "enable_checkpointing": True}
    make_trainer(path, make_rollout(), *checkpoints, **options).fit(module, make_prompts(prompts))
    return {name: weight.clone() for name, weight in module.contract.named_weights(module.policy)}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_write_one_model_together(tmp_path, tiny_folder, prompt_file, strategy):
    weights, others = on_ranks(2, train, tiny_folder, prompt_file, tmp_path, strategy, False)

    for folder, dtype in [("hf", torch.float32), ("bf16", torch.bfloat16)]:
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / folder / "last", dtype="auto")
        for name, weight in loaded.named_parameters():
            assert_close(weight.data, weights[name].to(dtype), rtol=0, atol=0)
            assert torch.equal(weights[name], others[name])
    assert (tmp_path / "hf" / "last" / "value_head.safetensors").exists()
    ours, theirs = (GenerationConfig.from_pretrained(path) for path in (tmp_path / "hf" / "last", tiny_folder))
    assert ours.to_diff_dict() == theirs.to_diff_dict()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_write_one_adapter_together(tmp_path, tiny_folder, prompt_file, strategy):
    weights, _ = on_ranks(2, train, tiny_folder, prompt_file, tmp_path, strategy, True)

    base = AutoModelForCausalLM.from_pretrained(tiny_folder)
    merged = PeftModel.from_pretrained(base, tmp_path / "hf" / "last").merge_and_unload()

    for name, weight in merged.named_parameters():
        assert_near(weight.data, weights[name])
    export(
        tmp_path / "trainer" / "last.ckpt", tmp_path / "merged", to="merged", config=write_config(tmp_path, tiny_folder)
    )
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    for name, weight in exported.named_parameters():
        assert_close(weight.data, weights[name], rtol=0, atol=0)
    assert not torch.equal(weights["model.layers.0.mlp.up_proj.weight"], base_weight(tiny_folder))
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "bf16" / "last", dtype="auto").dtype == torch.bfloat16


def write_config(path, folder):
    """What `verl-fit` would have saved of the run above."""
    actor = {"path": str(folder), "lora": {"rank": 4, "alpha": 8.0}}
    settings = {"model": {"init_args": {"actor": actor, "critic": {"model": None}}}}
    (path / "config.yaml").write_text(yaml.safe_dump(settings))
    return path / "config.yaml"


def base_weight(folder):
    return AutoModelForCausalLM.from_pretrained(folder).model.layers[0].mlp.up_proj.weight.data
