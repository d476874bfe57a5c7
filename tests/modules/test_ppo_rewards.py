"""Where rewards and KL penalties go in PPO, and what becomes of responses without a reward."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import seed_everything
from torch.testing import assert_close

from tests.runs import Recorder, make_ppo, make_prompts, make_reward, make_rollout, make_trainer
from verl_lightning.algorithms.advantages.base import AdvantageInputs
from verl_lightning.algorithms.advantages.grpo import GRPO
from verl_lightning.algorithms.advantages.remax import ReMax
from verl_lightning.modules.ppo_config import KLConfig, UpdateConfig


@pytest.fixture(autouse=True)
def _seed():
    seed_everything(0, verbose=False)


@pytest.fixture
def run(tmp_path, tiny_folder, prompt_file):
    """Three iterations; gives their metrics and the module."""

    def fit(**parts):
        recorder, module = Recorder(), make_ppo(tiny_folder, **parts)
        trainer = make_trainer(tmp_path, make_rollout(), recorder)
        trainer.fit(module, datamodule=make_prompts(prompt_file))
        return recorder, module

    return fit


def test_kl_in_the_reward_is_taken_from_each_token(run):
    recorder, _ = run(kl=KLConfig(coef=100.0, place="reward", estimator="k2"))

    assert recorder.column("actor/ref_kl")[0] == 0  # the policy still is the reference
    for step in recorder.steps:
        kl_per_response = step["actor/ref_kl"] * step["response_length/mean"]
        expected = step["critic/score/mean"] - 100.0 * kl_per_response
        assert step["critic/rewards/mean"] == pytest.approx(expected, rel=1e-5)
    assert recorder.steps[2]["actor/ref_kl"] > 0
    assert "actor/kl_loss" not in recorder.steps[2]


def test_kl_in_the_loss_leaves_rewards_alone(run):
    recorder, _ = run(kl=KLConfig(coef=100.0), update=UpdateConfig(mini_batch_size=4, micro_batch_size=4))

    assert recorder.column("critic/rewards/mean") == pytest.approx(recorder.column("critic/score/mean"))
    # One optimizer step an iteration: its KL is measured where the iteration began, by the same estimator.
    assert recorder.column("actor/kl_loss") == pytest.approx(recorder.column("actor/ref_kl"), abs=1e-7)
    assert recorder.steps[2]["actor/kl_loss"] > 0


def test_a_kl_penalty_in_the_loss_holds_the_policy_back(run):
    near = run(kl=KLConfig(coef=100.0))[0].steps[2]["actor/ref_kl"]
    far = run(kl=KLConfig(coef=0.0))[0].steps[2]["actor/ref_kl"]
    assert 0 < near < far


def test_adaptive_kl_steers_its_weight(run):
    recorder, module = run(kl=KLConfig(coef=0.5, target=1e-9, horizon=100))

    # 16 responses an iteration. The first KL is 0, far below the target; the others are far above it.
    expected = [0.5, 0.5 * (1 - 0.2 * 0.16), 0.5 * (1 - 0.2 * 0.16) * (1 + 0.2 * 0.16)]
    assert recorder.column("actor/kl_coef") == pytest.approx(expected)
    assert module.kl_coef == pytest.approx(expected[2] * (1 + 0.2 * 0.16))


@pytest.mark.parametrize(("target", "resumed"), [(0.1, 0.25), (None, 0.5)])
def test_checkpoints_hold_the_steered_weight_only(run, target, resumed):
    _, module = run(kl=KLConfig(coef=0.5, target=target))
    module.kl_coef = 0.25
    checkpoint = {"state_dict": module.state_dict()}
    module.on_save_checkpoint(checkpoint)

    module.kl_coef = 0.5  # as a new module has it
    module.on_load_checkpoint(checkpoint)

    assert module.kl_coef == resumed


class WatchedGRPO(GRPO):
    """Keeps what it was given and gave."""

    def __call__(self, inputs: AdvantageInputs):
        self.seen, self.given = inputs, super().__call__(inputs)
        return self.given


def test_responses_without_a_reward_count_in_nothing(run):
    advantage = WatchedGRPO(normalize_by_std=False)
    recorder, _ = run(advantage=advantage, reward=make_reward("fails_on_even", max_error_share=1.0))

    inputs, advantages = advantage.seen, advantage.given.advantages
    assert 0 < int(inputs.is_valid.sum()) < 16
    for row in range(16):
        group = (inputs.group_index == inputs.group_index[row]) & inputs.is_valid
        others = inputs.rewards[group].mean() if inputs.is_valid[row] and group.sum() > 1 else inputs.rewards[row]
        expected = (inputs.rewards[row] - others) * inputs.is_valid[row]
        assert_close(advantages[row], torch.where(inputs.response_mask[row], expected, 0.0))
    last = recorder.steps[-1]
    assert last["train/excluded_sequences"] == last["reward/errors"] == float((~inputs.is_valid).sum())
    assert last["critic/score/mean"] == pytest.approx(float(inputs.rewards[inputs.is_valid].mean()))
    assert not inputs.response_mask[~inputs.is_valid].any()


def test_none_is_no_reward(run):
    """Such responses count in no group, and are no failures."""
    advantage = WatchedGRPO(normalize_by_std=False)
    recorder, _ = run(advantage=advantage, reward=make_reward("none_on_even", max_error_share=0.0))

    inputs, last = advantage.seen, recorder.steps[-1]
    assert 0 < last["reward/none"] == last["train/excluded_sequences"] == float((~inputs.is_valid).sum()) < 16
    assert (last["reward/errors"], last["reward/timeouts"]) == (0, 0)
    assert last["critic/score/mean"] == pytest.approx(float(inputs.rewards[inputs.is_valid].mean()))
    assert not advantage.given.advantages[~inputs.is_valid].any()


class WatchedReMax(ReMax):
    """Keeps what it was given."""

    def __call__(self, inputs: AdvantageInputs):
        self.seen = inputs
        return super().__call__(inputs)


def test_responses_whose_greedy_sibling_failed_are_left_out(run):
    """A baseline of 0 in its place would bias them."""
    advantage = WatchedReMax()
    recorder, _ = run(advantage=advantage, reward=make_reward("fails_on_monotony", max_error_share=1.0))

    inputs = advantage.seen
    assert inputs.is_valid.tolist() == [False] * 4 + [True] * 4 + [False] * 4 + [True] * 4
    assert inputs.response_mask.any(-1).tolist() == inputs.is_valid.tolist()
    assert recorder.column("reward/errors") == [2.0, 2.0, 2.0]  # greedy responses are counted too
