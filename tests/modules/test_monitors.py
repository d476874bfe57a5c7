"""Callbacks that wait for a metric which nothing logs are refused, before the run where that is certain."""

from __future__ import annotations

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from tests.runs import Recorder, make_chats, make_ppo, make_prompts, make_rollout, make_sft, make_trainer
from verl_lightning.callbacks import HFCheckpoint
from verl_lightning.modules import SFTModule
from verl_lightning.modules.ppo_config import ValidationConfig
from verl_lightning.rollout.base import SamplingConfig


def refusal(tmp_path, chat_file, module, *callbacks):
    trainer = make_trainer(tmp_path, *callbacks, enable_checkpointing=True, max_steps=2, val_check_interval=1)
    with pytest.raises(MisconfigurationException, match="has `monitor: ") as failure:
        trainer.fit(module, datamodule=make_chats(chat_file, chat_file))
    return str(failure.value), trainer.global_step


@pytest.mark.parametrize("kind", [HFCheckpoint, ModelCheckpoint, EarlyStopping])
def test_a_misspelt_metric_of_a_validation_is_told_before_the_first_step(tmp_path, tiny_folder, chat_file, kind):
    said, step = refusal(tmp_path, chat_file, make_sft(tiny_folder), kind(monitor="val/los"))
    assert said == (f"`{kind.__name__}` has `monitor: val/los`, which nothing logs. Did you mean `val/loss`?")
    assert step == 0


def test_ppo_says_what_its_validation_logs(tmp_path, tiny_folder, prompt_file):
    two = {"validation": ValidationConfig(pass_k=[1, 2])}
    rollout = make_rollout(val_sampling=SamplingConfig(num_samples=2, max_new_tokens=4))
    trainer = make_trainer(tmp_path, rollout, HFCheckpoint(monitor="val/xyz"), enable_checkpointing=True)
    with pytest.raises(MisconfigurationException, match=r"There are `val/pass@1`, `val/pass@2`, `val/resp.*`val/rew"):
        trainer.fit(make_ppo(tiny_folder, **two), datamodule=make_prompts(prompt_file, prompt_file))


def test_what_is_listed_is_what_is_logged(tmp_path, tiny_folder, prompt_file):
    recorder, module = Recorder(), make_ppo(tiny_folder, validation=ValidationConfig(pass_k=[1]))
    make_trainer(tmp_path, make_rollout(), recorder).validate(module, make_prompts(prompt_file, prompt_file))
    logged = {name for name in recorder.validations[0] if name.startswith("val/")}
    assert logged == module.validation_metrics


def test_another_metric_is_looked_for_after_a_validation(tmp_path, tiny_folder, chat_file):
    """It may be logged by then: only the name of the callback that Lightning tells is put right."""
    said, step = refusal(tmp_path, chat_file, make_sft(tiny_folder), HFCheckpoint(monitor="train/los"))
    assert said == "`HFCheckpoint` has `monitor: train/los`, which nothing logs. Did you mean `train/loss`?"
    assert step == 1


class OwnMetric(SFTModule):
    def on_validation_epoch_end(self):
        super().on_validation_epoch_end()
        self.log("val/own", 1.0)


def test_what_classes_of_users_log_is_not_known(tmp_path, tiny_folder, chat_file):
    callback = HFCheckpoint(str(tmp_path / "hf"), monitor="val/own")
    trainer = make_trainer(tmp_path, callback, enable_checkpointing=True, max_steps=1, val_check_interval=1)
    trainer.fit(OwnMetric(make_sft(tiny_folder).policy_config), datamodule=make_chats(chat_file, chat_file))
    assert callback.best_model_path
