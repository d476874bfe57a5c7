"""Folders that transformers loads, written while PPO and SFT train."""

from __future__ import annotations

import json

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from peft import PeftModel
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.runs import make_chats, make_model_config, make_ppo, make_prompts, make_rollout, make_sft, make_trainer
from tests.tolerances import assert_near
from verl_lightning.algorithms.advantages.gae import GAE
from verl_lightning.callbacks import HFCheckpoint
from verl_lightning.models.config import LoraConfig
from verl_lightning.modules.ppo_config import CriticConfig, UpdateConfig

TOKENS = torch.arange(12).view(2, 6)


def logits_of(model):
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def saving_trainer(tmp_path, *callbacks, **changes):
    return make_trainer(tmp_path, *callbacks, enable_checkpointing=True, **changes)


def fit_sft(tmp_path, tiny_folder, chat_file, *callbacks, **changes):
    module = make_sft(tiny_folder)
    saving_trainer(tmp_path, *callbacks, **changes).fit(module, datamodule=make_chats(chat_file, chat_file))
    return module


@pytest.fixture
def sft_folder(tmp_path, tiny_folder, chat_file):
    """The module after three steps, and the folder that was written at the end."""
    module = fit_sft(tmp_path, tiny_folder, chat_file, HFCheckpoint(str(tmp_path / "hf")))
    return module, tmp_path / "hf" / "last"


def test_transformers_loads_the_trained_policy(sft_folder, tiny_folder):
    module, folder = sft_folder

    loaded = AutoModelForCausalLM.from_pretrained(folder)

    assert_close(logits_of(loaded), logits_of(module.policy.backbone), rtol=0, atol=0)
    assert not torch.equal(logits_of(loaded), logits_of(AutoModelForCausalLM.from_pretrained(tiny_folder)))


def test_the_folder_holds_tokenizer_template_and_generation_config(sft_folder, tiny_folder):
    _, folder = sft_folder

    ours, theirs = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(tiny_folder)

    assert ours.chat_template == theirs.chat_template
    assert ours.get_vocab() == theirs.get_vocab()
    assert GenerationConfig.from_pretrained(folder).eos_token_id == theirs.eos_token_id


def test_tied_weights_are_written_once_and_tied_on_load(sft_folder):
    _, folder = sft_folder

    names = load_file(folder / "model.safetensors").keys()
    loaded = AutoModelForCausalLM.from_pretrained(folder)

    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_large_models_are_cut_into_shards_with_an_index(tmp_path, tiny_folder, chat_file):
    module = fit_sft(tmp_path, tiny_folder, chat_file, HFCheckpoint(str(tmp_path / "hf"), max_shard_gib=20e3 / 2**30))
    folder = tmp_path / "hf" / "last"

    index = json.loads((folder / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in folder.glob("model-*"))

    assert len(shards) > 2
    assert set(index["weight_map"].values()) == set(shards)
    assert all(sum(w.nbytes for w in load_file(folder / shard).values()) <= 20e3 for shard in shards)
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert_close(logits_of(loaded), logits_of(module.policy.backbone), rtol=0, atol=0)


def test_dtype_chooses_the_stored_type(tmp_path, tiny_folder, chat_file):
    module = fit_sft(tmp_path, tiny_folder, chat_file, HFCheckpoint(str(tmp_path / "hf"), dtype="bfloat16"))

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf" / "last", dtype="auto")

    assert loaded.dtype == torch.bfloat16
    assert_close(loaded.lm_head.weight, module.policy.backbone.lm_head.weight.bfloat16(), rtol=0, atol=0)


def test_top_k_keeps_the_folders_with_the_best_metric(tmp_path, tiny_folder, chat_file):
    callback = HFCheckpoint(str(tmp_path / "hf"), monitor="val/loss", mode="min", save_top_k=2)

    fit_sft(tmp_path, tiny_folder, chat_file, callback, max_steps=4, val_check_interval=1)

    # Four validations of a falling loss: the last two are the best.
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == ["last", "step=3", "step=4"]
    assert callback.best_model_path == str(tmp_path / "hf" / "step=4")


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_a_repeated_step_takes_the_place_of_its_folder(tmp_path, tiny_folder, chat_file):
    for _ in range(2):
        callback = HFCheckpoint(str(tmp_path / "hf"), every_n_train_steps=2, save_top_k=-1)
        fit_sft(tmp_path, tiny_folder, chat_file, callback)

    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == ["last", "step=2"]


def test_chosen_steps_of_ppo_are_kept(tmp_path, tiny_folder, prompt_file):
    callback = HFCheckpoint(str(tmp_path / "hf"), every_n_train_steps=2, save_top_k=-1)
    module = make_ppo(tiny_folder)

    saving_trainer(tmp_path, make_rollout(), callback, max_steps=5).fit(module, datamodule=make_prompts(prompt_file))

    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == ["last", "step=2", "step=4"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf" / "last")
    assert_close(logits_of(loaded), logits_of(module.policy.backbone), rtol=0, atol=0)


def test_a_shared_value_head_has_its_own_file_and_is_read_back(tmp_path, tiny_folder, prompt_file):
    module = make_ppo(tiny_folder, advantage=GAE(), critic=CriticConfig())
    callbacks = make_rollout(), HFCheckpoint(str(tmp_path / "hf"))
    saving_trainer(tmp_path, *callbacks).fit(module, datamodule=make_prompts(prompt_file))
    folder = tmp_path / "hf" / "last"

    (weight,) = load_file(folder / "value_head.safetensors").values()
    again = make_ppo(folder, advantage=GAE(), critic=CriticConfig())
    data = make_prompts(prompt_file, prompt_file)
    saving_trainer(tmp_path, make_rollout(), limit_val_batches=1).validate(again, datamodule=data, verbose=False)

    assert weight.abs().sum() > 0
    assert_close(weight, module.policy.value_head.weight.detach(), rtol=0, atol=0)
    assert_close(again.policy.value_head.weight, module.policy.value_head.weight, rtol=0, atol=0)


def test_a_critic_is_written_with_its_value_head(tmp_path, tiny_folder, prompt_file):
    critic = CriticConfig(model=make_model_config(tiny_folder))
    module = make_ppo(tiny_folder, advantage=GAE(), critic=critic, update=UpdateConfig(mini_batch_size=2))
    callbacks = make_rollout(), HFCheckpoint(str(tmp_path / "hf"), role="critic")

    saving_trainer(tmp_path, *callbacks).fit(module, datamodule=make_prompts(prompt_file))

    folder = tmp_path / "hf" / "last"
    loaded = AutoModel.from_pretrained(folder).eval()(TOKENS).last_hidden_state
    assert_close(loaded, module.critic.backbone.eval()(TOKENS).last_hidden_state, rtol=0, atol=0)
    head = load_file(folder / "value_head.safetensors")
    assert_close(head["weight"], module.critic.value_head.weight.detach(), rtol=0, atol=0)


def test_a_critic_must_exist_to_be_written(tmp_path, tiny_folder, chat_file):
    with pytest.raises(MisconfigurationException, match="no critic with a trunk of its own"):
        fit_sft(tmp_path, tiny_folder, chat_file, HFCheckpoint(role="critic"))


def fit_lora(tmp_path, tiny_folder, prompt_file, **changes):
    """Three GRPO steps that train adapters, and the module after them."""
    module = make_ppo(tiny_folder, actor=make_model_config(tiny_folder, lr=1e-2, lora=LoraConfig(rank=4, alpha=8.0)))
    callbacks = make_rollout(), HFCheckpoint(str(tmp_path / "hf"), **changes)
    saving_trainer(tmp_path, *callbacks).fit(module, datamodule=make_prompts(prompt_file))
    return module


def test_a_lora_run_writes_an_adapter_that_peft_loads(tmp_path, tiny_folder, prompt_file):
    module = fit_lora(tmp_path, tiny_folder, prompt_file)
    folder = tmp_path / "hf" / "last"

    base = AutoModelForCausalLM.from_pretrained(tiny_folder)
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_folder), folder)

    assert_near(logits_of(loaded), logits_of(module.policy.backbone))
    assert not torch.allclose(logits_of(loaded), logits_of(base), atol=1e-3)
    assert not list(folder.glob("model*"))
    trained = sum(4 * p.numel() for p in module.parameters() if p.requires_grad)
    assert (folder / "adapter_model.safetensors").stat().st_size < trained + 10_000
    assert AutoTokenizer.from_pretrained(folder).chat_template


def test_merge_adapters_writes_the_whole_model(tmp_path, tiny_folder, prompt_file):
    module = fit_lora(tmp_path, tiny_folder, prompt_file, merge_adapters=True)

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf" / "last")

    assert_near(logits_of(loaded), logits_of(module.policy.backbone))
    assert not (tmp_path / "hf" / "last" / "adapter_config.json").exists()


def test_merge_adapters_needs_adapters(tmp_path, tiny_folder, chat_file):
    with pytest.raises(MisconfigurationException, match="the actor has no adapters"):
        fit_sft(tmp_path, tiny_folder, chat_file, HFCheckpoint(merge_adapters=True))


class Blocker(Callback):
    """Puts a file where folders are to be written."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, *args):
        self.path.parent.mkdir(exist_ok=True)
        self.path.touch()


def test_a_folder_that_cannot_be_written_stops_the_run(tmp_path, tiny_folder, chat_file):
    blocker = Blocker(tmp_path / "hf")

    with pytest.raises(RuntimeError, match=r"could not write `.*last` \(NotADirectoryError"):
        fit_sft(tmp_path, tiny_folder, chat_file, blocker, HFCheckpoint(str(tmp_path / "hf")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save_top_k": 3}, "`save_top_k: 3` has nothing to choose from.* no folder but `last` is written"),
        ({"max_shard_gib": 0.0}, "`max_shard_gib` must be above 0, got 0.0"),
    ],
)
def test_options_without_effect_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        HFCheckpoint(**options)


def test_validation_metrics_are_not_ranked_between_validations():
    with pytest.raises(ValueError, match="Leave `every_n_train_steps` out"):
        HFCheckpoint(monitor="val/reward", every_n_train_steps=5)


def test_folders_stand_beside_lightnings_checkpoints(tmp_path, tiny_folder, chat_file):
    fit_sft(tmp_path, tiny_folder, chat_file, HFCheckpoint())

    assert (tmp_path / "hf" / "last" / "config.json").exists()
    assert not (tmp_path / "checkpoints").exists()


def test_state_keys_tell_callbacks_apart():
    callbacks = [
        ModelCheckpoint(every_n_train_steps=2, mode="max"),
        HFCheckpoint(every_n_train_steps=2),
        HFCheckpoint(every_n_train_steps=2, dtype="bfloat16"),
        HFCheckpoint(every_n_train_steps=2, role="critic"),
    ]

    assert len({callback.state_key for callback in callbacks}) == 4


def test_resume_does_not_take_a_folder_for_a_checkpoint(tmp_path, tiny_folder, chat_file):
    fit_sft(tmp_path, tiny_folder, chat_file, HFCheckpoint(str(tmp_path / "hf")))
    trainer = saving_trainer(tmp_path, HFCheckpoint(str(tmp_path / "hf")), max_steps=1)

    with pytest.warns(UserWarning, match="there is no last checkpoint available"):
        trainer.fit(make_sft(tiny_folder), datamodule=make_chats(chat_file), ckpt_path="last")
