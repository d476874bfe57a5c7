"""Table of what files and flags do to settings, after LIGHTNING.md 1.4."""

from __future__ import annotations

import re

import pytest
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, Timer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy as LightningDDPStrategy
from lightning.pytorch.strategies import SingleDeviceStrategy

from tests.cli.toy import Lenient, ParsedCLI, ToyRollout
from verl_lightning.loggers import ResumableCSVLogger
from verl_lightning.strategies import DDPStrategy


def test_defaults_of_verl_fit_reach_the_trainer(parse):
    trainer = parse().trainer
    assert trainer.log_every_n_steps == 1
    assert trainer.num_sanity_val_steps == 0
    assert isinstance(trainer.logger, ResumableCSVLogger)
    assert re.fullmatch(r"runs/base-\d{8}-\d{6}(-\d+)?", trainer.logger.log_dir)


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        (["--model.optim.lr", "1e-5"], "model.init_args.optim.lr", 1e-5),
        (["--model.init_args.optim.lr=1e-5"], "model.init_args.optim.lr", 1e-5),
        (["--model.optim", "{lr: 2.0}"], "model.init_args.optim.lr", 2.0),
        (["--model.lora", "{}"], "model.init_args.lora.rank", 8),
        (["--model.lora.rank", "4"], "model.init_args.lora.rank", 4),
        (["--model.lora.rank", "4", "--model.lora", "null"], "model.init_args.lora", None),
        (["--model.judge", "Lenient"], "model.init_args.judge.class_path", "tests.cli.toy.Lenient"),
        (["--rollout.temperature", "0.5"], "rollout.init_args.temperature", 0.5),
        (["--rollout", "null"], "rollout", None),
        (["--trainer.max_steps=9"], "trainer.max_steps", 9),
        (["--seed_everything", "7"], "seed_everything", 7),
        ([], "weights_only", True),
    ],
)
def test_flags_override_the_file(parse, flags, key, value):
    assert parse(*flags).config.fit.get(key) == value


def test_flags_win_wherever_the_file_stands():
    """A file after a flag would override it in jsonargparse."""
    cli = ParsedCLI(["--trainer.max_steps", "9", "--config", "base.yaml"])
    assert cli.trainer.max_steps == 9


def test_second_file_is_merged_key_by_key(parse, folder):
    (folder / "over.yaml").write_text("model: {init_args: {optim: {betas: [0.1, 0.2]}}}\ntrainer: {max_epochs: 5}\n")
    cli = parse("--config", "over.yaml")
    assert cli.model.optim.lr == 1e-3
    assert cli.model.optim.betas == (0.1, 0.2)
    assert (cli.trainer.max_steps, cli.trainer.max_epochs) == (3, 5)


def test_plus_appends_to_the_callbacks_and_later_flags_reach_the_last(parse, folder):
    (folder / "over.yaml").write_text("trainer: {callbacks+: [{class_path: LearningRateMonitor}]}")
    cli = parse("--config", "over.yaml", "--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=reward")
    kinds = [type(callback) for callback in cli.trainer.callbacks]
    assert kinds[:3] == [ToyRollout, LearningRateMonitor, EarlyStopping]


def test_slots_come_before_other_callbacks_and_null_leaves_them_out(parse):
    assert type(parse().trainer.callbacks[0]) is ToyRollout
    assert ToyRollout not in map(type, parse("--rollout", "null").trainer.callbacks)


@pytest.mark.parametrize(
    ("switch", "left"),
    [
        ("enable_progress_bar", ["ModelCheckpoint", "HFCheckpoint", "LearningRateMonitor"]),
        ("enable_checkpointing", ["LearningRateMonitor", "PhaseProgressBar"]),
        ("logger", ["ModelCheckpoint", "HFCheckpoint", "PhaseProgressBar"]),
    ],
)
def test_a_switch_of_the_trainer_leaves_callbacks_of_a_file_out(parse, folder, caplog, switch, left):
    """Lightning refuses to have both."""
    names = ["ModelCheckpoint", "HFCheckpoint", "LearningRateMonitor", "PhaseProgressBar"]
    (folder / "over.yaml").write_text(f"trainer: {{enable_progress_bar: true, callbacks: [{', '.join(names)}]}}")
    with caplog.at_level("INFO"):
        trainer = parse("--config", "over.yaml", f"--trainer.{switch}", "false").trainer
    kinds = [type(callback).__name__ for callback in trainer.callbacks]
    assert [name for name in names if name in kinds] == left
    assert f"Switched off: {', '.join(name for name in names if name not in left)}." in caplog.messages


def test_class_switch_drops_the_settings_of_the_other_class(parse):
    judge = parse("--model.judge", "Lenient", "--model.judge.smile", "1").model.judge
    assert isinstance(judge, Lenient)
    assert judge.smile == 1.0


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ([], SingleDeviceStrategy),
        (["--strategy", "ddp"], DDPStrategy),
        (["--trainer.strategy=ddp"], DDPStrategy),
        (["--strategy", "ddp_find_unused_parameters_true", "--ddp.timeout=9"], DDPStrategy),
        (["--strategy", "{class_path: lightning.pytorch.strategies.DDPStrategy}"], LightningDDPStrategy),
    ],
)
def test_strategy_by_name_or_class(parse, flags, kind):
    assert type(parse(*flags).trainer.strategy) is kind


def test_group_of_a_strategy_reaches_it(parse):
    strategy = parse("--strategy", "ddp", "--ddp.timeout", "60").trainer.strategy
    assert strategy._timeout.total_seconds() == 60


@pytest.mark.filterwarnings("ignore:.*is supported for historical reasons")
def test_auto_with_several_devices_takes_the_settings_of_ddp(parse):
    strategy = parse("--trainer.devices", "2", "--ddp.timeout", "60").trainer.strategy
    assert type(strategy) is DDPStrategy
    assert strategy._timeout.total_seconds() == 60
    assert parse("--trainer.devices", "2").trainer.strategy._timeout.total_seconds() == 1800


def test_settings_of_other_strategies_in_a_file_are_told_of(parse, folder, caplog):
    """One file may serve several."""
    (folder / "over.yaml").write_text("ddp: {timeout: 60}\nfsdp: {compile: true, timeout: 1800}\nmegatron: {}")
    with caplog.at_level("INFO"):
        parse("--config", "over.yaml", "--strategy", "ddp")
    assert [line for line in caplog.messages if "Not used" in line] == [
        "Not used by the strategy `ddp`: `fsdp.compile`."
    ]


def test_loggers_can_be_added_and_removed(parse):
    both = parse("--trainer.logger+=TensorBoardLogger", "--trainer.logger.save_dir=boards").trainer.loggers
    assert [type(logger) for logger in both] == [ResumableCSVLogger, TensorBoardLogger]
    assert parse("--trainer.logger", "false").trainer.loggers == []


def test_timer_can_be_dumped(parse, capsys):
    """Its default is an enum, which YAML can't represent by itself."""
    cli = parse("--trainer.callbacks+=Timer", "--trainer.callbacks.duration=00:01:00:00")
    assert any(isinstance(callback, Timer) for callback in cli.trainer.callbacks)
    with pytest.raises(SystemExit):
        parse("--trainer.callbacks+=Timer", "--print_config")
    assert "interval: step" in capsys.readouterr().out


def test_printed_config_is_a_config(parse, folder, capsys):
    with pytest.raises(SystemExit):
        parse("--model.optim.lr", "0.5", "--print_config")
    printed = capsys.readouterr().out
    (folder / "printed.yaml").write_text(printed)

    with pytest.raises(SystemExit):
        ParsedCLI(["--config", "printed.yaml", "--print_config"])
    assert capsys.readouterr().out == printed


def test_checkpoint_is_not_read_while_parsing(parse):
    """Lightning would load it whole for hyper-parameters; here it is a file that can't be loaded."""
    assert parse("--ckpt_path", "base.yaml").config.fit.ckpt_path == "base.yaml"


def test_validate_and_test_take_the_same_file():
    assert ParsedCLI(["validate", "--config", "base.yaml", "--verbose", "false"]).subcommand == "validate"
    assert ParsedCLI(["test", "--config", "base.yaml"]).subcommand == "test"


def test_help_of_a_class_shows_docstrings_of_nested_fields(capsys):
    with pytest.raises(SystemExit):
        ParsedCLI(["fit", "--model.help", "ToyModule"])
    page = capsys.readouterr().out
    assert "How far the toy moves." in page
    assert "--model.optim.lr" in page
