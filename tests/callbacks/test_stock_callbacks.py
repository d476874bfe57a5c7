"""Lightning's own callbacks, each driven through PPO until it has done its job."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    OnExceptionCheckpoint,
    RichModelSummary,
    RichProgressBar,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from torch.testing import assert_close

from tests.callbacks.conftest import EACH_STEP
from tests.resume.experiment import read_metrics

SAVES = {"enable_checkpointing": True}


def test_early_stopping_ends_the_run_when_the_reward_stands_still(fit):
    """The first validation sets the mark and the second does not beat it by 10."""
    stopping = EarlyStopping("val/reward", mode="max", min_delta=10, patience=1)

    run = fit(stopping, max_steps=6, **EACH_STEP)

    assert run.trainer.global_step == 2
    assert float(stopping.best_score) == run.recorder.validations[0]["val/reward"]


def test_early_stopping_may_watch_a_training_metric(fit):
    stopping = EarlyStopping("critic/score/mean", mode="max", stopping_threshold=-1.0)

    run = fit(stopping, max_steps=6, limit_train_batches=2)

    assert run.trainer.global_step == 2  # looked at after each epoch


def test_checkpoints_are_written_every_n_iterations(fit, tmp_path):
    fit(ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1), max_steps=5, **SAVES)

    files = sorted(tmp_path.glob("*.ckpt"))

    assert [file.name for file in files] == ["step=2.ckpt", "step=4.ckpt"]
    assert [torch.load(file, weights_only=True)["global_step"] for file in files] == [2, 4]


def test_checkpoints_of_the_best_iterations_are_kept(fit, tmp_path):
    saves = ModelCheckpoint(
        tmp_path, "{step}", monitor="critic/score/mean", mode="max", save_top_k=2, every_n_train_steps=1
    )

    run = fit(saves, max_steps=5, **SAVES)

    scores = run.recorder.column("critic/score/mean")
    best = sorted(range(5), key=scores.__getitem__)[-2:]
    assert {file.name for file in tmp_path.glob("*.ckpt")} == {f"step={index + 1}.ckpt" for index in best}
    assert float(saves.best_model_score) == max(scores)


def test_the_checkpoint_with_the_best_validation_is_kept(fit, tmp_path):
    saves = ModelCheckpoint(tmp_path, "{step}", monitor="val/reward", mode="max", save_top_k=1)

    run = fit(saves, max_steps=4, **EACH_STEP, **SAVES)

    rewards = [validation["val/reward"] for validation in run.recorder.validations]
    assert saves.best_model_path == str(tmp_path / f"step={rewards.index(max(rewards)) + 1}.ckpt")
    assert list(tmp_path.glob("*.ckpt")) == [Path(saves.best_model_path)]


@pytest.mark.parametrize(("interval", "num_files"), [(0.0, 3), (1e6, 0)])
def test_checkpoints_are_written_by_the_clock(fit, tmp_path, interval, num_files):
    """Which Lightning does under automatic optimization only; at each of three iterations, or at none."""
    saves = ModelCheckpoint(tmp_path, "{step}", train_time_interval=timedelta(seconds=interval), save_top_k=-1)

    fit(saves, **SAVES)

    assert len(list(tmp_path.glob("*.ckpt"))) == num_files


@pytest.mark.filterwarnings("ignore:.*was called without a model", "ignore:.*there is no last checkpoint available")
def test_a_run_that_fails_saves_where_it_was(fit, tmp_path):
    class Fail(Callback):
        def on_train_batch_end(self, *args):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit(Fail(), OnExceptionCheckpoint(tmp_path), **SAVES)

    assert torch.load(tmp_path / "on_exception.ckpt", weights_only=True)["global_step"] == 1


def test_checkpoints_of_epochs_are_written(fit, tmp_path):
    fit(ModelCheckpoint(tmp_path, "{epoch}-{step}", save_top_k=-1), limit_train_batches=2, max_steps=4, **SAVES)

    assert sorted(file.name for file in tmp_path.glob("*.ckpt")) == ["epoch=0-step=2.ckpt", "epoch=1-step=4.ckpt"]


def test_learning_rates_of_all_models_are_logged_each_iteration(fit, tmp_path):
    """Two steps of warm-up to 1e-3; an optimizer has a group with weight decay and one without."""
    fit(LearningRateMonitor(), logger=CSVLogger(tmp_path, ""))

    rows = [row for row in read_metrics(tmp_path / "version_0") if "lr/actor/pg1" in row]

    assert [row["step"] for row in rows] == ["0", "1", "2"]
    for name in ("lr/actor/pg1", "lr/actor/pg2", "lr/critic/pg1"):
        assert [float(row[name]) for row in rows] == pytest.approx([5e-4, 1e-3, 1e-3])


def test_device_stats_are_logged_each_iteration(fit, tmp_path):
    fit(DeviceStatsMonitor(cpu_stats=True), logger=CSVLogger(tmp_path, ""))

    rows = [row for row in read_metrics(tmp_path / "version_0") if any("cpu_percent" in name for name in row)]

    assert {row["step"] for row in rows} == {"0", "1", "2"}


@pytest.mark.parametrize("by_trainer", [False, True])
def test_the_timer_stops_the_run_early(fit, by_trainer):
    limit = timedelta(seconds=1)
    timer = Timer(limit, interval="step")

    run = fit(*([] if by_trainer else [timer]), max_steps=1000, max_time=limit if by_trainer else None)

    assert 1 <= run.trainer.global_step < 1000
    if not by_trainer:
        assert timer.time_elapsed("train") >= 1


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_progress_bars_show_iterations_reward_and_speed(fit, bar, capsys, tmp_path):
    run = fit(bar(), enable_progress_bar=True, limit_train_batches=3)

    shown = run.trainer.progress_bar_metrics
    output = "".join(capsys.readouterr())
    assert shown["reward"] == pytest.approx(run.recorder.steps[-1]["critic/score/mean"], abs=1e-3)
    assert shown["tokens/s"] > 0
    assert "3/3" in output
    assert "reward" in output
    assert "tokens/s" in output


@pytest.mark.parametrize("summary", [ModelSummary, RichModelSummary])
def test_the_summary_counts_actor_and_critic(fit, summary, capsys, caplog):
    caplog.set_level("INFO")

    run = fit(summary(), enable_model_summary=True, max_steps=1)

    output = "".join(capsys.readouterr()) + caplog.text
    count = sum(parameter.numel() for parameter in run.module.parameters())
    assert "actor" in output
    assert "critic" in output
    assert f"{count / 1000:.1f} K" in output


@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback with a model that overrides")
def test_an_exponential_average_replaces_the_weights_at_the_end(fit):
    """With a decay of 0 the average is the newest weights; with 1 it stays at those after the first update."""
    newest, first = (fit(EMAWeightAveraging(decay=decay), max_steps=3) for decay in (0.0, 1.0))
    plain, one = fit(max_steps=3), fit(max_steps=1)

    for averaged, expected in [(newest, plain), (first, one)]:
        assert_close(dict(averaged.module.state_dict()), dict(expected.module.state_dict()))


@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback with a model that overrides")
def test_averaged_weights_are_validated_but_never_sampled_from_in_training(fit):
    """The first iteration's weights are validated each time; responses come from the newest."""
    run = fit(EMAWeightAveraging(decay=1.0), max_steps=4, **EACH_STEP)
    plain = fit(max_steps=4, **EACH_STEP)

    rewards = [validation["val/reward"] for validation in run.recorder.validations]
    assert rewards == rewards[:1] * 4
    assert max(run.recorder.column("rollout_corr/abs_log_prob_gap")) < 1e-5
    assert run.recorder.column("critic/score/mean") == plain.recorder.column("critic/score/mean")


def test_fast_dev_run_is_one_iteration_and_one_validation(fit, tmp_path):
    run = fit(fast_dev_run=True, max_steps=-1, logger=CSVLogger(tmp_path, ""))

    assert run.trainer.global_step == 1
    assert len(run.recorder.validations) == 1
    assert not list(tmp_path.glob("version_0/*"))


def test_the_simple_profiler_names_the_phases(fit, tmp_path):
    from lightning.pytorch.profilers import SimpleProfiler

    fit(profiler=SimpleProfiler(tmp_path, "profile"))

    report = next(tmp_path.glob("*profile*")).read_text()
    phases = ("gen", "reward", "old_log_prob", "values", "adv", "update_critic", "update_actor", "update_weights")
    assert all(f"[PPOModule]{phase}" in report for phase in phases)
