"""LoRA in whole runs: rollouts from the newest policy, small checkpoints, exact resume."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from tests.runs import Recorder, make_model_config, make_ppo, make_prompts, make_rollout, make_trainer
from tests.tiny import write_tiny_folder
from verl_lightning.algorithms.advantages.gae import GAE
from verl_lightning.models.config import LoraConfig
from verl_lightning.modules.ppo_config import CriticConfig, KLConfig

ADAPTERS = LoraConfig(rank=4, alpha=8.0)


def lora_ppo(folder, **changes):
    return make_ppo(folder, actor=make_model_config(folder, lr=1e-2, lora=ADAPTERS), **changes)


def fit(tmp_path, prompt_file, module, *callbacks, max_steps=3, ckpt_path=None):
    checkpoint = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, every_n_train_steps=2)
    callbacks = (make_rollout(), checkpoint, *callbacks)
    trainer = make_trainer(tmp_path, *callbacks, enable_checkpointing=True, max_steps=max_steps)
    trainer.fit(module, datamodule=make_prompts(prompt_file), ckpt_path=ckpt_path)
    return trainer


@pytest.fixture
def base_folder(tmp_path):
    return write_tiny_folder(tmp_path / "base", hidden_size=64)


def test_rollouts_come_from_the_merged_policy(tmp_path, tiny_folder, prompt_file):
    """Rollout log-probs equal the trainer's own of the adapted policy, at every step and not only at the first."""
    recorder = Recorder()
    fit(tmp_path, prompt_file, lora_ppo(tiny_folder, kl=KLConfig()), recorder)

    gaps = recorder.column("rollout_corr/abs_log_prob_gap")
    references = recorder.column("actor/ref_kl")

    assert max(gaps) < 1e-5
    assert references[0] == pytest.approx(0, abs=1e-7)  # B is zero: the policy is the base
    assert references[2] > 1e-4


def test_the_checkpoint_holds_only_what_is_trained(tmp_path, base_folder, prompt_file):
    module = lora_ppo(base_folder, advantage=GAE(), critic=CriticConfig())

    fit(tmp_path, prompt_file, module)

    checkpoint = torch.load(tmp_path / "step=2.ckpt")
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    assert checkpoint["state_dict"].keys() == trained
    assert "actor.value_head.weight" in trained


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_resumed_lora_run_goes_on_as_if_never_stopped(tmp_path, tiny_folder, prompt_file):
    whole, resumed = lora_ppo(tiny_folder), lora_ppo(tiny_folder)

    fit(tmp_path, prompt_file, whole, max_steps=4)
    fit(tmp_path / "again", prompt_file, resumed, max_steps=4, ckpt_path=tmp_path / "step=2.ckpt")

    assert whole.state_dict().keys() == resumed.state_dict().keys()
    for name, weight in whole.state_dict().items():
        assert_close(resumed.state_dict()[name], weight, rtol=0, atol=0)


def test_the_base_is_never_written(tmp_path, tiny_folder, prompt_file):
    module = lora_ppo(tiny_folder)

    fit(tmp_path, prompt_file, module)

    base = AutoModelForCausalLM.from_pretrained(tiny_folder).state_dict()
    weights = module.policy.backbone.state_dict()
    for name, weight in weights.items():
        if ".lora_" not in name:
            assert torch.equal(weight, base[name.replace(".base_layer", "")])


def test_adapters_do_not_load_on_another_base(tmp_path, tiny_folder, prompt_file):
    other = write_tiny_folder(tmp_path / "other", seed=1)
    fit(tmp_path, prompt_file, lora_ppo(tiny_folder))

    with pytest.raises(ValueError, match="adapters for another base than `model.actor.path`"):
        fit(tmp_path / "again", prompt_file, lora_ppo(other), ckpt_path=tmp_path / "step=2.ckpt")


def test_a_checkpoint_with_a_missing_adapter_is_refused(tmp_path, tiny_folder, prompt_file):
    fit(tmp_path, prompt_file, lora_ppo(tiny_folder))
    checkpoint = torch.load(tmp_path / "step=2.ckpt")
    name = next(name for name in checkpoint["state_dict"] if "lora_B" in name)
    del checkpoint["state_dict"][name]
    torch.save(checkpoint, tmp_path / "cut.ckpt")

    with pytest.raises(RuntimeError, match=f'Missing key.*"{name}"'):
        fit(tmp_path / "again", prompt_file, lora_ppo(tiny_folder), ckpt_path=tmp_path / "cut.ckpt")
