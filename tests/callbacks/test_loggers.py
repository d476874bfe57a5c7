"""Lightning's loggers, each with verl's metric names at the right steps of a PPO run."""

from __future__ import annotations

import json
import re

import pytest
import torch
import wandb
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.callbacks.conftest import EACH_STEP
from tests.resume.experiment import read_metrics
from tests.resume.settings import write_settings
from tests.runs import make_trainer
from verl_lightning.callbacks import ResumeWandb
from verl_lightning.callbacks.resume_wandb import saved_callback_state
from verl_lightning.cli.lightning_cli import CLI

VERL_NAMES = {
    *(
        f"critic/{of}/{what}"
        for of in ("score", "rewards", "advantages", "returns", "values")
        for what in ("mean", "max", "min")
    ),
    *(f"critic/{name}" for name in ("vf_loss", "vf_clipfrac", "vpred_mean", "grad_norm", "lr", "vf_explained_var")),
    *(
        f"actor/{name}"
        for name in ("pg_loss", "pg_clipfrac", "pg_clipfrac_lower", "ppo_kl", "entropy", "grad_norm", "lr")
    ),
    *(f"{of}_length/{what}" for of in ("prompt", "response") for what in ("mean", "max", "min")),
    "response_length/clip_ratio",
    *(
        f"timing_s/{name}"
        for name in ("gen", "reward", "old_log_prob", "values", "adv", "update_critic", "update_actor")
    ),
    *(f"perf/{name}" for name in ("total_num_tokens", "time_per_step", "throughput")),
    "training/global_step",
    "training/epoch",
}


class RecordingWandbLogger(WandbLogger):
    """Keeps what it sends to Weights & Biases: an offline run can only be read by their service."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.sent = []

    def log_metrics(self, metrics, step=None):
        super().log_metrics(metrics, step)
        self.sent.append((step, dict(metrics)))


def test_csv_and_tensorboard_carry_verls_names_at_each_iteration(fit, tmp_path):
    board = TensorBoardLogger(tmp_path, "board")

    run = fit(logger=[CSVLogger(tmp_path, "csv"), board], **EACH_STEP)

    events = EventAccumulator(board.log_dir).Reload()
    rows = [row for row in read_metrics(tmp_path / "csv/version_0") if "critic/score/mean" in row]
    assert not VERL_NAMES - set(events.Tags()["scalars"])
    for name in ("critic/score/mean", "actor/grad_norm", "critic/vf_loss"):
        expected = pytest.approx(dict(enumerate(run.recorder.column(name))))
        assert {event.step: event.value for event in events.Scalars(name)} == expected
        assert {int(row["step"]): float(row[name]) for row in rows} == expected
    rewards = {step: validation["val/reward"] for step, validation in enumerate(run.recorder.validations)}
    assert {event.step: event.value for event in events.Scalars("val/reward")} == pytest.approx(rewards)


def test_global_step_is_the_number_of_finished_iterations(fit):
    assert fit().recorder.column("training/global_step") == [1, 2, 3]


@pytest.mark.slow
def test_wandb_carries_verls_names_and_goes_on_with_the_same_run(fit, tmp_path):
    """Offline, each process makes a folder of its own; both bear the run's id."""
    saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2)
    first = RecordingWandbLogger(save_dir=tmp_path, offline=True)
    run = fit(ResumeWandb(), saves, logger=first, max_steps=2, enable_checkpointing=True)
    scores = run.recorder.column("critic/score/mean")
    sent = {step: row["critic/score/mean"] for step, row in first.sent if "critic/score/mean" in row}
    assert sent == pytest.approx(dict(enumerate(scores)))
    assert set().union(*(row for _, row in first.sent)) >= VERL_NAMES
    assert first.experiment.summary["critic/score/mean"] == pytest.approx(scores[-1])
    run_id = first.experiment.id
    first.experiment.finish()

    second, callback = RecordingWandbLogger(save_dir=tmp_path, offline=True), ResumeWandb()
    callback.continue_from(make_trainer(tmp_path, logger=second), tmp_path / "step=2.ckpt")
    saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2)
    fit(callback, saves, logger=second, max_steps=3, ckpt_path=tmp_path / "step=2.ckpt", enable_checkpointing=True)

    assert second.experiment.id == second.version == run_id
    second.experiment.finish()
    folders = {path.name for path in (tmp_path / "wandb").glob("offline-run-*")}
    assert {re.sub(r"offline-run-[\d_]+-", "", name) for name in folders} == {run_id}


@pytest.mark.slow
def test_an_offline_wandb_run_holds_metrics_tables_and_settings(tmp_path, tiny_folder, prompt_file, monkeypatch):
    """Read from the files that the run leaves for `wandb sync`."""
    monkeypatch.chdir(tmp_path)
    write_settings(tmp_path / "ppo.yaml", model=tiny_folder, prompts=prompt_file)
    flags = ["--trainer.logger=WandbLogger", "--trainer.logger.offline=true", f"--trainer.logger.save_dir={tmp_path}"]
    flags += ["--trainer.callbacks+=SamplesTable", "--trainer.callbacks.train_every_n_steps=2"]
    flags += ["--trainer.max_steps=4", "--trainer.val_check_interval=4", "--model.init_args.reward.num_workers=1"]

    trainer = CLI(["--config", "ppo.yaml", *flags]).trainer
    experiment = trainer.loggers[1].experiment
    config = dict(experiment.config)
    experiment.finish()

    assert config["model"]["init_args"]["advantage"]["class_path"].endswith("GAE")
    assert config["trainer"]["max_steps"] == 4
    assert len(list(tmp_path.glob("runs/*/samples/index.html"))) == 1  # of this run alone
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    tables = {path.name.split("_")[0]: json.loads(path.read_text()) for path in run.glob("files/media/table/*/*.json")}
    assert tables["samples"]["columns"][:5] == ["step", "data_source", "prompt", "response", "reward"]
    wandb.teardown()  # the service writes its log to the end before it goes
    log = next(run.glob("*.wandb")).read_bytes()
    names = ("val/samples", "train/samples", "critic/score/mean", "timing_s/gen")
    assert [name for name in names if name.encode() not in log] == []


def test_without_wandb_the_callback_does_nothing(fit, tmp_path):
    callback = ResumeWandb()

    fit(callback, ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1), max_steps=1, enable_checkpointing=True)

    assert saved_callback_state(tmp_path / "step=1.ckpt", callback.state_key) == {"run_id": None}
    assert saved_callback_state(tmp_path / "step=1.ckpt", "Nothing") == {}


@pytest.mark.parametrize("name", ["meta.pt", "megatron_meta.pt"])
def test_a_callbacks_state_is_read_from_the_folders_of_all_strategies(tmp_path, name):
    torch.save({"callbacks": {"ResumeWandb": {"run_id": "abc"}}}, tmp_path / name)

    assert saved_callback_state(tmp_path, "ResumeWandb") == {"run_id": "abc"}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["path", "last"])
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_verl_fit_goes_on_with_the_same_wandb_run(tmp_path, tiny_folder, prompt_file, monkeypatch, how):
    monkeypatch.chdir(tmp_path)
    write_settings(tmp_path / "ppo.yaml", model=tiny_folder, prompts=prompt_file)
    flags = ["--trainer.logger=WandbLogger", "--trainer.logger.offline=true", "--trainer.logger.save_dir=."]
    flags += ["--trainer.callbacks+=ResumeWandb", "--model.init_args.reward.num_workers=1"]
    first = CLI(["--config", "ppo.yaml", *flags, "--trainer.max_steps=4"]).trainer
    first.loggers[1].experiment.finish()
    saved = str(next(tmp_path.glob("*/*/checkpoints/last.ckpt"))) if how == "path" else "last"

    second = CLI(["--config", "ppo.yaml", *flags, "--trainer.max_steps=5", "--ckpt_path", saved]).trainer
    assert second.loggers[1].experiment.summary["training/global_step"] == 5
    assert len(list(tmp_path.glob("runs/*/checkpoints/last.ckpt"))) == (2 if how == "path" else 1)
    second.loggers[1].experiment.finish()

    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert len({folder.name.rpartition("-")[2] for folder in folders}) == 1


@pytest.mark.slow
def test_a_run_that_leaves_its_wandb_run_says_so(fit, tmp_path):
    saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2)
    first, second = (WandbLogger(save_dir=tmp_path, offline=True) for _ in range(2))
    fit(ResumeWandb(), saves, logger=first, max_steps=2, enable_checkpointing=True)
    first.experiment.finish()

    saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2)
    with pytest.warns(UserWarning, match="The checkpoint belongs to the W&B run"):
        fit(ResumeWandb(), saves, logger=second, ckpt_path=tmp_path / "step=2.ckpt", enable_checkpointing=True)
    second.experiment.finish()
