"""`verl-fit` from Python: settings without a command line, and their objects without a run."""

from __future__ import annotations

import pytest
import yaml
from jsonargparse import Namespace
from lightning.pytorch.callbacks import Timer

from tests.cli.toy import BASE, ToyData, ToyModule, ToyRollout
from tests.runs import run_folders
from verl_lightning.cli.lightning_cli import CLI
from verl_lightning.strategies import DDPStrategy

SETTINGS = yaml.safe_load(BASE)


def with_trainer(**options):
    return SETTINGS | {"trainer": SETTINGS["trainer"] | options}


@pytest.mark.parametrize(
    "args",
    [
        SETTINGS,
        Namespace(SETTINGS),
        {"subcommand": "fit", "fit": SETTINGS},
        ["--config", "base.yaml"],
    ],
)
def test_a_configuration_gives_module_data_and_trainer(args):
    cli = CLI(args, run=False)

    assert (type(cli.model), type(cli.datamodule)) == (ToyModule, ToyData)
    assert cli.model.optim.lr == 1e-3
    assert isinstance(cli.trainer.callbacks[0], ToyRollout)
    assert cli.trainer.global_step == 0


def test_what_was_built_can_be_run(folder):
    cli = CLI(SETTINGS, run=False)

    cli.trainer.fit(cli.model, cli.datamodule)

    assert cli.trainer.global_step == 3
    assert (run_folders(folder)[0] / "config.yaml").exists()


def test_read_settings_are_settings():
    first = CLI(["--config", "base.yaml", "--trainer.max_steps", "2"], run=False)

    again = CLI(first.config, run=False)

    assert again.config.fit.trainer.max_steps == 2
    assert again.model.judge.bar == 1.0


def test_settings_are_run_and_evaluated():
    assert CLI(SETTINGS).trainer.global_step == 3
    assert "reward" in CLI({"subcommand": "validate"} | SETTINGS).trainer.callback_metrics


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"trainer": {"max_step": 3}}, "`trainer.max_step` is not a setting of `verl-fit`. Did you mean"),
        ({"megatron": 3}, "megatron"),
        ({"modle": {}}, "`modle` is not a group of settings. Did you mean `model`"),
        (
            {"model": {"class_path": "ToyModule", "init_args": {"optim": {"lr": -1.0}}}},
            "`model.optim.lr` must be above 0",
        ),
        ({"trainer": {"strategy": "dpd"}}, "`trainer.strategy` has no choice 'dpd'. Did you mean `ddp`"),
    ],
)
def test_a_mistake_in_settings_is_one_sentence(changes, sentence, capsys):
    with pytest.raises(SystemExit):
        CLI(SETTINGS | changes, run=False)
    error = capsys.readouterr().err
    assert error.startswith("verl-fit: error: ")
    assert sentence in error


def test_a_wrong_subcommand_is_refused():
    with pytest.raises(ValueError, match=r"no subcommand 'train'\. Choose from fit, validate, test"):
        CLI({"subcommand": "train"} | SETTINGS)


class WithTimer(CLI):
    """A program of the user's own."""

    def instantiate_trainer(self, **kwargs):
        return super().instantiate_trainer(callbacks=[Timer()], max_steps=1, **kwargs)


def test_a_subclass_may_say_what_the_trainer_gets():
    """Callbacks take the place of the file's, as in Lightning; slots stay."""
    cli = WithTimer(
        with_trainer(callbacks=[{"class_path": "EarlyStopping", "init_args": {"monitor": "loss"}}]), run=False
    )

    kinds = [type(callback).__name__ for callback in cli.trainer.callbacks]
    assert "Timer" in kinds
    assert "ToyRollout" in kinds
    assert "EarlyStopping" not in kinds
    assert cli.trainer.max_steps == 1


def test_a_strategys_class_is_another_word_for_its_name(parse):
    strategy = parse("--trainer.strategy=DDPStrategy", "--ddp.timeout=60").trainer.strategy

    assert type(strategy) is DDPStrategy
    assert strategy.timeout == 60


def test_settings_of_another_run_are_replaced_with_a_word_where_runs_share_a_folder():
    CLI(with_trainer(logger=False))

    CLI(with_trainer(logger=False))  # the same
    with pytest.warns(
        UserWarning, match=r"`runs/config\.yaml` is of another run.*`trainer\.default_root_dir` of its own"
    ):
        CLI(with_trainer(logger=False, max_steps=2))
