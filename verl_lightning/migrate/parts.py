"""Parts of a translation: verl's values, our settings, and remarks on keys that made no setting."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One of our settings, and where it comes from."""

    key: str
    """Our dotted key."""

    value: Any
    """Value of the setting."""

    sources: tuple[str, ...]
    """verl's keys that it was made of."""

    note: str = ""
    """Words on what differs from verl, empty if nothing does."""


@dataclass(frozen=True, kw_only=True)
class Remark:
    """Remark on what became of a key of verl's that made no setting."""

    source: str
    """verl's key."""

    reason: str
    """Reason that the key made no setting."""

    needed: bool = True
    """True if the run would differ, so that a user must decide."""


Findings = Iterator[Setting | Remark]


@dataclass(frozen=True)
class VerlConfig:
    """Values that a verl run was given, on top of verl's defaults."""

    given: Mapping[str, Any]
    """Values by dotted key."""

    defaults: Mapping[str, Any]
    """verl's own values of the keys that are translated."""

    def __getitem__(self, key: str) -> Any:
        """Returns the given value of a key, or verl's default."""
        return self.given[key] if key in self.given else self.defaults.get(key)

    def first(self, *keys: str) -> str:
        """Returns the first of these keys that was given a value, or the last one."""
        return next((key for key in keys if self.given.get(key) is not None), keys[-1])

    def number(self, key: str) -> float:
        """Returns the value of a key as a number.

        Raises:
            ValueError: If the value is something else, such as a variable that only the shell knows.
        """
        value = self[key]
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"verl's `{key}` must be a number, got {value!r}. Give it behind the file: `{key}=1`.")
        return float(value)

    def numbers(self, key: str) -> list[float]:
        """Returns the value of a key as a list of numbers, also where quotation marks made a text of it.

        Raises:
            ValueError: If the value is something else.
        """
        value = self[key]
        if isinstance(value, str):
            value = [part.strip() for part in value.strip("'\"[]() ").split(",")]
        try:
            return [float(part) for part in value]
        except (TypeError, ValueError) as error:
            message = (
                f"verl's `{key}` must be a list of numbers, got {self[key]!r}. Give it behind the file: `{key}=[1]`."
            )
            raise ValueError(message) from error

    def whole(self, key: str) -> int:
        """Returns the value of a key as a whole number, which Hydra may hold as a float.

        Raises:
            ValueError: If the value is no number.
        """
        return int(self.number(key))


def at_home(value: Any) -> Any:
    """A path, or a list of them, with ``~`` written out."""
    if isinstance(value, list):
        return [at_home(item) for item in value]
    return os.path.expanduser(value) if isinstance(value, str) else value


def flag(key: str) -> str:
    """Our key as flags write it."""
    return key.replace(".init_args.", ".").removesuffix(".class_path")


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted key as the nested mappings of a YAML file."""
    tree: dict[str, Any] = {}
    for key, value in settings.items():
        *groups, leaf = key.split(".")
        group = tree
        for name in groups:
            group = group.setdefault(name, {})
        group[leaf] = value
    return tree
