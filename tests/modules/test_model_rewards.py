"""Rewards of a reward model on the trainer's devices, beside transformers' own classifier."""

from __future__ import annotations

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, seed_everything
from torch.testing import assert_close
from transformers import AutoModelForSequenceClassification

from tests.processes import on_ranks
from tests.runs import Recorder, make_model_config, make_ppo, make_prompts, make_reward, make_rollout, make_trainer
from verl_lightning.algorithms.advantages.gae import GAE
from verl_lightning.models.config import OptimConfig
from verl_lightning.modules.ppo_config import CriticConfig
from verl_lightning.rewards.config import RewardConfig, RewardModelConfig
from verl_lightning.strategies import STRATEGIES


class Seen(Callback):
    """Keeps what each iteration was judged by."""

    def __init__(self):
        self.scored = []

    def on_experience(self, module, scored, experience, rows):
        """As `ExperienceListener` says."""
        self.scored.append(scored)


def judged(tmp_path, folder, prompt_file, reward, *, max_steps=1, lr=1e-3, trainer=None, **parts):
    seed_everything(0, verbose=False)
    seen, recorder = Seen(), Recorder()
    actor = make_model_config(folder, optim=OptimConfig(lr=lr))
    module = make_ppo(folder, **{"reward": reward, "actor": actor} | parts)
    options = {"max_steps": max_steps} | (trainer or {})
    trainer = make_trainer(tmp_path, make_rollout(max_new_tokens=12), seen, recorder, **options)
    trainer.fit(module, datamodule=make_prompts(prompt_file))
    return seen.scored, recorder


def by_transformers(folder, rollout, length=None):
    """Logit of each response, or of its first tokens, one sequence at a time."""
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    width, rewards = rollout.response_mask.shape[1], []
    for ids, mask in zip(rollout.input_ids, rollout.attention_mask, strict=True):
        real = mask.clone()
        real[mask.shape[0] - width + (width if length is None else length) :] = False
        with torch.no_grad():
            rewards.append(model(input_ids=ids[real][None]).logits[0, 0])
    return torch.stack(rewards)


def test_rewards_are_the_logits_of_transformers(tmp_path, tiny_folder, reward_folder, prompt_file):
    reward = RewardConfig(model=RewardModelConfig(path=str(reward_folder), micro_batch_size=3, offload=True))

    (scored,), recorder = judged(tmp_path, tiny_folder, prompt_file, reward)

    expected = by_transformers(reward_folder, scored.rollout)
    assert_close(scored.reward_result.rewards, expected, rtol=1e-4, atol=1e-5)
    assert recorder.column("reward/model/mean") == pytest.approx([float(expected.mean())], rel=1e-4)


def judged_on_rank(strategy, path, folder, prompt_file, reward_folder):
    reward = RewardConfig(model=RewardModelConfig(path=str(reward_folder), micro_batch_size=3))
    options = {"strategy": STRATEGIES[strategy](), "devices": 2}
    (scored,), recorder = judged(path, folder, prompt_file, reward, trainer=options)
    expected = by_transformers(reward_folder, scored.rollout)
    return scored.reward_result.rewards, expected, recorder.column("reward/model/mean")


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_judge_their_own_responses(strategy, tmp_path, tiny_folder, prompt_file, reward_folder):
    ranks = on_ranks(2, judged_on_rank, strategy, tmp_path, tiny_folder, prompt_file, reward_folder)

    for rewards, expected, _ in ranks:
        assert_close(rewards, expected, rtol=1e-4, atol=1e-5)
    means = [float(expected.mean()) for _, expected, _ in ranks]
    assert ranks[0][2] == pytest.approx([sum(means) / 2], rel=1e-4)


def test_a_reward_model_and_functions_add_up(tmp_path, tiny_folder, reward_folder, prompt_file):
    model = RewardModelConfig(path=str(reward_folder), weight=0.5)
    (both,), _ = judged(tmp_path, tiny_folder, prompt_file, make_reward(model=model))
    (alone,), _ = judged(tmp_path, tiny_folder, prompt_file, make_reward())

    expected = alone.reward_result.rewards + 0.5 * by_transformers(reward_folder, both.rollout)
    assert_close(both.reward_result.rewards, expected, rtol=1e-4, atol=1e-5)


def test_each_step_is_rewarded_where_it_ends(tmp_path, tiny_folder, reward_folder, prompt_file):
    """A letter that the untrained policy says now and then ends a step."""
    model = RewardModelConfig(path=str(reward_folder), step="e")
    critic = CriticConfig(model=make_model_config(tiny_folder))
    (scored,), _ = judged(tmp_path, tiny_folder, prompt_file, RewardConfig(model=model), advantage=GAE(), critic=critic)

    result, rollout = scored.reward_result, scored.rollout
    found = result.token_rewards.nonzero().tolist()
    assert found
    for row, column in found:
        expected = by_transformers(reward_folder, rollout.select(slice(row, row + 1)), column + 1)
        assert_close(result.token_rewards[row, column][None], expected, rtol=1e-4, atol=1e-5)
    whole = by_transformers(reward_folder, rollout)
    assert_close(result.rewards, whole + result.token_rewards.sum(-1), rtol=1e-4, atol=1e-5)


def test_a_policy_learns_from_a_reward_model(tmp_path, tiny_folder, reward_folder, prompt_file):
    reward = RewardConfig(model=RewardModelConfig(path=str(reward_folder)))

    _, recorder = judged(tmp_path, tiny_folder, prompt_file, reward, max_steps=12, lr=1e-2)

    rewards = recorder.column("critic/score/mean")
    assert sum(rewards[-3:]) > sum(rewards[:3])


def test_it_judges_on_a_device_of_its_own(tmp_path, tiny_folder, reward_folder, prompt_file):
    """On the one that there is here; that others are refused is all that a CPU can show."""
    model = RewardModelConfig(path=str(reward_folder), devices=["cpu"])
    (scored,), _ = judged(tmp_path, tiny_folder, prompt_file, RewardConfig(model=model))
    assert_close(scored.reward_result.rewards, by_transformers(reward_folder, scored.rollout), rtol=1e-4, atol=1e-5)

    for devices, told in {("cuda:99",): "there is no device `cuda:99`", ("nowhere",): "there is no device"}.items():
        reward = RewardConfig(model=RewardModelConfig(path=str(reward_folder), devices=list(devices)))
        with pytest.raises(MisconfigurationException, match=f"`model.reward.model.devices`: {told}"):
            judged(tmp_path, tiny_folder, prompt_file, reward)


def test_a_language_model_is_no_reward_model(tmp_path, tiny_folder, prompt_file):
    reward = RewardConfig(model=RewardModelConfig(path=str(tiny_folder)))

    with pytest.raises(ValueError, match=r"`model.reward.model.path: .* is no reward model"):
        judged(tmp_path, tiny_folder, prompt_file, reward)
