"""Whole runs of a toy: what they save, how they are resumed, and what they say."""

from __future__ import annotations

import csv
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from tests.modules.test_run_lock import held
from tests.runs import run_folders
from verl_lightning.cli import show_error
from verl_lightning.cli.lightning_cli import CLI
from verl_lightning.loggers import rows_before
from verl_lightning.modules.run_lock import FolderInUseError

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
    saved = yaml.safe_load((run_folders(folder)[0] / "config.yaml").read_text())
    assert saved["model"]["init_args"]["optim"]["lr"] == 0.5
    assert saved["trainer"]["max_steps"] == 3
    assert saved["seed_everything"] == 42


def test_saved_settings_repeat_the_run(run, folder):
    run("--model.optim.lr", "0.5", "--seed_everything", "7")
    CLI(["--config", str(run_folders(folder)[0] / "config.yaml")])
    first, second = run_folders(folder)
    assert read_metrics(first) == read_metrics(second)
    assert second.name.startswith("base-2")  # what the first one was named after, not "config"


def test_every_logger_gets_the_settings(run, folder):
    run("--trainer.logger+=TensorBoardLogger", "--trainer.logger.save_dir=boards", "--trainer.logger.name=b")
    for saved in (run_folders(folder)[0], folder / "boards/b/version_0"):
        assert yaml.safe_load((saved / "hparams.yaml").read_text())["rollout"]["init_args"]["temperature"] == 0.7


def test_without_a_logger_settings_lie_beside_the_checkpoints(run, folder):
    run("--trainer.logger", "false")
    assert (folder / "runs/config.yaml").exists()
    assert list((folder / "runs/checkpoints").glob("*.ckpt"))


@pytest.mark.slow
def test_a_run_of_wandb_has_a_folder_as_all_have_and_its_name(run, folder):
    """`trainer.log_dir` would put its files where all runs of W&B share one folder."""
    flags = ["--trainer.logger=WandbLogger", "--trainer.logger.offline=true", "--trainer.logger.save_dir=w"]
    experiment = run(*flags, "--name", "first").trainer.loggers[1].experiment
    experiment.finish()
    assert experiment.name == "first"
    assert {"checkpoints", "config.yaml", "metrics.csv", "report.html"} <= {
        path.name for path in (folder / "runs/first").iterdir()
    }


def test_last_goes_on_in_the_newest_runs_folder(run, folder):
    run(*CHECKPOINTS)
    cli = run(*CHECKPOINTS, "--ckpt_path", "last", "--trainer.max_steps", "4")
    assert cli.trainer.global_step == 4
    (folder,) = run_folders(folder)
    assert [row["step"] for row in read_metrics(folder) if row["loss"]] == ["0", "1", "2", "3"]


LOGGERS = {
    "ours": [],
    "none": ["--trainer.logger=false"],
    "csv": ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=boards"],
    "tensorboard": ["--trainer.logger=TensorBoardLogger", "--trainer.logger.save_dir=boards"],
    "two": ["--trainer.logger+=TensorBoardLogger", "--trainer.logger.save_dir=boards"],
    "wandb": ["--trainer.logger=WandbLogger", "--trainer.logger.offline=true", "--trainer.logger.save_dir=boards"],
    "dirpath": ["--trainer.callbacks.dirpath=saved"],
}
SLOW = {"wandb"}


@pytest.mark.parametrize(
    "logger", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in LOGGERS]
)
@pytest.mark.filterwarnings("ignore:.*exists and is not empty")
@pytest.mark.filterwarnings("ignore:.*is of another run, whose settings these replace")
def test_last_is_the_newest_run_that_has_a_checkpoint(run, logger, caplog):
    """Whatever the loggers, and though a run that failed before its first save is newer."""

    def trainer_of(*words):
        trainer = run(*words, *CHECKPOINTS, *LOGGERS[logger]).trainer
        if logger == "wandb":
            trainer.loggers[1].experiment.finish()
        return trainer

    trainer_of("fit")
    saved = trainer_of("fit", "--trainer.max_steps=4").checkpoint_callback.last_model_path
    trainer_of("fit", "--trainer.enable_checkpointing=false")
    with caplog.at_level(logging.INFO):
        trained = trainer_of("fit", "--ckpt_path=last", "--trainer.max_steps=5")
        evaluated = trainer_of("validate", "--ckpt_path=last")

    assert trained.global_step == 5
    assert Path(trained.ckpt_path).absolute() == Path(saved).absolute()
    assert Path(evaluated.ckpt_path).absolute() == Path(trained.checkpoint_callback.last_model_path).absolute()
    assert f"`--ckpt_path last` is `{trained.ckpt_path}`." in caplog.text


def test_last_goes_on_in_the_folder_of_the_run_that_it_means(run, folder, caplog):
    run(*CHECKPOINTS)
    run(*CHECKPOINTS, "--trainer.enable_checkpointing", "false")

    with caplog.at_level(logging.INFO):
        run(*CHECKPOINTS, "--ckpt_path", "last", "--trainer.max_steps", "4")

    first, second = run_folders(folder)
    assert [row["step"] for row in read_metrics(first) if row["loss"]] == ["0", "1", "2", "3"]
    assert f"Newer runs have no checkpoint and are passed over: `{second.relative_to(folder)}`." in caplog.text


def test_last_of_a_chosen_run_is_its_own(run, folder):
    """Of an evaluation too, and never that of another run."""
    version = ["--trainer.logger=ResumableCSVLogger", "--trainer.logger.version=0"]
    run(*CHECKPOINTS, *version)
    run(*CHECKPOINTS)
    chosen = [*version, "--ckpt_path=last"]

    assert run(*CHECKPOINTS, *chosen).trainer.ckpt_path == "runs/version_0/checkpoints/last.ckpt"
    with pytest.raises(MisconfigurationException, match="no run in `runs/` has a `last` checkpoint"):
        run(*CHECKPOINTS, *chosen, "--trainer.logger.version=5")


def test_last_leaves_what_other_runs_keep_in_the_same_folder(run, folder, caplog):
    """A run goes on with its own, in its own folder; one of a folder that is gone may be its own."""
    saves = [*CHECKPOINTS, "--trainer.callbacks.dirpath=saved", "--trainer.callbacks.save_top_k=-1"]
    mine = [*saves, "--trainer.default_root_dir=mine", "--ckpt_path=auto"]
    run(*saves, "--trainer.default_root_dir=theirs")
    run(*mine, "--trainer.callbacks.save_last=false")

    with caplog.at_level(logging.INFO):
        trainer = run(*mine, "--trainer.max_steps=4", "--trainer.callbacks.save_last=false").trainer

    assert Path(trainer.ckpt_path).name == "epoch=0-step=3-v1.ckpt"
    assert "Newer checkpoints there are of other runs: `" in caplog.text
    (own,) = (folder / "mine").glob("*/metrics.csv")
    assert [row["step"] for row in read_metrics(own.parent) if row["loss"]] == ["0", "1", "2", "3"]
    shutil.rmtree("theirs")
    assert Path(run(*mine, "--trainer.max_steps=4").trainer.ckpt_path).name == "last.ckpt"


def test_last_takes_another_checkpoint_where_a_run_has_no_last_one(run):
    run("--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.every_n_train_steps=2")

    cli = run("--ckpt_path", "last", "--trainer.max_steps=4")

    assert cli.trainer.ckpt_path.endswith("/checkpoints/epoch=0-step=2.ckpt")


@pytest.mark.parametrize("words", [["fit"], ["validate"], ["test"]])
@pytest.mark.parametrize("logger", ["ours", "none", "tensorboard", "dirpath"])
def test_last_without_a_checkpoint_is_refused(run, words, logger):
    with pytest.raises(MisconfigurationException, match="`--ckpt_path last`: no run in `.*` has a `last` checkpoint"):
        run(*words, *CHECKPOINTS, *LOGGERS[logger], "--ckpt_path", "last")


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_run_that_is_still_at_work_is_not_gone_on_with(run, folder):
    """Not even its settings are written over."""
    run(*CHECKPOINTS, "--name", "first")
    before = {path: path.read_bytes() for path in (folder / "runs/first").rglob("*") if path.is_file()}

    with held(folder / "runs/first") as pid:
        with pytest.raises(FolderInUseError, match=rf"first` is in use by another run: process {pid} on"):
            run(*CHECKPOINTS, "--ckpt_path", "last", "--trainer.max_steps", "4")
        assert run("validate", "--ckpt_path", "last").trainer.logger.version.startswith("base-validate-")

    assert before == {path: path.read_bytes() for path in before}
    assert run(*CHECKPOINTS, "--ckpt_path", "last", "--trainer.max_steps", "4").trainer.global_step == 4


def test_auto_begins_anew_once_and_goes_on_from_then_on(run, folder, caplog):
    """For schedulers that start a job by the same command until it is done."""
    with caplog.at_level(logging.INFO):
        first = run(*CHECKPOINTS, "--ckpt_path", "auto")
    second = run(*CHECKPOINTS, "--ckpt_path", "auto", "--trainer.max_steps", "4")

    assert "`--ckpt_path auto`: no run has a checkpoint yet, so this one begins anew." in caplog.text
    assert first.trainer.ckpt_path is None
    (folder,) = run_folders(folder)
    assert second.trainer.ckpt_path == f"runs/{folder.name}/checkpoints/last.ckpt"
    assert yaml.safe_load((folder / "config.yaml").read_text())["ckpt_path"] is None


def test_auto_is_for_training(refuse):
    said = refuse("validate", "--config", "base.yaml", "--ckpt_path", "auto")
    assert said == "`--ckpt_path auto` begins anew where there is no checkpoint, but `validate` needs one: `last`."


def test_resumed_settings_still_repeat_the_run(run, folder):
    """They must not say `last` themselves, or repeating would go on instead."""
    run(*CHECKPOINTS)
    run(*CHECKPOINTS, "--ckpt_path", "last", "--trainer.max_steps", "4")
    assert yaml.safe_load((run_folders(folder)[0] / "config.yaml").read_text())["ckpt_path"] is None


def test_validation_of_last_reads_the_newest_weights(run, folder):
    trained = run(*CHECKPOINTS).model.linear.weight.detach().clone()
    cli = run("validate", *CHECKPOINTS, "--ckpt_path", "last")
    torch.testing.assert_close(cli.model.linear.weight.detach(), trained)
    assert list((folder / "runs").glob("base-validate-*/config_validate.yaml"))
    assert [row["step"] for row in read_metrics(run_folders(folder)[0])] == ["0", "1", "2"]


def test_settings_win_over_those_of_the_checkpoint(run, folder):
    run(*CHECKPOINTS)
    cli = run("--ckpt_path", str(run_folders(folder)[0] / "checkpoints/last.ckpt"), "--model.optim.lr", "0.25")
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
    assert len(read_metrics(run_folders(folder)[0])) == 1
