"""Private names of jsonargparse and of Lightning's command line are where `compat` looks for them."""

from __future__ import annotations

import argparse
import inspect

from jsonargparse import ArgumentParser
from lightning.pytorch.cli import LightningCLI

from verl_lightning.compat import lightning_cli
from verl_lightning.compat.jsonargparse import actions_of, type_of


def sample(size: int | None = 3) -> None:
    """Has a setting."""


def test_arguments_of_parsers_are_told_with_their_types():
    plain, typed = argparse.ArgumentParser(), ArgumentParser()
    plain.add_argument("--size", type=int)
    typed.add_function_arguments(sample)
    assert {action.dest: type_of(action) for action in actions_of(plain)} == {"help": None, "size": None}
    assert {action.dest: type_of(action) for action in actions_of(typed)} == {"help": None, "size": int | None}


def test_lightnings_command_line_runs_and_reads_checkpoints_by_these_methods():
    """`OpenCLI` overrides them."""
    for name in ("_run_subcommand", "_parse_ckpt_path"):
        theirs, ours = (inspect.signature(getattr(kind, name)) for kind in (LightningCLI, lightning_cli.OpenCLI))
        assert list(theirs.parameters) == list(ours.parameters)
    assert {"_run_subcommand", "_parse_ckpt_path"} <= set(LightningCLI.__init__.__code__.co_names)
