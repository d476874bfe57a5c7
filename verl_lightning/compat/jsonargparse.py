"""Private names of jsonargparse 4.53, and of Python's argparse beneath it."""

from __future__ import annotations

import argparse
from typing import Any


def actions_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """The arguments of a parser, of which public methods tell the defaults alone."""
    return parser._actions


def type_of(action: argparse.Action) -> Any:
    """The annotation of an argument that jsonargparse has made from a signature; None for another one."""
    return getattr(action, "_typehint", None)
