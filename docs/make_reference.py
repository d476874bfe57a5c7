"""Writes a table of every option, and every option's value in the shipped configurations: ``make reference``.

The words are those of ``verl-fit ... --help``. A test fails when the pages are not what this script would write.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import re
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jsonargparse import set_parsing_settings

from verl_lightning import callbacks, data, modules
from verl_lightning.callbacks.rollout import RolloutCallback
from verl_lightning.cli import shipped_configs
from verl_lightning.cli.lightning_cli import CLI
from verl_lightning.cli.parser import class_parser
from verl_lightning.compat.jsonargparse import actions_of, type_of
from verl_lightning.launch.options import LaunchOptions
from verl_lightning.loggers import ResumableCSVLogger
from verl_lightning.strategies import STRATEGIES
from verl_lightning.submit.kubernetes import KubernetesOptions
from verl_lightning.submit.slurm import SlurmOptions

HERE = Path(__file__).parent
OPEN = """\
# Every option

Written by `make reference` from the types and docstrings that `verl-fit` itself reads; its `--help` says the same.
`required` has no default. A type that is a link is a group of settings. Options of algorithms stand on the pages of
[Algorithms](algorithms.md), those of `trainer:` in Lightning's documentation. The shipped configurations with every
default written out: {files}. All options exist since 0.1.
"""


def groups() -> dict[str, list[type]]:
    """Classes by the key of the configuration that takes them."""
    named = [getattr(callbacks, name) for name in callbacks.__all__]
    found = [cls for cls in named if hasattr(cls, "state_dict")]
    return {
        "model": [getattr(modules, name) for name in modules.__all__],
        "data": [getattr(data, name) for name in data.__all__],
        "rollout": [cls for cls in found if issubclass(cls, RolloutCallback) and cls is not RolloutCallback],
        "trainer.callbacks": [cls for cls in found if not issubclass(cls, (RolloutCallback, callbacks.Preemption))],
        "preemption": [callbacks.Preemption],
        "trainer.strategy": list(STRATEGIES.values()),
        "trainer.logger": [ResumableCSVLogger],
        "verl-fit ray": [LaunchOptions],
        "verl-fit slurm": [SlurmOptions],
        "verl-fit kubernetes": [KubernetesOptions],
    }


def options_of(owner: type) -> list[argparse.Action]:
    """The options that YAML may set on a class, fields of plain groups one by one."""
    actions = actions_of(class_parser(owner))
    return [action for action in actions if action.default != argparse.SUPPRESS and type_of(action) is not None]


def parts_of(hint: Any) -> Iterator[type]:
    """Groups of settings of this package within a type."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint) and hint.__module__.startswith("verl_lightning."):
        yield hint
    for inner in typing.get_args(hint):
        yield from parts_of(inner)


def type_text(hint: Any) -> str:
    """A type as YAML users know it."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " \\| ".join(type_text(inner) for inner in typing.get_args(hint))
    text = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
    text = re.sub(r"ForwardRef\('([\w.]+)'\)", r"\1", re.sub(r"typing\.|<class '([\w.]+)'>", r"\1", text))
    text = re.sub(r"\b(?:[a-zA-Z_]\w*\.)+(\w+)", r"\1", text)
    text = re.sub(r"Literal\[(.*?)\]", lambda match: match[1].replace("'", "`").replace(", ", " or "), text)
    text = text.replace("NoneType", "null").replace("None", "null").replace("|", "\\|")
    for part in parts_of(hint):
        text = text.replace(part.__name__, f"[{part.__name__}](#{part.__name__.lower()})")
    return text


def default_text(action: argparse.Action) -> str:
    """The default as YAML writes it."""
    if getattr(action, "required", False):
        return "required"
    if dataclasses.is_dataclass(action.default):
        return "its defaults"
    value = action.default
    if value is None or isinstance(value, bool):
        return f"`{json.dumps(value)}`"
    return f"`{value}`"


def table(owner: type) -> str:
    """The heading and options of a class."""
    first = (owner.__doc__ or "").strip().splitlines()[:1]
    rows = [
        f"| `{action.dest}` | {type_text(type_of(action))} | {default_text(action)} |"
        f" {' '.join((action.help or '').replace('|', chr(92) + '|').split())} |"
        for action in options_of(owner)
    ]
    head = ["| option | type | default | meaning |", "|---|---|---|---|"]
    return "\n\n".join([f"### {owner.__name__}", *first, "\n".join([*head, *rows]) if rows else "It has no options."])


def with_parts(owners: list[type], seen: set[type]) -> Iterator[type]:
    """Classes, each followed by the groups of settings that its options name, each once."""
    for owner in owners:
        if owner not in seen:
            seen.add(owner)
            yield owner
            inner = [part for action in options_of(owner) for part in parts_of(type_of(action))]
            yield from with_parts(inner, seen)


def expanded(name: str) -> str:
    """A shipped configuration with every default written out."""
    written = io.StringIO()
    with contextlib.redirect_stdout(written), contextlib.suppress(SystemExit):
        CLI(["fit", "--config", name, "--print_config"])
    lines = [line for line in written.getvalue().splitlines() if not line.startswith("#")]
    return "\n".join([f"# verl-fit --config {name} --print_config", *lines]) + "\n"


def pages() -> dict[str, str]:
    """Every file by its path below ``docs``."""
    names = [name for name in shipped_configs() if "/" not in name]
    files = {f"reference/{name}.yaml": expanded(name) for name in names}
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    links = ", ".join(f"[{name}]({path})" for name, path in zip(names, files, strict=True))
    parts, seen = [OPEN.format(files=links)], set[type]()
    for key, owners in groups().items():
        parts += [f"## `{key}`", *(table(owner) for owner in with_parts(owners, seen))]
    return {"reference.md": "\n\n".join(parts) + "\n"} | files


def main() -> None:
    """Write all files."""
    (HERE / "reference").mkdir(exist_ok=True)
    for name, text in pages().items():
        (HERE / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
