"""Private names of jsonargparse are where `compat.jsonargparse` looks for them."""

from __future__ import annotations

import argparse

from jsonargparse import ArgumentParser

from verl_lightning.compat.jsonargparse import actions_of, type_of


def sample(size: int | None = 3) -> None:
    """Has a setting."""


def test_arguments_of_parsers_are_told_with_their_types():
    plain, typed = argparse.ArgumentParser(), ArgumentParser()
    plain.add_argument("--size", type=int)
    typed.add_function_arguments(sample)
    assert {action.dest: type_of(action) for action in actions_of(plain)} == {"help": None, "size": None}
    assert {action.dest: type_of(action) for action in actions_of(typed)} == {"help": None, "size": int | None}
