"""Dynamic sampling, whose iterations take several batches: Lightning logs, validates and stops by iterations."""

from __future__ import annotations

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger

from tests.resume.experiment import read_metrics
from tests.runs import Recorder, make_ppo, make_prompts, make_reward, make_rollout, make_trainer
from verl_lightning.callbacks import HealthMonitor
from verl_lightning.callbacks.health import HealthCheck
from verl_lightning.modules.ppo_config import DynamicSamplingConfig

EVERY = {"check_val_every_n_epoch": None}


class ValidatedSteps(Callback):
    """The iterations after which there was a validation."""

    def __init__(self):
        self.steps = []

    def on_validation_end(self, trainer, pl_module):
        self.steps.append(trainer.global_step)


class SaveEachBatch(Callback):
    """Saves after each batch, under its number."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, *args):
        trainer.save_checkpoint(self.folder / f"{trainer.fit_loop.epoch_loop.total_batch_idx}.ckpt")


def fit(tmp_path, folder, prompts, *callbacks, ckpt_path=None, **options):
    """Iterations of two batches each, as half of each is without signal; returns the steps that were validated."""
    module = make_ppo(
        folder, reward=make_reward("same_on_even_rows"), dynamic_sampling=DynamicSamplingConfig(max_batches=20)
    )
    watch = ValidatedSteps()
    options = {"limit_val_batches": 1, "log_every_n_steps": 1, "logger": CSVLogger(tmp_path, "")} | options
    trainer = make_trainer(tmp_path, make_rollout(), *callbacks, watch, **options)
    trainer.fit(module, datamodule=make_prompts(prompts, prompts), ckpt_path=ckpt_path, weights_only=True)
    return watch.steps


@pytest.mark.parametrize("interval", [1, 2])
def test_an_integer_interval_counts_iterations(tmp_path, tiny_folder, prompt_file, interval):
    recorder = Recorder()
    options = {"max_steps": 4, "val_check_interval": interval}
    steps = fit(tmp_path, tiny_folder, prompt_file, recorder, LearningRateMonitor(), **EVERY, **options)

    rows = read_metrics(tmp_path / "version_0")
    assert len(recorder.steps) == 8  # batches
    assert steps == list(range(interval, 5, interval))
    for name, expected in [
        ("actor/lr", range(4)),
        ("lr/actor", range(4)),
        ("val/reward", [step - 1 for step in steps]),
    ]:
        assert [int(row["step"]) for row in rows if row.get(name)] == list(expected)


@pytest.mark.parametrize(("share", "expected"), [(1.0, [2]), (0.25, [1, 2]), (0.5, [1, 2])])
def test_a_share_of_an_epoch_validates_no_weights_twice(tmp_path, tiny_folder, prompt_file, share, expected):
    """An epoch of five batches ends within its third iteration."""
    options = {"max_epochs": 1, "max_steps": -1, "limit_train_batches": 5, "val_check_interval": share}
    assert fit(tmp_path, tiny_folder, prompt_file, **options) == expected


def test_a_health_check_counts_iterations(tmp_path, tiny_folder, prompt_file):
    """The rewards of the second iteration would be the third time that they are looked at."""
    monitor = HealthMonitor(reward=HealthCheck(level="stop", limit=10.0, patience=3))

    with pytest.warns(UserWarning, match=r"Step 3: all rewards lie within .* for 3 logged steps"):
        fit(tmp_path, tiny_folder, prompt_file, monitor, max_steps=4, limit_val_batches=0)


def test_a_run_resumed_after_any_batch_logs_and_validates_the_same(tmp_path, tiny_folder, prompt_file):
    options = {"max_steps": 3, "val_check_interval": 1} | EVERY
    whole = fit(tmp_path, tiny_folder, prompt_file, SaveEachBatch(tmp_path), **options)
    expected = [(row["step"], row.get("critic/score/mean"), row.get("val/reward")) for row in metrics(tmp_path, 0)]

    for batch in range(1, 5):
        steps = fit(tmp_path, tiny_folder, prompt_file, ckpt_path=tmp_path / f"{batch}.ckpt", **options)
        done = (batch + 1) // 2  # iterations before
        is_last = batch % 2 == 1  # its row and its validation follow in the resumed run
        assert steps == whole[done - is_last :]
        rows = [(row["step"], row.get("critic/score/mean"), row.get("val/reward")) for row in metrics(tmp_path, batch)]
        assert rows == [row for row in expected if int(row[0]) >= done - is_last]


def metrics(folder, version):
    return read_metrics(folder / f"version_{version}")


def test_the_trainer_is_left_as_it_was(tmp_path, tiny_folder, prompt_file):
    trainers = []

    class Keep(Callback):
        def on_train_start(self, trainer, pl_module):
            trainers.append(trainer)

    fit(tmp_path, tiny_folder, prompt_file, Keep(), max_epochs=1, max_steps=-1, limit_train_batches=3)

    assert trainers[0].log_every_n_steps == 1
