"""The command with this package's own parts: every configuration parses, every option is explained, PPO trains."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from jsonargparse import set_parsing_settings
from lightning.pytorch import Trainer

from tests.cli.toy import ParsedCLI
from tests.runs import make_settings, run_folders
from verl_lightning.callbacks import HFRollout
from verl_lightning.cli import shipped_configs
from verl_lightning.cli.help_pages import short_help
from verl_lightning.cli.lightning_cli import CLI
from verl_lightning.cli.parser import class_parser, keys_within
from verl_lightning.compat.jsonargparse import actions_of
from verl_lightning.data import ChatDataModule, PromptDataModule
from verl_lightning.loggers import read_rows
from verl_lightning.modules import PPOModule, SFTModule
from verl_lightning.strategies import STRATEGIES

ROOT = Path(__file__).parents[2]
FILES = [*shipped_configs().values(), *sorted((ROOT / "examples").rglob("*.yaml"))]
CONFIGS = [path for path in FILES if "class_path" in yaml.safe_load(path.read_text()).get("model", {})]  # whole ones


class CheckedCLI(ParsedCLI):
    """Reads and checks a command line, and builds nothing."""

    def instantiate_classes(self) -> None: ...


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: str(path.relative_to(path.parents[2])))
def test_every_configuration_of_the_repository_parses(path):
    config = CheckedCLI(["--config", str(path)]).config.fit
    assert config.model.class_path.startswith("verl_lightning.")


@pytest.mark.parametrize(
    "kind", [PPOModule, SFTModule, PromptDataModule, ChatDataModule, HFRollout, *STRATEGIES.values()]
)
def test_every_option_is_explained(kind):
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    page = class_parser(kind)
    silent = [action.dest for action in actions_of(page) if not (action.help or "").strip()]
    assert silent == []


@pytest.fixture
def ppo_config(folder: Path, tiny_folder: Path, prompt_file: Path) -> Path:
    """Two iterations of GRPO on the tiny model."""
    path = folder / "ppo.yaml"
    path.write_text(yaml.safe_dump(make_settings(tiny_folder, prompt_file, max_steps=2)))
    return path


def test_ppo_trains_and_its_saved_settings_repeat_it(ppo_config, folder):
    assert CLI(["--config", str(ppo_config)]).trainer.global_step == 2
    CLI(["--config", str(run_folders(folder)[0] / "config.yaml")])
    first, second = (read_rows(run / "metrics.csv") for run in run_folders(folder))
    learnt = [name for name in first[0] if not name.startswith(("timing", "perf"))]
    assert "actor/grad_norm" in learnt
    assert [[row[name] for name in learnt] for row in first] == [[row[name] for name in learnt] for row in second]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            "--model.actor.optim.lrr 1",
            "`model.actor.optim.lrr` is not a setting of `ModelConfig`. Did you mean `model.ac",
        ),
        ("--model.advantage GRP", "`model.advantage` has no choice 'GRP'. Did you mean `GRPO`?"),
        ("--model.update.micro_batch_size 0", "`model.update.micro_batch_size` must be"),
        ("--rollout.sampling.temperatur 1", "`rollout.sampling.temperatur` is not a setting of `HFRollout`. Did you"),
        ("--data.prompt_per_step 1", "`data.prompt_per_step` is not a setting of `PromptDataModule`. Did you mean"),
    ],
)
def test_mistake_in_our_settings_is_one_sentence(refuse, ppo_config, words, sentence):
    said = refuse("--config", str(ppo_config), *words.split())
    assert said.startswith(sentence)
    assert len(said.splitlines()) == 1


def keys_of_page(page: str) -> set[str]:
    """Flags on a help page, without slashes, values and what lies in brackets."""
    return set(re.findall(r"^  --([a-z_.]+)", page, re.MULTILINE))


def test_the_short_help_names_options_that_exist():
    page = short_help("fit")
    known = {"trainer": Trainer, "model": PPOModule, "data": PromptDataModule, "rollout": HFRollout, **STRATEGIES}
    options = {group: set(keys_within(kind)) for group, kind in known.items()}

    asked = [key.partition(".")[::2] for key in keys_of_page(page)]
    assert len(asked) > 30
    wrong = [(group, key) for group, key in asked if key and key not in options[group]]
    assert wrong == []
    top = {*vars(CheckedCLI(["--config", "sft"]).config.fit), "strategy", "print_config"}
    assert {group for group, key in asked if not key} <= top
