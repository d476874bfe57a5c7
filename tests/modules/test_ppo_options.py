"""Options of PPO that shape what is learnt from: corrections, dynamic sampling, long responses, whole-step losses."""

from __future__ import annotations

import math

import pytest
import torch
from lightning.pytorch import Callback
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from tests.runs import Recorder, make_model_config, make_ppo, make_prompts, make_reward, make_rollout, make_trainer
from tests.tiny import write_prompt_file
from verl_lightning.algorithms.advantages.gpg import GPG
from verl_lightning.algorithms.advantages.optimal_token_baseline import OptimalTokenBaseline
from verl_lightning.algorithms.corrections.icepop import IcePop
from verl_lightning.algorithms.corrections.rejection import Rejection
from verl_lightning.algorithms.corrections.truncated_importance_sampling import TruncatedImportanceSampling
from verl_lightning.algorithms.losses.clip_cov import ClipCov
from verl_lightning.algorithms.losses.kl_cov import KLCov
from verl_lightning.faults import RunError
from verl_lightning.models.config import OptimConfig
from verl_lightning.modules.dynamic_sampling import DynamicSampling
from verl_lightning.modules.judge import RewardResult
from verl_lightning.modules.ppo_config import DynamicSamplingConfig, ShapingConfig, UpdateConfig
from verl_lightning.modules.scored_rollout import ScoredRollout
from verl_lightning.types import Rollout


def run(tiny_folder, prompt_file, tmp_path, *callbacks, steps=2, rollout=None, **changes):
    """Metrics and module of a short run."""
    recorder = Recorder()
    module = make_ppo(tiny_folder, **changes)
    trainer = make_trainer(tmp_path, rollout or make_rollout(), recorder, *callbacks, max_steps=steps)
    trainer.fit(module, datamodule=make_prompts(prompt_file))
    return recorder, module


def make_scored(rewards, *, num_samples=2, width=3, prompts=2):
    """A rollout of made-up tokens with given rewards."""
    count = len(rewards)
    rollout = Rollout(
        input_ids=torch.arange(count * (prompts + width)).view(count, prompts + width),
        attention_mask=torch.ones(count, prompts + width, dtype=torch.bool),
        response_mask=torch.ones(count, width, dtype=torch.bool),
        rollout_log_probs=torch.zeros(count, width),
        is_truncated=torch.zeros(count, dtype=torch.bool),
        prompt_index=torch.arange(count) // num_samples,
    )
    reward_result = RewardResult(
        responses=[str(row) for row in range(count)],
        rewards=torch.tensor(rewards),
        is_valid=torch.ones(count, dtype=torch.bool),
        components={},
        num_errors=0,
        num_timeouts=0,
    )
    return ScoredRollout(rollout=rollout, reward_result=reward_result)


@pytest.mark.parametrize("loss", [ClipCov(), KLCov()])
def test_losses_that_compare_a_whole_step_train(loss, tiny_folder, prompt_file, tmp_path):
    recorder, _ = run(tiny_folder, prompt_file, tmp_path, policy_loss=loss)

    assert all(0 < norm < math.inf for norm in recorder.column("actor/grad_norm"))


@pytest.mark.parametrize("estimator", [OptimalTokenBaseline(), GPG()])
def test_estimators_that_need_more_than_rewards_get_it(estimator, tiny_folder, prompt_file, tmp_path):
    recorder, _ = run(tiny_folder, prompt_file, tmp_path, advantage=estimator)

    assert all(0 < norm < math.inf for norm in recorder.column("actor/grad_norm"))


def test_corrections_hardly_change_what_an_exact_engine_sampled(tiny_folder, prompt_file, tmp_path):
    recorder, _ = run(tiny_folder, prompt_file, tmp_path, corrections=[TruncatedImportanceSampling(), IcePop()])

    assert recorder.steps[0]["rollout_corr/weight"] == pytest.approx(1.0, abs=1e-4)
    assert recorder.steps[0]["rollout_corr/rejected_frac"] == 0
    assert recorder.steps[0]["rollout_corr/effective_sample_size"] == pytest.approx(1.0, abs=1e-4)


def test_a_correction_scales_the_loss(tiny_folder, prompt_file, tmp_path):
    update = UpdateConfig(mini_batch_size=4, micro_batch_size=4)
    plain, _ = run(tiny_folder, prompt_file, tmp_path, steps=1, update=update)
    halved, _ = run(tiny_folder, prompt_file, tmp_path, steps=1, update=update, corrections=[HalfWeight()])

    assert halved.steps[0]["actor/grad_norm"] == pytest.approx(plain.steps[0]["actor/grad_norm"] / 2, rel=1e-3)


def test_rejecting_all_changes_no_weight_and_hides_no_gap(tiny_folder, prompt_file, tmp_path):
    """Weight decay rests too."""
    actor = make_model_config(tiny_folder, optim=OptimConfig(lr=0.1, weight_decay=0.1))
    all_of_them = [Rejection("k1", "token", low=5.0, high=6.0)]
    recorder, module = run(tiny_folder, prompt_file, tmp_path, actor=actor, corrections=all_of_them)

    assert recorder.column("train/empty_batches") == [2, 2]
    assert recorder.column("actor/grad_norm") == [0, 0]
    assert len(recorder.column("rollout_corr/abs_log_prob_gap")) == 2
    weights = AutoModelForCausalLM.from_pretrained(tiny_folder).state_dict()
    assert_close(dict(module.policy.backbone.state_dict()), dict(weights), rtol=0, atol=0)


class HalfWeight(TruncatedImportanceSampling):
    """Every token at half its weight."""

    def __init__(self):
        super().__init__(cap=0.5)


def test_corrections_refuse_truncated_sampling(tiny_folder, prompt_file, tmp_path):
    rollout = make_rollout()
    object.__setattr__(rollout.sampling, "top_p", 0.9)

    with pytest.raises(ValueError, match="top_p"):
        run(tiny_folder, prompt_file, tmp_path, rollout=rollout, corrections=[IcePop()])


def test_the_engines_log_probs_may_be_the_old_ones(tiny_folder, prompt_file, tmp_path):
    update = UpdateConfig(mini_batch_size=2, micro_batch_size=4, old_log_probs="engine")
    recorder, _ = run(tiny_folder, prompt_file, tmp_path, update=update)

    assert "timing_s/old_log_prob" not in recorder.steps[0]
    assert not [name for name in recorder.steps[0] if name.startswith("rollout_corr/")]  # a gap of 0 would be a lie


def test_the_engines_log_probs_leave_nothing_to_correct(tiny_folder):
    with pytest.raises(ValueError, match="old_log_probs"):
        make_ppo(tiny_folder, update=UpdateConfig(old_log_probs="engine"), corrections=[IcePop()])


def test_dynamic_sampling_asks_until_there_are_enough_groups_with_signal(tiny_folder, prompt_file, tmp_path):
    reward, sampling = make_reward("same_on_even_rows"), DynamicSamplingConfig(max_batches=4)
    recorder, module = run(tiny_folder, prompt_file, tmp_path, reward=reward, dynamic_sampling=sampling)

    assert module.trainer.global_step == 2
    assert recorder.column("train/frac_zero_std") == [0, 0]


@pytest.mark.parametrize(("function", "words"), [("always_one", "more batches."), ("fails", "RuntimeError: as ever\n")])
def test_dynamic_sampling_gives_up_on_a_hopeless_task(tiny_folder, prompt_file, tmp_path, function, words):
    sampling, reward = DynamicSamplingConfig(max_batches=2), make_reward(function, max_error_share=1.0)

    with pytest.raises(RunError, match="max_batches") as failure:
        run(tiny_folder, prompt_file, tmp_path, reward=reward, dynamic_sampling=sampling)

    assert str(failure.value).endswith(words)


def test_a_prompt_that_comes_again_in_an_iteration_is_answered_anew(tiny_folder, tmp_path):
    """Two of four prompts have signal, so each iteration goes through the file about twice."""
    file = write_prompt_file(tmp_path / "four.jsonl", num_rows=4)
    sampling = DynamicSamplingConfig(max_batches=4)
    seen = SeenResponses()
    run(tiny_folder, file, tmp_path, seen, reward=make_reward("same_on_even_rows"), dynamic_sampling=sampling)

    assert [len(responses) for responses in seen.responses] == [16, 16]
    assert all(len(set(responses)) > 8 for responses in seen.responses)


def test_failures_of_all_groups_of_an_iteration_are_counted(tiny_folder, prompt_file, tmp_path):
    """All four responses to a prompt fail, or none of them."""
    reward, sampling = make_reward("fails_on_even_rows", max_error_share=1.0), DynamicSamplingConfig(max_batches=4)
    recorder, _ = run(tiny_folder, prompt_file, tmp_path, reward=reward, dynamic_sampling=sampling)

    assert all(count > 0 and count % 4 == 0 for count in recorder.column("reward/errors"))


class SeenResponses(Callback):
    """What each iteration learnt from."""

    def __init__(self):
        self.responses = []

    def on_experience(self, module, scored, experience, rows):
        self.responses.append(list(map(tuple, experience.input_ids.tolist())))


def test_groups_without_signal_are_told_from_others():
    scored = make_scored([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])

    parts = DynamicSampling(DynamicSamplingConfig()).sift(scored.reward_result, scored.rollout.prompt_index)

    assert [part and part.responses for part in parts] == [["0", "1"], None, ["4", "5"]]


def test_long_responses_cost_reward():
    shaped = make_scored([1.0, 0.0]).with_penalty(torch.tensor([-0.5, 0.0]))

    assert shaped.reward_result.rewards.tolist() == [0.5, 0.0]


def test_truncated_responses_may_be_left_out_of_training(tiny_folder, prompt_file, tmp_path):
    rollout = make_rollout(max_new_tokens=1)
    recorder, _ = run(
        tiny_folder, prompt_file, tmp_path, steps=1, rollout=rollout, shaping=ShapingConfig(mask_truncated=True)
    )

    ended = 1 - recorder.steps[0]["response_length/clip_ratio"]
    assert recorder.steps[0]["train/excluded_sequences"] == pytest.approx(16 * (1 - ended))
