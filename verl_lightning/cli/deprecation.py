"""Renamed classes and options: an old name still works, with a warning of what to use and when it will be gone."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml  # type: ignore[import-untyped]
from jsonargparse import get_loader


@dataclass(frozen=True, kw_only=True)
class Renamed:
    """A name that still works and will be gone."""

    old: str
    """The name as users write it, such as `update.ppo_epochs`."""

    new: str
    """The name to write in place of the old one."""

    since: str
    """First version that warns."""

    gone_in: str
    """First version without the old name."""

    def __str__(self) -> str:
        return (
            f"`{self.old}` is `{self.new}` since version {self.since}, and will be gone in {self.gone_in}."
            f" Use `{self.new}`."
        )

    def warn(self) -> None:
        """Shows the message, the first time in this process and on rank 0 only."""
        from lightning.fabric.utilities import rank_zero_warn  # late: old keys are known before Lightning is

        if str(self) not in _SHOWN:
            _SHOWN.add(str(self))
            rank_zero_warn(str(self), category=FutureWarning, stacklevel=4)


_SHOWN: set[str] = set()


def unchanged(value: Any) -> Any:
    """Returns the value itself, for an option of which only the name has changed."""
    return value


@dataclass(frozen=True, kw_only=True)
class RenamedOption(Renamed):
    """An option whose old key still works in files and flags; both keys lie in the same group.

    Keys are dotted and without `init_args`. One ``*`` may stand for the part that several groups have in common:
    ``model.*.ckpt`` is that of the actor and of the critic.
    """

    convert: Callable[[Any], Any] = unchanged
    """Function from the old option's value to the new one's."""

    def at(self, key: str) -> RenamedOption | None:
        """Returns this renaming for one key, with the ``*`` filled in; None if it renames other keys."""
        match = re.fullmatch(re.escape(self.old).replace(r"\*", "(.+)"), key)
        return match and replace(self, old=key, new=self.new.replace("*", "".join(match.groups())))

    @property
    def place(self) -> str:
        """The new key, without the group of both keys."""
        return self.new.removeprefix(self.old.rpartition(".")[0] + ".")


class OldKeyError(ValueError):
    """An old key stands beside its new one, or has none in its group."""


RENAMED_OPTIONS: tuple[RenamedOption, ...] = (
    RenamedOption(
        old="model.*.gradient_checkpointing",
        new="model.*.activation_checkpointing",
        since="0.1",
        gone_in="0.3",
        convert=lambda is_on: "full" if is_on else "none",
    ),
    RenamedOption(old="rollout.overlap", new="rollout.max_staleness", since="0.1", gone_in="0.3", convert=int),
)
"""Options that have another name now."""

MOVED_OPTIONS = {
    "fsdp.checkpoint_every": "`fsdp.checkpoint_every` is an option of each model since version 0.1: set"
    " `model.actor.activation_checkpointing` to that number, and `model.critic.model.activation_checkpointing` too."
}
"""Error message by old key, for options that are in another group now."""


MOVED_MODULES: tuple[Renamed, ...] = tuple(
    Renamed(old=f"verl_lightning.{old}", new=f"verl_lightning.{new}", since="0.1", gone_in="0.3")
    for old, new in (
        ("modules.advantages", "algorithms.advantages"),
        ("modules.policy_losses", "algorithms.losses"),
        ("modules.corrections", "algorithms.corrections"),
    )
)
"""Modules whose classes lie elsewhere now; whole class paths in files and flags go on."""


def with_moved_modules(text: str) -> str:
    """Puts new modules in the place of old ones in YAML text, and warns of each."""
    for moved in MOVED_MODULES:
        pattern = rf"\b{re.escape(moved.old)}(?=\.)"
        if re.search(pattern, text):
            moved.warn()
            text = re.sub(pattern, moved.new, text)
    return text


def find_renamed(key: str) -> RenamedOption | None:
    """Finds the renaming of a key; None if the key was not renamed.

    Raises:
        OldKeyError: If its option is in another group now.
    """
    if key in MOVED_OPTIONS:
        raise OldKeyError(MOVED_OPTIONS[key])
    return next((found for option in RENAMED_OPTIONS if (found := option.at(key)) is not None), None)


def renamed_settings(settings: Mapping[str, Any], group: str = "") -> dict[str, Any]:
    """Puts new keys in the place of old ones in the settings of a file, and warns of each.

    Args:
        settings: Nested settings, as they were read.
        group: Key of the group that they lie in, with a final dot.

    Raises:
        OldKeyError: If an option is set by both of its keys, or is in another group now.
    """
    found: dict[str, Any] = {}
    for name, value in settings.items():
        inner = group if name == "init_args" else f"{group}{name}."
        option = find_renamed(f"{group}{name}")
        if option is None:
            found[name] = renamed_value(value, inner)
        elif option.place in settings:
            raise OldKeyError(f"`{option.old}` and `{option.new}` are one option. Leave out `{option.old}`.")
        else:
            option.warn()
            found[option.place] = option.convert(value)
    return found


def renamed_value(value: Any, group: str) -> Any:
    """Puts new keys in the place of old ones in a value, where it holds settings, and warns of each."""
    if isinstance(value, list):
        return [renamed_value(item, group) for item in value]
    return renamed_settings(value, group) if isinstance(value, dict) else value


def renamed_text(text: str, group: str = "") -> str:
    """Puts new keys and modules in the place of old ones in YAML text, and warns of each; other text stays as it is.

    Args:
        text: A file's content or a flag's value.
        group: Key of the group that its settings lie in, with a final dot.

    Raises:
        OldKeyError: If an option is set by both of its keys, or is in another group now.
    """
    text = with_moved_modules(text)
    old_keys = [*(option.old for option in RENAMED_OPTIONS), *MOVED_OPTIONS]
    if not any(key.rpartition(".")[2] in text for key in old_keys):
        return text
    try:
        settings = get_loader("yaml")(text)
    except yaml.YAMLError:
        return text  # the parser says what is wrong with it
    return as_yaml(renamed_value(settings, group))


def renamed_flags(words: Sequence[str]) -> Iterator[str]:
    """Yields the words of a command line with new keys in the place of old ones, and warns of each.

    Raises:
        OldKeyError: If a flag's value sets an option by both of its keys, or an option is in another group now.
    """
    rest, key = iter(words), ""
    for word in rest:
        flag, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        key = flag.removeprefix("--").removesuffix("+").replace(".init_args.", ".") or key
        option = find_renamed(key) if flag else None
        if option is not None:
            option.warn()
            value = value if equals else next(rest, "null")
            yield f"--{option.new}={as_yaml(option.convert(get_loader('yaml')(value)))}"
        else:
            yield flag + equals + renamed_text(value, f"{key}.")


def as_yaml(value: Any) -> str:
    """A value in one line of YAML."""
    return str(yaml.safe_dump(value, default_flow_style=True, width=10**6)).removesuffix("\n").removesuffix("\n...")


def renamed_classes(module: str, names: dict[Renamed, type]) -> Callable[[str], type]:
    """A module's ``__getattr__`` that lends renamed classes under their old names.

    Args:
        module: Name of the module, for the error about any other name.
        names: The class for each renaming; ``old`` is its old name in the module.
    """
    known = {renamed.old: (renamed, cls) for renamed, cls in names.items()}

    def lend(name: str) -> type:
        if name not in known:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        renamed, cls = known[name]
        renamed.warn()
        return cls

    return lend
