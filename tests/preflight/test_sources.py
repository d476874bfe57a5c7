"""What is read of sources is what the real parser knows: an option less would refuse what is right."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy

from tests.cli.toy import BASE, ParsedCLI
from verl_lightning.algorithms.advantages.base import AdvantageEstimator
from verl_lightning.algorithms.corrections.base import RolloutCorrection
from verl_lightning.algorithms.losses.base import PolicyLoss
from verl_lightning.cli import shipped_configs
from verl_lightning.cli.lightning_cli import CALLBACK_SLOTS, SaveConfig
from verl_lightning.cli.parser import class_keys, subclasses
from verl_lightning.cli.preflight.groups import CHOICES, STRATEGIES, dotted, root_options
from verl_lightning.cli.preflight.reading import Reading
from verl_lightning.cli.preflight.sources import ClassSource, classes_of, find_class, named_class
from verl_lightning.cli.preflight.words import read_settings
from verl_lightning.compat.jsonargparse import actions_of
from verl_lightning.rollout.turns import Environment
from verl_lightning.strategies import STRATEGIES as REAL_STRATEGIES

ROOT = Path(__file__).parents[2]
BASES = (LightningModule, LightningDataModule, Callback, Strategy, Logger)
PARTS = (AdvantageEstimator, PolicyLoss, RolloutCorrection, Environment)


def with_parts(source: ClassSource) -> Iterator[ClassSource]:
    """A class, and the groups of settings that its options name."""
    yield source
    for kind in (source.options or {}).values():
        for part in kind.parts:
            yield from with_parts(part)


def keys(cls: type) -> set[str]:
    """Dotted names of what the real parser takes for a class, without those that only stand for a group."""
    names = {name for name in class_keys(cls) if not name.endswith(".help")}
    return {name for name in names if not any(other.startswith(f"{name}.") for other in names)}


@pytest.mark.parametrize("base", [*BASES, *PARTS], ids=lambda base: base.__name__)
def test_options_of_every_class_that_a_file_may_name_are_those_of_the_parser(base):
    for cls in set(subclasses(base, package="verl_lightning")) - {SaveConfig}:  # no file can name that one
        source = find_class(f"{cls.__module__}.{cls.__qualname__}")
        assert source is not None
        assert set(dotted(source.options)) == keys(cls), cls


@pytest.mark.parametrize("base", [Callback, Logger], ids=lambda base: base.__name__)
def test_options_of_lightnings_classes_are_those_of_the_parser_or_open(base):
    found = {cls: find_class(f"{cls.__module__}.{cls.__qualname__}") for cls in subclasses(base, package="lightning.")}
    known = {cls: source.options for cls, source in found.items() if source is not None and source.options is not None}
    assert len(known) > 2
    for cls in [cls for cls in known if "SaveConfig" not in cls.__name__]:
        assert keys(cls) == {name for name in dotted(known[cls]) if name in keys(cls)}, cls


@pytest.mark.parametrize("command", ["fit", "validate"])
def test_the_top_knows_every_option_of_the_parser(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(BASE)
    parser = ParsedCLI([command, "--config", "base.yaml"]).reader

    known = set(dotted(root_options(command)))

    real = {action.dest for action in actions_of(parser) if not action.dest.endswith(".help")}
    groups = {name for name in real if any(other.startswith(f"{name}.") for other in real)}
    assert real - groups - known == set()
    assert known - real <= {"model", "dataloaders", "train_dataloaders", "val_dataloaders", "datamodule"}


def test_keys_at_the_top_are_those_of_the_command_line():
    assert {name: f"{cls.__module__}.{cls.__qualname__}" for name, cls in REAL_STRATEGIES.items()} == STRATEGIES
    bases = {"model": LightningModule, "data": LightningDataModule, **CALLBACK_SLOTS}
    assert {key: f"{cls.__module__}.{cls.__qualname__}" for key, cls in bases.items()} == CHOICES


FILES_OF_EXAMPLES = [file for file in ROOT.glob("examples/*/*.yaml") if file.stem != "phases"]
"""Without the one that is split into several before it is read."""


@pytest.mark.parametrize(
    "file",
    [*shipped_configs().values(), *ROOT.glob("docs/reference/*.yaml"), *FILES_OF_EXAMPLES],
    ids=lambda file: file.name,
)
def test_no_setting_of_our_own_files_is_refused(file):
    reading, base = Reading("fit"), shipped_configs()["sft" if "sft" in file.name else "ppo"]
    for setting in read_settings(["--config", str(base), "--config", str(file)]):
        reading.add(setting)
    assert reading.values


def test_a_name_of_several_classes_is_judged_by_none_of_them(tmp_path, monkeypatch):
    for module in ("one", "other"):
        (tmp_path / "twice").mkdir(exist_ok=True)
        (tmp_path / "twice" / f"{module}.py").write_text(f"class Same:\n    def __init__(self, {module}: int): ...\n")
    (tmp_path / "twice" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)

    assert len(classes_of("twice")["Same"]) == 2
    assert named_class("Same", "twice") is None
