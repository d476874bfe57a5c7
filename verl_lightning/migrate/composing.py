"""Composes a Hydra file from its `defaults` list, as far as the files that it names are there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

PACKAGE = re.compile(r"^#\s*@package\s+(\S+)", re.M)
CHOICE = re.compile(r"\$\{([\w.]+)\}")
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One line of a `defaults` list."""

    group: str
    """Folder of the file, from the root of the configuration; empty for the root."""

    option: str | None
    """Name of the file without its suffix, None for none."""

    package: str
    """Dotted key under which its settings come."""

    @property
    def is_self(self) -> bool:
        """True for the entry `_self_`, at whose place the list's own file comes."""
        return self.option == "_self_"


def compose(path: Path, choices: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves of a file by dotted key, with those of all files that its `defaults` name.

    A file that is not there has one leaf, ``defaults.<group>``, whose value is its name.

    Args:
        path: The primary file; its folder, and those of `hydra.searchpath`, hold the others.
        choices: File by group, as overrides such as ``model_engine=megatron`` choose.

    Raises:
        ValueError: If a file is no mapping.
    """
    chosen = {group: str(option) for group, option in choices.items() if isinstance(option, str)}
    content, _ = read(path)
    roots = [path.parent, *search_path(path, content)]
    leaves = Composition(roots=roots, chosen=chosen).leaves(path, Entry(group="", option=path.stem, package=""))
    if "defaults.ppo_megatron_trainer" in leaves:
        chosen.setdefault("model_engine", "megatron")
    return {key: chosen[key] for key in ("model_engine",) if key in chosen} | leaves


@dataclass(frozen=True, kw_only=True)
class Composition:
    """A configuration that is being put together."""

    roots: list[Path]
    """Folders with the files."""

    chosen: dict[str, str]
    """File by group; what was chosen first stays."""

    def leaves(self, path: Path, entry: Entry) -> dict[str, Any]:
        """Leaves of a file and of all that it names."""
        content, header = read(path)
        package = "" if header == "_global_" else entry.package
        defaults = content.pop("defaults", None) or []
        for line in defaults:
            self._note_override(line)
        entries = [self._entry(line, replace(entry, package=package)) for line in defaults]
        if not any(found.is_self for found in entries):
            entries.append(replace(entry, option="_self_"))
        values: dict[str, Any] = {}
        for found in entries:
            own = flatten(content, f"{package}." if package else "") if found.is_self else self._named(found)
            values = merged(values, own)
        return values

    def _named(self, entry: Entry) -> dict[str, Any]:
        """Leaves of the file that an entry names."""
        if entry.option in (None, "null"):
            return {}
        place = f"{entry.group}/{entry.option}".strip("/")
        for root in self.roots:
            if (path := root / f"{place}.yaml").is_file():
                return self.leaves(path, entry)
        return {f"defaults.{entry.group or entry.option}": entry.option}

    def _note_override(self, line: Any) -> None:
        """Keeps what a line chooses for a group, before the files that ask for it are read."""
        if isinstance(line, dict):
            (group, option), *_ = line.items()
            name = str(group).removeprefix("override ").removeprefix("optional ").partition("@")[0]
            if str(group).startswith("override ") or "@" not in str(group):
                self.chosen.setdefault(name, str(option))

    def _entry(self, line: Any, parent: Entry) -> Entry:
        """Reads one line of the list of a file."""
        if not isinstance(line, dict):
            group, _, option = str(line).rpartition("/")
            place = resolve_group(group, parent.group) if group else parent.group
            return Entry(group=place, option=option, package=join(parent.package, group.replace("/", ".")))
        (key, option), *_ = line.items()
        words = str(key).removeprefix("override ").removeprefix("optional ")
        if str(key).startswith("override "):
            return Entry(group="", option=None, package="")  # noted before
        group, at, package = words.partition("@")
        own_place = not at or package == group.replace("/", ".")
        name = self.chosen.get(words, self.chosen.get(group, option) if own_place else option)
        text = CHOICE.sub(lambda match: self.chosen.get(match[1], match[0]), str(name)) if name is not None else None
        below = package if at else group.replace("/", ".")
        return Entry(group=resolve_group(group, parent.group), option=text, package=join(parent.package, below))


def read(path: Path) -> tuple[dict[str, Any], str]:
    """A file's settings, and the package that its head names; empty if it names none.

    Raises:
        ValueError: If it is no mapping.
    """
    text = path.read_text(encoding="utf-8")
    content = yaml.safe_load(text)
    if not isinstance(content, dict):
        raise ValueError(f"`{path}` must hold settings, such as `algorithm: {{adv_estimator: grpo}}`, got {content!r}.")
    header = PACKAGE.search(text)
    return content, header[1] if header else ""


def search_path(path: Path, content: Mapping[str, Any]) -> Iterator[Path]:
    """Folders that `hydra.searchpath` names, from the working directory or a folder above the file."""
    for place in (content.get("hydra") or {}).get("searchpath") or []:
        folder = str(place).removeprefix("file://")
        yield from (found for base in (Path(), *path.resolve().parents) if (found := base / folder).is_dir())


def resolve_group(group: str, parent: str) -> str:
    """A group from the root, given as its list writes it: ``../optim`` in ``actor`` is ``optim``."""
    parts = [] if group.startswith("/") else [part for part in parent.split("/") if part]
    for part in group.strip("/").split("/"):
        parts = parts[:-1] if part == ".." else [*parts, part]
    return "/".join(parts)


def join(package: str, below: str) -> str:
    """A package within another."""
    if below in ("_here_", ""):
        return package
    return "" if below == "_global_" else f"{package}.{below}".strip(".")


def merged(values: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves with others over them; a leaf takes the place of a group and the other way round, `{}` of nothing."""
    result = dict(values)
    for key, value in others.items():
        inner = [old for old in result if old.startswith(f"{key}.")]
        if value == {} and inner:
            continue
        parts = key.split(".")
        for old in [*inner, *(".".join(parts[:count]) for count in range(1, len(parts)))]:
            result.pop(old, None)
        result[key] = value
    return result


def flatten(group: Mapping[str, Any], parent: str = "") -> dict[str, Any]:
    """Leaves of nested settings by dotted key; a list or an empty group is a leaf."""
    leaves: dict[str, Any] = {}
    for name, value in group.items():
        key = f"{parent}{name}"
        leaves |= flatten(value, f"{key}.") if isinstance(value, dict) and value else {key: plain(value)}
    return leaves


def plain(value: Any) -> Any:
    """The value with numbers such as ``1e-6`` as numbers, which YAML 1.1 reads as text."""
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, str) and NUMBER.fullmatch(value):
        return float(value)
    return value
