"""What a checkpoint does not hold must be that of its run, by content; where it lies does not matter."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from tests.runs import (
    make_chats,
    make_model_config,
    make_ppo,
    make_prompts,
    make_reward,
    make_rollout,
    make_sft,
    make_trainer,
)
from tests.tiny import write_tiny_folder
from verl_lightning.algorithms.advantages.gae import GAE
from verl_lightning.models.config import LoraConfig
from verl_lightning.modules.ppo_config import CriticConfig, KLConfig


def edit_json(file, change):
    """Rewrites a JSON file."""
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def swap_tokens(folder):
    """The ids of two characters."""

    def swap(content):
        vocab = content["model"]["vocab"]
        vocab["a"], vocab["b"] = vocab["b"], vocab["a"]

    edit_json(folder / "tokenizer.json", swap)


def change_template(folder):
    """A word more."""
    file = next(folder.glob("chat_template*"), folder / "tokenizer_config.json")
    file.write_text(file.read_text() + "!")


def change_rotation(folder):
    edit_json(folder / "config.json", lambda config: config["rope_parameters"].update(rope_theta=77.0))


def change_end(folder):
    edit_json(folder / "generation_config.json", lambda config: config.update(eos_token_id=[5, 6]))


def train(folder, prompts, tmp_path, *, steps, ckpt_path=None, **changes):
    """GRPO with a KL penalty; saves at its end where it has not resumed."""
    trainer = make_trainer(tmp_path, make_rollout(), max_steps=steps)
    module = make_ppo(folder, **{"kl": KLConfig(coef=0.1)} | changes)
    trainer.fit(module, datamodule=make_prompts(prompts), ckpt_path=ckpt_path, weights_only=True)
    if ckpt_path is None:
        trainer.save_checkpoint(tmp_path / "saved.ckpt")
    return trainer


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tiny_folder, prompt_file):
    """A checkpoint of one step with a KL penalty."""
    folder = tmp_path_factory.mktemp("saved")
    train(tiny_folder, prompt_file, folder, steps=1)
    return folder / "saved.ckpt"


def other_folder(tmp_path, tiny_folder, change):
    """A model with the same weights."""
    folder = tmp_path / "other"
    shutil.copytree(tiny_folder, folder)
    change(folder)
    return folder


CHANGES = {
    "tokenizer": (swap_tokens, "the tokenizer is not that"),
    "template": (change_template, "the chat template is not that"),
    "end": (change_end, r"the list of end tokens is not that of `ckpt_path`: `\d+` there, `.*5, 6.*` here"),
    "config": (change_rotation, r"`config.json` is not .*: `rope_parameters.rope_theta` was 10000.0 there and is 77.0"),
}


@pytest.mark.parametrize(("change", "told"), CHANGES.values(), ids=CHANGES)
def test_another_model_folder_is_refused(tmp_path, tiny_folder, prompt_file, saved, change, told):
    folder = other_folder(tmp_path, tiny_folder, change)
    with pytest.raises(ValueError, match=f"`model.actor.path`: {told}"):
        train(folder, prompt_file, tmp_path, steps=2, ckpt_path=saved)


def test_another_reference_is_refused_with_both(tmp_path, tiny_folder, prompt_file, saved):
    """It would be the weights of another model with the same shapes, and the KL penalty another one."""
    other = write_tiny_folder(tmp_path / "other", seed=1)
    told = rf"`model.actor.path`: the reference .* `{tiny_folder}` \(\w+\) there, `{other}` \(\w+\) here. Use that of"
    with pytest.raises(ValueError, match=told):
        train(other, prompt_file, tmp_path, steps=2, ckpt_path=saved)


def test_the_same_model_elsewhere_goes_on(tmp_path, tiny_folder, prompt_file, saved):
    moved = other_folder(tmp_path, tiny_folder, lambda folder: None)
    assert train(moved, prompt_file, tmp_path, steps=2, ckpt_path=saved).global_step == 2


def test_weights_that_the_checkpoint_holds_may_come_from_anywhere(tmp_path, tiny_folder, prompt_file, saved):
    """Without a reference nothing is left of the path's."""
    other = write_tiny_folder(tmp_path / "other", seed=1)
    assert train(other, prompt_file, tmp_path, steps=2, ckpt_path=saved, kl=None).global_step == 2


def test_a_reference_that_comes_later_is_the_model_that_the_first_run_began_with(tmp_path, tiny_folder, prompt_file):
    """Also where a run between them had another one there, of which it needed nothing."""
    other, second = write_tiny_folder(tmp_path / "other", seed=1), tmp_path / "second.ckpt"
    train(tiny_folder, prompt_file, tmp_path, steps=1, kl=None)
    train(other, prompt_file, tmp_path, steps=2, kl=None, ckpt_path=tmp_path / "saved.ckpt").save_checkpoint(second)

    with pytest.raises(ValueError, match=rf"the reference .* `{tiny_folder}` \(\w+\) there, `{other}` \(\w+\) here"):
        train(other, prompt_file, tmp_path, steps=3, ckpt_path=second)
    assert train(tiny_folder, prompt_file, tmp_path, steps=3, ckpt_path=second).global_step == 3


def test_a_reference_that_cannot_be_compared_is_told(tmp_path, tiny_folder, prompt_file, saved, caplog):
    actor = make_model_config(tiny_folder, dtype="bfloat16")
    with pytest.warns(UserWarning, match="does not tell whether .* its run began with in another `dtype`"):
        train(tiny_folder, prompt_file, tmp_path, steps=2, actor=actor, ckpt_path=saved)
    assert "`model.actor.dtype`: float32 in the checkpoint, bfloat16 now." in caplog.text


def test_an_evaluation_asks_for_the_tokenizer_and_not_for_the_reference(tmp_path, tiny_folder, prompt_file, saved):
    trainer, data = make_trainer(tmp_path, make_rollout()), make_prompts(prompt_file, prompt_file)
    other = make_ppo(write_tiny_folder(tmp_path / "weights", seed=1), kl=KLConfig(coef=0.1))
    assert trainer.validate(other, datamodule=data, ckpt_path=saved, verbose=False, weights_only=True)

    swapped = make_ppo(other_folder(tmp_path, tiny_folder, swap_tokens))
    with pytest.raises(ValueError, match="the tokenizer is not that"):
        trainer.validate(swapped, datamodule=data, ckpt_path=saved, weights_only=True)


def test_a_checkpoint_of_an_older_version_goes_on(tmp_path, tiny_folder, prompt_file, saved):
    checkpoint = torch.load(saved, weights_only=True)
    for key in ("identities", "model_configs", "told_settings"):
        del checkpoint[key]
    torch.save(checkpoint, tmp_path / "old.ckpt")
    with pytest.warns(UserWarning, match="`ckpt_path` does not tell whether"):
        assert train(tiny_folder, prompt_file, tmp_path, steps=2, ckpt_path=tmp_path / "old.ckpt").global_step == 2


def test_another_reward_model_is_refused(tmp_path, tiny_folder, prompt_file):
    """Its folder is an argument of the reward function."""
    judge = write_tiny_folder(tmp_path / "judge", seed=2)
    reward = make_reward("of_a_model", arguments={"path": str(judge)})
    train(tiny_folder, prompt_file, tmp_path, steps=1, reward=reward)
    judge.rename(tmp_path / "moved")
    moved = make_reward("of_a_model", arguments={"path": str(tmp_path / "moved")})
    train(tiny_folder, prompt_file, tmp_path, steps=2, reward=moved, ckpt_path=tmp_path / "saved.ckpt")

    write_tiny_folder(judge, seed=3)
    told = r"`model.reward.arguments.path`: the reward model is not that .*: `.*judge` \(\w+\) there, `.*judge`"
    with pytest.raises(ValueError, match=told):
        train(tiny_folder, prompt_file, tmp_path, steps=2, reward=reward, ckpt_path=tmp_path / "saved.ckpt")


def test_another_base_of_a_critics_adapters_is_refused_by_its_key(tmp_path, tiny_folder, prompt_file):
    def critic(folder):
        return CriticConfig(model=make_model_config(folder, lora=LoraConfig(rank=2)))

    train(tiny_folder, prompt_file, tmp_path, steps=1, advantage=GAE(), critic=critic(tiny_folder))
    other = write_tiny_folder(tmp_path / "other", seed=1)
    path = tmp_path / "saved.ckpt"
    told = r"adapters for another base than `model.critic.model.path`: .* \(fingerprint \w+ there, \w+ here\)"
    with pytest.raises(ValueError, match=told):
        train(tiny_folder, prompt_file, tmp_path, steps=2, advantage=GAE(), critic=critic(other), ckpt_path=path)


def test_sft_asks_for_its_tokenizer_too(tmp_path, tiny_folder, chat_file):
    trainer = make_trainer(tmp_path, max_steps=1)
    trainer.fit(make_sft(tiny_folder), datamodule=make_chats(chat_file))
    trainer.save_checkpoint(tmp_path / "sft.ckpt")
    other = make_sft(other_folder(tmp_path, tiny_folder, swap_tokens))
    with pytest.raises(ValueError, match="`model.actor.path`: the tokenizer is not that of `ckpt_path`"):
        make_trainer(tmp_path, max_steps=2).fit(
            other, datamodule=make_chats(chat_file), ckpt_path=tmp_path / "sft.ckpt", weights_only=True
        )
