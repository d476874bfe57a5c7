"""Settings as they stand in files and on the command line, in the order in which they win over one another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from jsonargparse import get_loader

from verl_lightning.cli.arguments import HYDRA, about_stray
from verl_lightning.cli.strict_yaml import StrictLoader


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A value for a key."""

    key: str
    """Dotted key, as the user wrote it; empty for all settings of a file."""

    value: Any
    """The value as YAML reads it."""

    file: Path | None = None
    """File in which it stands; None for a flag."""


def read_settings(words: Sequence[str]) -> Iterator[Setting]:
    """All settings of a command line, in their order.

    Args:
        words: Words after the subcommand, as `normalize_arguments` gives them.

    Raises:
        ValueError: If a file is no YAML with settings, or a word is neither a flag nor the value of one.
    """
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            raise ValueError(about_stray(word))
        flag, equals, value = word.partition("=")
        if not equals and rest and not rest[0].startswith("--"):
            if flag == "--print_config" and HYDRA.fullmatch(rest[0]):
                continue
            value = rest.pop(0)
        if flag == "--config":
            yield Setting(key="", value=read_file(Path(value)), file=Path(value))
        elif flag.startswith("--"):
            # What `key+` adds to a list is judged like what `key` sets.
            yield Setting(key=flag.removeprefix("--").removesuffix("+"), value=read_value(value))


def read_file(path: Path) -> dict[str, Any]:
    """The settings in a file.

    Raises:
        ValueError: If it holds none.
    """
    where = f"in `{path}`: "
    try:
        text = path.read_text(encoding="utf-8")
        settings = get_loader("yaml")(text)
        yaml.load(text, Loader=StrictLoader)  # that no key stands twice
    except yaml.MarkedYAMLError as error:
        line = 0 if error.problem_mark is None else error.problem_mark.line + 1
        raise ValueError(f"{where}line {line} is not valid YAML: {error.problem}.") from error
    except (OSError, ValueError, yaml.YAMLError) as error:  # also a key that stands twice, and bytes that are no text
        raise ValueError(f"{where}{error}") from error
    if not isinstance(settings, dict):
        got = "nothing" if settings is None else "something else"
        raise ValueError(f"{where}expected settings, such as `trainer: {{max_steps: 10}}`, got {got}.")
    return settings


def read_value(text: str) -> Any:
    """A flag's value as YAML reads it; the text itself where that can't be read, or where there is none."""
    if not text:
        return text
    try:
        return get_loader("yaml")(text)
    except yaml.YAMLError:
        return text
