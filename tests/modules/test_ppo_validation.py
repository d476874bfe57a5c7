"""Validation of PPO: what counts, and how it is averaged."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import seed_everything

from tests.runs import Recorder, make_ppo, make_prompts, make_reward, make_rollout, make_trainer
from tests.tiny import write_prompt_file
from verl_lightning.modules.ppo_config import ValidationConfig
from verl_lightning.modules.validation import ScoredResponse, scored_responses, validation_metrics
from verl_lightning.rewards.config import RewardConfig, WeightedReward
from verl_lightning.rollout.base import SamplingConfig


def response(row, reward, *, source="a", loader=0, length=4):
    return ScoredResponse(loader, row, source, reward, length)


def test_metrics_by_hand():
    """Prompt 0 of source a has 2 of 4 right, prompt 1 none of 4; prompt 2 of source b has 1 of 2 right."""
    responses = [response(0, reward) for reward in (1.0, 0.0, 1.0, 0.0)]
    responses += [response(1, reward, length=8) for reward in (0.5, 0.0, 0.0, 0.0)]
    responses += [response(2, reward, source="b", length=10) for reward in (1.0, 0.0)]

    metrics = validation_metrics(responses, ValidationConfig(pass_k=[1, 2, 4]), num_samples=4, stage="val")

    pass_at_2 = 1 - (2 * 1) / (4 * 3)  # of prompt 0: not both of the two drawn are wrong
    assert metrics == pytest.approx(
        {
            "val/reward": 3.5 / 10,
            "val/response_length": (4 * 4 + 4 * 8 + 2 * 10) / 10,
            "val/unscored_responses": 0.0,
            "val/pass@1": (0.5 + 0 + 0.5) / 3,
            "val/pass@2": (pass_at_2 + 0 + 1) / 3,
            "val/pass@4": (1 + 0) / 2,  # prompt 2 has too few
            "val-core/a/reward/mean@4": 2.5 / 8,
            "val-core/a/pass@1": 0.25,
            "val-core/a/pass@2": pass_at_2 / 2,
            "val-core/a/pass@4": 0.5,
            "val-core/b/reward/mean@4": 0.5,
            "val-core/b/pass@1": 0.5,
            "val-core/b/pass@2": 1.0,
        }
    )


def test_parts_of_the_reward_are_logged_where_there_are_any():
    right, wrong = response(0, 1.5), response(1, 0.0)._replace(components=(("exact", 0.0),))
    right = right._replace(components=(("exact", 1.0), ("format", 0.5)))

    metrics = validation_metrics([right, wrong], ValidationConfig(), num_samples=1, stage="val")

    assert (metrics["val/reward/exact"], metrics["val/reward/format"]) == (0.5, 0.5)
    assert metrics["val-aux/a/exact/mean@1"] == 0.5


def test_the_same_row_of_two_loaders_is_two_prompts():
    responses = [response(0, 1.0, loader=0), response(0, 0.0, loader=1)]
    metrics = validation_metrics(responses, ValidationConfig(pass_k=[1, 2]), num_samples=1, stage="test")
    assert metrics["test/pass@1"] == 0.5
    assert "test/pass@2" not in metrics


def test_success_reward_decides_what_is_right():
    responses = [response(0, 0.5), response(1, 0.4)]
    metrics = validation_metrics(responses, ValidationConfig(success_reward=0.5), num_samples=1, stage="val")
    assert metrics["val/pass@1"] == 0.5


def test_failures_are_counted_and_in_no_mean():
    failed = response(0, 0.0)._replace(is_valid=False)
    metrics = validation_metrics([response(0, 1.0), failed], ValidationConfig(), num_samples=2, stage="val")
    assert (metrics["val/reward"], metrics["val/pass@1"], metrics["val/unscored_responses"]) == (1.0, 1.0, 1.0)


def test_duplicates_never_count():
    rollout = SimpleNamespace(
        prompt_index=torch.tensor([0, 0, 1, 1]), response_mask=torch.tensor([[True, True], [True, False]] * 2)
    )
    batch = SimpleNamespace(
        rollout=rollout,
        row_index=torch.tensor([7, 0]),
        is_duplicate=torch.tensor([False, True]),
        rows=[{"data_source": "a"}, {"data_source": "b"}],
    )
    reward_result = SimpleNamespace(
        rewards=torch.tensor([1.0, 0.0, 1.0, 1.0]),
        is_valid=torch.tensor([True, False, True, True]),
        components={"format": torch.tensor([0.5, math.nan, 1.0, 1.0])},
    )

    scored = [
        ScoredResponse(2, 7, "a", 1.0, 2, components=(("format", 0.5),)),
        ScoredResponse(2, 7, "a", 0.0, 1, is_valid=False),
    ]
    assert scored_responses(batch, reward_result, 2) == scored


def test_all_rows_are_validated_once_whatever_the_batch_size(tmp_path, tiny_folder):
    seed_everything(0, verbose=False)
    file = write_prompt_file(tmp_path / "val.jsonl", num_rows=7)
    share = WeightedReward(function=make_reward().function, weight=0.5, name="share")
    reward = RewardConfig(functions=[share, WeightedReward(function="boxed_format")], num_workers=1)
    rewards = []
    for batch_size in (7, 3):
        rollout = make_rollout(val_sampling=SamplingConfig(num_samples=2, max_new_tokens=6))
        trainer = make_trainer(tmp_path, rollout)
        module = make_ppo(tiny_folder, reward=reward, validation=ValidationConfig(success_reward=0.25, pass_k=[1, 2]))
        data = make_prompts(file, file, val_batch_size=batch_size)
        (metrics,) = trainer.validate(module, datamodule=data, verbose=False)
        rewards.append({name: value for name, value in metrics.items() if not name.startswith("timing")})
    assert rewards[0] == pytest.approx(rewards[1], rel=1e-6)
    assert 0 <= rewards[0]["val/pass@1"] <= rewards[0]["val/pass@2"] <= 1
    assert 0 < rewards[0]["val/reward"] == pytest.approx(0.5 * rewards[0]["val/reward/share"])
    assert rewards[0]["val/reward/boxed_format"] == 0


def test_validation_during_training_is_logged_once_a_round(tmp_path, tiny_folder, prompt_file):
    seed_everything(0, verbose=False)
    recorder = Recorder()
    options = {"val_check_interval": 1, "check_val_every_n_epoch": None, "limit_val_batches": 1}
    trainer = make_trainer(tmp_path, make_rollout(), recorder, **options)
    trainer.fit(make_ppo(tiny_folder), datamodule=make_prompts(prompt_file, prompt_file))
    assert len({validation["val/reward"] for validation in recorder.validations}) > 1  # the policy moves
    assert len(recorder.validations) == 3


def test_validation_without_a_scored_response_is_an_error(tmp_path, tiny_folder, prompt_file):
    trainer = make_trainer(tmp_path, make_rollout(), limit_val_batches=1)
    module = make_ppo(tiny_folder, reward=make_reward("fails", max_error_share=1.0))
    with pytest.raises(RuntimeError, match=r"(?s)no val response could be scored: .* as ever"):
        trainer.validate(module, datamodule=make_prompts(prompt_file, prompt_file), verbose=False)


@pytest.mark.parametrize(("stage", "name"), [("validate", "val_files"), ("test", "test_files")])
def test_evaluation_without_files_is_an_error(tmp_path, tiny_folder, prompt_file, stage, name):
    """Lightning would do nothing and end well."""
    trainer = make_trainer(tmp_path, make_rollout())
    with pytest.raises(MisconfigurationException, match=rf"`data\.{name}` is empty, so there is nothing to read"):
        getattr(trainer, stage)(make_ppo(tiny_folder), datamodule=make_prompts(prompt_file))
