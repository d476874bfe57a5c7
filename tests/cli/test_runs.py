"""Whole runs of a toy: what they save, how they are resumed, and what they say."""

from __future__ import annotations

import csv
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from verl_lightning.cli import show_error
from verl_lightning.lightning_cli import CLI
from verl_lightning.loggers import rows_before

pytestmark = [
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),  # an evaluation has a folder of its own
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks"),
]

CHECKPOINTS = [
    "--trainer.callbacks+=ModelCheckpoint",
    "--trainer.callbacks.save_last=true",
    "--trainer.callbacks.every_n_train_steps=1",
]


def read_metrics(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_settings_are_saved_in_the_runs_folder(run, folder):
    run("--model.optim.lr", "0.5")
    saved = yaml.safe_load((folder / "runs/version_0/config.yaml").read_text())
    assert saved["model"]["init_args"]["optim"]["lr"] == 0.5
    assert saved["trainer"]["max_steps"] == 3
    assert saved["seed_everything"] == 42


def test_saved_settings_repeat_the_run(run, folder):
    run("--model.optim.lr", "0.5", "--seed_everything", "7")
    CLI(["--config", "runs/version_0/config.yaml"])
    assert read_metrics(folder / "runs/version_0") == read_metrics(folder / "runs/version_1")


def test_every_logger_gets_the_settings(run, folder):
    run("--trainer.logger+=TensorBoardLogger", "--trainer.logger.save_dir=boards", "--trainer.logger.name=b")
    for saved in ("runs/version_0/hparams.yaml", "boards/b/version_0/hparams.yaml"):
        assert yaml.safe_load((folder / saved).read_text())["rollout"]["init_args"]["temperature"] == 0.7


def test_without_a_logger_settings_lie_beside_the_checkpoints(run, folder):
    run("--trainer.logger", "false")
    assert (folder / "runs/config.yaml").exists()
    assert list((folder / "runs/checkpoints").glob("*.ckpt"))


@pytest.mark.slow
def test_wandb_settings_lie_beside_its_checkpoints(run, folder):
    """`trainer.log_dir` would put them where all runs of W&B share one file."""
    run("--trainer.logger=WandbLogger", "--trainer.logger.offline=true", "--trainer.logger.save_dir=w")
    (saved,) = (folder / "w").glob("*/*/config.yaml")
    assert (saved.parent / "checkpoints").is_dir()


def test_last_goes_on_in_the_newest_runs_folder(run, folder):
    run(*CHECKPOINTS)
    cli = run(*CHECKPOINTS, "--ckpt_path", "last", "--trainer.max_steps", "4")
    assert cli.trainer.global_step == 4
    losses = [row["step"] for row in read_metrics(folder / "runs/version_0") if row["loss"]]
    assert losses == ["0", "1", "2", "3"]
    assert not (folder / "runs/version_1").exists()


@pytest.mark.parametrize(
    "loggers",
    [
        ["--trainer.logger=TensorBoardLogger", "--trainer.logger.save_dir=boards"],
        ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=boards"],
        ["--trainer.logger+=TensorBoardLogger", "--trainer.logger.save_dir=boards"],
    ],
)
def test_last_goes_on_whatever_the_loggers(run, loggers):
    """Those of Lightning begin a new folder, in which it would find nothing and start anew."""
    run(*CHECKPOINTS, *loggers)

    cli = run(*CHECKPOINTS, *loggers, "--ckpt_path", "last", "--trainer.max_steps", "4")

    assert cli.trainer.global_step == 4
    assert str(cli.trainer.ckpt_path).endswith("last.ckpt")


@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available")
def test_last_starts_anew_if_the_newest_run_saved_nothing(run, folder):
    run(*CHECKPOINTS)
    run("--trainer.enable_checkpointing", "false")
    cli = run(*CHECKPOINTS, "--ckpt_path", "last")
    assert cli.trainer.logger.version == 2
    assert [row["step"] for row in read_metrics(folder / "runs/version_2")] == ["0", "1", "2"]


def test_resumed_settings_still_repeat_the_run(run, folder):
    """They must not say `last` themselves, or repeating would go on instead."""
    run(*CHECKPOINTS)
    run(*CHECKPOINTS, "--ckpt_path", "last", "--trainer.max_steps", "4")
    assert yaml.safe_load((folder / "runs/version_0/config.yaml").read_text())["ckpt_path"] is None


def test_validation_of_last_reads_the_newest_weights(run, folder):
    trained = run(*CHECKPOINTS).model.linear.weight.detach().clone()
    cli = run("validate", *CHECKPOINTS, "--ckpt_path", "last")
    torch.testing.assert_close(cli.model.linear.weight.detach(), trained)
    assert (folder / "runs/version_1/config_validate.yaml").exists()
    assert [row["step"] for row in read_metrics(folder / "runs/version_0")] == ["0", "1", "2"]


def test_validation_of_last_without_a_checkpoint_is_refused(run):
    with pytest.raises(MisconfigurationException, match="no run in `runs/` has a `last` checkpoint"):
        run("validate", "--ckpt_path", "last")


def test_settings_win_over_those_of_the_checkpoint(run, folder):
    run(*CHECKPOINTS)
    cli = run("--ckpt_path", "runs/version_0/checkpoints/last.ckpt", "--model.optim.lr", "0.25")
    assert cli.model.optim.lr == 0.25


@pytest.mark.parametrize("flags", [["--trainer.fast_dev_run", "2"], ["--trainer.overfit_batches", "1"]])
@pytest.mark.filterwarnings("ignore:.*overfit")
def test_debugging_flags_of_the_trainer_work(run, flags):
    assert run(*flags).trainer.global_step in (2, 3)


def test_lightnings_advertisements_are_left_out(run, caplog):
    with caplog.at_level(logging.INFO):
        run()
    assert "`Trainer.fit` stopped: `max_steps=3` reached." in caplog.text
    assert "litlogger" not in caplog.text
    assert "litmodels" not in caplog.text


def test_error_meant_for_the_user_is_one_sentence(capsys):
    error = MisconfigurationException("Parts don't fit.")
    show_error(type(error), error, None)
    assert capsys.readouterr().err == "verl-fit: error: Parts don't fit.\n"


def test_error_raised_by_this_package_is_one_sentence(capsys):
    from verl_lightning.models.config import LoraConfig

    with pytest.raises(ValueError, match="lora.rank") as caught:
        LoraConfig(rank=0)
    show_error(caught.type, caught.value, caught.tb)
    assert capsys.readouterr().err == "verl-fit: error: `lora.rank` must be at least 1, got 0.\n"


@pytest.mark.parametrize("mistake", [lambda: 1 / 0, lambda: rows_before([{"step": "x"}], {}, 0)])
def test_error_that_nobody_raised_on_purpose_keeps_its_traceback(mistake, capsys):
    with pytest.raises((ZeroDivisionError, ValueError)) as caught:
        mistake()
    show_error(caught.type, caught.value, caught.tb)
    assert "Traceback" in capsys.readouterr().err


def test_console_script_trains(folder):
    """Class names resolve from a module of the working directory."""
    (folder / "mine.py").write_text("from tests.cli.toy import *\n")
    root = Path(__file__).parents[2]
    text = (folder / "base.yaml").read_text().replace("Toy", "mine.Toy").replace("Strict", "mine.Strict")
    (folder / "base.yaml").write_text(text)
    command = [str(Path(sys.executable).with_name("verl-fit")), "--config", "base.yaml", "--trainer.max_steps=1"]
    environment = {"PYTHONPATH": str(root), "PATH": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(read_metrics(folder / "runs/version_0")) == 1
