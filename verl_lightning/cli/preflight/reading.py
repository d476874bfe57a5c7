"""Puts settings together in their order, and refuses what the real parser is certain to refuse."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import verl_lightning
from verl_lightning.cli.deprecation import find_renamed
from verl_lightning.cli.errors import Failure, describe
from verl_lightning.cli.preflight.groups import LIGHTNING, dotted_of_choices, dotted_within, root_options
from verl_lightning.cli.preflight.option_types import OptionType
from verl_lightning.cli.preflight.sources import (
    PACKAGE,
    ClassSource,
    classes_of,
    find_class,
    module_file,
    named_class,
    names_without,
    subclasses,
)
from verl_lightning.cli.preflight.words import Setting, read_file
from verl_lightning.faults import closest

FILES = (".yaml", ".yml", ".json")


@dataclass(frozen=True)
class Owner:
    """Class or command whose options are being read."""

    key: str
    """Dotted key of the owner, with a final dot; empty at the top."""

    name: str
    """Name of the class, or of the command."""

    options: Mapping[str, OptionType] | None
    """Options of the owner by name; None where they are not known."""


class Reading:
    """The settings of a command line.

    Args:
        command: The subcommand.
    """

    def __init__(self, command: str) -> None:
        self.command = command
        self.values: dict[str, Any] = {}
        """Values by dotted key, as far as they are certain."""
        self.classes: dict[str, ClassSource | None] = {}
        """Chosen class by dotted key; None for a class whose source is not known."""
        self.mentioned: set[str] = set()
        """Dotted keys of all options that were set, or below which one was."""
        self.has_foreign_classes = False
        """True once a class of another package is set: its module's classes may then be named without the module."""
        self.has_dirpath = False
        """True once checkpoints may lie elsewhere than in the run's folder."""
        self._top = Owner("", "verl-fit", root_options(command))

    def add(self, setting: Setting) -> None:
        """Takes a file or a flag.

        Raises:
            ValueError: If the real parser is certain to refuse it.
        """
        self.has_dirpath |= "dirpath" in f"{setting.key} {setting.value}"
        if setting.file is None:
            parts = [part for part in setting.key.split(".") if part != "init_args"]
            if parts[-1] != "help":
                self._put(self._top, self._top.options, "", parts, setting.value)
            return
        try:
            self._put_all(self._top, self._top.options, "", setting.value)
        except ValueError as error:
            raise ValueError(f"in `{setting.file}`: {error}") from error

    def get(self, key: str) -> Any:
        """The value of a setting; None if it is not set, or not known for certain."""
        return self.values.get(key)

    def own_class(self, key: str) -> str | None:
        """Name of the class of this package that was chosen by a key, None if it is none."""
        chosen = self.classes.get(key)
        return None if chosen is None or not chosen.is_ours else chosen.name

    def _put_all(
        self, owner: Owner, options: Mapping[str, OptionType] | None, group: str, settings: Mapping[Any, Any]
    ) -> None:
        for name, value in settings.items():
            self._put(owner, options, group, [str(name)], value)

    def _put(
        self, owner: Owner, options: Mapping[str, OptionType] | None, group: str, parts: list[str], value: Any
    ) -> None:
        """Puts a value at the option whose key has these parts below a group of an owner."""
        name, *rest = parts
        key = f"{group}{name}"
        self.mentioned.add(key)
        if options is None or name == "dict_kwargs":
            return
        if name not in options:
            self._refuse_key(owner, ".".join([key, *rest]))
            return
        kind, choice = options[name], options[name].choice
        if not rest:
            self._set(owner, key, kind, value)
        elif kind.parts:
            inner = self._owner_of_part(owner, key, kind)
            self._put(inner, kind.parts[0].options, f"{key}.", rest, value)
        elif choice is not None and rest == ["class_path"]:
            self._choose(key, choice, value)
        elif choice is not None and (chosen := self.classes.get(key)) is not None:
            self._put(Owner(f"{key}.", chosen.name, chosen.options), chosen.options, f"{key}.", rest, value)

    def _set(self, owner: Owner, key: str, kind: OptionType, value: Any) -> None:
        """Sets an option to a whole value."""
        choice = kind.choice
        if isinstance(value, str) and kind.parts and value.endswith(FILES) and Path(value).is_file():
            value = read_file(Path(value))
        if isinstance(value, dict) and kind.parts:
            self._put_all(self._owner_of_part(owner, key, kind), kind.parts[0].options, f"{key}.", value)
        elif isinstance(value, dict) and choice is not None:
            self._set_class(key, choice, value)
        elif isinstance(value, str) and choice is not None:
            self._choose(key, choice, value)
        else:
            self._forget(key)
            if isinstance(value, list) and kind.items is not None and not kind.items.is_simple:
                for item in value:
                    self._set(owner, key, kind.items, item)
                    self._forget(key)  # no flag reaches into the items of a list
            elif is_no_group(kind, value):
                raise ValueError(group_got(key, kind.parts[0], value))
            elif not kind.takes(value):
                raise ValueError(describe(Failure(key=key, expected=tuple(kind.texts), got=str(value)), (), (), ""))
            self.values[key] = value

    def _set_class(self, key: str, kind: OptionType, value: Mapping[Any, Any]) -> None:
        """Sets an option from a mapping with ``class_path`` and ``init_args``."""
        if "class_path" in value:
            self._choose(key, kind, value["class_path"])
        chosen, settings = self.classes.get(key), value.get("init_args")
        if chosen is not None and isinstance(settings, dict):
            self._put_all(Owner(f"{key}.", chosen.name, chosen.options), chosen.options, f"{key}.", settings)

    def _choose(self, key: str, kind: OptionType, name: Any) -> None:
        """Sets the class of an option by the class's name."""
        before, chosen = self.classes.get(key), None
        if isinstance(name, str) and not name.endswith(FILES):
            chosen = self._find(key, kind, name)
        if before is None or chosen is None or chosen.node is not before.node:
            self._forget(key)
        if chosen is None and kind.takes_words:
            self.values[key] = name
        else:
            self.classes[key] = chosen

    def _find(self, key: str, kind: OptionType, name: str) -> ClassSource | None:
        if any(base.name == "Path" for base in kind.bases):  # a folder's name may have a dot
            return None
        if "." in name:
            if not name.startswith((f"{PACKAGE}.", "lightning.")):
                self.has_foreign_classes = True
            check_importable(key, name)
            return find_class(name)
        for package in (PACKAGE, LIGHTNING):
            if name in classes_of(package):
                return named_class(name, package)
        if name.isidentifier() and not kind.takes_words and not self.has_foreign_classes:
            known = [
                found
                for base in kind.bases
                for package in (PACKAGE, LIGHTNING)
                for found in subclasses(base.name, package)
            ]
            failure = Failure(key=key, reason=f"Expected a dot import path string: {name}")
            raise ValueError(describe(failure, (), known, ""))
        return None

    def _forget(self, key: str) -> None:
        """Forgets the value and class of an option, and those of all options below it."""
        for known in (self.values, self.classes):
            for name in [name for name in known if name == key or name.startswith(f"{key}.")]:
                del known[name]

    def _owner_of_part(self, owner: Owner, key: str, kind: OptionType) -> Owner:
        """Returns the owner of a dataclass's options: those of a plain group belong to the owner of the group."""
        part = kind.parts[0]
        return owner if kind.is_group else Owner(f"{key}.", part.name, part.options)

    def _refuse_key(self, owner: Owner, key: str) -> None:
        if find_renamed(key) is not None:
            return
        known: Iterator[str] = (f"{owner.key}{option}" for option in dotted_within(owner.options))
        failure = Failure(
            key=owner.key.removesuffix("."),
            class_path=owner.name if owner.key else None,
            reason=f"Option '{key.removeprefix(owner.key)}' is not accepted",
        )
        known_keys = [*known, *(() if owner.key else dotted_of_choices())]
        raise ValueError(describe(failure, known_keys, (), f"verl-fit {self.command} --help"))


def is_no_group(kind: OptionType, value: Any) -> bool:
    """Tells whether a value, itself no file of settings, stands where only a group of settings can be."""
    if not kind.parts or kind != OptionType(parts=kind.parts, is_null=kind.is_null):
        return False
    if isinstance(value, str):
        return not (value.endswith(FILES) or Path(value).is_file())
    return value is not None or not kind.is_null


def check_importable(key: str, name: str) -> None:
    """Refuses a class of a package that is not there, or that this package or Lightning does not have.

    Raises:
        ValueError: If it is certain that it can't be imported.
    """
    package = name.partition(".")[0]
    if package.isidentifier() and importlib.util.find_spec(package) is None:
        raise ValueError(f"`{key}`: No module named '{package}'")
    if package in (PACKAGE, LIGHTNING.partition(".")[0]):
        check_defined(key, name)


def check_defined(key: str, name: str) -> None:
    """Refuses a class that its module certainly does not define.

    Raises:
        ValueError: If no module of that name is there, or it defines no such class.
    """
    parts, depth = name.split("."), 1
    while depth < len(parts) and module_file(".".join(parts[: depth + 1])) is not None:
        depth += 1
    if depth == len(parts):  # a module, which the real parser refuses
        return
    module, attribute, file = ".".join(parts[:depth]), parts[depth], module_file(".".join(parts[:depth]))
    if module == PACKAGE:
        names = None if attribute in verl_lightning.__all__ else set(verl_lightning.__all__)
    else:
        names = None if file is None else names_without(file, attribute)
    if names is not None:
        is_elsewhere = parts[-1] in {**classes_of(PACKAGE), **classes_of(LIGHTNING)}
        hint = f" Say `{parts[-1]}`." if is_elsewhere else closest(attribute, names)
        raise ValueError(f"`{key}`: `{module}` has no `{attribute}`.{hint}")


def group_got(key: str, part: ClassSource, value: Any) -> str:
    """Says what to write where another value stands in the place of a group of settings."""
    if value is None:
        return f"`{key}` is a group of settings, got null. Leave it out, or set one of them below it."
    fits = (name for name, kind in (part.options or {}).items() if kind.is_simple and kind.takes(value))
    example = f", such as `--{key}.{next(fits, next(iter(part.options or {}), ''))} {value}`"
    return f"`{key}` is a group of settings, got {value}. Set one of them{example}."
