"""The parser of `verl-fit`: jsonargparse's, with one-sentence errors and without its lenient corners."""

from __future__ import annotations

import dataclasses
import enum
import pydoc
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NoReturn, TypeGuard, Union, get_args, get_origin

import yaml  # type: ignore[import-untyped]
from jsonargparse import ActionSubCommands, Namespace, set_dumper
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from typing_extensions import override

from verl_lightning.cli.arguments import about_stray
from verl_lightning.cli.deprecation import OldKeyError, renamed_settings, renamed_text
from verl_lightning.cli.errors import (
    describe,
    did_you_mean,
    place_in_users_code,
    read_failure,
    readable_type,
    with_full_keys,
)
from verl_lightning.cli.strict_yaml import DuplicateKeyError, StrictLoader
from verl_lightning.compat.jsonargparse import actions_of, type_of
from verl_lightning.processes.messages import say_once

YAML_PLACE = re.compile(r"Problems parsing config: (?:.*\n)*(?P<problem>.+)\n\s+in .*, line (?P<line>\d+), column \d+")

STRAY_WORD = re.compile(r"unrecognized arguments: ([^-\s]\S*)")


class ConfigDumper(yaml.SafeDumper):  # type: ignore[misc]
    """Writes the strings that Lightning declares as enums, such as the `interval` of `Timer`, as plain strings."""


ConfigDumper.add_multi_representer(enum.Enum, lambda dumper, member: dumper.represent_data(member.value))
set_dumper("yaml", lambda config: yaml.dump(config, Dumper=ConfigDumper, allow_unicode=True, sort_keys=False))


class Parser(LightningArgumentParser):
    """Reads settings strictly: no abbreviated flags, no unknown groups, no value in place of a group.

    jsonargparse makes further parsers of this class for the classes that a `class_path` names.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **kwargs)
        self.class_groups: dict[str, type] = {}  # base class by key, of the settings that take a `class_path`
        self._config_file: Path | None = None  # the one that is being read

    @override
    def parse_path(self, cfg_path: str, *args: Any, **kwargs: Any) -> Namespace:
        self._config_file = Path(cfg_path)
        config: Namespace = super().parse_path(cfg_path, *args, **kwargs)
        try:
            written = renamed_settings(yaml.load(self._config_file.read_text(), Loader=StrictLoader))
        except DuplicateKeyError as error:
            self.error(str(error), error)
        for complaint in self.find_stray_groups(written, config):
            self.error(complaint)
        self._config_file = None
        return config

    @override
    def parse_string(self, content: str, *args: Any, **kwargs: Any) -> Namespace:
        try:
            config: Namespace = super().parse_string(renamed_text(content), *args, **kwargs)
        except OldKeyError as error:
            self.error(str(error), error)
        return config

    @override
    def instantiate_classes(self, cfg: Namespace, **kwargs: Any) -> Namespace:
        """Builds the configured objects; a value that a constructor refuses is an error of the command line."""
        try:
            built: Namespace = self.instantiate(cfg, **kwargs)
        except (ValueError, MisconfigurationException) as error:
            place, settings = next(self.find_refusals(cfg), ("", []))
            self.error(with_full_keys(str(error), place, settings), error)
        return built

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:
            super().error(message, ex)
        where = f"in `{self._config_file}`: " if self._config_file else ""
        say_once(f"verl-fit: error: {where}{self.explain(message)}{place_in_users_code(ex)}\n")
        self.exit(2)

    def explain(self, message: str) -> str:
        """Says in a sentence or two what jsonargparse says in a page."""
        if match := YAML_PLACE.match(message):
            return f"line {match['line']} is not valid YAML: {match['problem']}."
        if match := STRAY_WORD.match(message):
            return about_stray(match[1])
        if message.startswith("Unexpected config:"):
            return "expected settings, such as `trainer: {max_steps: 10}`, got something else."
        failure = read_failure(message)
        known_keys = list(self.known_keys(failure.key, failure.class_path))
        command = f"{self.prog} --help all".replace(" [options]", "")
        groups = {key: base for parser in self.all_parsers() for key, base in parser.class_groups.items()}
        return describe(failure, known_keys, known_class_names(groups.get(failure.key)), command)

    def known_keys(self, key: str, class_path: str | None) -> Iterator[str]:
        """Dotted keys that may stand beside a wrong one: of the class at `key`, or everywhere if there is no class."""
        if class_path is not None:
            yield from (f"{key}.{name}" for name in keys_within(pydoc.locate(class_path)))
            return
        for parser in self.all_parsers():
            yield from (action.dest for action in actions_of(parser))
            for group, base in parser.class_groups.items():
                for choice in subclasses(base, package="verl_lightning"):
                    yield from (f"{group}.{name}" for name in keys_within(choice))

    def all_parsers(self) -> list[Parser]:
        """This parser and those of its subcommands."""
        return [self, *self.subcommand_parsers().values()]

    def subcommand_parsers(self) -> dict[str, Parser]:
        """The parsers of `fit` and so on, by name; none if this is one of them."""
        actions = [action for action in actions_of(self) if isinstance(action, ActionSubCommands)]
        return {name: parser for action in actions for name, parser in (action.choices or {}).items()}

    def find_stray_groups(
        self, written: Mapping[str, Any], config: Mapping[str, Any] | Namespace, parent: str = "", shown: str = ""
    ) -> Iterator[str]:
        """Complaints about groups that jsonargparse lets pass: empty ones that don't exist, and values in their place.

        Args:
            written: Part of a configuration file.
            config: Settings that were read from that part; their classes are resolved.
            parent: Key of that part in this parser, with a final dot.
            shown: The same key as the user wrote it.
        """
        slots = [action.dest for action in actions_of(self) if type_of(action) is not None]  # null leaves these out
        for name, value in written.items():
            key, shown_key, read = f"{parent}{name}", f"{shown}{name}", config.get(name)
            if not isinstance(value, dict):
                if key in (self.groups or {}) and (value is not None or key not in slots):
                    got = "null. Leave it out, or set one of them below it" if value is None else repr(value)
                    yield f"`{shown_key}` is a group of settings, got {got}."
            elif part := next(self.parts_at(key), None):
                settings = read.get("init_args", read) if isinstance(read, Namespace) else {}
                yield from class_parser(part).find_stray_groups(value, settings, "", f"{shown_key}.")
            elif isinstance(read, Namespace) and "class_path" in read:
                inner, settings = class_parser(pydoc.locate(read.class_path)), value.get("init_args") or {}
                yield from inner.find_stray_groups(settings, read.get("init_args", {}), "", f"{shown_key}.")
            elif key in (self.groups or {}):
                yield from self.find_stray_groups(value, read or {}, f"{key}.", f"{shown_key}.")
            elif key not in {action.dest for action in actions_of(self)}:
                groups = [f"{shown.removesuffix(parent)}{group}" for group in self.groups or {}]
                yield f"`{shown_key}` is not a group of settings.{did_you_mean(shown_key, groups)}"

    def parts_at(self, key: str) -> Iterator[type]:
        """Dataclasses that the setting at a key may be."""
        hints = (type_of(action) for action in actions_of(self) if action.dest == key)
        parts = (part for hint in hints for part in (hint, *get_args(hint)))
        yield from (part for part in parts if isinstance(part, type) and dataclasses.is_dataclass(part))

    def find_refusals(self, config: Mapping[str, Any] | Namespace, shown: str = "") -> Iterator[tuple[str, list[str]]]:
        """Keys of the groups whose constructors refuse their settings, the innermost first, and their settings' names.

        Args:
            config: Settings that were read.
            shown: Key of these settings as the user wrote it, with a final dot.
        """
        for name, parser in self.subcommand_parsers().items():
            yield from parser.find_refusals(config.get(name, {}), shown)
        for action in actions_of(self):
            value, key = config.get(action.dest), f"{shown}{action.dest}"
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, Namespace) and "class_path" in item:
                    located, settings = pydoc.locate(item.class_path), item.get("init_args")
                elif isinstance(item, Namespace):
                    group = getattr((self.groups or {}).get(action.dest), "group_class", None)
                    located, settings = group or next(self.parts_at(action.dest), None), item
                else:
                    continue
                if settings is None:
                    continue
                parser = class_parser(located)
                yield from parser.find_refusals(settings, f"{key}.")
                if has_plain_constructor(located) and parser.refuses(located, settings):
                    yield key, class_keys(located)

    def refuses(self, part: Callable[..., object], settings: Namespace) -> bool:
        """Tells whether a class, whose parser this is, can't be made of settings."""
        try:
            part(**self.instantiate(settings).as_dict())
        except (ValueError, MisconfigurationException):
            return True
        except TypeError:  # a group is null
            return False
        return False

    def find_nulls(self, config: Namespace, shown: str = "") -> Iterator[str]:
        """Complaints about settings that are null and may not be, which jsonargparse takes for ones without a value.

        Args:
            config: Settings that were read.
            shown: Key of these settings as the user wrote it, with a final dot.
        """
        for action in actions_of(self):
            hint, value = type_of(action), config.get(action.dest, ())
            key = f"{shown}{action.dest}"
            is_set = action.default is not None or action.required
            if value is None and is_set and not may_be_null(hint):
                yield f"`{key}`: expected {readable_type(str(hint))}, got null."
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, Namespace) and "init_args" in item:
                    yield from class_parser(pydoc.locate(item.class_path)).find_nulls(item.init_args, f"{key}.")
                elif isinstance(item, Namespace):
                    for part in self.parts_at(action.dest):
                        yield from class_parser(part).find_nulls(item, f"{key}.")


def may_be_null(hint: Any) -> bool:
    """Tells whether a type allows null; a missing or unresolved type allows it."""
    return (
        hint in (None, Any, NoneType) or isinstance(hint, str) or any(may_be_null(part) for part in union_parts(hint))
    )


def has_plain_constructor(located: object) -> TypeGuard[type]:
    """Tells whether something is a class that only keeps and checks what it gets: a dataclass, or one of ours."""
    is_ours = isinstance(located, type) and located.__module__.startswith("verl_lightning.")
    return is_ours or (isinstance(located, type) and dataclasses.is_dataclass(located))


def union_parts(hint: Any) -> tuple[Any, ...]:
    """Types of a union, none of any other type."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else ()


def class_parser(located: object) -> Parser:
    """A parser for the constructor of a class; an empty one for anything else."""
    parser = Parser(exit_on_error=False)
    if isinstance(located, type):
        parser.add_class_arguments(located, fail_untyped=False)
    return parser


def class_keys(located: object) -> list[str]:
    """Dotted names of the settings of a class."""
    return [action.dest for action in actions_of(class_parser(located)) if action.dest != "help"]


def keys_within(located: object) -> Iterator[str]:
    """Dotted names of the settings of a class, and of those of each group that stands among several choices."""
    parser = class_parser(located)
    for name in class_keys(located):
        yield name
        for part in parser.parts_at(name):
            yield from (f"{name}.{inner}" for inner in keys_within(part))


def subclasses(base: type, package: str = "") -> Iterator[type]:
    """All loaded classes below `base`, or those whose module lies in `package`."""
    children: list[type] = base.__subclasses__()
    for child in children:
        if child.__module__.startswith(package):
            yield child
        yield from subclasses(child, package)


def known_class_names(base: type | None) -> set[str]:
    """Names that a `class_path` may give without their module.

    Args:
        base: Class below which the choice lies; None for all of Lightning's parts and every class of this package.
    """
    if base is not None:
        return {child.__name__ for child in subclasses(base)}
    bases = (LightningModule, LightningDataModule, Callback, Logger, Strategy)
    names = {child.__name__ for base in bases for child in subclasses(base)}
    ours = [module for name, module in list(sys.modules.items()) if name.startswith("verl_lightning.")]
    classes = (value for module in ours for value in vars(module).values() if isinstance(value, type))
    return names | {value.__name__ for value in classes if value.__module__.startswith("verl_lightning.")}
