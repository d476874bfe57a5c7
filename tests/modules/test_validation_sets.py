"""Several sets of validation prompts, each with its environment and its sampling."""

from __future__ import annotations

import dataclasses

import pytest
from lightning.pytorch.callbacks import EarlyStopping

from tests.environments.worlds import Counting
from tests.runs import Recorder, make_ppo, make_prompts, make_rollout, make_trainer
from verl_lightning.data.validation_sets import ValidationSet
from verl_lightning.modules.ppo_config import ValidationConfig


class Long(Counting):
    """Is worth more."""

    async def step(self, message):
        return dataclasses.replace(await super().step(message), reward=100.0)


def test_each_set_has_its_environment_its_samples_and_its_metrics(tmp_path, tiny_folder, prompt_file):
    recorder = Recorder()
    worlds = {"short": Counting, "long": Long}
    rollout = make_rollout(max_new_tokens=40, environment=worlds)
    data = make_prompts(
        prompt_file,
        val_sets={
            "easy": {"files": str(prompt_file), "environment": "short", "num_samples": 2},
            "hard": ValidationSet(files=str(prompt_file), environment="long", temperature=0.0),
        },
    )
    module = make_ppo(tiny_folder, reward="environment", validation=ValidationConfig(pass_k=[1, 2]))

    stop = EarlyStopping("val/hard/reward", mode="max")
    make_trainer(tmp_path, rollout, recorder, stop, limit_val_batches=1).validate(module, data)

    (metrics,) = recorder.validations
    logged = {name for name in metrics if name.startswith("val/")}
    assert logged == module.validation_metrics
    assert metrics["val/hard/reward"] >= 100 > metrics["val/easy/reward"]
    assert "val/easy/pass@2" in logged
    assert "val/hard/pass@2" not in logged
    assert "val-core/easy/sort4/reward/mean@2" in metrics


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"val_file": "a.jsonl", "val_sets": {"b": {"files": "b.jsonl"}}}, "`data.val_files` and `data.val_sets` are"),
        ({"val_sets": {"a/b": {"files": "b.jsonl"}}}, "`data.val_sets` has a set called 'a/b'"),
        ({"val_sets": {"a": {"files": ""}}}, "`files` must name the files of a validation set"),
        ({"val_sets": {"a": {"files": "b.jsonl", "num_samples": 0}}}, "`num_samples` must be at least 1, got 0"),
    ],
)
def test_sets_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_prompts("train.jsonl", **options)
